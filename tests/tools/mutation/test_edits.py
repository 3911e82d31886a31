"""Edits: what each operator makes of a text, what is never edited, and ids that outlive moved lines."""

from __future__ import annotations

import ast
import re

import pytest

from kvcheck.core.base.errors import UsageError
from tools.mutation.edits import all_edits, edits_of, is_product, module_of, read_sources, sampled
from tools.mutation.operators import OPERATORS
from tools.mutation.source import REPORTERS, STANDING_PARTS, STANDINGS, Source

FILE = "core/cache/example.py"


def news(body: str, operator: str, names: str = "", *, head: str = "def f(a, b):") -> set[str]:
    """The texts that an operator makes of a function's body, each with the edit in it; "" stands for its old text."""
    text = f"{head}\n" + "".join(f"    {line}\n" for line in body.splitlines())
    found = set()
    for edit in edits_of(FILE, text, frozenset(names.split())):
        if edit.operator == operator:
            changed = edit.applied(text)
            ast.parse(changed)
            found.add("\n".join(line[4:] for line in changed.splitlines()[1:]))
    return found


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("delete-call", "a.wait(b)", {"pass"}),
        ("delete-call", "c = a.wait(b)", set()),
        ("move-call", "a.wait(b)\nb.run()", {"b.run()\na.wait(b)"}),
        ("move-call", "c = b.run()\na.wait(b)", {"a.wait(b)\nc = b.run()"}),
        ("move-call", "c = b.run()\na.wait(c)", set()),
        ("move-call", "a.wait(b)\nreturn a", set()),
        ("drop-argument", "return a.submit(b, lane=a, after=b)", {"return a.submit(b, lane=a)"}),
        ("drop-argument", "a.wait(b, lane=a)", {"a.wait(b)"}),
        ("delete-store", "a.n = 1", {"pass"}),
        ("delete-store", "a.n += 1\ndel a[b]", {"pass\ndel a[b]", "a.n += 1\npass"}),
        ("delete-store", "n = 1", set()),
        ("shift-number", "return a[1]", {"return a[2]", "return a[0]"}),
        ("shift-number", "return a[0]", {"return a[1]"}),
        ("shift-number", "return a - -1", {"return a - 0", "return a - -2"}),
        ("shift-bound", "return a[b:]", {"return a[(b + 1):]"}),
        ("shift-bound", "return a[:b]", {"return a[:(b - 1)]", "return a[:(b + 1)]"}),
        ("shift-bound", "return range(a, b)", {"return range(a, (b - 1))", "return range((a + 1), b)"}),
        ("swap-names", "return g(a, b)", {"return g(b, a)"}),
        ("swap-names", "return g(host=a.host, device=a.device)", {"return g(host=a.device, device=a.host)"}),
        ("swap-names", "return g(a, b.c)", set()),
        ("swap-names", "return a, b", {"return b, a"}),
        ("swap-names", "return max(a, b)", set()),
        ("swap-names", "try:\n    g()\nexcept (a, b):\n    pass", set()),
        (
            "drop-row",
            "for c in (a, b, 1):\n    g(c)",
            {f"for c in ({row}):\n    g(c)" for row in ("a, b", "a,  1", " b, 1")},
        ),
        ("drop-row", "return (Part(a), Part(b))", {"return (Part(a),)", "return (Part(b),)"}),
        ("drop-row", "a, b = (b, a)", set()),
        ("drop-row", "return (int(a), int(b))", set()),
        ("move-call", "c = []\nc.append(a)\nb.run()", set()),
        ("turn-comparison", "return a < b", {"return a <= b"}),
        ("turn-comparison", "return a <= 1 < b", {"return a < 1 < b", "return a <= 1 <= b"}),
        ("turn-comparison", "return a not in b", {"return a in b"}),
        ("turn-comparison", "return a is not None", {"return a is None"}),
        ("turn-comparison", "return (a == b)", {"return (a != b)"}),
        ("turn-logic", "return a and (b or 1)", {"return (a or (b or 1))", "return a and ((b and 1))"}),
        ("negate-condition", "if a > b:\n    g()", {"if (not (a > b)):\n    g()"}),
        ("negate-condition", "if a == b:\n    g()", set()),
        ("drop-not", "return not a", {"return (a)"}),
        ("turn-status", "return True", {"return False"}),
        ("turn-bound", "return min(a, b)", {"return max(a, b)"}),
        ("drop-return", "if a:\n    return b\nreturn a", {"if a:\n    pass\nreturn a"}),
        ("turn-loop", "for c in a:\n    break", {"for c in a:\n    continue"}),
        ("drop-filter", "return [c for c in a if c > b]", {"return [c for c in a if True]"}),
        ("turn-pages", "return pages_for(a, b)", {"return ((a) // (b))"}),
        ("turn-pages", "return floor_to_page(a, b)", {"return (-(-(a) // (b)) * (b))"}),
        ("drop-copy", "return a.copy()", {"return a"}),
        ("drop-copy", "return a.copy(b)", set()),
    ],
)
def test_an_operator_makes_these_texts(operator: str, body: str, expected: set[str]) -> None:
    assert news(body, operator) == expected


def test_the_other_tier_is_taken_where_the_package_knows_the_name() -> None:
    assert news("return a.device", "other-tier", "device host") == {"return a.host"}
    assert news("return a.device", "other-tier", "device") == set()
    assert news("return a.host_free", "other-tier", "device_free") == {"return a.device_free"}
    assert news('return a["full"]', "other-tier") == {'return a["window"]'}
    assert news("device = a\nhost = b\nreturn device", "other-tier") >= {"device = a\nhost = b\nreturn host"}


def test_every_operator_is_tried_above() -> None:
    (rows,) = (mark.args[1] for mark in test_an_operator_makes_these_texts.pytestmark)  # type: ignore[attr-defined]
    assert {operator for operator, _, _ in rows} | {"other-tier"} == set(OPERATORS)


@pytest.mark.parametrize(
    "text",
    [
        '"""A module."""\n',
        "class A(Protocol):\n    def f(self, a: int = 1) -> int:\n        self.g(a, a)\n",
        'def f(a: Literal[1]) -> Literal[2]:\n    """Text."""\n',
        "def f(a):\n    raise ValueError(f'{a[1]} {a < 2}', a[1])\n",
        "def f(a):\n    assert a < 1, a[2]\n",
        "class A:\n    def f(self, a):\n        self._emit(Took(a, 1))\n",
        "class A:\n    def f(self, a):\n        if self._emit is not None and a:\n            self._emit(Took(a, 1))\n",
        "class A:\n    def f(self, a):\n        self.rows.report_wanted('device', a, 1)\n",
        "class A:\n    def _report_lock(self, a):\n        self.took(a, 1)\n",
        "class A:\n    def states(self):\n        return f(self.a, self.b[1])\n",
        "class A:\n    __slots__ = ('a', 'b')\n    n: int = field(default=1)\n",
        "if TYPE_CHECKING:\n    LEGS = (1, 2)\n",
        "def __repr__(self):\n    return f(self.a, self.b[1])\n",
        "COUNT = 3\n",
    ],
)
def test_what_changes_no_behaviour_is_not_edited(text: str) -> None:
    assert edits_of(FILE, text, frozenset()) == []


def test_a_condition_that_does_more_than_to_report_is_edited() -> None:
    told = "if self._emit is not None:\n    self._emit(Took(a))"
    assert news(told, "turn-comparison") == set()
    assert news(f"{told}\n    a.run()", "turn-comparison") and news(f"{told}\nelse:\n    a.run()", "turn-comparison")


def test_a_footprint_of_one_layer_names_no_layer_more() -> None:
    body = 'return Footprint("table", (a,), (0, 1), b)'
    first, last = (body.replace("(0, 1)", layers) for layers in ("(1, 1)", "(0, 0)"))
    assert news(body, "shift-number") == {first, last}
    assert body.replace("(0, 1)", "(0, 2)").replace("Footprint", "Other") in news(
        body.replace("Footprint", "Other"), "shift-number"
    )


def test_only_functions_that_are_left_out_ask_for_standings() -> None:
    """What they say decides nothing in the cache, so no edit of them is a fault of it."""
    asking: set[str] = set()
    for file, text in read_sources().items():
        source = Source(file, text)
        for name, first, last in source.functions:
            here = name.rpartition(".")[2]
            body = "\n".join(text.splitlines()[first:last])
            if any(re.search(rf"\.{known}\(", body) for known in STANDINGS | STANDING_PARTS):
                asking.add(here)
    assert asking and asking <= STANDINGS | STANDING_PARTS


def test_what_emits_an_event_of_a_prefix_cache_does_nothing_else() -> None:
    """Each of them is there, asks whether somebody wants it, and has a name that no function with another work has."""
    found = dict.fromkeys(REPORTERS, 0)
    for file, text in read_sources().items():
        for name, first, last in Source(file, text).functions:
            if (here := name.rpartition(".")[2]) in REPORTERS:
                found[here] += 1
                assert "self._emit" in "\n".join(text.splitlines()[first:last]), name
    assert set(found.values()) == {1}


def test_a_table_of_a_module_loses_rows() -> None:
    text = 'LEGS = ("kv", "state", "aux")\nROWS = {"a": 1, "b": 2}\n'
    found = {edit.applied(text) for edit in edits_of(FILE, text, frozenset())}
    assert 'LEGS = ("kv", "state")\nROWS = {"a": 1, "b": 2}\n' in found
    assert 'LEGS = ("kv", "state", "aux")\nROWS = {"a": 1}\n' in found
    assert len(found) == 5
    assert all(edit.last == 0 for edit in edits_of(FILE, text, frozenset())), "it runs at the import"


def test_ids_outlive_moved_lines_and_tell_equal_texts_apart() -> None:
    text = "def f(a):\n    a.wait()\n    a.wait()\n"
    ids = [edit.id for edit in edits_of(FILE, text, frozenset())]
    moved = [edit.id for edit in edits_of(FILE, f"N = 1\n\n\n{text}", frozenset())]
    assert ids == moved and len(set(ids)) == len(ids) >= 2
    assert ids != [edit.id for edit in edits_of("core/cache/other.py", text, frozenset())]


def test_an_edit_says_which_lines_have_to_run() -> None:
    text = "def f(a):\n    if (a and\n            a[1]):\n        a.wait(\n            a[2])\n"
    lines = {(edit.operator, edit.old): (edit.first, edit.last) for edit in edits_of(FILE, text, frozenset())}
    assert lines["shift-number", "1"] == (2, 3)
    assert lines["shift-number", "2"] == (4, 5)


def test_offsets_hold_behind_text_that_is_not_ascii() -> None:
    text = "def f(a):\n    b = 'ä→'; return a[1]\n"
    assert {edit.applied(text) for edit in edits_of(FILE, text, frozenset()) if edit.operator == "shift-number"} == {
        "def f(a):\n    b = 'ä→'; return a[2]\n",
        "def f(a):\n    b = 'ä→'; return a[0]\n",
    }


def test_an_edit_refuses_another_text() -> None:
    text = "def f(a):\n    return a[1]\n"
    with pytest.raises(UsageError, match="has changed since"):
        edits_of(FILE, text, frozenset())[0].applied(text.replace("a[1]", "b[7]"))


def test_the_whole_cache_gives_thousands_of_different_edits() -> None:
    """One file in full: each edit compiles and differs. All files together take ten seconds."""
    sources = read_sources()
    file = "core/cache/hicache/controller.py"
    found = all_edits({file: sources[file]}, [file])[file]
    assert len(found) > 60 and len({edit.id for edit in found}) == len(found)
    original = ast.dump(ast.parse(sources[file]))
    for edit in found:
        changed = ast.parse(edit.applied(sources[file]))
        assert ast.dump(changed) != original, edit
        compile(changed, file, "exec")


def test_samples_are_the_same_each_time_and_spread() -> None:
    sources = read_sources()
    files = ["core/cache/offload.py", "core/cache/hicache/controller.py"]
    edits = [edit for rows in all_edits({file: sources[file] for file in files}, files).values() for edit in rows]
    few, more = sampled(edits, 40, 1), sampled(edits, 80, 1)
    assert few == sampled(edits[::-1], 40, 1)[::-1]
    assert {edit.id for edit in few} <= {edit.id for edit in more}, "a larger sample holds the smaller one"
    assert sampled(edits, 40, 2) != few and sampled(edits, None, 1) == edits
    assert {edit.file for edit in few} == set(files) and len({edit.operator for edit in few}) >= 10


def test_a_file_is_product_or_not_and_has_a_module() -> None:
    assert not is_product("core/cache/backend/simulated.py") and not is_product("core/cache/transfer/ipc/wire.py")
    assert is_product("core/cache/backend/scoped.py") and is_product("core/cache/hicache/cache.py")
    assert module_of("core/cache/pools/__init__.py") == "kvcheck.core.cache.pools"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a):\n    if a[1]:\n        raise ValueError\n", True),
        ("def f(a):\n    if a[1]:\n        raise ValueError\n    else:\n        a.run()\n", False),
        ("def f(a):\n    if a[1]:\n        return 0\n    return 2\n", False),
        ("def f(a):\n    a.pool.check_open(a)\n", True),
        ("def f(a):\n    _check_ids(a)\n", True),
        ("def f(a):\n    a.wait(check_open)\n", False),
        ("def _check_saved(a):\n    return a[1]\n", True),
        ("class A:\n    def __post_init__(self):\n        self.b = self.c[1]\n", True),
        ("def f(a):\n    return zip(a, a, strict=True)\n", True),
        ("def f(a):\n    return g(a, done=True)\n", False),
    ],
)
def test_edits_in_checks_are_told_apart(text: str, expected: bool) -> None:
    found = {edit.is_guard for edit in edits_of(FILE, text, frozenset())}
    assert found == {expected}
