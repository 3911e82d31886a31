"""The drawing of a wrong token of a known-answer model, as SVG to be placed inside a page.

Positions of the request go to the right and its layers down. A thin line joins what the last right step read in each
layer, a thick one what the first wrong step had to read. A cross and dashes mark the read that is suspected first, and
a filled box with a letter each page of a layer that is suspected.

Invariants:
- A record comes from a file. What is no such finding, or not of its sizes, is not drawn, and nothing is raised.
- Letters, widths and dashes carry the meaning. Colour only repeats it. The drawing has no script and loads nothing.
- Text of the record is escaped, and its control characters are too.
- A drawing of any size has at most MOST_SUSPECTS boxes and few elements a layer: it stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from kvcheck.core.report.printable import printable
from kvcheck.core.report.wording import clip

MOST_SUSPECTS = 12
MOST_LAYERS = 192
MOST_POSITIONS = 1 << 24
WORD_CHARS = 40
WHY_CHARS = 300

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 60, 26, 50, 46
PLOT = WIDTH - LEFT - RIGHT
HIGH, LOW = 34.0, 6.0
"""Most and least height of a layer's row."""

READABLE = 24.0
"""Width of a page or height of a row from which each of them has its number."""

LEAST_BOX, LEAST_BAND = 14.0, 3.0
PAGES_AROUND = 2
"""Pages that are drawn beside those that are read or suspected: often these are close together in a long request."""

LEGEND = "with dashes: the read that is suspected first · letters: suspected pages, see below · thin dashes: the answer"
LABELLED_LAYERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A page of a layer that the answer points to. first, last: its positions. letter: its name in the drawing."""

    letter: str
    layer: int
    head: int | None
    page: int
    first: int
    last: int
    why: str

    def __str__(self) -> str:
        head = "" if self.head is None else f", KV head {self.head}"
        return f"layer {self.layer}{head}, page {self.page} (positions {self.first:,} to {self.last:,})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn.

    page: tokens of a page. prompt: tokens of the request. step: of the answer, from 0. right, wrong: positions by layer
    that is read; right is None where no step was right before. is_walk: False for the position test. left_out:
    suspects.
    """

    is_walk: bool
    page: int
    page_assumed: bool
    prompt: int
    step: int
    right: Mapping[int, int] | None
    wrong: Mapping[int, int]
    expected: str
    answered: str
    suspects: tuple[Suspect, ...]
    left_out: int

    @property
    def asker(self) -> int:
        """Position of the token whose answer is wrong: the prompt's last one at step 0."""
        return self.prompt - 1 + self.step

    @property
    def positions(self) -> list[int]:
        """All that is drawn. Of a position test also the token that looks back."""
        placed = [place for each in self.suspects for place in (each.first, each.last)]
        return [*self.wrong.values(), *(self.right or {}).values(), *placed, *(() if self.is_walk else (self.asker,))]

    @property
    def start(self) -> int:
        """The first page that is drawn."""
        return max(0, min(self.positions) // self.page - PAGES_AROUND)

    @property
    def stop(self) -> int:
        """The page after the last one that is drawn."""
        whole = max(self.asker, *self.positions) // self.page + 1
        return min(max(self.positions) // self.page + 1 + PAGES_AROUND, whole)

    @property
    def wrong_layer(self) -> int | None:
        """The layer whose read is suspected first: its page is that of a suspect. None if there is no such layer."""
        wrong = self.wrong
        return next(
            (each.layer for each in self.suspects if each.first <= wrong.get(each.layer, -1) <= each.last), None
        )

    @property
    def layers(self) -> int:
        """Rows that are drawn."""
        return max(*self.wrong, *(each.layer for each in self.suspects), 0) + 1


def picture_of(minimal: Mapping[str, object] | None) -> Picture | None:
    """Parse the wrong-token fields of a finding; None if it has none."""
    if minimal is None or minimal.get("test") not in ("walk", "position"):
        return None
    page = _number(minimal.get("page"), least=1)
    prompt, step = _number(minimal.get("prompt"), least=1), _number(minimal.get("step"))
    wrong = _path(minimal.get("wrong"))
    if page is None or prompt is None or step is None or wrong is None:
        return None
    given = minimal.get("suspects")
    rows = given if isinstance(given, list) else []
    known = [found for row in rows if (found := _suspect(row)) is not None]
    return Picture(
        is_walk=minimal["test"] == "walk",
        page=page,
        page_assumed=minimal.get("page_assumed") is True,
        prompt=prompt,
        step=step,
        right=_path(minimal.get("right")),
        wrong=wrong,
        expected=_word(minimal, "expected"),
        answered=_word(minimal, "answered"),
        suspects=tuple(replace(row, letter=chr(ord("A") + at)) for at, row in enumerate(known[:MOST_SUSPECTS])),
        left_out=max(0, len(known) - MOST_SUSPECTS),
    )


def _number(value: object, *, least: int = 0, most: int = MOST_POSITIONS) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def _path(value: object) -> Mapping[int, int] | None:
    """Positions by layer, in the order of layers; null stands for a layer that is not read. None of anything else."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_LAYERS:
        return None
    found = {layer: number for layer, each in enumerate(value) if (number := _number(each)) is not None}
    return found if found and len(found) == sum(each is not None for each in value) else None


def _suspect(row: object) -> Suspect | None:
    """A suspect that has no letter yet; None if it says no place."""
    if not isinstance(row, dict):
        return None
    layer, page = _number(row.get("layer"), most=MOST_LAYERS - 1), _number(row.get("page"))
    first, last = _number(row.get("first")), _number(row.get("last"))
    if layer is None or page is None or first is None or last is None or last < first:
        return None
    why = row.get("why")
    return Suspect(
        letter="",
        layer=layer,
        head=_number(row.get("head")),
        page=page,
        first=first,
        last=last,
        why=clip(why, WHY_CHARS) if isinstance(why, str) else "",
    )


def _word(minimal: Mapping[str, object], name: str) -> str:
    """A token's word; its number where it has no word."""
    word = minimal.get(f"{name}_word")
    number = minimal.get(name)
    text = word if isinstance(word, str) else f"token {number}" if type(number) is int else "n/a"
    return printable(text if len(text) <= WORD_CHARS else f"{text[:WORD_CHARS]}…")


@dataclass(frozen=True, slots=True)
class Plot:
    """Where a position and a layer are on the drawing."""

    picture: Picture

    @property
    def row(self) -> float:
        """Height of a layer."""
        return max(LOW, min(HIGH, 460 / self.picture.layers))

    @property
    def height(self) -> float:
        """Of the whole drawing."""
        return TOP + self.row * self.picture.layers + BOTTOM

    @property
    def floor(self) -> float:
        """The lower edge of the last layer."""
        return TOP + self.row * self.picture.layers

    def x(self, position: float) -> float:
        """The middle of a position."""
        pages = (position + 0.5) / self.picture.page - self.picture.start
        return round(LEFT + self.page_width * pages, 1)

    def y(self, layer: float) -> float:
        """The middle of a layer."""
        return round(TOP + self.row * (layer + 0.5), 1)

    @property
    def page_width(self) -> float:
        """Of a page."""
        return PLOT / (self.picture.stop - self.picture.start)


def walk_svg(picture: Picture) -> Markup:
    """The `<svg>` element."""
    plot = Plot(picture)
    name = "walk" if picture.is_walk else "position test"
    title = f"{name}, step {picture.step}: expected {picture.expected}, answered {picture.answered}"
    parts = (
        *_legend(picture),
        *_pages(plot),
        *_layers(plot),
        *_boxes(plot),
        *_paths(plot),
        *_letters(plot),
    )
    opened = Markup('<svg class="walk" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, f"{plot.height:.0f}", title
    )
    return opened + Markup("\n").join(parts) + Markup("</svg>")


def _text(x: float, y: float, text: str, kind: str = "") -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(f"{x:g}", f"{y:g}", kind, text)


def _line(points: Sequence[tuple[float, float]], kind: str) -> Markup:
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return Markup('<path class="{}" d="{}"/>').format(kind, path)


def _legend(picture: Picture) -> Iterator[Markup]:
    """What the lines mean, above the drawing."""
    x = float(LEFT)
    read = "what the first wrong step" + (" had to read" if picture.is_walk else " had to look back to")
    rows = [("wrong", f"{read}: expected {picture.expected}, answered {picture.answered}")]
    if picture.right is not None:
        rows.insert(0, ("right", "what the last right step read"))
    for kind, text in rows:
        yield _line([(x, 14), (x + 26, 14)], kind)
        yield _text(x + 32, 18, text)
        x += 52 + 6.4 * len(text)
    yield _cross(LEFT + 13, 33)
    yield _text(LEFT + 32, 37, LEGEND)


def _pages(plot: Plot) -> Iterator[Markup]:
    """Pages as bands, with their numbers below: all of them, or those near a suspect where they are many."""
    picture, width = plot.picture, plot.page_width
    if width >= LEAST_BAND:
        bands = "".join(
            f"M{left:.1f} {TOP}V{plot.floor:.1f}H{min(left + width, LEFT + PLOT):.1f}V{TOP}z"
            for page in range(picture.start | 1, picture.stop, 2)
            for left in (plot.x(page * picture.page - 0.5),)
        )
        yield Markup('<path class="band" d="{}"/>').format(bands)
    yield Markup('<path class="frame" d="M{} {}h{}V{}h-{}z"/>').format(LEFT, TOP, PLOT, f"{plot.floor:.1f}", PLOT)
    if picture.start * picture.page <= picture.prompt < picture.stop * picture.page:
        x = plot.x(picture.prompt - 0.5)
        yield _line([(x, TOP - 4), (x, round(plot.floor + 4, 1))], "answer")
    for page, x in _numbered(plot):
        yield _text(x, round(plot.floor + 16, 1), f"{page:,}", "mid")
    assumed = ", assumed: the server does not say it" if picture.page_assumed else ""
    whole = picture.asker // picture.page
    part = "" if (picture.start, picture.stop) == (0, whole + 1) else f", which has pages 0 to {whole:,}"
    named = f"page of the request{part} ({picture.page:,} tokens each{assumed}); {picture.prompt:,} tokens were sent"
    yield _text(LEFT, round(plot.floor + 36, 1), named)


def _numbered(plot: Plot) -> Iterator[tuple[int, float]]:
    """Pages that have a number, and where. Of two that would overlap, the one that matters more has it."""
    picture = plot.picture
    if plot.page_width >= READABLE:
        wanted = list(range(picture.start, picture.stop))
    else:
        suspected = [each.page for each in picture.suspects]
        near = [page + step for page in suspected for step in (-1, 1)]
        read = [position // picture.page for position in picture.wrong.values()]
        wanted = [*suspected, *near, picture.start, picture.stop - 1, *read]
    taken: list[tuple[float, float]] = []
    for page in dict.fromkeys(each for each in wanted if picture.start <= each < picture.stop):
        middle = plot.x((page + 0.5) * picture.page - 0.5)
        half = 4.0 * len(f"{page:,}") + 3
        if all(middle + half < low or middle - half > high for low, high in taken):
            taken.append((middle - half, middle + half))
            yield page, middle


def _layers(plot: Plot) -> Iterator[Markup]:
    """A line and a number for each layer; fewer numbers where rows are low."""
    layers = plot.picture.layers
    rows = "".join(f"M{LEFT} {plot.y(layer):g}h{PLOT}" for layer in range(layers))
    yield Markup('<path class="row" d="{}"/>').format(rows)
    each = max(1, round(13 / plot.row + 0.49))
    suspected = {suspect.layer for suspect in plot.picture.suspects}
    shown = [layer for layer in range(layers) if layer in suspected]
    for layer in range(0, layers, each):
        if all(abs(layer - other) >= each for other in shown):
            shown.append(layer)
    for layer in sorted(shown):
        yield _text(LEFT - 8, plot.y(layer) + 4, f"layer {layer}" if layer == min(shown) else f"{layer}", "end")


def _boxes(plot: Plot) -> Iterator[Markup]:
    for suspect in plot.picture.suspects:
        x, width, height = _box(plot, suspect)
        top = plot.y(suspect.layer) - height / 2
        yield Markup('<rect class="suspect" x="{}" y="{}" width="{}" height="{}"/>').format(
            f"{x:.1f}", f"{top:.1f}", f"{width:.1f}", f"{height:.1f}"
        )


def _box(plot: Plot, suspect: Suspect) -> tuple[float, float, float]:
    """Left edge, width and height; a page that would be too narrow to see is drawn wider."""
    first, last = plot.x(suspect.first - 0.5), plot.x(suspect.last + 0.5)
    width = max(last - first, LEAST_BOX)
    return (first + last - width) / 2, width, max(plot.row - 4, LOW - 1)


def _letters(plot: Plot) -> Iterator[Markup]:
    """The letters of suspects, in their boxes beside what was read, or left of narrow boxes."""
    together: dict[tuple[int, int], list[Suspect]] = {}
    for suspect in plot.picture.suspects:
        together.setdefault((suspect.layer, suspect.first), []).append(suspect)
    wrong = plot.picture.wrong
    for (layer, first), found in together.items():
        left, width, _height = _box(plot, found[0])
        x, kind = left - 4, "letter end"
        if width >= 2 * READABLE * len(found):
            is_left = plot.x(wrong.get(layer, first)) < left + width / 2
            x, kind = (left + width - 6, "letter end") if is_left else (left + 6, "letter")
        yield _text(round(x, 1), plot.y(layer) + 5, " ".join(each.letter for each in found), kind)


def _paths(plot: Plot) -> Iterator[Markup]:
    picture = plot.picture
    for kind, path in (("right", picture.right), ("wrong", picture.wrong)):
        if path is None:
            continue
        points = [(plot.x(position), plot.y(layer)) for layer, position in path.items()]
        yield _line(points, kind)
        yield Markup('<path class="{} dots" d="{}"/>').format(kind, "".join(f"M{x:g} {y:g}h0" for x, y in points))
    layer = picture.wrong_layer
    if layer is not None:
        here = plot.x(picture.wrong[layer]), plot.y(layer)
        before = max((each for each in picture.wrong if each < layer), default=None)
        if picture.is_walk and before is not None:
            yield _line([(plot.x(picture.wrong[before]), plot.y(before)), here], "hop")
        if not picture.is_walk:
            yield _line([(plot.x(picture.asker), here[1]), here], "hop")
            back = picture.asker - picture.wrong[layer]
            yield _text((plot.x(picture.asker) + here[0]) / 2, here[1] - 6, f"{back:,} back", "mid")
        yield _cross(*here)
    if picture.layers <= LABELLED_LAYERS:
        read = [*picture.wrong.items()]
        for at, position in read if picture.is_walk else read[:1]:
            is_late = plot.x(position) > WIDTH - 90
            x = plot.x(position) + (-11 if is_late else 11)
            yield _text(round(x, 1), plot.y(at) - 5, f"{position:,}", "end" if is_late else "")


def _cross(x: float, y: float) -> Markup:
    return _line([(x - 6, y - 6), (x + 6, y + 6)], "cross") + _line([(x - 6, y + 6), (x + 6, y - 6)], "cross")
