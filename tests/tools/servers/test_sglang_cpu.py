"""How SGLang's servers are started: flags, environment, stand-ins and faults of each variant."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from tools.servers.faults.planting import LOG, ORDERS
from tools.servers.inside.stand_ins import STAND_INS
from tools.servers.sglang_cpu import VARIANTS, Sizes, called, commands, stand_ins

PLACE = Path("/environments")
MODEL = Path("/models/tiny")


def value(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_serves_the_model_over_loopback_from_a_small_pool(variant: str, tmp_path: Path) -> None:
    made = commands(PLACE, MODEL, folder=tmp_path, variant=variant, sizes=Sizes(longest=512, slots=1024))
    assert len({each.port for each in made}) == len({each.name for each in made}) == len(made)
    for each in made:
        assert each.words[:3] == ("/environments/sglang-cpu-0.5.23/bin/python", "-m", "sglang.launch_server")
        assert value(each.words, "--model-path") == "/models/tiny"
        assert value(each.words, "--host") == "127.0.0.1"
        assert int(value(each.words, "--port")) == each.port
        assert value(each.words, "--max-total-tokens") == "1024"
        assert not any("{" in text for text in (*each.words, *each.variables.values())), "every hole is filled"
        assert ORDERS not in each.variables
        assert set(each.variables["KVCHECK_STAND_INS"].split(",")) == set(stand_ins(variant)) <= set(STAND_INS)
    assert called(tmp_path) == {}


def test_only_variants_with_a_host_tier_or_a_peer_need_copies_and_each_stand_in_is_told_in_words() -> None:
    assert list(stand_ins("plain")) == ["compiled-packages"]
    assert {name for name, row in STAND_INS.items() if row.moves_bytes} == {"host-copies"}
    assert all(stand_ins("pair").values())


def test_the_prefill_server_of_a_pair_is_the_first_and_alone_has_faults(tmp_path: Path) -> None:
    prefill, decode = commands(PLACE, MODEL, folder=tmp_path, variant="pair", has_faults=True)
    assert value(prefill.words, "--disaggregation-mode") == "prefill"
    assert int(value(prefill.words, "--disaggregation-bootstrap-port")) not in (prefill.port, decode.port)
    assert "--disaggregation-bootstrap-port" not in decode.words
    assert {ORDERS, LOG} <= set(prefill.variables)
    assert not {ORDERS, LOG} & set(decode.variables)


def test_sizes_and_variants_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whole pages of 16"):
        Sizes(slots=3201)
    with pytest.raises(UsageError, match="room for one request"):
        Sizes(longest=4096)
    with pytest.raises(
        UsageError, match="unknown variant 'hicache-direkt' of SGLang; known: plain, priority, mla, hicache"
    ):
        commands(PLACE, MODEL, folder=tmp_path, variant="hicache-direkt")
