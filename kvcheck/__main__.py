"""`python -m kvcheck`: the same program as the `kvcheck` script.

Invariants:
- Nothing happens here but the call; `main` ends the process with the documented exit code.
"""

from __future__ import annotations

from kvcheck.commands.main import main

if __name__ == "__main__":
    main()
