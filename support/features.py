"""Frame features on disk (paper §3.1, App. B.4): read by range, and extracted from videos.

    python data.py encode VIDEO... --output DIR       SigLIP's CLS and 3x3 pooled tokens at 2 FPS, one file per video

x           frame features [T, J, D]: frames, tokens per frame, width
store       features_metadata.json, {video: {"duration": seconds, "path": file}}, and the files that it names; our own
            also say how many "frames" a file has
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from support.common import BadData, choose, chunks, read_json, replacing, write_json
from support.video import Video

FEATURES = re.compile(r"(.+?\.safetensors)(?::(.*))?|(.+\.pt)", re.IGNORECASE)


def is_features(spec: str) -> bool:
    """Does an argument name frame features (FILE.safetensors, FILE.safetensors:NAME, FILE.pt), not a video?"""
    return FEATURES.fullmatch(str(spec)) is not None


def load_features(spec: str, tokens: int | None = None, width: int | None = None) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    spec: FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a tensor; read with weights_only)
    tokens, width: what J and D must be, if given. Raises BadData for anything that is not such features.
    """
    match = FEATURES.fullmatch(str(spec))
    if match is None:
        raise BadData(f"{spec}: features are FILE.safetensors, FILE.safetensors:NAME or FILE.pt")
    path = Path(match[1] or match[3])
    if not path.is_file():
        raise BadData(f"{path}: {'is a directory, not a feature file' if path.is_dir() else 'no such file'}")
    x = _read_pt(path) if match[3] else _read_safetensors(path, match[2])
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise BadData(f"{spec}: features must be floating point, not {str(x.dtype).removeprefix('torch.')}")
    if x.ndim != 3 or x.numel() == 0:
        raise BadData(f"{spec}: features must be [frames, tokens, width], none of them 0, not {list(x.shape)}")
    for name, given, wanted in (("tokens per frame", x.shape[1], tokens), ("wide", x.shape[2], width)):
        if wanted is not None and given != wanted:
            raise BadData(f"{spec}: features are {given} {name}, the model wants {wanted}; use its vision model")
    if not x.isfinite().all():
        raise BadData(f"{spec}: features contain NaN or infinite values; extract them again")
    return x


def _read_safetensors(path: Path, name: str | None) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            if name is None and len(names) != 1:
                raise BadData(f"{path}: holds {len(names)} tensors; name one: FILE:NAME (it has {few or 'none'})")
            if name is not None and name not in names:
                raise BadData(f"{path}: has no tensor {name!r} (names: {few or 'none'})")
            return file.get_tensor(names[0] if name is None else name)
    except (SafetensorError, OSError) as error:
        raise BadData(f"{path}: cannot be read as safetensors ({error}); damaged?") from error


def _read_pt(path: Path) -> Tensor:
    try:
        x = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                 # a damaged pickle can raise nearly anything
        reason = type(error).__name__          # the message itself can be a page long
        raise BadData(f"{path}: cannot be read as a tensor ({reason}); damaged, or no plain tensor?") from error
    if not isinstance(x, Tensor):
        raise BadData(f"{path}: holds a {type(x).__name__}; save one tensor [frames, tokens, width]")
    return x.detach()


# ----------------------------------------------------------------------------------------- a data set's features

class Store:
    """The features of a data set, in files that are opened when a range of frames is asked for and never read whole.

    root        folder with features_metadata.json (or with features/features_metadata.json); the files lie beside it,
                under root/features at any depth of one, or all in root/features.safetensors under the videos' names
    names       other names of videos, if annotations and features do not use the same (EgoExo4D's takes)
    """

    def __init__(self, root: Path, names: dict[str, str] | None = None):
        self.root, self.names = root, names or {}
        name = "features_metadata.json"
        self.file = next((file for file in (root / name, root / "features" / name) if file.is_file()), None)
        if self.file is None:
            raise BadData(f"{root}: has no features_metadata.json; get it with the features (FlowNar-Data), or make both: "
                          f"python data.py encode VIDEO... --output {root / 'features'}")
        self.videos = read_json(self.file)
        if not isinstance(self.videos, dict):
            raise BadData(f"{self.file}: expected an object with one entry per video")

    def entry(self, video: str) -> dict:
        """{"duration", "path"} of a video; BadData if it has none."""
        entry = self.videos.get(video, self.videos.get(self.names.get(video, "")))
        known = entry if isinstance(entry, dict) else {}
        if not isinstance(known.get("path"), str) or not isinstance(known.get("duration"), int | float):
            raise BadData(f'{self.file}: video {video} has no entry {{"duration": seconds, "path": file}}; '
                          f"get its features, or encode it")
        return entry

    def locate(self, video: str) -> tuple[Path, str | None]:
        """The file of a video, and the name of its tensor if the file holds several videos."""
        name = self.entry(video)["path"]
        for folder in (self.file.parent, self.root, self.root / "features", *sorted((self.root / "features").glob("*/"))):
            for path in (folder / name, (folder / name).with_suffix(".safetensors")):
                if path.is_file():
                    return path, None
        if (self.root / "features.safetensors").is_file():
            return self.root / "features.safetensors", video
        raise BadData(f"{self.root}: the features of {video}, {name}, are not there; look into {self.root / 'features'}, "
                      f"or encode the video")

    def read(self, video: str, start: int, stop: int | None, tokens: int | None = None, width: int | None = None) -> Tensor:
        """Frames start .. stop of a video [stop - start, J, D] (all from start on without a stop), fp32.

        tokens, width: what J and D must be, if given. BadData if the file is shorter than its range.
        """
        path, name = self.locate(video)
        where = f"{path}, video {video}"
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    names = list(file.keys())
                    name = name if name in names else names[0] if name is None and len(names) == 1 else None
                    if name is None:
                        raise BadData(f"{where}: holds no tensor of that name")
                    rows = file.get_slice(name)
                    shape, x = rows.get_shape(), rows[start:stop]
            else:
                rows = memory_mapped(path)
                shape, x = list(rows.shape), rows[start:stop].clone()
        except (SafetensorError, OSError, RuntimeError, AttributeError) as error:
            raise BadData(f"{where}: cannot be read ({type(error).__name__}); damaged? get it again") from error
        if len(shape) != 3 or tokens not in (None, shape[1]) or width not in (None, shape[2]):
            raise BadData(f"{where}: is {list(shape)}, the narrator needs [frames, {tokens or 'tokens'}, {width or 'width'}]; "
                          f"use its vision model")
        if stop is not None and len(x) < stop - start:
            raise BadData(f"{where}: has {shape[0]} frames, its annotations need {stop}; get the features again")
        return x.float()

    def rows(self, video: str) -> int:
        """How many frames the file of a video holds."""
        path, name = self.locate(video)
        if path.suffix != ".safetensors":
            return len(memory_mapped(path))
        with safe_open(path, "pt") as file:
            return file.get_slice(name or next(iter(file.keys()))).get_shape()[0]


def memory_mapped(path: Path) -> Tensor:
    """A tensor saved by torch, of which only what is used is read (files of torch < 1.6 cannot be mapped)."""
    try:
        x = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        x = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(x, Tensor):
        raise BadData(f"{path}: holds a {type(x).__name__}; save one tensor [frames, tokens, width]")
    return x


# ----------------------------------------------------------------------------------------- python data.py encode

def encode(videos: list[str], output: Path, vision: str, fps: float, grid: int, batch: int, device: str,
           shard: tuple[int, int]):
    """Features of videos, one bf16 file per video and features_metadata.json; BadData at the end if any failed.

    batch: frames at once; shard: (i, n), only every n-th video from the i-th on.

    Files appear when they are complete, and finished ones are not made again: kill it and start it anew.
    """
    from narrator import VisionEncoder
    names = [Path(video).stem for video in videos]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadData(f"two of the videos are named {twice}; features are kept by that name")
    output.mkdir(parents=True, exist_ok=True)
    settings = {"vision": vision, "fps": str(fps), "grid": str(grid)}
    mine, failed = videos[shard[0]::shard[1]], []
    device, dtype = choose(device)
    encoder = None
    for source in tqdm(mine, desc=f"encoding {shard[0] + 1}/{shard[1]}" if shard[1] > 1 else "encoding", unit="video"):
        path = output / f"{Path(source).stem}.safetensors"
        if path.exists():
            with safe_open(path, "pt") as file:
                made = file.metadata() or {}
            if any(made.get(key) != value for key, value in settings.items()):
                raise BadData(f"{path}: was made with other settings ({made}); delete it, or choose another --output")
            continue
        encoder = encoder or VisionEncoder(vision, grid, device, dtype)
        try:
            video, encoded = Video(source, fps), []
            for pictures in chunks(video, batch):
                encoded.append(encoder(torch.from_numpy(np.stack(pictures))).to("cpu", torch.bfloat16))
            video.report()
        except BadData as error:
            failed.append(str(error))
            continue
        x = torch.cat(encoded)
        with replacing(path) as part:
            save_file({"features": x}, part, metadata=settings | {"duration": str(len(x) / fps)})
    write_metadata(output)
    if failed:
        for line in failed:
            print(line, file=sys.stderr)
        raise BadData(f"{len(failed)} of {len(mine)} videos could not be encoded (listed above); the others are done")


def write_metadata(output: Path):
    """features_metadata.json of all feature files in a folder, whichever process has made them."""
    entries = {}
    for path in sorted(output.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            frames = file.get_slice("features").get_shape()[0]
            entries[path.stem] = {"duration": float(file.metadata()["duration"]), "path": path.name, "frames": frames}
    write_json(output / "features_metadata.json", entries)
