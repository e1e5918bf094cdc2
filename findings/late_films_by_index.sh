#!/usr/bin/env bash
# Expected: index=45 is the picture that comes 46th when the film is read through.
# imageio's pyav plugin counts on from a key frame whose number it takes from its time, without taking off the time at
# which the film begins: of an .mp4 that begins at 0.04 s it gives the picture before the
# one asked for, of one that begins at 0.5 s the one 15 earlier. That number is rounded down: in an .mkv, whose times are
# whole milliseconds, it gives the next picture behind a key frame at 1.333 s. With constant_framerate=False all is right.
# Versions: imageio 2.38.1 with PyAV 18.1.0, numpy 2.4.6, pillow 13.0.0.
# Who meets it: whoever takes pictures by number out of an .mkv, or out of films that do not begin at 0.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet imageio==2.38.1 av==18.1.0 numpy==2.4.6 pillow==13.0.0
"$place/venv/bin/python" - "$place" <<'PYTHON'
import sys
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import av
import imageio.v3 as iio
import numpy as np


def make(path, start):
    with av.open(str(path), "w") as film:
        stream = film.add_stream("libx264", rate=30, width=64, height=64, pix_fmt="yuv420p", options={"g": "20"})
        stream.codec_context.time_base = Fraction(1, 30000)
        for number in range(60):
            picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 4 * number, np.uint8), "rgb24")
            picture.pts, picture.time_base = 1000 * number + round(30000 * start), Fraction(1, 30000)
            film.mux(stream.encode(picture))
        film.mux(stream.encode())


def number(picture):
    return round(picture.mean() / 4)


print(", ".join(f"{name} {version(name)}" for name in ("imageio", "av")))
found = []
for kind in ("mp4", "mkv"):
    for start in (0, 0.04, 0.5):
        path = Path(sys.argv[1]) / f"film.{kind}"
        make(path, start)
        through = [number(picture) for picture in iio.imiter(path, plugin="pyav")]
        if through != list(range(60)):
            raise SystemExit(f"changed: {through} read through")
        asked = 5, 45, 55
        by_index = [number(iio.imread(path, plugin="pyav", index=one)) for one in asked]
        slow = [number(iio.imread(path, plugin="pyav", index=one, constant_framerate=False)) for one in asked]
        print(f"{kind}, begins at {start} s, pictures {asked}: {by_index}, with constant_framerate=False {slow}")
        found.append(by_index)
        if slow != list(asked):
            raise SystemExit(f"changed: {slow}")
before = [[5, 45, 55], [4, 44, 54], [0, 30, 40], [5, 46, 56], [4, 44, 54], [0, 30, 41]]
if found != before:
    raise SystemExit(f"changed: {found}; {before} before")
PYTHON
