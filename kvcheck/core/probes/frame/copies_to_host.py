"""Copies to the host on a machine without a device: each returns a new tensor, as a copy from a device does.

Only a call that names a device is such a copy. Any other conversion may share its memory, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CopiesToHost(TorchFunctionMode):
    """Make `.to(device)` and `.cpu()` return tensors with memory of their own in this block."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        made = func(*args, **named)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and _names_side((*args[1:], named.get("device")))):
            source = args[0].untyped_storage()
            return made.clone() if made.untyped_storage().data_ptr() == source.data_ptr() else made
        return made


def _names_side(given: tuple[Any, ...]) -> bool:
    return any(isinstance(each, (str, torch.device)) for each in given)
