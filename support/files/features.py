"""Frame features (paper §3.1, App. B.6): pictures are encoded; feature files are read whole or by
range.

x           frame features, the frame tokens X_t of a video: [T, J, D] = frames, tokens per frame,
            width
store       the features of a data set: features_metadata.json, {video: {"duration": seconds,
            "path": file}}, and the files that it names; or files that `data.py encode` has written
header      what such a file says of itself: duration, fps, the settings of its encoder
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from support.common.disk import is_number, read_json
from support.common.errors import BadData
from support.common.iterate import prefetch, chunks
from support.files.video import Video

# FILE.safetensors (group 1) with :NAME (group 2), or FILE.pt (group 3)
FEATURES = re.compile(r"(.+?\.safetensors)(?::(.*))?|(.+\.pt)", re.IGNORECASE)


# ------------------------------------------------------------------------------------------- files


def is_features(spec: str) -> bool:
    """Whether an argument names frame features, not a video: FILE.safetensors,
    FILE.safetensors:NAME or FILE.pt.
    """
    return FEATURES.fullmatch(str(spec)) is not None


def find_features(spec: str) -> tuple[Path, str | None]:
    """The file of features, and the name of a tensor if one is given.

    Raises BadData if there is no such file.
    """
    match = FEATURES.fullmatch(str(spec))
    path = Path(match[1] or match[3])
    if not path.is_file():
        raise BadData(f"{path}: no such file")
    return path, match[2]


@contextmanager
def open_features(path: Path, name: str | None) -> Iterator[tuple[list[int], Any]]:
    """Open features -> (their shape [T, J, D], the frames, which can be sliced).

    Only the frames of a slice are read. A slice of a .pt file is a view, which keeps the file open.

    name    of the tensor, in a .safetensors file with several

    Raises BadData, which names the file, if it holds no such features, here or while it is used.
    """
    try:
        if path.suffix.lower() == ".pt":
            x = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(x, Tensor):
                raise BadData(f"{path}: holds a {type(x).__name__}; "
                              f"save one tensor [frames, tokens, width]")
            yield features_shape(path, list(x.shape)), x.detach()
            return
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            if name is None and len(names) == 1:
                name = names[0]
            if name not in names:
                raise BadData(f"{path}: holds {len(names)} tensors, not one named {name}; "
                              f"give FILE:NAME, such as {', '.join(names[:4])}")
            frames = file.get_slice(name)
            yield features_shape(path, frames.get_shape()), frames
    except BadData:
        raise
    except Exception as error:                 # a damaged pickle can raise nearly anything
        reason = type(error).__name__          # the message itself can be a page long
        raise BadData(f"{path}: cannot be read as features ({reason}); "
                      f"damaged, or no plain tensor?") from error


def features_shape(path: Path, shape: list[int]) -> list[int]:
    if len(shape) != 3 or 0 in shape:
        raise BadData(f"{path}: features must be [frames, tokens, width], none of them 0, "
                      f"not {shape}")
    return shape


def check_values(path: Path, x: Tensor) -> None:
    """Raise BadData unless the numbers of features are finite and floating point."""
    if not x.is_floating_point():
        raise BadData(f"{path}: features must be floating point, not {x.dtype}")
    if not x.isfinite().all():
        raise BadData(f"{path}: features contain NaN or infinite values; extract them again")


def load_features(spec: str, tokens: int | None = None, width: int | None = None) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    spec            FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a
                    tensor; read with weights_only)
    tokens, width   the required J and D, if given

    Raises BadData if the file does not hold such features.
    """
    path, name = find_features(spec)
    with open_features(path, name) as (shape, frames):
        if tokens not in (None, shape[1]):
            raise BadData(f"{spec}: features are {shape[1]} tokens per frame, "
                          f"the model needs {tokens}; use its vision model")
        if width not in (None, shape[2]):
            raise BadData(f"{spec}: features are {shape[2]} wide, "
                          f"the model needs {width}; use its vision model")
        x = frames[:]
        check_values(path, x)
    return x


# ----------------------------------------------------------------------------- pictures to features


def check_inputs(sources: list[str]) -> None:
    """BadData if none of the files can be read; a video's first picture is decoded.

    If at least one of several can be read, the others are reported when their turn comes.
    """
    first_problem = None
    for source in sources:
        try:
            if is_features(source):
                find_features(source)
            else:
                Video(source)
            return
        except BadData as error:
            first_problem = first_problem or error
    raise first_problem


def open_frames(source: str, config, encode: Callable[[Tensor], Tensor], batch: int = 1,
                largest: int | None = None, open_video: Callable = Video,
                skip: int = 0) -> tuple[Iterator[Tensor], int | None, Video | None]:
    """Open a video or a feature file -> (frame tokens, number of frames, video).

    frame tokens        [J, D] each, from frame `skip` on
    number of frames    of the whole source; None if it is not known
    video               None for a feature file

    config              the narrator's settings
    encode              encodes `batch` pictures at a time, while the next pictures are decoded
    largest             longest side of the pictures [px]; larger pictures are scaled down
    open_video          a function (source, fps, largest); cameras have another one (live.py)
    skip                omit the first `skip` frames
    """
    if is_features(source):
        x = load_features(source, tokens=config.J, width=config.width)
        return iter(x[skip:]), len(x), None
    video = open_video(source, config.fps, largest)
    pictures = video
    if isinstance(video, Video):               # other sources have a thread already
        pictures = prefetch(video, 2 * batch)
    if getattr(config, "width_second", 0):              # LION-FS (baselines/lionfs.py)
        pictures = pairs(pictures)
    return encode_pictures(pictures, encode, batch, skip), video.frames, video


def pairs(pictures: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pair each picture with the picture before it, [H, W, 6], for a second encoder (LION-FS). The
    first picture is paired with itself.

    If both pictures are the same arrays as in the last pair, the pair is the same array, too.
    """
    picture_before = partner_before = pair = None
    for picture in pictures:
        partner = picture_before
        # A camera may change the size of its pictures.
        if partner is None or partner.shape != picture.shape:
            partner = picture
        if picture is not picture_before or partner is not partner_before:
            pair = np.concatenate([picture, partner], axis=2)
        picture_before = picture
        partner_before = partner
        yield pair


class PictureBatch:
    """Pictures that are encoded together, when the tokens of one of them are needed."""

    def __init__(self, vision: Callable[[Tensor], Tensor]):
        self.vision = vision
        self.pictures = []
        self.x = None                          # their tokens [B, J, D], once encoded

    def tokens(self, place: int) -> Tensor:
        """Frame tokens [J, D] of the picture at this place of the batch."""
        if self.x is None:
            self.x = self.vision(torch.from_numpy(np.stack(self.pictures)))
            self.pictures = []
        return self.x[place]


def encode_pictures(pictures: Iterable[np.ndarray], vision: Callable[[Tensor], Tensor],
                    batch: int = 1, skip: int = 0) -> Iterator[Tensor]:
    """Frame tokens [J, D] of each picture (uint8 [H, W, 3], all of one size).

    vision      uint8 [B, H, W, 3] (of `pairs`: 6) -> [B, J, D]
    batch       pictures per call of `vision`. A picture that is the same array as the picture
                before it is not encoded again
    skip        omit the first `skip` pictures. A batch that contains a wanted picture is still
                encoded whole: the tokens of a picture depend on its batch, and all results are to
                be the same to the last bit
    """
    previous = None                            # the last picture
    source = None                              # the batch that encodes it, and its place there
    for number, chunk in enumerate(chunks(pictures, batch)):
        new_batch = PictureBatch(vision)
        sources = []
        for picture in chunk:
            if picture is not previous:
                source = (new_batch, len(new_batch.pictures))
                new_batch.pictures.append(picture)
                previous = picture
            sources.append(source)
        # All pictures of a batch are listed now. It can be encoded.
        for i, (picture_batch, place) in enumerate(sources, number * batch):
            if i >= skip:
                yield picture_batch.tokens(place)


# ---------------------------------------------------------------------------- a data set's features


def feature_file(root: Path, video: str) -> Path:
    """Where `data.py encode` puts the features of a video."""
    return root / "features" / f"{video}.safetensors"


@dataclass
class Features:
    """The features of one video, and what is known of it without reading them."""
    path: Path
    duration: float                            # of the video [s]
    tensor: str | None = None                  # its name, in a file with the features of all videos
    fps: float | None = None                   # these three only of files of `data.py encode`:
    frames: int | None = None                  # number of frames in the file
    header: dict[str, str] = field(default_factory=dict)

    def rows(self) -> int:
        """Number of frames in the file."""
        with open_features(self.path, self.tensor) as (shape, _):
            return shape[0]

    def read(self, start: int, stop: int) -> Tensor:
        """Frames start .. stop of the video [stop - start, J, D], in fp32.

        Raises BadData if the file is damaged, or too short for the range.
        """
        with open_features(self.path, self.tensor) as (shape, frames):
            if shape[0] < stop:
                raise BadData(f"{self.path}: has {shape[0]} frames, its annotations need {stop}; "
                              f"get the features again")
            x = frames[start:stop]
            check_values(self.path, x)
            # always a copy, because a view of the file would keep it mapped
            return x.to(torch.float32, copy=True)

    def reader(self, first: int) -> Callable[[int, int], Tensor]:
        """`read` for a part of the video, whose frames are counted from frame `first`."""
        def read(start: int, stop: int) -> Tensor:
            return self.read(first + start, first + stop)

        return read


def read_header(path: Path) -> Features:
    """What a file that `data.py encode` wrote says of itself.

    Raises BadData if the file is damaged, or was written by another program.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            is_ours = {"duration", "fps", "grid", "size", "vision"} <= header.keys()
            frames = file.get_slice("features").get_shape()[0] if is_ours else 0
    except Exception as error:
        raise BadData(f"{path}: is damaged, or was not written by data.py encode "
                      f"({type(error).__name__}); delete it, and encode its video again") from error
    if not is_ours:
        raise BadData(f"{path}: was not written by data.py encode; choose another --output, with "
                      f"no other features in it")
    return Features(path, float(header["duration"]), None, float(header["fps"]), frames, header)


class Store:
    """The features of a data set.

    root        folder with features/VIDEO.safetensors, as `data.py encode` writes them; or with
                features_metadata.json and the files that it names, there or in a folder of
                root/features. Or all features are in root/features.safetensors, under the names
                of the videos
    names       {name in the annotations: name in the features}, where they differ (EgoExo4D's
                takes)
    """

    def __init__(self, root: Path, names: dict[str, str]):
        self.root = root
        self.names = names
        self.index = {}
        file = root / "features_metadata.json"
        if file.is_file():
            self.index = read_json(file)
        if not isinstance(self.index, dict):
            raise BadData(f"{file}: expected an object with one entry per video")
        # listed once, because a large folder is slow to list
        self.folders = [root, root / "features", *sorted((root / "features").glob("*/"))]

    def find(self, video: str) -> Features:
        """The features of a video.

        Raises BadData if there are none, or if the index does not describe them.
        """
        for name in (video, self.names.get(video, video)):
            if name in self.index:
                return self.indexed(name)
            path = feature_file(self.root, name)
            if path.is_file():
                return read_header(path)
        raise BadData(f"{self.root}: video {video} has no features; get them and their "
                      f"features_metadata.json (FlowNar-Data), or make them: python data.py encode "
                      f"VIDEO... --output {self.root / 'features'}")

    def indexed(self, video: str) -> Features:
        """The features that features_metadata.json describes."""
        entry = self.index[video]
        fields = entry if isinstance(entry, dict) else {}
        duration = fields.get("duration")
        name = fields.get("path")
        if not is_number(duration) or duration <= 0 or not isinstance(name, str):
            raise BadData(f'{self.root}: features_metadata.json, video {video}: expected '
                          f'{{"duration": seconds, "path": file}}, not {str(entry)[:60]}')
        for folder in self.folders:
            if (folder / name).is_file():
                return Features(folder / name, duration)
        path = self.root / "features.safetensors"
        if path.is_file():
            return Features(path, duration, tensor=video)
        raise BadData(f"{self.root}: the features of {video}, {name}, are not there; "
                      f"look into {self.root / 'features'}, or encode the video")
