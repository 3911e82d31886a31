"""Probes of installed engines: what SGLang, vLLM and LMCache keep in a cache, driven on a CPU."""
