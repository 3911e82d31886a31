"""How often the judge names the page and layer that are damaged, from a model's own answers: a table.

    PYTHONPATH=tests python -m tools.tables.naming_table naming.csv --trials 4

Each trial damages a cache after the prompt was read, and lets the model go on from what it says itself. The judge is
given the answer, and the requests that ran beside it with their right answers. In one page (16 tokens) of one layer:

    foreign             the same page of another request
    stale               another page of another request
    zero                nothing in it
    shifted             the page before it, or after it
    keys*N, values*N    keys or values of N times their strength; heads*N: keys of one head

block is a page shifted in all layers; layer*N are values of a whole layer. context: all that is cached is another
request's, before the first token or, context-later, in the middle of the answer.

Invariants:
- right, page, layer: the judge names what is damaged, a page of it, a layer of it; no page at all for a context.
  wrong: it names something else. none: it names nothing. found: a token is wrong, so that there is something to judge.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from rigs.known_answers import forward, small
from rigs.llama_forward import Cache, LlamaForward

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Answer, End, Exchange, Question, Sending
from kvcheck.core.live.judge import SentPrompts, ServerSetting, finding, judge_round
from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.answers import answers, draw_nodes, mark_prompt, walk_prompt

PAGE = 16
DISTANCE = 61
MODEL = small(length=2048, nodes=4096, digits=7, distance=DISTANCE)
ALPHABET = Alphabet(MODEL)
SETTING = ServerSetting(alphabet=ALPHABET, page=PAGE)
ASKED = 8
COLUMNS = ("trials", "found", "right", "page", "layer", "wrong", "none")
KINDS = (
    *("foreign", "stale", "zero", "shifted", "keys*2", "keys*0.5", "heads*2", "values*2", "values*0.5"),
    *("layer*2", "layer*0.5", "block", "context", "context-later"),
)


class Asked:
    """A question, and the cache and first token after its prompt."""

    def __init__(self, model: LlamaForward, question: Question) -> None:
        self.question, self.cache = question, Cache()
        self.first = int(model.step(question.ids, self.cache).argmax())

    def answered(self, model: LlamaForward, cache: Cache, said: list[int]) -> tuple[int, ...]:
        """What the model goes on with on a cache, each of its tokens fed back. A lost model stays lost."""
        while len(said) < len(self.question.expected):
            if ALPHABET.as_node(said[-1]) is None and ALPHABET.as_mark(said[-1]) is None:
                said.append(ALPHABET.lost(0, None))
                continue
            said.append(int(model.step(said[-1:], cache).argmax()))
        return tuple(said)


def of_another(model: LlamaForward, one: Asked, other: Asked, step: int) -> tuple[int, ...]:
    """The answer where all of the cache is another request's from the token of that step on."""
    said, cache, foreign = [*one.question.expected[:step]], Cache(), other.cache.copy()
    own = (*one.question.ids, *said)
    model.step(own[:-1], cache)
    model.step(other.question.expected, foreign)
    for mine, theirs in zip(cache.keys + cache.values, foreign.keys + foreign.values, strict=True):
        mine[: len(theirs)] = theirs[: len(mine)]
    return one.answered(model, cache, [*said, int(model.step(own[-1:], cache).argmax())])


def damaged(one: Asked, other: Asked, kind: str, layer: int, page: int, rng: Rng, first: int) -> Cache:
    """A copy of the cache with a page of a layer damaged, or more of it."""
    copy, (what, _, times) = one.cache.copy(), kind.partition("*")
    last = (len(one.question.ids) - 1) // PAGE - 1
    rows = slice(max(page * PAGE, len(HEADER)), (page + 1) * PAGE)
    source = {"stale": first + rng.below(last - first + 1), "shifted": page - 1 if page == last else page + 1}.get(
        what, page
    )
    source = page - 1 if what == "block" else source
    theirs = slice(source * PAGE + rows.start - page * PAGE, (source + 1) * PAGE)
    head = rng.below(MODEL.kv_heads)
    heads = slice(head, head + 1) if what == "heads" else slice(None)
    held = one.cache if what in ("shifted", "block") else other.cache
    for each in range(MODEL.layers) if what == "block" else (layer,):
        keys, values = copy.keys[each], copy.values[each]
        if what == "layer":
            values *= float(times)
        elif times:
            (values if what == "values" else keys)[rows, heads] *= float(times)
        else:
            keys[rows] = 0 if what == "zero" else held.keys[each][theirs]
            values[rows] = 0 if what == "zero" else held.values[each][theirs]
    return copy


def exchange(question: Question, tokens: tuple[int, ...]) -> Exchange:
    """An answer as a client gives it."""
    return Exchange(
        Sending(question=question, rid=str(question.number)), Answer(end=End.DONE, tokens=tokens, finish="length")
    )


def drawn(rng: Rng, test: str, places: int, number: int, used: set[int] | None) -> Question:
    """One question. used: nodes that other questions have, where they may share none."""
    if test == "walk":
        nodes = draw_nodes(ALPHABET, rng, places, but=frozenset(used or ()))
        if used is not None:
            used.update(nodes)
        ids, count = walk_prompt(ALPHABET, nodes, rng.below(places)), places + 1
    else:
        values = [rng.below(1 << MODEL.bits) for _ in range(places + DISTANCE)]
        ids, count = mark_prompt(ALPHABET, values, rng.below(MODEL.phases)), DISTANCE
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, count))


def rows(given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each test, length and damage."""
    model, rng = forward(MODEL), Rng(given.seed)
    for test in given.tests.split(","):
        for places in map(int, given.places.split(",")):
            used = set[int]() if given.disjoint else None
            questions = [drawn(rng, test, places, number, used) for number in range(given.beside + 1)]
            asked = [Asked(model, question) for question in questions[:ASKED]]
            for kind in given.damage.split(","):
                counts = tally(model, rng, asked, questions, kind, given)
                row = {"test": test, "places": places, "damage": kind} | {column: counts[column] for column in COLUMNS}
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
                yield row


def tally(
    model: LlamaForward, rng: Rng, asked: list[Asked], questions: list[Question], kind: str, given: argparse.Namespace
) -> Counter[str]:
    """How so many damages of one kind in each layer were named."""
    counts: Counter[str] = Counter()
    for trial in range(given.trials * MODEL.layers):
        layer, one, other = trial % MODEL.layers, asked[trial % len(asked)], asked[(trial + 1) % len(asked)]
        length, is_walk = len(one.question.ids), ALPHABET.as_node(one.question.ids[-1]) is not None
        first = 0 if is_walk else (length - DISTANCE) // PAGE
        page = max(first + rng.below((length - 1) // PAGE - first), int(kind == "block"))
        if kind.startswith("context"):
            step = 1 + rng.below(min(20, len(one.question.expected) - 2)) if kind == "context-later" else 0
            said = of_another(model, one, other, step)
        else:
            said = one.answered(model, damaged(one, other, kind, layer, page, rng, first), [one.first])
        beside = [exchange(each, each.expected) for each in questions if each is not one.question]
        setting = ServerSetting(alphabet=ALPHABET, page=PAGE, retracts=given.retracts)
        judged = judge_round(setting, [exchange(one.question, said), *beside], SentPrompts())
        counts["trials"] += 1
        if not judged.wrong:
            continue
        counts["found"] += 1
        named = finding(judged.wrong[0])
        is_layer = named.layer is not None and (kind == "block" or named.layer == layer)
        is_page = named.page is not None and (kind.startswith("layer") or named.page == page)
        is_wrong = (named.layer, named.page) != (None, None) and (
            kind.startswith("context")
            or (named.layer is not None and not is_layer)
            or (named.page is not None and not is_page)
        )
        counts["wrong"] += is_wrong
        counts["none"] += named.layer is None and named.page is None
        counts["right"] += not is_wrong and (is_layer or is_page)
        counts["page"] += is_page
        counts["layer"] += is_layer
    return counts


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=4, help="of each damage and layer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=15, help="requests of the same round")
    parser.add_argument("--disjoint", action="store_true", help="no two requests share a node")
    parser.add_argument("--tests", default="walk,position")
    parser.add_argument("--damage", default=",".join(KINDS))
    parser.add_argument("--places", default="61,151,301")
    parser.add_argument("--retracts", action="store_true", help="retractions may have happened")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        table = list(rows(given))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["test", "places", "damage", *COLUMNS])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
