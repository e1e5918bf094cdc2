#!/usr/bin/env bash
# Expected: OpenTimelineIO reads the markers of the EDL that it has written.
# At 29.97 and 59.94 frames a second it writes drop-frame times, 01:00:01;00, for markers as for clips. Its reader takes
# such times for clips; for markers it takes colons alone and leaves out all others, without a warning.
# At 24, 25 and 30 frames a second the same markers come back.
# Versions: OpenTimelineIO 0.18.1, otio-cmx3600-adapter 1.0.0.
# Who meets it: whoever hands narrations to an editor, or takes notes from one, as markers of an NTSC film.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet OpenTimelineIO==0.18.1 otio-cmx3600-adapter==1.0.0
"$place/venv/bin/python" - <<'PYTHON' 2> "$place/words" || { cat "$place/words"; exit 1; }
from importlib.metadata import version

import opentimelineio as otio

print("OpenTimelineIO", version("OpenTimelineIO"), "otio-cmx3600-adapter", version("otio-cmx3600-adapter"))
found = []
for rate in (24.0, 25.0, 30.0, 30000 / 1001, 60000 / 1001):

    def span(start, length):
        return otio.opentime.TimeRange(*(otio.opentime.RationalTime(round(s * rate), rate) for s in (start, length)))

    clip = otio.schema.Clip("film", otio.schema.ExternalReference("film.mov", span(0, 7200)), span(3600, 60))
    for second, words in ((3601, "OPENS A DRAWER"), (3610, "CUTS AN ONION")):
        clip.markers.append(otio.schema.Marker(words, span(second, 0), "RED"))
    timeline = otio.schema.Timeline("film")
    timeline.tracks.append(otio.schema.Track(children=[clip], kind="Video"))
    edl = otio.adapters.write_to_string(timeline, "cmx_3600", rate=rate)
    (back,) = otio.adapters.read_from_string(edl, "cmx_3600", rate=rate).find_clips()
    kept = back.source_range == clip.source_range
    found.append((kept, [marker.name for marker in back.markers]))
    written = [line for line in edl.splitlines() if "LOC:" in line]
    print(f"{rate:.2f} frames a second: {written} -> {found[-1][1]}; the clip's times are kept: {kept}")
both = ["OPENS A DRAWER", "CUTS AN ONION"]
if found != [(True, both)] * 3 + [(True, [])] * 2:
    print("changed: two markers thrice, then none twice, before")
    raise SystemExit(1)
PYTHON
echo "warnings: $(cat "$place/words")"
[ ! -s "$place/words" ] || { echo "changed: it warns"; exit 1; }
