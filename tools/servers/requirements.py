"""Requirements: what a wheel asks for, less what a text server on a CPU never loads, one requirement a line.

    DIR/bin/python tools/servers/requirements.py WHEEL [WITHOUT...]

    WITHOUT: names of packages; [name]: an extra that is not asked for

Invariants:
- What is said comes from the wheel's own METADATA, for this machine and without the wheel's extras.
- A local version label is left out: torch==2.13.0+cpu is in no ordinary index, and pip prefers a local build of 2.13.0.
- A name in WITHOUT that the wheel does not ask for is an error: it would hide that the wheel has changed.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Collection, Sequence
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def main(arguments: Sequence[str]) -> None:
    wheel, *without = arguments
    sys.stdout.writelines(f"{line}\n" for line in requirements(metadata(wheel), without=without))


def metadata(wheel: str) -> str:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        return packed.read(name).decode("utf-8")


def requirements(text: str, *, without: Collection[str]) -> tuple[str, ...]:
    """What METADATA asks for here, in its order. Raises ValueError for a name in `without` that it does not ask for."""
    unseen = {name if name.startswith("[") else canonicalize_name(name) for name in without}
    left_out = frozenset(unseen)
    lines: list[str] = []
    for line in Parser().parsestr(text).get_all("Requires-Dist") or []:
        each = Requirement(line)
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(each.name)
        extras = {f"[{extra}]" for extra in each.extras}
        unseen -= {name, *extras}
        if name in left_out:
            continue
        asked = ",".join(sorted(extra.strip("[]") for extra in extras - left_out))
        versions = ",".join(sorted(f"{part.operator}{part.version.partition('+')[0]}" for part in each.specifier))
        lines.append(f"{each.name}{f'[{asked}]' if asked else ''}{versions}")
    if unseen:
        raise ValueError(f"the wheel asks for none of: {', '.join(sorted(unseen))}")
    return tuple(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
