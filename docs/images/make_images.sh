#!/usr/bin/env bash
# Makes the pictures of the documents. Needs chromium; --no-sandbox lets it run as root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

chromium --headless --no-sandbox --hide-scrollbars --window-size=1400,820 --screenshot="$PWD/releases.png" \
  "file://$(cd ../.. && pwd)/reports/published/engines/releases.html"

# The story of a missing wait, out of the page of a run of bug b in docs/bugs.md.
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m kvcheck stress hicache --shape glm-5.1-tiny --requests 20 --seed 1 --schedules 3 --jobs 1 \
  --mutant index-key-reader-without-wait --out "$work" > "$work/printed.txt" || test $? -eq 1
"${PYTHON:-python3}" - "$work" <<'PAGE'
import pathlib, re, sys
page = next(pathlib.Path(sys.argv[1]).glob("*/report.html")).read_text(encoding="utf-8")
style, figure = (re.search(text, page, re.DOTALL)[0] for text in ("<style>.*?</style>", '<figure class="story">.*?</figure>'))
text = f'<!doctype html><meta charset="utf-8">{style}<body style="max-width:none">{figure}'
pathlib.Path(sys.argv[1], "story.html").write_text(text, encoding="utf-8")
PAGE
chromium --headless --no-sandbox --hide-scrollbars --window-size=900,880 --screenshot="$PWD/story.png" "file://$work/story.html"

# The first screens of two pages: the run of `kvcheck stress --seed 1`, and a price list.
(cd "$work" && "${PYTHON:-python3}" -m kvcheck stress --seed 1 > printed.txt)
"${PYTHON:-python3}" -m kvcheck report ../../reports/published/cpu/*/run.json -o html="$work/prices.html"
chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,560 --screenshot="$work/matrix.png" \
  "file://$(echo "$work"/reports/runs/*/report.html)"
chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1460 --screenshot="$work/prices.png" "file://$work/prices.html"
"${PYTHON:-python3}" - "$work" <<'SMALL'
import pathlib, sys
from PIL import Image
for name in ("matrix.png", "prices.png"):
    Image.open(pathlib.Path(sys.argv[1], name)).convert("RGB").quantize(64).save(name, optimize=True)
SMALL
