"""The fixed implementation of a KV cache: pools, offload, host tier, transfer and scheduler, over one backend."""
