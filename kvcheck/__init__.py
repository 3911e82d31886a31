"""kvcheck: integrity checker, race detector and price list for the KV cache of LLM inference engines."""

__version__ = "0.1.0"
