#!/usr/bin/env bash
# Expected: a segment of a live HLS playlist has one date and one number, with partial segments listed or not.
# m3u8 moves its clock by a segment's length once for its parts (EXT-X-PART) and once more for the segment itself. A
# segment with parts gets the date of its end, and all that follows is later by its length: of six segments of 4 s whose
# last two list parts, the last is 8 s late, and so is the part behind it. Behind EXT-X-SKIP, segments are numbered as
# if nothing had been skipped: those of a delta update get the numbers 100 to 102 for 103 to 105.
# Versions: m3u8 6.0.0.
# Who meets it: whoever dates a low-latency HLS camera's pictures, or remembers by number which segments were seen.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet m3u8==6.0.0
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import m3u8


def playlist(with_parts, skipped=0):
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:4", "#EXT-X-VERSION:9", "#EXT-X-PART-INF:PART-TARGET=1.0"]
    lines += ["#EXT-X-SERVER-CONTROL:CAN-BLOCK-RELOAD=YES,PART-HOLD-BACK=3.0,CAN-SKIP-UNTIL=24.0"]
    lines += ["#EXT-X-MEDIA-SEQUENCE:100"] + [f"#EXT-X-SKIP:SKIPPED-SEGMENTS={skipped}"] * bool(skipped)
    for number in range(100 + skipped, 107):
        lines += ["#EXT-X-PROGRAM-DATE-TIME:2026-11-01T10:00:00Z"] * (number == 100)
        parts = range(1 if number == 106 else 4) if with_parts and number > 103 else ()
        lines += [f'#EXT-X-PART:DURATION=1.0,URI="{number}.{part}.mp4"' for part in parts]
        lines += ["#EXTINF:4.0,", f"{number}.mp4"] if number < 106 else []
    return "\n".join([*lines, '#EXT-X-PRELOAD-HINT:TYPE=PART,URI="106.1.mp4"'] if with_parts else lines) + "\n"


def seconds(moment):
    return moment and moment.second


print("m3u8", version("m3u8"))
found = []
for with_parts in (False, True):
    segments = m3u8.loads(playlist(with_parts)).segments
    whole = [(one.uri, seconds(one.current_program_date_time)) for one in segments if one.uri]
    parts = [(part.uri, seconds(part.program_date_time)) for one in segments for part in one.parts if ".0." in part.uri]
    print("with parts:" if with_parts else "without parts:", *whole, "first parts:", *parts)
    found.append([second for _, second in whole + parts])
skipping = [(one.uri, one.media_sequence) for one in m3u8.loads(playlist(False, skipped=3)).segments]
print("delta update that skips three:", *skipping)
found.append([number for _, number in skipping])
before = [[0, 4, 8, 12, 16, 20], [0, 4, 8, 12, 20, 28, 16, 24, 32], [100, 101, 102]]
if found != before:
    raise SystemExit(f"changed: {found}; {before} before")
PYTHON
