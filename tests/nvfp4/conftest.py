"""Property tests here compare bits, not speed: no deadline, so that a busy machine fails none of them."""

from hypothesis import settings

settings.register_profile("nvfp4", deadline=None)
settings.load_profile("nvfp4")
