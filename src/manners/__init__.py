"""manners: round a fine-tuned language model to NVFP4 and prove that it still behaves."""

__version__ = "0.1.0"
