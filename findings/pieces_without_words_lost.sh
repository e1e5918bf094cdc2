#!/usr/bin/env bash
# Expected: TextGrids of pieces of a film that are put one behind another are as long together as the pieces.
# tgt's concatenate_textgrids adds a piece's length with its first annotation only: a piece in which nothing is said adds
# nothing, and all later annotations come early by its length: 125 s become 65 s.
# The joined tiers come in the order of a set: another one in another process. extract_part turns points into intervals.
# Versions: tgt 1.5 (TextGridTools) with numpy 2.4.6.
# Who meets it: whoever annotates a long film in pieces and joins the pieces.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet tgt==1.5 numpy==2.4.6
cat > "$place/join.py" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import tgt


def piece(name, *narrations):
    grid = tgt.TextGrid()
    for tier in ("narration", "objects", "hands"):
        grid.add_tier(tgt.IntervalTier(0, 60, tier, [tgt.Interval(*one) for one in narrations]))
    file = Path(sys.argv[1]) / f"{name}.TextGrid"
    tgt.write_to_file(grid, file, format="long")
    return tgt.read_textgrid(file)


whole = tgt.util.concatenate_textgrids([piece(1, (5, 10, "takes a knife")), piece(2), piece(3, (5, 10, "cuts an onion"))])
tier = whole.get_tier_by_name("narration")
found = [tuple(one) for one in ((one.start_time, one.end_time, one.text) for one in tier)] + [tier.end_time]
clicks = tgt.TextGrid()
clicks.add_tier(tgt.PointTier(0, 60, "clicks", [tgt.Point(20, "tap")]))
kinds = [one.tiers[0].tier_type() for one in (clicks, clicks.extract_part(10, 30))]
print(f"tgt {version('tgt')}, three pieces of 60 s:", *found, "a point tier and its part:", *kinds, file=sys.stderr)
before = [(5, 10, "takes a knife"), (65, 70, "cuts an onion"), 120], ["TextTier", "IntervalTier"]
if (found, kinds) != before:
    raise SystemExit(f"changed: {found}, {kinds}; {before} before")
print(*whole.get_tier_names())
PYTHON
for seed in 1 2 3 4 5 6; do
  PYTHONHASHSEED=$seed "$place/venv/bin/python" "$place/join.py" "$place" >> "$place/orders" 2> "$place/words" || break
done
cat "$place/words"
echo "orders of the tiers narration, objects, hands in six processes:"
sort -u "$place/orders"
test "$(wc -l < "$place/orders")" = 6 && test "$(sort -u "$place/orders" | wc -l)" -gt 1
