"""check_round_trip: parts of rows that nobody moved, where other layers of the same buffer show that they hold KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, found, judged

from kvcheck.testing import IntegrityError, NotJudged, check_round_trip

VALUES = 8


class Cells:
    """Rows of bytes, each with its scale behind its values. `scale_of` says which layer's scales a layer uses."""

    scale = torch.float32

    def __init__(self, is_wrong: bool = False, layers: int = 3) -> None:
        self.is_wrong, self.layers = is_wrong, layers
        self.width = VALUES + self.scale.itemsize
        self.cells = self.made()

    def made(self) -> Any:
        return torch.zeros(self.layers, SLOTS, self.width, dtype=torch.uint8)

    def cell(self, layer: int) -> torch.Tensor:
        return self.cells[layer]

    def scale_of(self, layer: int) -> int:
        return 0 if self.is_wrong else layer

    def scales(self, layer: int) -> torch.Tensor:
        return self.cell(self.scale_of(layer))[:, VALUES:].view(self.scale)

    def save(self, ids: Any) -> Any:
        return [(self.cell(at)[ids, :VALUES], self.scales(at)[ids].clone()) for at in range(self.layers)]

    def load(self, copy: Any, ids: Any) -> None:
        for at, (values, scales) in enumerate(copy):
            self.cell(at)[ids, :VALUES] = values
            self.scales(at)[ids] = scales


class ListOfLayers(Cells):
    def made(self) -> Any:
        return [torch.zeros(SLOTS, self.width, dtype=torch.uint8) for _ in range(self.layers)]


class ClampsTheLast(Cells):
    """Wrong: the last layer has the scales of the one before."""

    def scale_of(self, layer: int) -> int:
        return min(layer, self.layers - 2) if self.is_wrong else layer


class HalfScales(Cells):
    """Scales of two bytes, which alone tell nothing."""

    scale = torch.float16


class ByteScales(Cells):
    """Scales of one byte."""

    scale = torch.uint8


class SetOnStorage(Cells):
    """Views that are kept, made of the untyped storage. Wrong: without the offset of the layer."""

    def __init__(self, is_wrong: bool = False, layers: int = 3) -> None:
        super().__init__(is_wrong, layers)
        self.views = [self.laid(layer) for layer in self.cells]

    def laid(self, layer: torch.Tensor) -> torch.Tensor:
        at = (0 if self.is_wrong else layer.storage_offset()) + VALUES
        return torch.empty(0).set_(layer.untyped_storage(), at // 4, (SLOTS, 1), (self.width // 4, 1))

    def scales(self, layer: int) -> torch.Tensor:
        return self.views[layer]


class LeavesTheLastOut(Cells):
    """Wrong: the scales of the last layer are neither saved nor loaded."""

    def scale_of(self, layer: int) -> int:
        return layer

    def save(self, ids: Any) -> Any:
        copy = super().save(ids)
        return [*copy[:-1], (copy[-1][0], None)] if self.is_wrong else copy

    def load(self, copy: Any, ids: Any) -> None:
        for at, (values, scales) in enumerate(copy):
            self.cells[at][ids, :VALUES] = values
            if scales is not None:
                self.scales(at)[ids] = scales


WRONG = (
    *((Cells, 3), (Cells, 2), (ListOfLayers, 3), (ClampsTheLast, 3)),
    *((HalfScales, 3), (ByteScales, 3), (SetOnStorage, 3), (LeavesTheLastOut, 3)),
)


class LayersInARow(Cells):
    """All layers of a slot in one row."""

    def made(self) -> Any:
        return torch.zeros(SLOTS, self.layers, self.width, dtype=torch.uint8)

    def cell(self, layer: int) -> torch.Tensor:
        return self.cells[:, layer]


class Blob(LayersInARow):
    """The same without a dimension of layers."""

    def made(self) -> Any:
        return torch.zeros(SLOTS, self.layers * self.width, dtype=torch.uint8)

    def cell(self, layer: int) -> torch.Tensor:
        return self.cells.view(SLOTS, self.layers, -1)[:, layer]


@pytest.mark.parametrize(("kind", "layers"), [(LayersInARow, 3), (Blob, 3), (LayersInARow, 2)])  # or keys and values
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_whose_like_in_the_same_row_is_saved_again_is_not_moved(kind: Any, layers: int, seed: int) -> None:
    assert judged(kind(layers=layers), seed=seed).not_tried == ()
    for options in ({}, {"unused": {"cells": (slice(1, None), slice(VALUES, None))}} if kind is not Blob else {}):
        error = found(kind(is_wrong=True, layers=layers), seed=seed, **options)
        assert {each.code for each in error.findings} == {"KV304"} and "unused=" not in str(error)


class OneScale(Cells):
    """Legal: the layers share the scale in the cells of the first, and the others have nothing there."""

    def save(self, ids: Any) -> Any:
        return [self.cell(at)[ids, :VALUES] for at in range(self.layers)], self.scales(0)[ids].clone()

    def load(self, copy: Any, ids: Any) -> None:
        for at, values in enumerate(copy[0]):
            self.cell(at)[ids, :VALUES] = values
        self.scales(0)[ids] = copy[1]


class OneScaleInARow(OneScale, LayersInARow):
    """Legal: the same in one row."""


@pytest.mark.parametrize("kind", [OneScale, OneScaleInARow], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_one_layer_alone_has_is_not_judged_and_views_of_it_are(kind: Any, seed: int) -> None:
    with pytest.raises(NotJudged, match="pass views of what") as caught:
        judged(kind(), seed=seed)
    assert "unused=" not in str(caught.value) and "exclude=" not in str(caught.value)
    pool = kind()
    views = [*(pool.cell(layer)[:, :VALUES] for layer in range(3)), pool.scales(0)]
    assert check_round_trip(views, save=pool.save, load=pool.load, slots=SLOTS, seed=seed).not_tried == ()


@pytest.mark.parametrize(("kind", "layers"), WRONG)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_another_layer_brings_back_is_not_moved_and_its_twin_is_clean(
    kind: Any, layers: int, seed: int
) -> None:
    result = judged(kind(layers=layers), seed=seed)
    assert not result.not_tried and result.words
    error = found(kind(is_wrong=True, layers=layers), seed=seed)
    assert {each.code for each in error.findings} == {"KV304"}
    assert f"cells[{layers - 1}]" in str(error) and "the same part of cells[0] came back" in str(error)
    assert "unused=" not in str(error) and "exclude=" not in str(error)


@pytest.mark.parametrize(("kind", "layers"), [(Cells, 3), (Cells, 2), (ListOfLayers, 3)])
def test_no_name_in_unused_hides_it(kind: Any, layers: int) -> None:
    part = slice(VALUES, VALUES + 4)
    for names in (("cells",), ("cells[1]",), tuple(f"cells[{layer}]" for layer in range(1, layers))):
        with pytest.raises(IntegrityError, match="KV304"):
            judged(kind(is_wrong=True, layers=layers), unused=dict.fromkeys(names, part))
    with pytest.raises(NotJudged, match=r"the same part of cells\[0\] came back"):
        judged(LeavesTheLastOut(is_wrong=True), unused={"cells": part})


class Aligned(Cells):
    """Legal: in no layer is there anything behind the values."""

    def save(self, ids: Any) -> Any:
        return [self.cell(at)[ids, :VALUES] for at in range(self.layers)]

    def load(self, copy: Any, ids: Any) -> None:
        for at, values in enumerate(copy):
            self.cell(at)[ids, :VALUES] = values


class NarrowValues:
    """Legal: keys and values in one tensor, values narrower; for each layer, or for one."""

    def __init__(self, layers: int) -> None:
        self.kv = torch.zeros(*([layers] if layers else []), 2, SLOTS, 2, 16)

    def save(self, ids: Any) -> Any:
        return self.kv[..., 0, ids, :, :].clone(), self.kv[..., 1, ids, :, :10].clone()

    def load(self, copy: Any, ids: Any) -> None:
        self.kv[..., 0, ids, :, :], self.kv[..., 1, ids, :, :10] = copy


@pytest.mark.parametrize("seed", SEEDS)
def test_the_advice_that_is_printed_is_taken(seed: int) -> None:
    with pytest.raises(NotJudged) as caught:
        judged(Aligned(), seed=seed)
    assert "pass unused={'cells': slice(8, 12)}" in str(caught.value)
    assert judged(Aligned(), seed=seed, unused={"cells": slice(8, 12)}).reads
    assert judged(Cells(), seed=seed, unused={"cells": slice(8, 12)}).reads, (
        "a part that is moved everywhere may be named"
    )


@pytest.mark.parametrize(("layers", "name"), [(0, "kv[1]"), (3, "kv[*, 1]")])
def test_values_that_are_narrower_than_keys_are_not_accused_and_can_be_named(layers: int, name: str) -> None:
    with pytest.raises(NotJudged, match="came back"):
        judged(NarrowValues(layers))
    part = (slice(None), slice(10, 16))
    assert judged(NarrowValues(layers), unused={name: part}).not_tried[0].startswith(name)
    with pytest.raises(NotJudged, match="came back"):
        judged(NarrowValues(layers), unused={"kv": part})
    pool = NarrowValues(layers)
    views = [pool.kv[..., 0, :, :, :], pool.kv[..., 1, :, :, :10]]
    assert check_round_trip(views, save=pool.save, load=pool.load, slots=SLOTS).not_tried == ()


class Layers:
    """[layer, kv, slot, ...] of which `left` is neither saved nor loaded."""

    def __init__(self, *left: tuple[int, int]) -> None:
        self.kv = torch.zeros(2, 2, SLOTS, 4)
        self.moved = [(at, side) for at in range(2) for side in range(2) if (at, side) not in left]

    def save(self, ids: Any) -> Any:
        return [self.kv[index][ids] for index in self.moved]

    def load(self, copy: Any, ids: Any) -> None:
        for index, rows in zip(self.moved, copy, strict=True):
            self.kv[index][ids] = rows


def test_a_layer_may_be_named_in_exclude() -> None:
    error = found(Layers((1, 0)))
    assert (error.findings[0].code, error.findings[0].buffer) == ("KV304", "kv[1, 0]")
    assert "load wrote kv[0, 0]; if it holds no KV, pass exclude=('kv[1, 0]',)" in str(error)
    assert judged(Layers((1, 0)), exclude=("kv[1, 0]",)).not_tried == ("kv[1, 0]: excluded by name",)
    result = judged(Layers((1, 0), (1, 1)), exclude=("kv[1]",))
    assert result.not_tried == ("kv[1, 0]: excluded by name", "kv[1, 1]: excluded by name")
    assert set(result.words) == {"kv[0, 0]", "kv[0, 1]", "saved"}
    with pytest.raises(NotJudged, match="expected names of tensors"):
        judged(Layers(), exclude=("kv[2, 0]",))
