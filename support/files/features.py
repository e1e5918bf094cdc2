"""Frame features (paper §3.1, App. B.6): pictures are encoded; feature files are read whole or by range.

x           frame features, the frame tokens X_t of a video: [T, J, D] = frames, tokens per frame,
            width
store       features_metadata.json, {video: {"duration": seconds, "path": file}}, and the files that
            it names. `python data.py encode` also writes how many "frames" a file has, and their
            rate, "fps"
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from support.common.devices import dtype_name
from support.common.disk import is_number, read_json
from support.common.errors import BadData
from support.common.iterate import prefetch, chunks
from support.files.annotations import expect
from support.files.video import Video

# FILE.safetensors (group 1) with :NAME (group 2), or FILE.pt (group 3)
FEATURES = re.compile(r"(.+?\.safetensors)(?::(.*))?|(.+\.pt)", re.IGNORECASE)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def is_features(spec: str) -> bool:
    """Whether an argument names frame features, not a video: FILE.safetensors,
    FILE.safetensors:NAME or FILE.pt.
    """
    return FEATURES.fullmatch(str(spec)) is not None


def load_features(spec: str, tokens: int | None = None, width: int | None = None) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    spec            FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a
                    tensor; read with weights_only)
    tokens, width   the required J and D, if given

    Raises BadData if the file does not hold such features.
    """
    path, name = find_features(spec)
    if path.suffix.lower() == ".safetensors":
        x = _read_safetensors(path, name)
    else:
        x = _read_pt(path)
    if x.dtype not in FLOATS:
        raise BadData(f"{spec}: features must be floating point, not {dtype_name(x.dtype)}")
    if x.ndim != 3 or x.numel() == 0:
        raise BadData(f"{spec}: features must be [frames, tokens, width], none of them 0, "
                      f"not {list(x.shape)}")
    if tokens is not None and x.shape[1] != tokens:
        raise BadData(f"{spec}: features are {x.shape[1]} tokens per frame, "
                      f"the model needs {tokens}; use its vision model")
    if width is not None and x.shape[2] != width:
        raise BadData(f"{spec}: features are {x.shape[2]} wide, "
                      f"the model needs {width}; use its vision model")
    if not x.isfinite().all():
        raise BadData(f"{spec}: features contain NaN or infinite values; extract them again")
    return x


def find_features(spec: str) -> tuple[Path, str | None]:
    """The file of features, and the name of a tensor if one is given.

    Raises BadData if there is no such file.
    """
    match = FEATURES.fullmatch(str(spec))
    if match is None:
        raise BadData(f"{spec}: features are FILE.safetensors, FILE.safetensors:NAME or FILE.pt")
    path = Path(match[1] or match[3])
    if path.is_dir():
        raise BadData(f"{path}: is a directory, not a feature file")
    if not path.is_file():
        raise BadData(f"{path}: no such file")
    return path, match[2]


def _read_safetensors(path: Path, name: str | None) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            listed = ", ".join(names[:4]) or "none"
            if len(names) > 4:
                listed += ", ..."
            if name is None and len(names) != 1:
                raise BadData(f"{path}: holds {len(names)} tensors; name one: FILE:NAME "
                              f"(it has {listed})")
            if name is None:
                name = names[0]
            if name not in names:
                raise BadData(f"{path}: has no tensor {name!r} (names: {listed})")
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise BadData(f"{path}: cannot be read as safetensors ({error}); damaged?") from error


def _read_pt(path: Path) -> Tensor:
    """A tensor saved by torch. The file is mapped: only the used part is read. Files of
    torch < 1.6 cannot be mapped, and are read whole.
    """
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
        raise BadData(f"{path}: cannot be read as a tensor ({reason}); "
                      f"damaged, or no plain tensor?") from error
    if not isinstance(x, Tensor):
        raise BadData(f"{path}: holds a {type(x).__name__}; "
                      f"save one tensor [frames, tokens, width]")
    # A tensor on the device "meta" has a shape, but no content.
    if x.layout != torch.strided or x.device.type != "cpu":
        raise BadData(f"{path}: holds a sparse or an empty tensor; "
                      f"save a dense one [frames, tokens, width]")
    return x.detach()


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
    open_video          a function (source, fps, largest); cameras have another one (camera.py)
    skip                omit the first `skip` frames
    """
    if is_features(source):
        x = load_features(source, tokens=config.J, width=config.width)
        return iter(x[skip:]), len(x), None
    video = open_video(source, config.fps, largest)
    pictures = video
    if isinstance(video, Video):               # other sources have a thread already
        pictures = prefetch(video, 2 * batch)
    if config.width_second:
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


def read_header(path: Path) -> tuple[int, dict[str, str]]:
    """Number of frames and settings of a file that `python data.py encode` wrote.

    Raises BadData if the file is damaged, or was written by another program.
    """
    frames = 0
    try:
        with safe_open(path, "pt") as file:
            settings = file.metadata() or {}
            by_another_program = "duration" not in settings or "features" not in file.keys()
            if not by_another_program:
                frames = file.get_slice("features").get_shape()[0]
                float(settings["duration"])
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise BadData(f"{path}: is damaged, or was not written by data.py encode "
                      f"({type(error).__name__}); delete it, and encode its video again") from error
    if by_another_program:
        raise BadData(f"{path}: was not written by data.py encode; choose another --output, with no "
                      f"other features in it")
    return frames, settings


def read_index(file: Path) -> dict:
    """{video: entry} of a features_metadata.json. BadData if it is none."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise BadData(f"{file}: expected an object with one entry per video")
    return content


# ---------------------------------------------------------------------- a data set's features


class Store:
    """The features of a data set. A file is opened when a range of its frames is needed. It is
    never read whole.

    root        folder with features_metadata.json, features/features_metadata.json, or both: of
                a video in both, the second one counts. The feature files lie beside these files, or
                in a folder of root/features. Or all features are in root/features.safetensors,
                under the names of the videos
    names       {name in the annotations: name in the features}, where they differ (EgoExo4D's
                takes)
    """

    def __init__(self, root: Path, names: dict[str, str] | None = None):
        self.root = root
        self.names = names or {}
        features = root / "features"
        indices = [folder / "features_metadata.json" for folder in (root, features)]
        indices = [file for file in indices if file.is_file()]
        if not indices:
            raise BadData(f"{root}: has no features_metadata.json; "
                          f"get it with the features (FlowNar-Data), or make both: "
                          f"python data.py encode VIDEO... --output {features}")
        self.videos = {}
        for file in indices:
            self.videos |= read_index(file)
        self.file = indices[0]
        # Listed once, because a large folder is slow to list.
        self.folders = [self.file.parent, root, features, *sorted(features.glob("*/"))]

    def entry(self, video: str) -> dict:
        """{"duration", "path"} of a video, perhaps with "frames" and "fps".

        Raises BadData if the video has no entry, or an invalid one.
        """
        if video in self.videos:
            entry = self.videos[video]
        else:
            entry = self.videos.get(self.names.get(video, ""))
        if not isinstance(entry, dict) or not {"duration", "path"} <= entry.keys():
            raise BadData(f'{self.file}: video {video} has no entry '
                          f'{{"duration": seconds, "path": file}}; get its features, or encode it')

        def check(condition: bool, message: str) -> None:
            expect(condition, self.file, f"video {video}", message)

        duration = entry["duration"]
        check(is_number(duration) and duration > 0,
              f'"duration" must be seconds, above 0, not {duration!r}')
        fps = entry.get("fps", 1)
        check(is_number(fps) and fps > 0, f'"fps" must be a number above 0, not {fps!r}')
        frames = entry.get("frames", 1)
        check(isinstance(frames, int) and is_number(frames) and frames > 0,
              f'"frames" must be a whole number above 0, not {frames!r}')
        path = entry["path"]
        # No path may lead out of the folder.
        is_inside = False
        if isinstance(path, str):
            parts = Path(path).parts
            is_inside = parts != () and ".." not in parts and not Path(path).anchor
        check(is_inside, f'"path" must be a file in the folder of the data set, not {path!r}')
        return entry

    def locate(self, video: str) -> tuple[Path, str | None]:
        """The file of a video, and the name of its tensor if the file holds several videos."""
        name = self.entry(video)["path"]
        for folder in self.folders:
            path = folder / name
            if path.is_file():
                return path, None
            path = path.with_suffix(".safetensors")
            if path.is_file():
                return path, None
        path = self.root / "features.safetensors"
        if path.is_file():
            return path, video
        raise BadData(f"{self.root}: the features of {video}, {name}, are not there; "
                      f"look into {self.root / 'features'}, or encode the video")

    @contextmanager
    def _frames(self, video: str) -> Iterator[tuple[str, list[int], Any]]:
        """Open the features of a video -> (place, shape [T, J, D], frames).

        place       the file and the video, for messages
        frames      can be sliced while the file is open
        """
        path, name = self.locate(video)
        place = f"{path}, video {video}"
        try:
            with ExitStack() as stack:
                if path.suffix == ".safetensors":
                    file = stack.enter_context(safe_open(path, "pt"))
                    names = list(file.keys())
                    if name is None and len(names) == 1:
                        name = names[0]
                    if name not in names:
                        raise BadData(f"{place}: holds no tensor of that name")
                    frames = file.get_slice(name)
                    shape = frames.get_shape()
                else:
                    frames = _read_pt(path)
                    shape = list(frames.shape)
                if len(shape) != 3:
                    raise BadData(f"{place}: must be [frames, tokens, width], not {shape}")
                yield place, shape, frames
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadData(f"{place}: cannot be read ({type(error).__name__}); "
                          f"damaged? get it again") from error

    def read(self, video: str, start: int, stop: int | None, tokens: int | None = None,
             width: int | None = None) -> Tensor:
        """Frames start .. stop of a video [stop - start, J, D], in fp32.

        stop            None: up to the end
        tokens, width   the required J and D, if given

        Raises BadData if the file is damaged, or too short for the range.
        """
        with self._frames(video) as (place, shape, frames):
            if tokens not in (None, shape[1]) or width not in (None, shape[2]):
                raise BadData(f"{place}: is {shape}, the narrator needs "
                              f"[frames, {tokens or 'tokens'}, {width or 'width'}]; "
                              f"use its vision model")
            if stop is not None and shape[0] < stop:
                raise BadData(f"{place}: has {shape[0]} frames, its annotations need {stop}; "
                              f"get the features again")
            x = frames[start:stop]
            if x.dtype not in FLOATS:
                raise BadData(f"{place}: must be floating point, not {dtype_name(x.dtype)}")
            # Always a copy, because a view of the file would keep it mapped.
            x = x.to(torch.float32, copy=True)
        if not x.isfinite().all():
            raise BadData(f"{place}: has NaN or infinite values after frame {start}; "
                          f"encode the video again")
        return x

    def rows(self, video: str) -> int:
        """Number of frames in the file of a video."""
        with self._frames(video) as (_, shape, _):
            return shape[0]
