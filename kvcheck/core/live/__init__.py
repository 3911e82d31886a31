"""Running servers, judged by a model whose every answer is known before the run.

Invariants:
- Nothing here imports the cache, the stress runner or a probe: a server is reached from outside.
"""
