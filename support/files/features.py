"""Frame features (paper §3.1, App. B.6): pictures scaled and encoded, feature files read whole or by range.

x           frame features, the frame tokens X_t of a video: [T, J, D] = frames, tokens per frame, width
store       features_metadata.json, {video: {"duration": seconds, "path": file}}, and the files that it names; those of
            `python data.py encode` also say how many "frames" a file has
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor

from support.common.disk import is_number, read_json
from support.common.errors import BadData
from support.common.iterate import prefetch, chunks
from support.files.annotations import expect
from support.files.video import Video

FEATURES = re.compile(r"(.+?\.safetensors)(?::(.*))?|(.+\.pt)", re.IGNORECASE)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def is_features(spec: str) -> bool:
    """Does an argument name frame features (FILE.safetensors, FILE.safetensors:NAME, FILE.pt), not a video?"""
    return FEATURES.fullmatch(str(spec)) is not None


def load_features(spec: str, tokens: int | None = None, width: int | None = None) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    spec: FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a tensor; read with weights_only)
    tokens, width: what J and D must be, if given. Raises BadData for anything that is not such features.
    """
    path, name = find_features(spec)
    x = _read_safetensors(path, name) if path.suffix.lower() == ".safetensors" else _read_pt(path)
    if x.dtype not in FLOATS:
        raise BadData(f"{spec}: features must be floating point, not {str(x.dtype).removeprefix('torch.')}")
    if x.ndim != 3 or x.numel() == 0:
        raise BadData(f"{spec}: features must be [frames, tokens, width], none of them 0, not {list(x.shape)}")
    for name, given, wanted in (("tokens per frame", x.shape[1], tokens), ("wide", x.shape[2], width)):
        if wanted is not None and given != wanted:
            raise BadData(f"{spec}: features are {given} {name}, the model needs {wanted}; use its vision model")
    if not x.isfinite().all():
        raise BadData(f"{spec}: features contain NaN or infinite values; extract them again")
    return x


def find_features(spec: str) -> tuple[Path, str | None]:
    """The file of features, and the name of a tensor if one is given. BadData if there is no such file."""
    match = FEATURES.fullmatch(str(spec))
    if match is None:
        raise BadData(f"{spec}: features are FILE.safetensors, FILE.safetensors:NAME or FILE.pt")
    path = Path(match[1] or match[3])
    if not path.is_file():
        raise BadData(f"{path}: {'is a directory, not a feature file' if path.is_dir() else 'no such file'}")
    return path, match[2]


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
    """A tensor saved by torch; only the part that is used is read (files of torch < 1.6 are read whole)."""
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        try:
            x = load(mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            x = load()
    except Exception as error:                 # a damaged pickle can raise nearly anything
        reason = type(error).__name__          # the message itself can be a page long
        raise BadData(f"{path}: cannot be read as a tensor ({reason}); damaged, or no plain tensor?") from error
    if not isinstance(x, Tensor):
        raise BadData(f"{path}: holds a {type(x).__name__}; save one tensor [frames, tokens, width]")
    if x.layout != torch.strided or x.device.type != "cpu":        # sparse, or a meta tensor without any content
        raise BadData(f"{path}: holds a sparse or an empty tensor; save a dense one [frames, tokens, width]")
    return x.detach()


def open_frames(source: str, config, encode: Callable[[Tensor], Tensor], batch: int = 1,
                largest: int | None = None, open_video: Callable = Video,
                skip: int = 0) -> tuple[Iterator[Tensor], int | None, Video | None]:
    """Frame tokens [J, D] of a video or a feature file, from frame `skip` on; the number of all its frames if it is
    known, and the video if it is one.

    config is a narrator's. Pictures, no side longer than `largest`, are decoded while the models work,
    and encoded `batch` at a time. open_video(source, fps, largest): for sources of another kind (camera.py).
    """
    if is_features(source):
        x = load_features(source, tokens=config.J, width=config.width)
        return iter(x[skip:]), len(x), None
    video = open_video(source, config.fps, largest)
    pictures = prefetch(video, 2 * batch) if isinstance(video, Video) else video          # others have a thread already
    pictures = pairs(pictures) if config.width_second else pictures
    return encode_pictures(pictures, encode, batch, skip), video.frames, video


def pairs(pictures: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """What a second encoder (LION-FS) sees: each picture with the one before it, [H, W, 6]; the first with itself.

    Where neither changes (the same arrays), it is the same array again.
    """
    seen = pair = None
    for picture in pictures:
        new = picture, seen[0] if seen and seen[0].shape == picture.shape else picture     # a camera's size may change
        if seen is None or any(a is not b for a, b in zip(new, seen)):
            pair = np.concatenate(new, axis=2)
        seen = new
        yield pair


def encode_pictures(pictures: Iterable[np.ndarray], vision: Callable[[Tensor], Tensor],
                    batch: int = 1, skip: int = 0) -> Iterator[Tensor]:
    """Frame tokens [J, D] of each picture (uint8 [H, W, 3], all of one size), `batch` pictures at a time.

    skip: so many pictures are left out; encoded is only what gives those after them the same numbers, to the last bit.
    vision: uint8 [B, H, W, 3] (of `pairs`: 6) -> [B, J, D]. A picture that is the same array as the last is not encoded
    again.
    """
    last, x, skipped = None, None, []                              # the picture before, its tokens; skipped ones
    for n, chunk in enumerate(chunks(pictures, batch)):
        new = [picture for before, picture in zip([last, *chunk], chunk) if picture is not before]
        if (n + 1) * batch <= skip:
            last, skipped = chunk[-1], new or skipped
            continue
        if chunk[0] is last and skipped:
            x = vision(torch.from_numpy(np.stack(skipped)))[-1]
        encoded, skipped = iter(vision(torch.from_numpy(np.stack(new))) if new else ()), []
        for i, picture in enumerate(chunk, n * batch):
            if picture is not last:
                last, x = picture, next(encoded)
            if i >= skip:
                yield x


def read_header(path: Path) -> tuple[int, dict[str, str]]:
    """Frames and settings of a file that `python data.py encode` wrote; BadData if it is damaged or another file."""
    try:
        with safe_open(path, "pt") as file:
            frames, settings = file.get_slice("features").get_shape()[0], file.metadata() or {}
        float(settings["duration"])
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise BadData(f"{path}: is damaged, or was not written by data.py encode ({type(error).__name__}); "
                      f"delete it, and encode its video again") from error
    return frames, settings


# ----------------------------------------------------------------------------------------- a data set's features

class Store:
    """The features of a data set. A file is opened when a range of its frames is needed, and never read whole.

    root        folder with features_metadata.json (or with features/features_metadata.json); the files lie beside it,
                under root/features at any depth of one, or all in root/features.safetensors under the videos' names
    names       other names of videos, if annotations and features do not use the same (EgoExo4D's takes)
    """

    def __init__(self, root: Path, names: dict[str, str] | None = None):
        self.root, self.names = root, names or {}
        name = "features_metadata.json"
        self.file = next((file for file in (root / name, root / "features" / name) if file.is_file()), None)
        if self.file is None:
            raise BadData(f"{root}: has no features_metadata.json; get it with the features (FlowNar-Data), or make "
                          f"both: python data.py encode VIDEO... --output {root / 'features'}")
        self.videos = read_json(self.file)
        if not isinstance(self.videos, dict):
            raise BadData(f"{self.file}: expected an object with one entry per video")
        features = root / "features"
        self.folders = [self.file.parent, root, features, *sorted(features.glob("*/"))]    # listed once: slow if large

    def entry(self, video: str) -> dict:
        """{"duration", "path"} of a video, perhaps "frames"; BadData if it has none, or an invalid one."""
        entry = self.videos.get(video, self.videos.get(self.names.get(video, "")))
        if not isinstance(entry, dict) or not {"duration", "path"} <= entry.keys():
            raise BadData(f'{self.file}: video {video} has no entry {{"duration": seconds, "path": file}}; '
                          f"get its features, or encode it")
        duration, path, frames = entry["duration"], entry["path"], entry.get("frames", 1)
        check = partial(expect, path=self.file, entry=f"video {video}")
        check(is_number(duration) and duration > 0, what=f'"duration" must be seconds, above 0, not {duration!r}')
        check(isinstance(frames, int) and is_number(frames) and frames > 0,
              what=f'"frames" must be a whole number above 0, not {frames!r}')
        parts = Path(path).parts if isinstance(path, str) else ()
        check(bool(parts) and ".." not in parts and not Path(path).anchor,
              what=f'"path" must be a file in the folder of the data set, not {path!r}')
        return entry

    def locate(self, video: str) -> tuple[Path, str | None]:
        """The file of a video, and the name of its tensor if the file holds several videos."""
        name = self.entry(video)["path"]
        for folder in self.folders:
            for path in (folder / name, (folder / name).with_suffix(".safetensors")):
                if path.is_file():
                    return path, None
        if (self.root / "features.safetensors").is_file():
            return self.root / "features.safetensors", video
        raise BadData(f"{self.root}: the features of {video}, {name}, are not there; look into "
                      f"{self.root / 'features'}, or encode the video")

    @contextmanager
    def _frames(self, video: str) -> Iterator[tuple[str, list[int], Any]]:
        """Its name for messages, its shape [T, J, D], and its frames, to be sliced while the file is open."""
        path, name = self.locate(video)
        where = f"{path}, video {video}"
        try:
            with ExitStack() as stack:
                if path.suffix == ".safetensors":
                    file = stack.enter_context(safe_open(path, "pt"))
                    names = list(file.keys())
                    name = name if name in names else names[0] if name is None and len(names) == 1 else None
                    if name is None:
                        raise BadData(f"{where}: holds no tensor of that name")
                    frames = file.get_slice(name)
                    shape = frames.get_shape()
                else:
                    frames = _read_pt(path)
                    shape = list(frames.shape)
                if len(shape) != 3:
                    raise BadData(f"{where}: must be [frames, tokens, width], not {shape}")
                yield where, shape, frames
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadData(f"{where}: cannot be read ({type(error).__name__}); damaged? get it again") from error

    def read(self, video: str, start: int, stop: int | None, tokens: int | None = None,
             width: int | None = None) -> Tensor:
        """Frames start .. stop of a video [stop - start, J, D], in fp32; stop None: up to the end.

        tokens, width: what J and D must be, if given. BadData if the file is too short for the range, or damaged.
        """
        with self._frames(video) as (where, shape, frames):
            if tokens not in (None, shape[1]) or width not in (None, shape[2]):
                raise BadData(f"{where}: is {shape}, the narrator needs [frames, {tokens or 'tokens'}, "
                              f"{width or 'width'}]; use its vision model")
            if stop is not None and shape[0] < stop:
                raise BadData(f"{where}: has {shape[0]} frames, its annotations need {stop}; get the features again")
            x = frames[start:stop]
            if x.dtype not in FLOATS:
                raise BadData(f"{where}: must be floating point, not {str(x.dtype).removeprefix('torch.')}")
            x = x.to(torch.float32, copy=True)                            # of a mapped file, too
        if not x.isfinite().all():
            raise BadData(f"{where}: has NaN or infinite values after frame {start}; encode the video again")
        return x

    def rows(self, video: str) -> int:
        """How many frames the file of a video holds."""
        with self._frames(video) as (_, shape, _):
            return shape[0]


def letterbox(frames: Tensor, size: int) -> Tensor:
    """[T, H, W, 3] in 0..1 -> [T, 3, size, size]: the longer side scaled to `size`, the rest black."""
    frames = rearrange(frames, "t h w c -> t c h w")
    height, width = frames.shape[2:]
    if (height, width) == (size, size):
        return frames
    scale = size / max(height, width)
    new = max(1, round(height * scale)), max(1, round(width * scale))
    frames = F.interpolate(frames, new, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    return F.pad(frames, (left, size - new[1] - left, top, size - new[0] - top))
