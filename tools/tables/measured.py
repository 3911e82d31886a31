"""CSV files of tables: a row is written when it is measured, so a table that is broken off is right up to there."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row", bound=Mapping[str, object])


def append(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def measured(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, each after it was written to the file, which begins anew."""
    path.unlink(missing_ok=True)
    for row in rows:
        append(path, columns, [row])
        yield row
