#!/usr/bin/env bash
# Makes every picture of the documents. Needs chromium, and kvcheck in the environment of PYTHON; PICTURES names some of them alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here="$PWD" root="$(cd ../.. && pwd)" python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

wanted() { [[ " ${PICTURES:-bugs releases matrix} " == *" $1 "* ]]; }

# shot PAGE NAME WIDTH HEIGHT: the first screen of a page. --no-sandbox lets it run as root.
shot() {
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="$3,$4" --screenshot="$work/$2.png" "file://$1" 2> chromium.txt ||
    { cat chromium.txt >&2; exit 1; }
}

# The story of the first cause of each bug: the figure out of the page of the red command of docs/bugs.md.
if wanted bugs; then
  for letter in a b c d e; do
    line="$(sed -n "/^## $letter/,/^## /s/^kvcheck \(.*\)  # red: .*/\1/p" "$root/docs/bugs.md")"
    read -ra words <<< "$line"
    "$python" -m kvcheck "${words[@]}" --jobs 1 --out "$letter" > printed.txt || test $? -eq 1
    "$python" - "$letter" << 'PAGE'
import pathlib, re, sys
letter = sys.argv[1]
page = next(pathlib.Path(letter).glob("*/report.html")).read_text(encoding="utf-8")
if 'class="story"' not in page:
    raise SystemExit(f"bug {letter}: the run had no time for its story; run this on an idle machine")
style, figure = (re.search(text, page, re.DOTALL)[0] for text in ("<style>.*?</style>", '<figure class="story">.*?</figure>'))
text = f'<!doctype html><meta charset="utf-8">{style}<body style="max-width:none">{figure}'
pathlib.Path(f"{letter}.html").write_text(text, encoding="utf-8")
PAGE
    shot "$work/$letter.html" "bug-$letter" 980 1400
  done
fi

# The first screens of pages: releases by bugs, and the run of `kvcheck stress --seed 1`.
if wanted releases; then
  mapfile -t releases < <(ls -v "$root"/reports/published/engines/runs/*.json.gz)
  "$python" -m kvcheck report "${releases[@]}" -o html="$work/releases.html"
  shot "$work/releases.html" releases 1400 820
fi
if wanted matrix; then
  "$python" -m kvcheck stress --seed 1 > printed.txt
  shot "$(echo "$work"/reports/runs/*/report.html)" matrix 1280 560
fi

# What is left empty below is cut off, and colours are counted, so that a picture stays small.
"$python" - "$here" << 'SMALL'
import pathlib, sys
from PIL import Image, ImageChops
for path in sorted(pathlib.Path().glob("*.png")):
    picture = Image.open(path).convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((picture.width - 1, picture.height - 1)))
    bottom = ImageChops.difference(picture, empty).getbbox()[3]
    picture = picture.crop((0, 0, picture.width, min(bottom + 16, picture.height)))
    small = picture.quantize(24, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    small.save(pathlib.Path(sys.argv[1], path.name), optimize=True)
SMALL
