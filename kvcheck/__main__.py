"""`python -m kvcheck`, and the `kvcheck` script.

Invariants:
- The process ends with a documented exit code, also where a library is missing that the command line loads.
"""

from __future__ import annotations

import sys

from kvcheck.core.base.errors import UnknownVerdict, missing_library


def main() -> None:
    try:
        from kvcheck.commands.main import main as run_command
    except ModuleNotFoundError as error:
        if (missing := missing_library(error)) is None:
            raise
        sys.stderr.write(f"kvcheck: {missing}\n")
        sys.exit(UnknownVerdict.exit_code)
    run_command()


if __name__ == "__main__":
    main()
