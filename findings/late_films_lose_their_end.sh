#!/usr/bin/env bash
# Expected: a film of 20 s that begins at 5 s on its clock lasts 20 s, and its clips of 2 s are ten, as get_clip counts from
# the first picture.
# pytorchvideo takes the start from the length: 15 s are left, and all samplers stay within them. The uniform one gives seven
# clips, the random one none of the last 5 s. A .ts that begins an hour into its stream lasts -3580 s: each sampler gives its
# first 2 s alone, without a warning. Of an .mkv, whose streams have no length, the start of the last picture is the end:
# nine clips of ten, wherever it begins. Asked for 18 to 20 s, get_clip gives the rest of each. Even of a film from 0 s the
# constant sampler's last clip of five begins at 14.4 s.
# Versions: pytorchvideo 0.1.5, av 18.1.0, torch 2.13.0. A stand-in takes the place of torchvision, which lists folders there.
# Who meets it: whoever learns from a camera's recordings or from segments of a stream, which keep the stream's clock.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 av==18.1.0 numpy==2.2.6 iopath==0.1.10 pillow==13.0.0
"$place/venv/bin/pip" install --quiet --no-deps pytorchvideo==0.1.5
cd "$place"
venv/bin/python - <<'PYTHON'
import random
import sys
import types
from fractions import Fraction
from importlib.metadata import version
for name in ("torchvision", "torchvision.datasets", "torchvision.datasets.folder"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision.datasets.folder"].make_dataset = None
import av
import numpy as np
import torch
from pytorchvideo.data import LabeledVideoDataset
from pytorchvideo.data.clip_sampling import ConstantClipsPerVideoSampler, RandomClipSampler, UniformClipSampler
from pytorchvideo.data.encoded_video import EncodedVideo

print("pytorchvideo", version("pytorchvideo"), "av", av.__version__, "torch", torch.__version__)
torch.set_num_threads(1)


def film(name, begin):
    with av.open(name, "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"bf": "0", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(200):
            bits = np.repeat([255 * (number >> bit & 1) for bit in range(8)], 8).astype(np.uint8)
            picture = av.VideoFrame.from_ndarray(np.tile(bits[None, :, None], (32, 1, 3)))
            picture.pts, picture.time_base = begin * 1000 + number * 100, Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def numbers(clip):
    return ((clip.mean(dim=(0, 2))[:, 4::8] > 128) * 2 ** torch.arange(8)).sum(1).tolist()


found = {}
for name, begin in (("0.mp4", 0), ("5.mp4", 5), ("0.ts", 0), ("3600.ts", 3600), ("0.mkv", 0), ("5.mkv", 5)):
    film(name, begin)
    with av.open(name) as container:
        times = [picture.time for picture in container.decode(video=0)]
    shown = round(times[-1] - times[0] + 0.1, 3)
    video = EncodedVideo.from_path(name, decode_audio=False)
    clips = [numbers(sample["video"]) for sample in LabeledVideoDataset(
        [(name, {})], UniformClipSampler(2), torch.utils.data.SequentialSampler, decode_audio=False)]
    random.seed(0)
    drawn, even = RandomClipSampler(2), ConstantClipsPerVideoSampler(2, 5)
    last = max(drawn(0, video.duration, {}).clip_end_sec for _ in range(1000))
    fifth = [even(0, video.duration, {}).clip_start_sec for _ in range(5)][-1]
    rest = numbers(video.get_clip(18, 20)["video"])[-1]
    found[name] = (shown, round(float(video.duration), 3), len(clips), clips[-1][-1], round(float(last), 1), float(fifth),
                   rest)
    print(f"{name}: pictures for {shown} s; length {found[name][1]} s; uniform clips {len(clips)}, last picture",
          f"{clips[-1][-1]} of 199;\n  1,000 random clips end by {found[name][4]} s; the fifth of five begins at",
          f"{found[name][5]} s; get_clip(18, 20) ends with picture {rest}")
before = {"0.mp4": (20.0, 20.0, 10, 199, 20.0, 14.4, 199), "5.mp4": (20.0, 15.0, 7, 139, 15.0, 10.4, 199),
          "0.ts": (20.0, 20.0, 10, 199, 20.0, 14.4, 199), "3600.ts": (20.0, -3580.0, 1, 19, 2.0, 0.0, 199),
          "0.mkv": (20.0, 19.9, 9, 179, 19.9, 14.32, 199), "5.mkv": (20.0, 19.9, 9, 179, 19.9, 14.32, 199)}
if found != before:
    raise SystemExit(f"changed: {before} before")
PYTHON
