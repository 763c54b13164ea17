"""specserve: speculative decoding, trained and served by the same code."""

__version__ = "0.1.0"
