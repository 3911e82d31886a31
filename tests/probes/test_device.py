"""The device that stands in: what is put there has values, and what a device would refuse is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvcheck.core.probes.frame.device import DEVICE, OnDevice, WrongSide, on_host, present, side
from kvcheck.core.probes.frame.guard import Fault, attempt

VALUES = [5, 3, 9]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with present("an_engine"):
        yield


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor(VALUES, device=DEVICE),
    "as_tensor": lambda: torch.as_tensor(VALUES, device=DEVICE),
    "to": lambda: torch.tensor(VALUES).to(DEVICE, non_blocking=True),
    "factory": lambda: torch.zeros(3, dtype=torch.int64, device=DEVICE) + torch.tensor(VALUES).to(DEVICE),
    "cat": lambda: torch.cat([torch.tensor(VALUES[:1], device=DEVICE), torch.tensor(VALUES[1:], device=DEVICE)]),
    "index": lambda: torch.arange(10, device=DEVICE)[torch.tensor(VALUES)],
    "copy_": lambda: torch.empty(3, dtype=torch.int64, device=DEVICE).copy_(torch.tensor(VALUES)),
    "view": lambda: torch.tensor([1, *VALUES], device=DEVICE)[1:],
    "in place": lambda: torch.tensor([value - 1 for value in VALUES], device=DEVICE).add_(1),
}
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "cat": lambda there, here: torch.cat([there, here]),
    "compare": lambda there, here: there == here,
    "index of the host": lambda there, here: here[there],
    "put": lambda there, here: there.__setitem__(torch.tensor([0, 1, 2]), here),
}


@pytest.mark.parametrize("how", MADE)
def test_what_is_made_there_lies_there_and_has_values(how: str) -> None:
    made = MADE[how]()
    assert isinstance(made, OnDevice) and made.is_cuda and side(made) == "the device"
    assert made.tolist() == VALUES and made.device.type == DEVICE


def test_a_copy_to_the_host_is_a_new_tensor_there() -> None:
    there = torch.tensor(VALUES, device=DEVICE)
    back = there.cpu()
    there.fill_(0)
    assert (back.tolist(), side(back)) == (VALUES, "the host")
    assert on_host(there).tolist() == [0, 0, 0]


def test_in_place_changes_are_seen_through_every_view() -> None:
    there = torch.tensor(VALUES, device=DEVICE)
    same, part = there, there[:2]
    there.copy_(there.sort().values)
    assert same is there and same.tolist() == [3, 5, 9] and part.tolist() == [3, 5]


@pytest.mark.parametrize("how", REFUSED)
def test_tensors_of_both_sides_are_refused(how: str) -> None:
    there, here = torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([0, 1, 2])
    with pytest.raises(WrongSide, match="expected all tensors on the same device"):
        REFUSED[how](there, here)


def test_scalars_of_the_host_are_taken() -> None:
    assert (torch.tensor(VALUES, device=DEVICE) + torch.tensor(1)).tolist() == [6, 4, 10]


def test_a_refusal_is_the_doing_of_whoever_asked_for_it() -> None:
    def asked() -> object:
        return torch.cat([torch.tensor(VALUES, device=DEVICE), torch.tensor(VALUES)])

    by_engine, by_nobody = attempt(asked, __name__.partition(".")[0]), attempt(asked, "somebody")
    assert isinstance(by_engine, Fault) and by_engine.is_engine and by_engine.where.startswith(__name__)
    assert isinstance(by_nobody, Fault) and not by_nobody.is_engine
