"""Crossing: copies to the host, made by an engine whose device is the host: a new tensor each, as from a device.

Invariants:
- Only what names a side is a crossing; a conversion that names none may share its memory, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CopiesToHost(TorchFunctionMode):
    """In here `.to(device)` and `.cpu()` give memory of their own."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the call; copy what would be shared."""
        named = dict(kwargs or {})
        made = func(*args, **named)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and _names_side((*args[1:], named.get("device")))):
            source = args[0].untyped_storage()
            return made.clone() if made.untyped_storage().data_ptr() == source.data_ptr() else made
        return made


def _names_side(given: tuple[Any, ...]) -> bool:
    return any(isinstance(each, (str, torch.device)) for each in given)
