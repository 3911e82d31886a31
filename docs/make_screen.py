"""Write docs/images/terminal.svg: the terminal of the README's first red run, drawn by rich from a run made here.

python docs/make_screen.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvcheck.commands import terminal
from kvcheck.commands.main import run
from kvcheck.core.run.store import write_text

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COMMAND = ["stress", "--mutant", "offload-skips-index-buffer", "--seed", "1"]
RUN = "20261128-040000-0c4e91d7"
COLUMNS = 100


def main() -> None:
    os.environ["COLUMNS"] = str(COLUMNS)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        run([*COMMAND, "--out", folder])
        text = said.getvalue().replace(f" --out {folder}", "").replace(folder, "reports/runs")
    lines = re.sub(r"\d{8}-\d{6}-[0-9a-f]{8}", RUN, text).splitlines()
    console = Console(record=True, file=io.StringIO(), width=COLUMNS + 2, force_terminal=True)
    console.print(Text.from_ansi(terminal.coloured(f"$ kvcheck {' '.join(COMMAND)}")))
    for line in lines:
        console.print(Text.from_ansi(terminal.coloured(line)), soft_wrap=True)
    svg = console.export_svg(title="kvcheck")
    write_text(PICTURE, re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
