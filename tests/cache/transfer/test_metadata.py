"""Metadata rows: ten fields in one packed row, handed out as owned copies, empty when a slot changes hands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, LengthMismatch
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataField, metadata_fields
from kvcheck.core.stress.strategies import LazyStrategy

# (name, width, dtype, offset) for a hidden size of 16
FIELDS = [
    ("output_ids", 16, torch.int32, 0),
    ("cached_tokens", 16, torch.int32, 64),
    ("output_token_logprobs_val", 16, torch.float32, 128),
    ("output_token_logprobs_idx", 16, torch.int32, 192),
    ("output_top_logprobs_val", 128, torch.float32, 256),
    ("output_top_logprobs_idx", 128, torch.int32, 768),
    ("output_topk_p", 16, torch.float32, 1280),
    ("output_topk_index", 16, torch.int64, 1344),
    ("output_hidden_states", 16, torch.float32, 1472),
    ("bootstrap_room", 8, torch.int64, 1536),
]
NAMES = [row[0] for row in FIELDS]
HIDDEN_SIZES = [1, 16, 17, 600]  # an odd one leaves a gap in the row; a large one needs several pieces of wire


def buffers_of(
    backend: Backend | None = None, *, slots: int = 3, hidden_size: int = 16, leased: int = 0
) -> MetadataBuffers:
    """Metadata buffers of a decode end. leased: so many slots belong to requests 1, 2, ..."""
    backend = backend or EagerBackend()
    lane = backend.lane("decode")
    made = MetadataBuffers("decode", slots=slots, hidden_size=hidden_size, backend=backend, lane=lane)
    assert [made.lease(1 + slot) for slot in range(leased)] == [*range(leased)]
    return made


def values_for(seed: int, fields: Sequence[MetadataField]) -> dict[str, torch.Tensor]:
    """Every field, full width, of arbitrary bits that differ by seed."""
    dice = np.random.default_rng(seed)
    return {
        field.name: torch.from_numpy(dice.integers(1, 256, field.size_bytes, dtype=np.uint8)).view(field.dtype)
        for field in fields
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_the_ten_fields_lie_in_this_order_at_these_offsets() -> None:
    assert [(each.name, each.width, each.dtype, each.offset) for each in metadata_fields(16)] == FIELDS
    assert buffers_of().row_bytes == 1600


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_every_field_that_is_set_is_read_back_bit_for_bit(hidden_size: int) -> None:
    buffers = buffers_of(hidden_size=hidden_size, leased=3)
    assert not any(buffers.row_view(slot).any() for slot in range(3))
    for slot in (0, 1, 2):
        buffers.set(slot, slot + 1, values_for(slot, buffers.fields))
    for slot in (0, 1, 2):
        row = buffers.get(slot, slot + 1)
        for name, value in values_for(slot, buffers.fields).items():
            assert same_bits(row.field(name), value)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_left_out_or_only_begun_stays_zero(name: str) -> None:
    buffers = buffers_of(leased=1)
    value = values_for(1, buffers.fields)[name][:2]
    buffers.set(0, 1, {name: value})
    row = buffers.get(0, 1)
    assert same_bits(row.field(name)[:2], value)
    assert not row.field(name)[2:].view(torch.uint8).any()
    assert not any(row.field(other).view(torch.uint8).any() for other in NAMES if other != name)


def test_a_row_that_was_read_is_the_callers_own() -> None:
    buffers = buffers_of(leased=1)
    buffers.set(0, 1, values_for(1, buffers.fields))
    row = buffers.get(0, 1)
    before = row.packed.clone()
    buffers.set(0, 1, values_for(2, buffers.fields))
    assert torch.equal(row.packed, before)
    row.packed.fill_(0)
    assert same_bits(buffers.get(0, 1).field("output_ids"), values_for(2, buffers.fields)["output_ids"])
    low, high = buffers.storage_range()
    assert not low <= row.packed.data_ptr() < high
    assert all(not low <= row.field(name).data_ptr() < high for name in NAMES)


def test_a_caller_may_change_what_it_passed_once_it_has_been_set() -> None:
    backend = SimulatedBackend(LazyStrategy())
    buffers = buffers_of(backend, leased=1)
    values = values_for(1, buffers.fields)
    backend.wait(buffers.set(0, 1, values))
    for value in values.values():
        value.view(torch.uint8).fill_(0)
    assert same_bits(buffers.get(0, 1).field("bootstrap_room"), values_for(1, buffers.fields)["bootstrap_room"])


@pytest.mark.parametrize("slot", [1, 2, 3, -1, -2])
@pytest.mark.parametrize("verb", ["set", "get", "release"])
def test_a_slot_of_another_or_of_nobody_is_neither_written_nor_read_nor_released(verb: str, slot: int) -> None:
    buffers = buffers_of(leased=2)  # slot 1 is another's, 2 is nobody's
    for each, request in ((0, 1), (1, 2)):
        buffers.set(each, request, values_for(request, buffers.fields))
    before = [buffers.row_view(each).clone() for each in range(3)]
    more = [values_for(3, buffers.fields)] if verb == "set" else []
    with pytest.raises((DoubleFree, ForeignAccess), match="metadata-decode"):
        getattr(buffers, verb)(slot, 1, *more)
    assert all(torch.equal(buffers.row_view(each), row) for each, row in enumerate(before))
    assert buffers.slots.available == 1


def test_a_second_release_does_not_clear_the_slot_of_its_next_owner() -> None:
    buffers = buffers_of(slots=1, leased=1)
    buffers.release(0, 1)
    assert buffers.lease(2) == 0
    buffers.set(0, 2, values_for(2, buffers.fields))
    with pytest.raises(ForeignAccess, match="request 1 and belongs to request 2"):
        buffers.release(0, 1)
    assert same_bits(buffers.get(0, 2).field("output_ids"), values_for(2, buffers.fields)["output_ids"])
    buffers.release(0, 2)
    with pytest.raises(DoubleFree):
        buffers.release(0, 2)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_row_outside_the_slots_is_not_shown(slot: int) -> None:
    with pytest.raises(ForeignAccess, match="expected a slot of 0 to 2"):
        buffers_of().row_view(slot)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_ids", torch.tensor(3, dtype=torch.int32)),
        ("output_ids", torch.zeros((2, 2), dtype=torch.int32)),
        ("output_ids", torch.zeros(1, dtype=torch.int64)),
        *((name, torch.zeros(width + 1, dtype=dtype)) for name, width, dtype, _ in FIELDS),
        *((name, torch.zeros(1, dtype=torch.float64)) for name in NAMES),
    ],
)
def test_a_value_of_a_wrong_dtype_or_one_too_long_is_refused_and_nothing_is_written(
    name: str, value: torch.Tensor
) -> None:
    buffers = buffers_of(leased=1)
    with pytest.raises(LengthMismatch, match=f"metadata field {name}: "):
        buffers.set(0, 1, values_for(1, buffers.fields) | {name: value})
    assert not buffers.row_view(0).any()


def test_freeing_gives_the_memory_back() -> None:
    backend = EagerBackend()
    buffers = buffers_of(backend, slots=5)
    assert backend.allocated() == {"metadata-decode": 5 * 1600}
    buffers.free()
    assert backend.allocated() == {}
