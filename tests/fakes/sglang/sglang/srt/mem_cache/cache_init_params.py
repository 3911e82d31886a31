"""What a tree is made with."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class CacheInitParams:
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    disable: bool = False
    page_size: int = 1
