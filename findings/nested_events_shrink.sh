#!/usr/bin/env bash
# Expected: joining events that touch or overlap covers what they covered.
# dcase_util's process_events takes the end of the last event joined, not the latest one: an event within another one
# cuts the outer one off, and event_inactivity, built on it, calls the rest silence. All but the last event also get
# the tags of the event behind them, where nothing is to be joined, too.
# Versions: dcase_util 0.2.20 (the containers of sed_eval, too).
# Who meets it: whoever joins overlapping events before scoring, or asks for the time in which nothing happens.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet dcase_util==0.2.20
cd "$place"
"$place/venv/bin/python" - <<'PYTHON' 2> "$place/words" || { cat "$place/words"; exit 1; }
from importlib.metadata import version

from dcase_util.containers import MetaDataContainer


def events(*rows):
    return MetaDataContainer(
        [dict(filename="a.wav", event_label="water", onset=on, offset=off, tags=[tag]) for on, off, tag in rows]
    )


def told(container):
    return [(item.onset, item.offset, *(item.tags or ())) for item in container]


print("dcase_util", version("dcase_util"))
apart = (0.0, 9.0, "tap"), (20.0, 30.0, "rain")
nested = (0.0, 9.0, "tap"), (1.0, 2.0, "tap"), (20.0, 30.0, "rain")
lengths = {"a.wav": 40.0}
found = {
    f"process_events {apart}": told(events(*apart).process_events(minimum_event_gap=0.5)),
    f"process_events {nested}": told(events(*nested).process_events(minimum_event_gap=0.5)),
    f"event_inactivity {nested}": told(events(*nested).event_inactivity(duration_list=lengths)),
}
for name, rows in found.items():
    print(name, rows, sep="\n  -> ")
before = [
    [(0.0, 9.0, "rain"), (20.0, 30.0, "rain")],
    [(0.0, 2.0, "rain"), (20.0, 30.0, "rain")],
    [(2.0, 20.0), (30.0, 40.0)],
]
if list(found.values()) != before:
    print(f"changed: {before} before")
    raise SystemExit(1)
PYTHON
