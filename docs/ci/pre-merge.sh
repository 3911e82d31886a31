#!/usr/bin/env bash
# Decides on any machine whether a change may be merged: exit 0 means yes (docs/exit-codes.md has the others).
#
#   docs/ci/pre-merge.sh [stress|probe|live ARGUMENTS]
#
# OUT: the folder of the runs, emptied of what an earlier call left. BUDGET: a file of budgets; then BENCH names the case that
# is measured, and the gate judges both runs. BASELINE: a file of what is known; then the gate judges the run by it.
set -euo pipefail

if [ -n "${BUDGET:-}" ] && [ -z "${BENCH:-}" ]; then
  echo "pre-merge: BUDGET needs BENCH, the case that it is about" >&2
  exit 2
fi
OUT=${OUT:-build/kvcheck}
rm -rf "$OUT/runs"
mkdir -p "$OUT"

judged=0
kvcheck "${@:-stress}" --out "$OUT/runs" -o junit="$OUT/junit.xml" || judged=$?
# 1 and 4 are verdicts. The gate repeats them, less what the baseline knows.
case "$judged" in
0) ;;
1 | 4) if [ -z "${BASELINE:-}" ]; then exit "$judged"; fi ;;
*) exit "$judged" ;;
esac
if [ -n "${BUDGET:-}" ]; then
  kvcheck bench "$BENCH" --out "$OUT/runs"
fi
if [ -n "${BUDGET:-}${BASELINE:-}" ]; then
  kvcheck gate "$OUT"/runs/* ${BUDGET:+--budget "$BUDGET"} ${BASELINE:+--baseline "$BASELINE"} \
    -o md="$OUT/gate.md" -o junit="$OUT/gate.xml"
fi
