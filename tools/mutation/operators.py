"""OPERATORS: the table of ways to edit a node, each with what it stands for.

Invariants:
- An operator is a function of the module, one node and the package's identifiers. It yields (start, end, new text).
- It need not look whether its text compiles or differs: `edits` drops what does not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tools.mutation.source import Source

Change: TypeAlias = tuple[int, int, str]
Make: TypeAlias = Callable[[Source, ast.AST, frozenset[str]], Iterator[Change]]

COMPARISONS: dict[type[ast.cmpop], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}
TURNED_ROUND = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
"""Comparisons that COMPARISONS negates; the others move by one."""
STATUSES = {"SUCCESS": "FAILED", "FAILED": "SUCCESS", "DONE": "REFUSED", "READY": "REFUSED", "REFUSED": "DONE"}
OTHER_TIER = {"device": "host", "d2h": "h2d", "lock": "lock_host", "unlock": "unlock_host", "full": "window"}
"""Word of a name, and what it is called on the other tier or in the other space."""
WORDS = {**OTHER_TIER, **{other: word for word, other in OTHER_TIER.items()}}
ROUNDING = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Operator:
    """about: what it does, for people. of_tables: also for what stands outside functions."""

    about: str
    make: Make
    of_tables: bool = False


def delete_call(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.Expr) and _is_call(node):
        yield (*source.span(node), "pass")


def move_call(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    """Swap a call with the statement behind it; where only the one behind is a call, the call moves up."""
    if not isinstance(node, ast.stmt):
        return
    block = source.block(node)
    at = block.index(node)
    if at + 1 == len(block):
        return
    behind = block[at + 1]
    if not (_is_call(node) or _is_call(behind)) or not (_can_move(node) and _can_move(behind)):
        return
    if _stored(node) & _loaded(behind) or _stored(behind) & _loaded(node):
        return
    if _keeps(node, behind) or _keeps(behind, node):
        return
    start, middle = source.span(node)
    until, end = source.span(behind)
    yield start, end, source.between(until, end) + source.between(middle, until) + source.between(start, middle)


def drop_argument(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    kept: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    needs_lane = not (isinstance(node.func, ast.Attribute) and node.func.attr == "wait")
    for keyword in node.keywords:
        if keyword.arg == "after" or (keyword.arg == "lane" and not needs_lane):
            yield _without(source, kept, keyword)


def delete_store(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = [*node.targets]
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    is_made = source.nodes[node].function.rpartition(".")[2] in ("__init__", "__post_init__")
    if targets and not is_made and all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
        yield (*source.span(node), "pass")


def shift_number(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return
    parent = source.parents[node]
    whole: ast.expr = node
    value = node.value
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
        whole, value, parent = parent, -value, source.parents[parent]
    if not isinstance(
        parent, ast.BinOp | ast.Compare | ast.Slice | ast.Subscript | ast.Call | ast.Tuple | ast.keyword | ast.Return
    ):
        return
    if not _is_only_layer(source, node):
        yield (*source.span(whole), str(value + 1))
    if value != 0:
        yield (*source.span(whole), str(value - 1))


def shift_bound(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    """A bound that is no number: the start or end of a slice, the last argument of range, the length of something."""
    ends: list[tuple[ast.expr, str]] = []
    if isinstance(node, ast.Slice):
        ends += [(node.lower, "+ 1")] if node.lower is not None else []
        ends += [(node.upper, "- 1"), (node.upper, "+ 1")] if node.upper is not None else []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "range" and node.args:
            ends += [(node.args[min(1, len(node.args) - 1)], "- 1")]
            ends += [(node.args[0], "+ 1")] if len(node.args) > 1 else []
        is_length = node.func.id == "len" and isinstance(source.parents[node], ast.BinOp | ast.Compare | ast.keyword)
        if is_length or node.func.id == "pages_for":
            ends += [(node, "+ 1"), (node, "- 1")]
    for bound, shift in ends:
        if not isinstance(bound, ast.Constant | ast.UnaryOp):
            text = source.of(bound)
            yield (*source.span(bound), f"({text} {shift})")


def swap_names(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    """Two neighbours of one kind, in a call's or a tuple's elements, where their order means something."""
    if _is_symmetric(source, node):
        return
    if isinstance(node, ast.Call):
        groups: list[list[ast.expr]] = [[*node.args], [each.value for each in node.keywords]]
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        groups = [[*node.elts]]
    else:
        return
    for group in groups:
        for one, other in pairwise(group):
            if _kind(one) is not None and _kind(one) == _kind(other):
                start, middle = source.span(one)
                until, end = source.span(other)
                between = source.between(middle, until)
                yield start, end, source.between(until, end) + between + source.between(start, middle)


def _is_symmetric(source: Source, node: ast.AST) -> bool:
    """A call of min or max, the errors that are caught together, the types that a value may have."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    parent = source.parents.get(node)
    is_check = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "isinstance"
    return is_check or (isinstance(parent, ast.ExceptHandler) and parent.type is node)


def drop_row(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    """An element of a table: of a module's constant, of what is looped over, or a list of values that are made."""
    if isinstance(node, ast.Dict) and not source.nodes[node].in_function and len(node.keys) > 1:
        for at, key in enumerate(node.keys):
            if key is not None:
                start, end = source.span(key)[0], source.span(node.values[at])[1]
                yield _cut(source, start, end, node, is_last=at + 1 == len(node.keys))
    if not isinstance(node, ast.Tuple | ast.List | ast.Set) or len(node.elts) < 2:
        return
    if isinstance(getattr(node, "ctx", None), ast.Store) or not _is_table(source, node):
        return
    for at, element in enumerate(node.elts):
        start, end, new = _cut(source, *source.span(element), node, is_last=at + 1 == len(node.elts))
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            other = source.of(node.elts[1 - at])
            start, end, new = *source.span(node), f"({other},)"
        yield start, end, new


def turn_comparison(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.Compare):
        return
    for at, (one, other) in enumerate(pairwise((node.left, *node.comparators))):
        start, end = source.span(one)[1], source.span(other)[0]
        old = {ast.NotIn: "not in", ast.IsNot: "is not"}.get(type(node.ops[at]))
        text = source.between(start, end)
        sign = old or text.strip(" ()\n\t")
        if sign in text:
            yield start, end, text.replace(sign, COMPARISONS[type(node.ops[at])], 1)


def turn_logic(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        start, end = source.span(node)
        values = [source.between(*_with_brackets(source, each, start, end)) for each in node.values]
        yield start, end, f"({f' {other} '.join(values)})"


def negate_condition(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.If | ast.While | ast.IfExp) or (isinstance(node, ast.If) and source.only_reports(node)):
        return
    test = node.test
    is_turned = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], TURNED_ROUND)
    if not is_turned and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        yield (*source.span(test), f"(not ({source.of(test)}))")


def drop_not(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (*source.span(node), f"({source.of(node.operand)})")


def turn_status(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield (*source.span(node), str(not node.value))
    elif isinstance(node, ast.Attribute) and node.attr in STATUSES:
        end = source.span(node)[1]
        yield end - len(node.attr), end, STATUSES[node.attr]


def other_tier(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    start, end = source.span(node) if isinstance(node, ast.expr) else (0, 0)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
        yield start, end, f'"{WORDS[node.value]}"'
    elif isinstance(node, ast.Attribute):
        yield from ((end - len(node.attr), end, new) for new in _other_names(node.attr) if new in names)
    elif isinstance(node, ast.Name):
        here = {each.id for each in ast.walk(_function(source, node)) if isinstance(each, ast.Name)}
        yield from ((start, end, new) for new in _other_names(node.id) if new in here)


def turn_bound(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ROUNDING:
        yield (*source.span(node.func), ROUNDING[node.func.id])


def drop_return(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.Return) and not isinstance(source.parents[node], ast.FunctionDef | ast.AsyncFunctionDef):
        yield (*source.span(node), "pass")


def turn_loop(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.Break | ast.Continue):
        yield (*source.span(node), "continue" if isinstance(node, ast.Break) else "break")


def drop_filter(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield (*source.span(test), "True")


def turn_pages(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) != 2:
        return
    tokens, size = (source.of(each) for each in node.args)
    if node.func.id == "pages_for":
        yield (*source.span(node), f"(({tokens}) // ({size}))")
    elif node.func.id == "floor_to_page":
        yield (*source.span(node), f"(-(-({tokens}) // ({size})) * ({size}))")


def drop_copy(source: Source, node: ast.AST, names: frozenset[str]) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args:
        return
    if node.func.attr in ("copy", "clone"):
        yield (*source.span(node), source.of(node.func.value))


OPERATORS: dict[str, Operator] = {
    "delete-call": Operator("a call for its effect is left out", delete_call),
    "move-call": Operator("such a call and its neighbour change places", move_call),
    "delete-store": Operator("an attribute or element is not written, or not deleted", delete_store),
    "drop-argument": Operator("an argument lane= or after= is left out", drop_argument),
    "shift-number": Operator("a number is one more or one less", shift_number),
    "shift-bound": Operator("a bound or length is one more or one less", shift_bound),
    "swap-names": Operator("two neighbouring arguments change places", swap_names),
    "drop-row": Operator("a row of a table is left out", drop_row, of_tables=True),
    "turn-comparison": Operator("a comparison takes or leaves the equal case, or is negated", turn_comparison),
    "turn-logic": Operator("and becomes or, or becomes and", turn_logic),
    "negate-condition": Operator("a condition is negated", negate_condition),
    "drop-not": Operator("a not is left out", drop_not),
    "turn-status": Operator("True becomes False, success becomes failure, and back", turn_status),
    "other-tier": Operator("the name of the other tier or space", other_tier),
    "turn-bound": Operator("min becomes max, any becomes all, and back", turn_bound),
    "drop-return": Operator("an early return is left out", drop_return),
    "turn-loop": Operator("break becomes continue, and back", turn_loop),
    "drop-filter": Operator("a comprehension takes everything", drop_filter),
    "turn-pages": Operator("tokens are rounded to pages the other way", turn_pages),
    "drop-copy": Operator("a value is kept in the place of its copy", drop_copy),
}


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _can_move(node: ast.stmt) -> bool:
    """Statements that stay in the flow of control, and are no definitions."""
    fixed = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.FunctionDef, ast.ClassDef, ast.Assert, ast.Pass)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return not isinstance(node, fixed) and not is_text


def _stored(node: ast.stmt) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _loaded(node: ast.stmt) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _kind(node: ast.expr) -> str | None:
    """Names are one kind, and attributes of one value are one."""
    if isinstance(node, ast.Name):
        return "name"
    return f"of {ast.unparse(node.value)}" if isinstance(node, ast.Attribute) else None


def _is_table(source: Source, node: ast.Tuple | ast.List | ast.Set) -> bool:
    """Whether the elements are rows of one kind: none of them has a meaning by its place."""
    parent = source.parents[node]
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple):
        return False
    if not source.nodes[node].in_function:
        return isinstance(parent, ast.Assign | ast.AnnAssign | ast.Call)
    if isinstance(parent, ast.For | ast.comprehension) and parent.iter is node:
        return True
    return all(isinstance(each, ast.Starred) or _makes(each) for each in node.elts)


def _makes(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _is_only_layer(source: Source, node: ast.Constant) -> bool:
    """The end of the layers (0, 1) that a footprint names. There is no layer behind it that one more could mean."""
    parent = source.parents[node]
    call = source.parents.get(parent)
    is_footprint = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Footprint"
    return is_footprint and isinstance(parent, ast.Tuple) and source.of(parent) == "(0, 1)" and parent.elts[1] is node


def _keeps(node: ast.stmt, other: ast.stmt) -> bool:
    """Whether a statement only appends names to a local list that the other one does not use."""
    if not (isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call)):
        return False
    target = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "append" else None
    is_plain = all(isinstance(each, ast.Name | ast.Tuple) for each in call.args)
    return isinstance(target, ast.Name) and is_plain and target.id not in _loaded(other)


def _cut(source: Source, start: int, end: int, whole: ast.expr, *, is_last: bool) -> Change:
    """Without an element and the comma behind it; the last one: before it."""
    first, last = source.span(whole)
    behind = source.between(end, last)
    if is_last:
        before = source.between(first, start).rstrip()
        return start - len(source.between(first, start).encode()) + len(before.removesuffix(",").encode()), end, ""
    comma = behind.index(",") + 1
    return start, end + len(behind[:comma].encode()), ""


def _without(source: Source, kept: list[ast.expr | ast.keyword], gone: ast.keyword) -> Change:
    at = kept.index(gone)
    start, end = source.span(gone)
    if at + 1 < len(kept):
        return start, source.span(kept[at + 1])[0], ""
    return (source.span(kept[at - 1])[1], end, "") if at else (start, end, "")


def _with_brackets(source: Source, node: ast.expr, first: int, last: int) -> tuple[int, int]:
    """A node's span with the brackets around it, which belong to no node."""
    start, end = source.span(node)
    while True:
        before, behind = source.between(first, start).rstrip(), source.between(end, last).lstrip()
        if not (before.endswith("(") and behind.startswith(")")):
            return start, end
        start = first + len(before.encode()) - 1
        end = last - len(behind.encode()) + 1


def _function(source: Source, node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        node = source.parents[node]
    return node


def _other_names(name: str) -> Iterator[str]:
    if name in WORDS:
        yield WORDS[name]
    parts = name.split("_")
    for at, part in enumerate(parts):
        if len(parts) > 1 and part in WORDS and "_" not in WORDS[part]:
            yield "_".join((*parts[:at], WORDS[part], *parts[at + 1 :]))
