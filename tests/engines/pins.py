"""Pins: the versions of some packages that a wheel asks for, one requirement a line.

    DIR/bin/python tests/engines/pins.py WHEEL NAME [NAME...]

Invariants:
- What the wheel says of a package on this machine is said as it stands; a package that it does not name has no version.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def main(arguments: Sequence[str]) -> None:
    """Say them."""
    wheel, *names = arguments
    asked = requirements(metadata(wheel))
    sys.stdout.writelines(f"{name}{asked.get(canonicalize_name(name), '')}\n" for name in names)


def metadata(wheel: str) -> str:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        return packed.read(name).decode("utf-8")


def requirements(text: str) -> dict[str, str]:
    """Canonical name -> versions, of what is required here without extras."""
    found: dict[str, str] = {}
    for line in Parser().parsestr(text).get_all("Requires-Dist") or []:
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            found[canonicalize_name(each.name)] = str(each.specifier)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
