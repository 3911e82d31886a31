"""Model presets: names, families, exact row sizes and the public dimensions of real models.

Invariants:
- Row sizes are literal numbers here, derived by hand and not by the code under test.
"""

from __future__ import annotations

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES, SHAPES, TINY_SHAPES, shape

FAMILIES = {"mha", "mla", "nsa", "swa", "mamba"}


def attention_row_bytes(preset: ModelShape) -> int:
    """Bytes of one token of one attention buffer (K, or the latent)."""
    if preset.latent_row_bytes:
        return preset.latent_row_bytes
    return (preset.latent_dim or preset.num_kv_heads * preset.head_dim) * preset.kv_dtype.itemsize


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_is_found_by_its_name_and_says_where_it_comes_from(name: str) -> None:
    preset = shape(name)
    assert preset.name == name
    assert preset.family in FAMILIES
    assert len(preset.source) > 10
    assert (name in TINY_SHAPES) == name.endswith("-tiny")


def test_the_tiny_shapes_cover_every_family() -> None:
    assert {shape(name).family for name in TINY_SHAPES} == FAMILIES


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        shape("glm-5.1-tinny")
    assert "unknown shape 'glm-5.1-tinny'" in str(caught.value)
    assert "did you mean 'glm-5.1-tiny'?" in str(caught.value)
    assert all(name in str(caught.value) for name in SHAPES)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("glm-5.1-micro", 8),
        ("deepseek-v3.2-micro", 16),
        ("deepseek-v3-micro", 8),
        ("llama-3-micro", 16),
        ("llama-3-fp8-micro", 32),
        ("gpt-oss-micro", 16),
        ("qwen3-next-micro", 8),
        ("glm-5.1-tiny", 32),
        ("deepseek-v3.2-tiny", 40),
        ("deepseek-v3-tiny", 32),
        ("llama-3-tiny", 32),
        ("llama-3-fp8-tiny", 64),
        ("gpt-oss-tiny", 32),
        ("qwen3-next-tiny", 32),
        ("glm-5.1", 1152),
        ("deepseek-v3.2", 656),
        ("deepseek-v3", 1152),
        ("llama-3-8b", 2048),
        ("llama-3-70b", 2048),
        ("llama-3-8b-fp8", 1024),
        ("gpt-oss-20b", 1024),
        ("gpt-oss-120b", 1024),
        ("qwen3-next-80b", 1024),
        ("llama-answers", 1024),
        ("llama-fp8-answers", 256),
        ("deepseek-answers", 2304),
        ("gpt-oss-answers", 512),
        ("deepseek-v3.2-answers", 2304),
        ("qwen3-next-answers", 2048),
    ],
)
def test_attention_rows_have_their_exact_size(name: str, row_bytes: int) -> None:
    assert attention_row_bytes(shape(name)) == row_bytes


def test_every_preset_has_a_row_in_the_size_table() -> None:
    marks = test_attention_rows_have_their_exact_size.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(SHAPES)


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_tiny_rows_and_states_are_small_multiples_of_a_word(name: str) -> None:
    preset = shape(name)
    assert attention_row_bytes(preset) % 8 == 0
    assert 16 <= attention_row_bytes(preset) <= 64
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
    assert attention_row_bytes(preset) % 8 == 0
    assert 8 <= attention_row_bytes(preset) <= 32
    assert (preset.family, preset.kv_dtype) == (tiny.family, tiny.kv_dtype)
    assert preset.window % 2 == bool(preset.window_layers)  # the window ends inside a page


@pytest.mark.parametrize("name", ["glm-5.1-tiny", "deepseek-v3.2-tiny", "glm-5.1", "deepseek-v3.2"])
def test_an_index_page_is_8448_bytes(name: str) -> None:
    preset = shape(name)
    scales = preset.index_head_dim // preset.index_quant_block
    assert preset.page_size == 64
    assert preset.page_size * (preset.index_head_dim + 4 * scales) == 8448


@pytest.mark.parametrize(
    ("name", "full", "window", "state"),
    [
        ("gpt-oss-tiny", (1, 3), (0, 2), ()),
        ("qwen3-next-tiny", (3,), (), (0, 1, 2)),
        ("glm-5.1-tiny", (0, 1), (), ()),
    ],
)
def test_layer_patterns(name: str, full: tuple[int, ...], window: tuple[int, ...], state: tuple[int, ...]) -> None:
    preset = shape(name)
    assert (preset.full_layers, preset.window_layers, preset.state_layers) == (full, window, state)


def test_the_tiny_window_ends_inside_a_page() -> None:
    preset = shape("gpt-oss-tiny")
    assert preset.window % preset.page_size != 0


@pytest.mark.parametrize(
    ("name", "layers", "full", "hidden"),
    [
        ("glm-5.1", 78, 78, 6144),
        ("deepseek-v3.2", 61, 61, 7168),
        ("deepseek-v3", 61, 61, 7168),
        ("llama-3-8b", 32, 32, 4096),
        ("llama-3-70b", 80, 80, 8192),
        ("llama-3-8b-fp8", 32, 32, 4096),
        ("gpt-oss-20b", 24, 12, 2880),
        ("gpt-oss-120b", 36, 18, 2880),
        ("qwen3-next-80b", 48, 12, 2048),
    ],
)
def test_real_models_have_their_public_depth_and_width(name: str, layers: int, full: int, hidden: int) -> None:
    preset = shape(name)
    assert (preset.num_layers, len(preset.full_layers), preset.hidden_size) == (layers, full, hidden)


def test_the_recurrent_state_of_qwen3_next() -> None:
    preset = shape("qwen3-next-80b")
    assert preset.conv_dim == 8192
    assert (preset.ssm_heads, preset.ssm_key_dim, preset.ssm_value_dim) == (32, 128, 128)
