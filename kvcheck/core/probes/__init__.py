"""Probes of installed engines: drive the caches of SGLang, vLLM and LMCache, and Mooncake's transfers, and judge
them."""
