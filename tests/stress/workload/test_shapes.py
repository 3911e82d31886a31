"""Model presets: row sizes and public dimensions as literal numbers, derived by hand and not by the code under test."""

from __future__ import annotations

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES, SHAPES, TINY_SHAPES, shape

# Bytes of one token of one attention buffer, layers, those with full attention, hidden size
MODELS: dict[str, tuple[int, int, int, int]] = {
    "glm-5.1": (1152, 78, 78, 6144),
    "deepseek-v3.2": (656, 61, 61, 7168),
    "deepseek-v3": (1152, 61, 61, 7168),
    "llama-3-8b": (2048, 32, 32, 4096),
    "llama-3-70b": (2048, 80, 80, 8192),
    "llama-3-8b-fp8": (1024, 32, 32, 4096),
    "gpt-oss-20b": (1024, 24, 12, 2880),
    "gpt-oss-120b": (1024, 36, 18, 2880),
    "qwen3-next-80b": (1024, 48, 12, 2048),
}
ANSWERS = {
    **{"llama-answers": 1024, "llama-fp8-answers": 256, "deepseek-answers": 2304, "gpt-oss-answers": 512},
    **{"deepseek-v3.2-answers": 2304, "qwen3-next-answers": 2048},
}


def row_bytes(preset: ModelShape) -> int:
    """Bytes of one token of one attention buffer (K, or the latent)."""
    if preset.latent_row_bytes:
        return preset.latent_row_bytes
    return (preset.latent_dim or preset.num_kv_heads * preset.head_dim) * preset.kv_dtype.itemsize


def test_every_preset_is_judged_here() -> None:
    assert {*SHAPES} == {*MODELS, *ANSWERS, *TINY_SHAPES, *MICRO_SHAPES}
    assert {shape(name).family for name in TINY_SHAPES} == {"mha", "mla", "nsa", "swa", "mamba"}


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'glm-5\.1-tiny'") as caught:
        shape("glm-5.1-tinny")
    assert all(name in str(caught.value) for name in SHAPES)


@pytest.mark.parametrize("name", MODELS)
def test_real_models_have_their_public_dimensions(name: str) -> None:
    preset = shape(name)
    assert (row_bytes(preset), preset.num_layers, len(preset.full_layers), preset.hidden_size) == MODELS[name]


@pytest.mark.parametrize("name", ANSWERS)
def test_rows_of_answering_shapes_have_their_exact_size(name: str) -> None:
    assert row_bytes(shape(name)) == ANSWERS[name]


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_tiny_rows_and_states_are_small_multiples_of_a_word(name: str) -> None:
    preset = shape(name)
    assert row_bytes(preset) % 8 == 0 and 16 <= row_bytes(preset) <= 64
    assert (preset.num_kv_heads * preset.head_dim * preset.kv_dtype.itemsize) % 8 == 0
    if preset.family != "nsa":
        assert 4 <= preset.page_size <= 16
    if preset.scale_block:
        assert (preset.num_kv_heads * preset.head_dim // preset.scale_block * 4) % 8 == 0
    assert (preset.conv_dim * (preset.conv_kernel - 1) * preset.conv_dtype.itemsize) % 8 == 0
    states = preset.ssm_heads * preset.ssm_key_dim * preset.ssm_value_dim
    assert (states * preset.ssm_dtype.itemsize) % 8 == 0
    assert preset.hidden_size == 16


@pytest.mark.parametrize("name", MICRO_SHAPES)
def test_micro_rows_are_a_few_words_in_pages_of_two_and_two_layers(name: str) -> None:
    preset, tiny = shape(name), shape(name.replace("micro", "tiny"))
    assert (preset.page_size, preset.num_layers) == (2, 2)
    assert row_bytes(preset) % 8 == 0 and 8 <= row_bytes(preset) <= 32
    assert (preset.family, preset.kv_dtype) == (tiny.family, tiny.kv_dtype)
    assert preset.window % 2 == bool(preset.window_layers)  # the window ends inside a page


@pytest.mark.parametrize("name", ["glm-5.1-tiny", "deepseek-v3.2-tiny", "glm-5.1", "deepseek-v3.2"])
def test_an_index_page_is_8448_bytes(name: str) -> None:
    preset = shape(name)
    assert preset.page_size == 64
    assert 64 * (preset.index_head_dim + 4 * (preset.index_head_dim // preset.index_quant_block)) == 8448


def test_tiny_hybrids_have_both_kinds_of_layers_and_a_window_that_ends_inside_a_page() -> None:
    windows, states = shape("gpt-oss-tiny"), shape("qwen3-next-tiny")
    assert (windows.full_layers, windows.window_layers) == ((1, 3), (0, 2)) and windows.window % windows.page_size
    assert (states.full_layers, states.state_layers) == ((3,), (0, 1, 2))


def test_the_recurrent_state_of_qwen3_next() -> None:
    preset = shape("qwen3-next-80b")
    assert (preset.conv_dim, preset.ssm_heads, preset.ssm_key_dim, preset.ssm_value_dim) == (8192, 32, 128, 128)
