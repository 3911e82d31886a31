"""Arguments of a server."""

import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    hicache_write_policy: str = "write_through"
    hicache_io_backend: str = "kernel"
    hicache_mem_layout: str = "layer_first"
    hicache_ratio: float = 2.0


def set_global_server_args_for_scheduler(args):
    pass
