"""A rank's process that ends before it has met its peers."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.readline()
    sys.stderr.write("no luck")
    sys.exit(7)
