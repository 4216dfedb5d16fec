"""How each server is started, watched and stopped. So far one: ``embedded``, which is part of the package.

Nothing here is imported by ``ask``: it knows a URL, and any server behind it will do.
"""
