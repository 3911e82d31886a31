"""Probes of installed engines: drive the caches of SGLang, vLLM and LMCache and judge what they hold."""
