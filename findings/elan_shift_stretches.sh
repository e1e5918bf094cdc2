#!/usr/bin/env bash
# Expected: shift_annotations moves all annotations of an ELAN file by one time, and cuts at 0 what would begin before.
# An annotation that is cut gets 0 as its start but keeps its old end, so it overlaps what follows, which did move.
# A time slot that touching annotations share, as the format allows, is moved twice: lengths and order of times change.
# Versions: pympi-ling 1.71.
# Who meets it: whoever trims the start of a film, or puts another in front, and moves its narrations with it.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet pympi-ling==1.71
"$place/venv/bin/python" - "$place/narration.eaf" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

from pympi.Elan import Eaf


def show(what, narration, before):
    found = sorted(narration.get_annotation_data_for_tier("narration"))
    print(f"{what}:", *found, sep="\n  ")
    if found != before:
        raise SystemExit(f"changed: {before} before")


print("pympi-ling", version("pympi-ling"))
opens, takes, cuts = "opens the drawer", "takes a knife", "cuts the onion"
narration = Eaf()
narration.add_tier("narration")
for start, end, text in ((1000, 5000, opens), (5000, 9000, takes), (9000, 12000, cuts)):
    narration.add_annotation("narration", start, end, text)
file = Path(sys.argv[1])
narration.to_file(file)
narration.shift_annotations(-2000)
show("2 s earlier", narration, [(0, 5000, opens), (3000, 7000, takes), (7000, 10000, cuts)])

sharing = file.read_text(encoding="utf-8").replace('REF1="ts4"', 'REF1="ts3"').replace('REF1="ts6"', 'REF1="ts5"')
file.write_text(sharing, encoding="utf-8")
narration = Eaf(file)
show("with shared slots", narration, [(1000, 5000, opens), (5000, 9000, takes), (9000, 12000, cuts)])
narration.shift_annotations(60000)
show("60 s later", narration, [(61000, 125000, opens), (125000, 129000, takes), (129000, 72000, cuts)])
PYTHON
