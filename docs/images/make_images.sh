#!/usr/bin/env bash
# Makes the pictures of README.md from published reports. Needs chromium; --no-sandbox lets it run as root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

chromium --headless --no-sandbox --hide-scrollbars --window-size=1400,820 --screenshot="$PWD/releases.png" \
  "file://$(cd ../.. && pwd)/reports/published/engines/releases.html"
