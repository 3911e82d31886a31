"""The architecture checks themselves, on literal sources: what they accept and what they refuse.

Invariants:
- Every kind of message that test_architecture.py can give appears here with a source that earns it.
"""

from __future__ import annotations

import pytest
from test_architecture import loose_ends, package_of, violations

GOOD = '"""Purpose.\n\nInvariants:\n- One.\n"""\n'


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("core.cache.pools.mha", "import torch\nlabel = str(torch.cuda)"),
        ("core.run.runners", 'ROWS = {"a": "kvcheck.core.stress.rows:SCHEDULE"}'),
        ("core.stress.runner", "try:\n    pass\nexcept Exception:\n    raise"),
        ("core.stress.walk", "import time, numpy as np\nnow = time.monotonic()\nrng = np.random.default_rng(3)"),
        ("core.stress.walk", "def pick(random: object) -> object:\n    return random.choice()"),
        ("core.stress.targets", 'MUTANTS = {"a": "kvcheck.core.stress.targets.mutants.metadata:ViewMetadata"}'),
        ("core.cache.pools.pool", "holding.committed = 3"),
        ("core.cache.scheduler.decode", "start = holding.committed"),
        ("commands.stress", "import os\nfrom kvcheck import __version__\nhome = os.environ"),
        ("core.report.to_csv", "import pandas\ntry:\n    pass\nexcept (OSError, ValueError):\n    raise"),
    ],
)
def test_checker_accepts(module: str, code: str) -> None:
    assert violations(module, GOOD + code) == []


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("core.cache.pools.mha", 'ROWS = {"a": "kvcheck.core.stress.runner:run"}', "lies in another package"),
        ("core.cache.pools.mha", "target.copy_(source)", ".copy_() is banned"),
        ("core.cache.transfer.seal", "row = row.to('cpu')", ".to() is banned"),
        ("core.cache.scheduler.decode", "torch.cuda.synchronize()", ".synchronize() is banned"),
        ("core.cache.offload", "holding.committed = 3", ".committed = is banned"),
        ("core.cache.scheduler.decode", "chunk.holding.committed += 1", ".committed = is banned"),
        ("core.stress.walk", "import random", "random is banned"),
        ("core.stress.workload.traces", "from random import Random", "random.Random is banned"),
        ("core.stress.walk", "import time as clock\nnow = clock.time()", "time.time is banned"),
        ("core.stress.walk", "import numpy as np\nnp.random.seed(1)", "numpy.random.seed is banned"),
        ("core.stress.walk", "key = hash(name)", "hash() is banned"),
        ("core.report.store", "import pickle", "pickle is banned"),
        ("commands.report", "import torch\nrun = torch.load('run')", "torch.load is banned"),
        ("core.base.codes", "eval('1')", "eval() is banned"),
        ("core.cache.backend.cuda", "import os\nvisible = os.environ['X']", "os.environ is banned"),
        ("core.cache.backend.cuda", "from os import getenv", "os.getenv is banned"),
        ("core.stress.walk", "import matplotlib.pyplot", "matplotlib is imported only in"),
        ("core.cache.pools.mha", "try:\n    pass\nexcept Exception:\n    raise", "catches everything"),
        ("core.cache.pools.mha", "try:\n    pass\nexcept:\n    raise", "catches everything"),
        ("core.cache.pools.mha", "try:\n    pass\nexcept (OSError, BaseException):\n    raise", "catches everything"),
        ("core.cache.pools.utils", "x = 1", "name of a drawer"),
        ("core.cache.pools.mha", "def long() -> None:\n" + "    x = 1\n" * 70, "long has 71 lines"),
        ("core.cache.pools.mha", "x = 1\n" * 500, "at most 500 (LONG_FILES)"),
    ],
)
def test_checker_refuses(module: str, code: str, message: str) -> None:
    found = violations(module, GOOD + code)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "no module docstring"),
        ('"""Purpose\nthat goes on."""', "first line is the purpose"),
        ('"""Purpose.\n\nInvariants: none\n"""\nx = 1', 'no list under "Invariants:"'),
    ],
)
def test_checker_wants_a_docstring(source: str, message: str) -> None:
    assert any(message in line for line in violations("core.cache.pools.mha", source))


def test_a_package_of_names_and_tables_needs_no_invariants() -> None:
    source = '"""Purpose."""\nfrom x import Registry, Y\n__all__ = ["Y"]\nROWS: Registry[Y] = Registry("row", {})\n'
    assert violations("core.cache.pools", source) == []


def test_loose_ends_are_found() -> None:
    sources = {
        "core.cache.pools": 'POOLS = {"a": "kvcheck.core.cache.pools.mha:MhaPool", '
        '"b": "kvcheck.core.cache.pools.mla:MlaPool"}',
        "core.cache.pools.mha": "from kvcheck.core.cache.pools.buffers import Buffers\nclass MhaPool: ...",
        "core.cache.pools.mla": "class Renamed: ...",
        "core.cache.pools.buffers": "class Buffers: ...",
        "core.cache.pools.forgotten": "from kvcheck.core.cache.pools.forgotten import itself",
        "commands.main": "def main() -> None: ...",
    }
    assert loose_ends(sources, {"core.cache.pools"}, {"commands.main"}) == [
        "core.cache.pools, line 1: kvcheck.core.cache.pools.mla:MlaPool does not exist",
        "core.cache.pools.mla: no module imports it and no table names it",
        "core.cache.pools.forgotten: no module imports it and no table names it",
    ]


def test_packages_are_wings_of_core() -> None:
    assert package_of("core.cache.pools.mha") == "core.cache" and package_of("core.bench") == "core.bench"
    assert package_of("commands.main") == "commands" and package_of("__main__") == "commands"
