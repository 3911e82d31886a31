"""The restated copies between device and host: each moves what its layouts mean, late, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import LAZY, Machine, SideStream
from kvcheck.core.probes.sglang.rig.copy_engine import CopyEngine

LAYERS, HEADS, DIM, PAGE, DEVICE_PAGES, HOST_PAGES = 3, 2, 4, 4, 5, 7
ITEM = HEADS * DIM * 2
DEVICE_IDS, HOST_IDS = [4, 5, 6, 7, 12, 13, 14, 15], [20, 21, 22, 23, 0, 1, 2, 3]
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    # shape of the host's memory of one buffer, and the same memory by [layer, token, head, dim] of whole tokens
    "layer_first": ((LAYERS, HOST_PAGES * PAGE, HEADS, DIM), lambda memory: memory),
    "page_first": ((HOST_PAGES * PAGE, LAYERS, HEADS, DIM), lambda memory: memory.transpose(0, 1)),
    "page_first_direct": (
        (HOST_PAGES, LAYERS, PAGE, HEADS, DIM),
        lambda memory: memory.permute(1, 0, 2, 3, 4).reshape(LAYERS, -1, HEADS, DIM),
    ),
    "page_head": (
        (HOST_PAGES, HEADS, PAGE, LAYERS, DIM),
        lambda memory: memory.permute(3, 0, 2, 1, 4).reshape(LAYERS, -1, HEADS, DIM),
    ),
}
COPIES = [("layer_first", "kernel"), ("page_first", "kernel"), ("page_head", "kernel")]
COPIES += [("layer_first", "direct"), ("page_first_direct", "direct")]
COPIES += [("layer_first", "late"), ("page_first", "late"), ("page_first", "staged")]


class Bed:
    """Memory of both tiers with different numbers everywhere, and the copies over it."""

    def __init__(self, layout: str) -> None:
        shape, self.plain = LAYOUTS[layout]
        self.host = [torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape) + 1 for _ in range(2)]
        rows = (DEVICE_PAGES * PAGE, HEADS, DIM)
        self.device = [
            [torch.full(rows, -1 - 10 * buffer - layer, dtype=torch.int16) for layer in range(LAYERS)]
            for buffer in range(2)
        ]
        for layers in self.device:
            for layer in layers:
                layer[:, 0, 0] = -torch.arange(1, len(layer) + 1, dtype=torch.int16)
        self.host[1] += 5000
        self.machine = Machine()
        self.machine.reset(LAZY, 0)
        self.stream, self.complaints = SideStream(machine=self.machine), list[str]()
        self.staging = [torch.empty((2 * PAGE, LAYERS, HEADS, DIM), dtype=torch.int16)[:PAGE] for _ in range(2)]
        memory = [*self.host, *self.device[0], *self.device[1], *self.staging]
        regions = sorted((each.data_ptr(), each.numel() * each.element_size()) for each in memory)
        self.copies = CopyEngine(self.machine, self.complaints.append, regions)

    def ask(self, name: str, **named: Any) -> None:
        with self.machine.on(self.stream):
            self.copies.table()[name](**named)

    def lists(self, to_host: bool) -> dict[str, torch.Tensor]:
        host, device = torch.tensor(HOST_IDS), torch.tensor(DEVICE_IDS)
        return {"src_indices": device, "dst_indices": host} if to_host else {"src_indices": host, "dst_indices": device}

    def table(self, buffer: int) -> torch.Tensor:
        return torch.tensor([layer.data_ptr() for layer in self.device[buffer]], dtype=torch.uint64)

    def refs(self, buffer: int) -> list[torch.Tensor]:
        """Rows of each layer, as far apart as the layout has them."""
        memory = self.host[buffer]
        return list(memory.transpose(0, 1) if memory.shape[1] == LAYERS else memory)

    def backup_late(self, way: str) -> None:
        lists = self.lists(to_host=True)
        sources = {"k_ptr_src": self.table(0), "v_ptr_src": self.table(1)}
        if way == "staged":
            between = {"staging_k": self.staging[0], "staging_v": self.staging[1], "page_size": PAGE}
            into = {"dst_k": self.host[0], "dst_v": self.host[1]}
            self.ask("jit_transfer_hicache_all_layer_staged_lf_pf", **sources, **between, **into, **lists)
            return
        tables = [torch.tensor([ref.data_ptr() for ref in self.refs(at)], dtype=torch.uint64) for at in range(2)]
        apart = self.refs(0)[0].stride(0) * 2
        self.ask(
            "jit_transfer_hicache_all_layer",
            indices_src=lists["src_indices"],
            indices_dst=lists["dst_indices"],
            k_ptr_dst=tables[0],
            v_ptr_dst=tables[1],
            kv_cache_src_stride_bytes=ITEM,
            kv_cache_dst_stride_bytes=apart,
            element_size=ITEM,
            **sources,
        )

    def load_late(self, layer: int) -> None:
        self.ask(
            "jit_transfer_hicache_one_layer",
            indices_src=torch.tensor(HOST_IDS),
            indices_dst=torch.tensor(DEVICE_IDS),
            k_cache_src=self.refs(0)[layer],
            v_cache_src=self.refs(1)[layer],
            k_cache_dst=self.device[0][layer],
            v_cache_dst=self.device[1][layer],
            element_dim=HEADS * DIM,
        )

    def backup(self, layout: str, way: str) -> None:
        if way in ("late", "staged"):
            self.backup_late(way)
            return
        lists = self.lists(to_host=True)
        sizes = {"item_size": ITEM, "num_layers": LAYERS}
        layers = {"src_k_layers": self.table(0), "src_v_layers": self.table(1)}
        memory = {"dst_k": self.host[0], "dst_v": self.host[1], "dst_layout_dim": LAYERS * ITEM}
        if way == "direct":
            sources = [*self.device[0], *self.device[1]]
            if layout == "layer_first":
                into = [*self.host[0], *self.host[1]]
                self.ask("transfer_kv_direct", src_layers=sources, dst_layers=into, page_size=PAGE, **lists)
                return
            pages = {"src_ptrs": sources, "dst_ptrs": self.host, "page_size": PAGE}
            self.ask("transfer_kv_all_layer_direct_lf_pf", **pages, **lists)
        elif layout == "layer_first":
            tables = [torch.tensor([part.data_ptr() for part in each], dtype=torch.uint64) for each in self.host]
            into_tables = {"dst_k_layers": tables[0], "dst_v_layers": tables[1]}
            self.ask("transfer_kv_all_layer", **layers, **into_tables, **sizes, **lists)
        elif layout == "page_first":
            self.ask("transfer_kv_all_layer_lf_pf", **layers, **memory, **sizes, **lists)
        else:
            heads = {"page_size": PAGE, "head_num": HEADS}
            self.ask("transfer_kv_all_layer_lf_ph", **layers, **memory, **sizes, **heads, **lists)

    def load(self, layout: str, way: str, layer: int) -> None:
        if way in ("late", "staged"):
            self.load_late(layer)
            return
        lists = self.lists(to_host=False)
        into = {"dst_k": self.device[0][layer], "dst_v": self.device[1][layer], "item_size": ITEM}
        memory = {"src_k": self.host[0], "src_v": self.host[1], "src_layout_dim": LAYERS * ITEM, "layer_id": layer}
        targets = [self.device[0][layer], self.device[1][layer]]
        if way == "direct" and layout == "layer_first":
            sources = [self.host[0][layer], self.host[1][layer]]
            self.ask("transfer_kv_direct", src_layers=sources, dst_layers=targets, page_size=PAGE, **lists)
        elif way == "direct":
            pages = {"src_ptrs": self.host, "dst_ptrs": targets, "layer_id": layer, "page_size": PAGE}
            self.ask("transfer_kv_per_layer_direct_pf_lf", **pages, **lists)
        elif layout == "layer_first":
            rows = {"src_k": self.host[0][layer], "src_v": self.host[1][layer]}
            self.ask("transfer_kv_per_layer", **rows, **into, **lists)
        elif layout == "page_first":
            self.ask("transfer_kv_per_layer_pf_lf", **memory, **into, **lists)
        else:
            self.ask("transfer_kv_per_layer_ph_lf", **memory, **into, page_size=PAGE, head_num=HEADS, **lists)


@pytest.mark.parametrize(("layout", "way"), COPIES)
def test_backup_moves_these_rows_and_no_other_and_only_when_waited_for(layout: str, way: str) -> None:
    bed = Bed(layout)
    before = [each.clone() for each in bed.host]
    wanted = [bed.plain(each).clone() for each in before]
    for buffer in range(2):
        for layer in range(LAYERS):
            wanted[buffer][layer, HOST_IDS] = bed.device[buffer][layer][DEVICE_IDS]
    bed.backup(layout, way)
    assert all(torch.equal(*pair) for pair in zip(bed.host, before, strict=True))
    bed.stream.synchronize()
    assert all(torch.equal(bed.plain(each), other) for each, other in zip(bed.host, wanted, strict=True))
    times = 2 if way == "staged" else 1
    assert not bed.complaints and bed.copies.moved_bytes == times * 2 * LAYERS * len(HOST_IDS) * ITEM


@pytest.mark.parametrize(("layout", "way"), COPIES)
def test_load_moves_one_layer_of_these_rows_and_no_other(layout: str, way: str) -> None:
    bed = Bed(layout)
    for layer in (2, 0):
        wanted = [[each.clone() for each in layers] for layers in bed.device]
        for buffer in range(2):
            wanted[buffer][layer][DEVICE_IDS] = bed.plain(bed.host[buffer])[layer, HOST_IDS]
        bed.load(layout, way, layer)
        bed.stream.synchronize()
        assert all(torch.equal(bed.device[at][one], wanted[at][one]) for at in range(2) for one in range(LAYERS))
    assert not bed.complaints


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"src_indices": torch.tensor([1, 2])}, "2 and 8 indices"),
        ({"src_indices": torch.tensor(HOST_IDS, dtype=torch.int32)}, "torch.int32"),
        ({"item_size": 12}, "items of 12 bytes"),
        ({"dst_indices": torch.tensor([*DEVICE_IDS[:-1], 1 << 20])}, "writes 16 bytes outside"),
        ({"src_indices": torch.tensor([*HOST_IDS[:-1], -(1 << 20)])}, "reads 16 bytes outside"),
    ],
)
def test_wrong_requests_are_told_and_touch_nothing_they_should_not(change: dict[str, Any], said: str) -> None:
    bed = Bed("layer_first")
    named = {"src": bed.host[0][0], "dst": bed.device[0][0], "item_size": ITEM, **bed.lists(to_host=False), **change}
    bed.ask("transfer_kv_per_layer_mla", **named)
    bed.stream.synchronize()
    assert len(bed.complaints) >= 1 and said in bed.complaints[0]


def test_unknown_way_of_asking_ends_the_probe() -> None:
    bed = Bed("layer_first")
    with pytest.raises(CannotDrive, match="transfer_kv_direct is asked for in a way that nobody here knows"):
        bed.ask("transfer_kv_direct", layers=[])
