"""Probes of installed engines: drive the caches of SGLang, vLLM and LMCache, and transfers of Mooncake."""
