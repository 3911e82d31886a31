"""How often the judge names the page and layer that are damaged, from a model's own answers: a table.

    PYTHONPATH=.:tests python tests/live/naming_table.py naming.csv --trials 20

Each trial damages one page (16 tokens) of one layer in all heads, after the prompt was read, and lets the model go on
from what it says itself. The judge is given the answer, and the requests that ran beside it with their right answers.

    foreign   the same page of another request
    stale     another page of another request
    values    the same page of another request, its values alone
    zero      nothing in it

Invariants:
- first, second, later: where in its list the judge names the damaged layer and page. missed: nowhere in it.
  right: every token was right, so there was nothing to judge.
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
from kvcheck.core.live.judge import Sent, Setting, judge_round
from kvcheck.core.live.model.alphabet import HEADER, Alphabet
from kvcheck.core.live.model.answers import answers, draw_nodes, mark_prompt, walk_prompt

PAGE = 16
DISTANCE = 61
MODEL = small(length=2048, nodes=4096, digits=7, distance=DISTANCE)
ALPHABET = Alphabet(MODEL)
SETTING = Setting(alphabet=ALPHABET, page=PAGE)
PLACES = (61, 151, 301)
ASKED = 20
COLUMNS = ("first", "second", "later", "missed", "right")


class Asked:
    """A question, and the cache and logits after its prompt."""

    def __init__(self, model: LlamaForward, question: Question) -> None:
        self.question, self.cache = question, Cache()
        self.first = model.step(question.ids, self.cache)

    def answered(self, model: LlamaForward, cache: Cache) -> tuple[int, ...]:
        """What the model says on a cache, each of its tokens fed back. A lost model stays lost."""
        said, logits = [int(self.first.argmax())], self.first
        while len(said) < len(self.question.expected):
            if ALPHABET.as_node(said[-1]) is None and ALPHABET.as_mark(said[-1]) is None:
                said.append(ALPHABET.lost(0, None))
                continue
            logits = model.step(said[-1:], cache)
            said.append(int(logits.argmax()))
        return tuple(said)


def damaged(cache: Cache, other: Cache, layer: int, kind: str, *, page: int, source: int) -> Cache:
    """A copy of the cache with one page of one layer damaged."""
    copy = cache.copy()
    rows = slice(max(page * PAGE, len(HEADER)), (page + 1) * PAGE)
    start = (source if kind == "stale" else page) * PAGE
    theirs = slice(start + rows.start - page * PAGE, start + PAGE)
    if kind != "values":
        copy.keys[layer][rows] = 0 if kind == "zero" else other.keys[layer][theirs]
    copy.values[layer][rows] = 0 if kind == "zero" else other.values[layer][theirs]
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
    """A row for each test, length, damage and layer."""
    model, rng = forward(MODEL), Rng(given.seed)
    for test in given.tests.split(","):
        for places in PLACES:
            used = set[int]() if given.disjoint else None
            questions = [drawn(rng, test, places, number, used) for number in range(max(given.beside + 1, ASKED))]
            asked = [Asked(model, question) for question in questions[:ASKED]]
            for kind in given.damage.split(","):
                for layer in range(MODEL.layers):
                    counts = tally(model, rng, asked, questions, layer, kind, given.trials)
                    row = {"test": test, "places": places, "damage": kind, "layer": layer}
                    row |= {column: counts[column] for column in COLUMNS}
                    sys.stdout.write(f"{row}\n")
                    sys.stdout.flush()
                    yield row


def tally(
    model: LlamaForward, rng: Rng, asked: list[Asked], questions: list[Question], layer: int, kind: str, trials: int
) -> Counter[str]:
    """How `trials` damages of one kind in one layer were named."""
    counts: Counter[str] = Counter()
    for trial in range(trials):
        one, other = asked[trial % ASKED], asked[(trial + 1) % ASKED]
        length = len(one.question.ids)
        first = 0 if ALPHABET.as_node(one.question.ids[-1]) is not None else (length - DISTANCE) // PAGE
        page, source = (first + rng.below((length - 1) // PAGE - first) for _ in range(2))
        cache = damaged(one.cache, other.cache, layer, kind, page=page, source=source)
        beside = [exchange(each, each.expected) for each in questions if each is not one.question]
        judged = judge_round(SETTING, [exchange(one.question, one.answered(model, cache)), *beside], Sent())
        if not judged.wrong:
            counts["right"] += 1
            continue
        named = [(place.layer, place.page) for place in judged.wrong[0].places]
        at = named.index((layer, page)) if (layer, page) in named else None
        counts["missed" if at is None else ("first", "second", "later")[min(at, 2)]] += 1
    return counts


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=15, help="requests of the same round")
    parser.add_argument("--disjoint", action="store_true", help="no two requests share a node")
    parser.add_argument("--tests", default="walk,position")
    parser.add_argument("--damage", default="foreign,stale,values,zero")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        table = list(rows(given))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["test", "places", "damage", "layer", *COLUMNS])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
