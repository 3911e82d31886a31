"""The fixed implementation: pools, offload, host tier, transfer and scheduler, over one backend."""
