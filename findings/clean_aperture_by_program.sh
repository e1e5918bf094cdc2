#!/usr/bin/env bash
# Expected: one film has the same pictures whatever reads it.
# An .mp4 says in "clap" which part is to be shown. The program ffmpeg crops to it; its libraries hand the crop on as side
# data alone, so PyAV and OpenCV, with FFmpeg 8, show all that is stored.
# MoviePy reads the stored size in ffmpeg's words and has the cropped picture scaled up to it: squares become upright.
# Versions: imageio-ffmpeg 0.8.1 (FFmpeg 9.0.2), moviepy 2.2.1, PyAV 18.1.0, OpenCV 5.0.0.
# Who meets it: whoever finds boxes, texts or captions in one of these and looks at them in another.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet imageio-ffmpeg==0.8.1 moviepy==2.2.1 av==18.1.0 opencv-python-headless==5.0.0.93
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import struct
import subprocess
import sys
from importlib.metadata import version
import av
import cv2
import imageio_ffmpeg
import moviepy
import numpy

print(*(f"{name} {version(name)}" for name in ("imageio-ffmpeg", "moviepy", "av")), "OpenCV", cv2.__version__)
print("FFmpeg", imageio_ffmpeg.get_ffmpeg_version())
picture = numpy.zeros((480, 640, 3), numpy.uint8)
picture[190:290, 270:370] = 255
with av.open("film.mp4", "w") as out:
    stream = out.add_stream("libx264", rate=25)
    stream.width, stream.height = 640, 480
    for _ in range(25):
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
    out.mux(stream.encode(None))

with open("film.mp4", "rb") as file:
    data = bytearray(file.read())
place = data.find(b"avcC") - 4
assert data.find(b"mdat") < data.find(b"moov") < place  # no place of a picture moves
clap = struct.pack(">I4s8i", 40, b"clap", 640, 1, 360, 1, 0, 1, 0, 1)
for box in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1"):
    at = data.find(box, data.find(b"moov")) - 4
    data[at : at + 4] = struct.pack(">I", struct.unpack(">I", data[at : at + 4])[0] + len(clap))
data[place:place] = clap
with open("film.mp4", "wb") as file:
    file.write(data)

raw = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "film.mp4", "-frames:v", "1", "-pix_fmt", "rgb24"]
shown = subprocess.run([*raw, "-f", "rawvideo", "-"], check=True, capture_output=True).stdout
pictures = {"ffmpeg": numpy.frombuffer(shown, numpy.uint8).reshape(-1, 640, 3)}
with av.open("film.mp4") as film:
    pictures["PyAV"] = next(film.decode(video=0)).to_ndarray(format="rgb24")
pictures["OpenCV"] = cv2.VideoCapture("film.mp4").read()[1]
with moviepy.VideoFileClip("film.mp4") as film:
    pictures["MoviePy"] = film.get_frame(0)
found = {}
print("640 x 480 stored, 640 x 360 to be shown, with a white square of 100 x 100")
for name, seen in pictures.items():
    rows, columns = (numpy.flatnonzero(seen[..., 0].max(axis) > 127) for axis in (1, 0))
    found[name] = seen.shape[0], int(rows[0]), len(rows), len(columns)
    print(f"{name}: {seen.shape[1]} x {seen.shape[0]}, square at row {rows[0]}, {len(columns)} x {len(rows)}")
stored = (480, 190, 100, 100)
ok = found["ffmpeg"] == (360, 130, 100, 100) and found["PyAV"] == found["OpenCV"] == stored
ok = ok and found["MoviePy"][0] == 480 and 130 <= found["MoviePy"][2] <= 136 and found["MoviePy"][3] == 100
sys.exit(0 if ok else f"changed: {found}")
PYTHON
