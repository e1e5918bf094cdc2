#!/usr/bin/env bash
# Expected: ffsubsync's --merge-with-reference puts both languages into one file: all subtitles of both are in it.
# Of those without a partner, the last one before each pair is lost: the merger holds two candidates for a partner, takes
# the later one if that is nearer, and never writes the earlier one. So what one language leaves out is lost from the
# other one, whichever is the reference: here 9 of 10. The times are right, and nothing is said.
# Without --merge-with-reference all subtitles of the file that is moved are written.
# Versions: ffsubsync 0.5.1, srt 3.5.3, pysubs2 1.8.1, numpy 2.4.6.
# Who meets it: whoever joins two languages, or narrations and speech, of one film.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet ffsubsync==0.5.1 srt==3.5.3 pysubs2==1.8.1 numpy==2.4.6
cd "$place"
python - <<'PYTHON'
import subprocess
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import srt


def write(name, places):
    cues = [
        srt.Subtitle(None, timedelta(seconds=at), timedelta(seconds=at + 2), f"{name} {at}")
        for at in (10 * k + k * k % 7 for k in places)
    ]
    Path(f"{name}.srt").write_text(srt.compose(cues))


def merged(*options):
    command = ["ffs", "english.srt", "-i", "french.srt", "-o", "out.srt", *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for cue in srt.parse(Path("out.srt").read_text()) for line in cue.content.splitlines()]
    return [sum(line.startswith(name) for line in lines) for name in ("english", "french")], "WARNING" in done.stdout


print("ffsubsync", version("ffsubsync"))
found = []
for english, french in ((range(1, 41), range(1, 41)), (range(1, 41), [k for k in range(1, 41) if k % 4])):
    for places in ((english, french), (french, english)):
        write("english", places[0])
        write("french", places[1])
        given = [len(list(kind)) for kind in places]
        found.append((given, merged()[0], *merged("--merge-with-reference")))
        print("given {} English, French; moved alone {}; merged {}; warned: {}".format(*found[-1]))
before = [
    ([40, 40], [0, 40], [40, 40], False),
    ([40, 40], [0, 40], [40, 40], False),
    ([40, 30], [0, 30], [31, 30], False),
    ([30, 40], [0, 40], [30, 31], False),
]
if found != before:
    raise SystemExit(f"changed: {before} before")
PYTHON
