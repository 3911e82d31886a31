"""What is put into a server's process: after which module, how it is counted, and what a stand-in refuses."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tools.servers.inside.after_import import AfterImport
from tools.servers.inside.ledger import Ledger, counts
from tools.servers.inside.stand_ins import STAND_INS, StandInCannot
from tools.servers.sglang_cpu import ON_PATH


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages that are forgotten afterwards."""
    folder = tmp_path / "packages"
    (folder / "made_up_engine").mkdir(parents=True)
    (folder / "made_up_engine" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield folder / "made_up_engine"
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_changes_are_made_when_their_module_has_been_loaded_and_not_before(engine: Path) -> None:
    (engine / "pool.py").write_text("NAME = 'pool'\nSEEN = NAME")
    (engine / "other.py").write_text("")
    made: list[str] = []
    AfterImport(
        {"made_up_engine.pool": (lambda module: made.append(module.SEEN), lambda _: made.append("then"))}
    ).install()
    importlib.import_module("made_up_engine.other")
    assert made == []
    pool = importlib.import_module("made_up_engine.pool")
    assert made == ["pool", "then"]
    assert pool.__spec__ is not None and pool.__spec__.loader is pool.__loader__
    assert not isinstance(pool.__loader__, AfterImport), "a module looks as if nobody had been there"


def test_a_change_that_cannot_be_made_makes_the_import_fail(engine: Path, ledger: Ledger) -> None:
    (engine / "conn.py").write_text("class MooncakeKVSender:\n    renamed = True")
    AfterImport({"made_up_engine.conn": (STAND_INS["sender-indices"].bind("sender-indices", ledger),)}).install()
    with pytest.raises(AttributeError, match="supports_host_tensor_indices"):
        importlib.import_module("made_up_engine.conn")


def test_counts_of_all_processes_are_added_and_a_name_that_nobody_called_is_there(tmp_path: Path) -> None:
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    first.installed("copies")
    first.add("copies: bytes moved", 4096)
    first.add("copies: bytes moved")
    (tmp_path / f"{os.getpid()}.txt").rename(tmp_path / "1.txt")  # of a process that has ended
    second.installed("copies")
    second.add("copies: bytes moved", 3)
    assert counts(tmp_path) == {"copies": 0, "copies: bytes moved": 4100}


def test_a_compiled_package_can_be_imported_by_the_engine_and_not_be_called(
    engine: Path, ledger: Ledger, tmp_path: Path
) -> None:
    STAND_INS["compiled-packages"].put_in("compiled-packages", ledger, None)
    sglang = engine.parent / "sglang"
    sglang.mkdir()
    (sglang / "__init__.py").write_text("from sgl_kernel import rotate\ndef run(): return rotate(1)")
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel")
    run = importlib.import_module("sglang").run
    with pytest.raises(StandInCannot, match=r"sgl_kernel\.rotate"):
        run()
    assert counts(tmp_path)["compiled-packages: sgl_kernel.rotate"] == 1


def host_pool(ledger: Ledger) -> ModuleType:
    """A module with a host pool of 2 layers, 8 slots of 16 bytes on the device and 12 on the host."""

    class MHATokenToKVPoolHost:
        def __init__(self) -> None:
            self.kv_buffer = torch.zeros(2, 2, 12, 1, 4)
            self.device_k_buffers = [torch.randn(8, 1, 4) for _ in range(2)]
            self.device_v_buffers = [torch.randn(8, 1, 4) for _ in range(2)]

    module = ModuleType("pool_host")
    module.MHATokenToKVPoolHost = MHATokenToKVPoolHost  # type: ignore[attr-defined]
    STAND_INS["host-copies"].put_in("host-copies", ledger, module)
    return module


def test_a_copy_between_the_tiers_moves_the_bytes_and_says_how_many(ledger: Ledger, tmp_path: Path) -> None:
    module = host_pool(ledger)
    pool = module.MHATokenToKVPoolHost()
    before = pool.kv_buffer.clone()
    device, host = torch.tensor([4, 5]), torch.tensor([10, 11])
    module.transfer_kv_direct(
        src_layers=[*pool.device_k_buffers, *pool.device_v_buffers],
        dst_layers=[*pool.kv_buffer[0], *pool.kv_buffer[1]],
        src_indices=device,
        dst_indices=host,
        page_size=2,
    )
    assert torch.equal(pool.kv_buffer[0, 1, 10:12], pool.device_k_buffers[1][4:6])
    assert torch.equal(pool.kv_buffer[1, 0, 10:12], pool.device_v_buffers[0][4:6])
    assert torch.equal(pool.kv_buffer[:, :, :10], before[:, :, :10]), "nothing else was written"
    assert counts(tmp_path)["host-copies: bytes moved"] == 4 * 2 * 16
    assert counts(tmp_path)["host-copies: transfer_kv_direct"] == 1


def test_a_copy_that_leaves_the_memory_of_both_tiers_or_moves_nothing_raises(ledger: Ledger) -> None:
    module = host_pool(ledger)
    pool = module.MHATokenToKVPoolHost()
    one = {"src_layers": [pool.device_k_buffers[0]], "dst_layers": [pool.kv_buffer[0, 0]], "page_size": 2}
    with pytest.raises(StandInCannot, match="outside the memory of both tiers"):
        module.transfer_kv_direct(**one, src_indices=torch.tensor([0, 1]), dst_indices=torch.tensor([100, 101]))
    with pytest.raises(StandInCannot, match="moved no byte"):
        nothing = {**one, "src_layers": [], "dst_layers": []}
        module.transfer_kv_direct(**nothing, src_indices=torch.tensor([0, 1]), dst_indices=torch.tensor([2, 3]))
    assert not hasattr(module, "jit_transfer_hicache_one_layer"), "a CPU is never offered it"


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize(
    ("stand_ins", "status", "said"),
    [("", 0, ""), ("compiled-packages", 0, ""), ("sgl-kernels", 70, "unknown stand-in 'sgl-kernels'; known: compiled")],
)
def test_a_process_gets_what_its_environment_names_and_ends_where_it_cannot(
    tmp_path: Path, stand_ins: str, status: int, said: str
) -> None:
    variables = {"KVCHECK_INSIDE": str(tmp_path), "KVCHECK_STAND_INS": stand_ins, "PYTHONPATH": str(ON_PATH)}
    code = "import sys; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert said in ended.stderr
    assert ended.stdout == ("False\n" if not status else ""), "it loads no torch"
    assert counts(tmp_path) == ({stand_ins: 0} if stand_ins and not status else {})
