#!/usr/bin/env bash
# Expected: a TextGrid that is cropped from 10 to 30 s and moved to 0 has all tiers 10 s earlier, as praatio documents.
# With mode "lax", which keeps annotations that reach across the cut, each interval tier is moved by the start of its own
# first annotation, if that lies before the cut: by 4 s and by 9 s here, the points by 10 s. What lay at 20 s in three
# tiers lies at 16, 11 and 10 s. "truncated" moves all by 10 s. mergeLabels, which documents that all intervals of its
# tier appear in the result, loses those without a partner.
# Versions: praatio 6.2.2.
# Who meets it: whoever cuts clips out of an annotated film, or joins actions to the objects that they use.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet praatio==6.2.2 typing_extensions==4.16.0
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from praatio.data_classes.interval_tier import IntervalTier
from praatio.data_classes.point_tier import PointTier
from praatio.textgrid import Textgrid

actions = IntervalTier("actions", [(4, 12, "washes"), (20, 25, "cuts"), (28, 33, "peels")], 0, 60)
objects = IntervalTier("objects", [(9, 13, "cup"), (20, 25, "onion")], 0, 60)
film = Textgrid(0, 60)
for tier in (actions, objects, PointTier("sounds", [(20, "knock")], 0, 60)):
    film.addTier(tier)
print("praatio", version("praatio"))
found = {}
for mode in ("truncated", "lax"):
    clip = film.crop(10, 30, mode, rebaseToZero=True)
    for tier in clip.tiers:
        print(f"{mode}, {tier.name}:", *(tuple(entry) for entry in tier.entries))
    found[mode] = [min(entry[0] for entry in tier.entries if entry[-1] in ("cuts", "onion", "knock")) for tier in clip.tiers]
found["merged"] = [entry.label for entry in actions.mergeLabels(objects.new(entries=[(20, 25, "onion")])).entries]
print("actions with the onion:", found["merged"], "of", [entry.label for entry in actions.entries])
before = {"truncated": [10, 10, 10], "lax": [16, 11, 10], "merged": ["cuts(onion)"]}
if found != before:
    raise SystemExit(f"changed: {found}; {before} before")
PYTHON
