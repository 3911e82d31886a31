"""Probe metadata: results of get_buf for a slot, while the slot becomes another request's.

The other request's row is delivered field by field in a drawn order, and the first result, which must not change, is
judged after each field. A slot is also read when its row has arrived in part.

The bytes of the first result identify the field of each returned tensor. Later results have the same order. A tensor of
no field ends the probe.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcheck.core.probes.frame.buffer_views import BufferView, among, inventory
from kvcheck.core.probes.frame.content import ContentWriter, rows_of
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.scheduler_loop import REQUEST_NEEDS, make_committed_request

SLOTS = 5
HIDDEN = 48
FIRST, SECOND = 1, 2
TOP_K = 4


class MetadataSlots:
    """get_buf and set_buf over slots that are reused."""

    def needs(self, subject: str) -> tuple[str, ...]:
        return ("metadata.buffers", "metadata.slots", *REQUEST_NEEDS)

    def control(self, rig: Rig) -> None:
        buffers, writer, slots = make(rig)
        slot = slots.alloc()
        writer.write(FIRST, "slot", (slot,))
        got = rig.measured(lambda: buffers.get_buf(slot), "get_buf")
        judge(rig, fields(rig, writer, got, slot), slot, "read at once")

    def measure(self, rig: Rig) -> None:
        buffers, writer, slots = make(rig)
        for _ in range(rig.mix.below(SLOTS)):
            slots.free(slots.alloc())  # the queue of free slots begins somewhere
        slot = slots.alloc()
        writer.write(FIRST, "slot", (slot,))
        got = rig.measured(lambda: buffers.get_buf(slot), "get_buf")
        held = fields(rig, writer, got, slot)
        rig.measured(lambda: slots.free(slot), "free", is_aside=True)
        again = next((each for each in (slots.alloc() for _ in range(SLOTS)) if each == slot), None)
        if again is None:
            raise CannotDrive(f"slot {slot} was not handed out again within {SLOTS} turns")
        rig.judge.count("requests", 2)
        rig.judge.count("foreign_reuses")
        for field, tensor in held:
            if tensor.untyped_storage().data_ptr() == field.rows.untyped_storage().data_ptr():
                text = f"get_buf returned {field.name} of slot {slot} as a view of the buffer, whose slot is reused"
                rig.judge.find("KV305", "aliasing", text, buffer=field.name, row=slot, request=FIRST)
        if rig.mix.chance(1, 2):
            deliver_in_parts(rig, buffers, writer, slot, held)
        else:
            set_for(rig, buffers, writer, slot)
            got = rig.measured(lambda: buffers.get_buf(slot), "get_buf")
            for field, tensor in by_place(held, got):
                seen = _bytes(tensor)[None]
                rig.judge.compare(
                    field,
                    seen,
                    request=SECOND,
                    positions=(0,),
                    ids=(slot,),
                    when="read after set_buf, and not what set_buf left there",
                    has_others=True,
                    wanted=field.rows[slot : slot + 1, : seen.shape[1]],
                )
            judge(rig, held, slot, "read, and its slot then written by set_buf for another request and read again")


def deliver_in_parts(
    rig: Rig, buffers: Any, writer: ContentWriter, slot: int, held: list[tuple[BufferView, torch.Tensor]]
) -> None:
    coming = list(writer.found.buffers)
    order = [coming.pop(rig.mix.below(len(coming))) for _ in range(len(coming))]
    torn_at = rig.mix.below(len(order))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at, field in enumerate(order):
        if at == torn_at:
            torn = rig.measured(lambda: buffers.get_buf(slot), "get_buf")
            kept = [(tensor, _bytes(tensor).clone()) for tensor in _tensors(torn)]
        writer.write_field(field, SECOND, (slot,))
        judge(
            rig, held, slot, f"read, and {at + 1} of {len(order)} fields of its slot then delivered for another request"
        )
    got = rig.measured(lambda: buffers.get_buf(slot), "get_buf")
    for tensor, before in kept:
        if not torch.equal(_bytes(tensor), before):
            text = (
                f"what get_buf returned of slot {slot}, a row of which {torn_at} fields had come, changed with the rest"
            )
            rig.judge.find("KV305", "aliasing", text, row=slot, request=SECOND, lane="torn")
    rig.judge.count("orderings_checked")
    when = "read when all of it was there, in a slot that another request had"
    judge(rig, by_place(held, got), slot, when, SECOND)
    judge(rig, held, slot, "read, and its slot then delivered for another request and read again")


def by_place(held: list[tuple[BufferView, torch.Tensor]], got: Any) -> list[tuple[BufferView, torch.Tensor]]:
    """Match tensors with fields by place: a wrong tensor's bytes match no field."""
    tensors = _tensors(got)
    if len(tensors) != len(held):
        raise CannotDrive(f"get_buf returned {len(held)} tensors of one row and {len(tensors)} of the next")
    return [(field, tensor) for (field, _), tensor in zip(held, tensors, strict=True)]


def make(rig: Rig, size: int = SLOTS) -> tuple[Any, ContentWriter, Any]:
    offered = {
        "size": size,
        "hidden_size": HIDDEN,
        "hidden_states_dtype": torch.bfloat16,
        "max_top_logprobs_num": 24,
        "max_sampling_mask_tokens": 24,
        "custom_mem_pool": None,
    }
    buffers = fitted(rig.names["metadata.buffers"], offered)
    found = among(inventory(buffers, rig.package, {"slot": size}), [buffers.get_buf_infos()])
    if not found.buffers or found.unknown:
        raise CannotDrive(f"metadata buffers hold {len(found.buffers)} fields; unknown: {'; '.join(found.unknown)}")
    return buffers, ContentWriter(found), fitted(rig.names["metadata.slots"], {"size": size})


def fields(rig: Rig, writer: ContentWriter, got: Any, slot: int) -> list[tuple[BufferView, torch.Tensor]]:
    """Raises CannotDrive if a tensor is a row of no field."""
    pairs = []
    for tensor in _tensors(got):
        seen = _bytes(tensor)
        field = next((each for each in writer.found.buffers if torch.equal(each.rows[slot, : len(seen)], seen)), None)
        if field is None:
            raise CannotDrive(f"get_buf returned {list(tensor.shape)} of {tensor.dtype}, which is no row of a field")
        if len(seen) < field.rows.shape[1]:
            rig.judge.note(f"get_buf returned {len(seen)} of {field.rows.shape[1]} bytes of {field.name}")
        pairs.append((field, tensor))
    lost = {each.name for each in writer.found.buffers} - {field.name for field, _ in pairs}
    if lost:
        rig.judge.note(f"get_buf did not return {', '.join(sorted(lost))}")
    return pairs


def judge(rig: Rig, held: list[tuple[BufferView, torch.Tensor]], slot: int, when: str, request: int = FIRST) -> None:
    """set_buf writes words of its own as well."""
    for field, tensor in held:
        seen = _bytes(tensor)[None]
        rig.judge.compare(field, seen, request=request, positions=(0,), ids=(slot,), when=when, has_others=True)


def set_for(rig: Rig, buffers: Any, writer: ContentWriter, slot: int) -> None:
    request = make_committed_request(rig, 3)
    request.metadata_buffer_index = slot
    request.bootstrap_room = 77
    request.hidden_states_tensor = _of(writer, "output_hidden_states", torch.bfloat16, HIDDEN)
    request.output_topk_p = torch.full((TOP_K,), 0.25)
    request.output_topk_index = torch.arange(TOP_K)
    rig.measured(lambda: buffers.set_buf(request), "set_buf")


def _of(writer: ContentWriter, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    field = next((each for each in writer.found.buffers if each.name == name), None)
    if field is None:
        raise CannotDrive(f"metadata buffers have no {name}")
    return rows_of(field, SECOND, (0,))[0].clone().view(dtype)[:size]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in _flat(value) if isinstance(each, torch.Tensor) and each.numel()]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [inner for each in value for inner in _flat(each)]
    if isinstance(value, dict):
        return [inner for each in value.values() for inner in _flat(each)]
    if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        return [inner for each in vars(value).values() for inner in _flat(each)]
    return [value]
