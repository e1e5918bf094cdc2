"""Frame features (paper §3.1, App. B.6): pictures are encoded; feature files are read whole or by
range.

x           frame features, the frame tokens X_t of a video: [T, J, D] = frames, tokens per frame,
            width
store       the features of a data set: features_metadata.json, {video: {"duration": seconds,
            "path": file}}, and the files that it names; or files that `data.py encode` has written
header      what such a file says of itself: duration, fps, the settings of its encoder. Files of
            other programs have none
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from support.common.disk import POINTER, expecting, is_pointer, read_json
from support.common.errors import BadData
from support.common.iterate import next_one_ready, prefetch
from support.common.marks import known_mark, mark_of_numbers
from support.common.text import listed
from support.files.sources import Source
from support.files.video import Video

Header = dict[str, str]
Encode = Callable[[Tensor], Tensor]            # pictures, uint8 [B, H, W, 3] -> [B, J, D]

# ------------------------------------------------------------------------------------------- files


READ = "what is read is .safetensors, or .pt with one tensor [frames, tokens, width]"


@contextmanager
def open_features(path: Path, name: str | None = None) -> Iterator[tuple[Tensor, Header]]:
    """Open a file of features -> (features [T, J, D], what the file says of itself).

    The features are a view of the file: what is not used is not read. Only files of `data.py
    encode` say something; of others, {}.

    name    of the tensor, in a .safetensors file with several

    Raises BadData, which names the file, if it holds no such features, here or while it is used.
    """
    if not path.is_file():
        raise BadData(f"{path}: no such file")
    try:
        header = {}
        if path.suffix.lower() == ".pt":
            x = torch.load(path, map_location="cpu", mmap=True, weights_only=True).detach()
        else:
            with safe_open(path, "pt") as file:
                names = sorted(file.keys())
                if name is None and len(names) == 1:
                    name = names[0]
                if name not in names:
                    raise BadData(f"{path}: holds {len(names)} tensors; give FILE:NAME, of "
                                  f"{listed(names)}")
                x = file.get_tensor(name)
                about = file.metadata() or {}
            if {"vision", "grid", "fps", "duration"} <= about.keys():
                header = about
        if x.dim() != 3 or 0 in x.shape or not x.is_floating_point():
            raise BadData(f"{path}: features must be [frames, tokens, width] in floating point, "
                          f"none of them 0, not {list(x.shape)} in {x.dtype}")
        yield x, header
    except BadData:
        raise
    except Exception as error:                 # a damaged pickle can raise nearly anything
        why = f"cannot be read as features ({type(error).__name__}), or is not whole"
        if is_pointer(path):
            why = POINTER
        raise BadData(f"{path}: {why}; {READ}") from error


def check_fit(name: str, fps: float, shape: Sequence[int] | None, config) -> None:
    """BadData if these are not the frames that a narrator with these settings (narrator.py: Config)
    needs.

    name        of the file, or of the sample
    shape       [T, J, D] of features; None where there are pictures
    """
    if fps != config.fps:
        raise BadData(f"{name}: has {fps:g} frames a second, the narrator needs {config.fps:g}")
    if shape is not None:
        _, J, width = shape
        if (J, width) != (config.J, config.width):
            raise BadData(f"{name}: its features are {width} wide with {J} tokens a frame, the "
                          f"narrator needs {config.width} and {config.J}; use its vision model, "
                          f"{config.vision}")


def encoder_mark(header: Header, config, what: str = "the features") -> str | None:
    """The mark of the vision model that made features and through which the narrator looks, as far
    as it is known. BadData if these are two, by their marks, or else by the last part of their names.

    header      of the features; {} says nothing
    """
    made_by = header.get("vision", config.vision)
    advice = (f"they are of {made_by}, and the narrator looks through {config.vision}; encode the "
              f"videos again (data.py encode --model)")
    mark = header.get("vision_mark")
    if not (mark and config.vision_mark) and Path(made_by).name != Path(config.vision).name:
        raise BadData(f"{what} are those of another vision model: {advice}")
    return known_mark(what, "vision model", mark, config.vision_mark, advice)


def check_finite(path: Path, x: Tensor) -> None:
    if not x.isfinite().all():
        raise BadData(f"{path}: features contain NaN or infinite values; extract them again")


def load_features(source: Source, config) -> Tensor:
    """Frame features [T, J, D] on the CPU, in the floating point format in which they are stored.

    source      FILE.safetensors (with one tensor), FILE.safetensors:NAME, or FILE.pt (a tensor;
                read with weights_only)
    config      the settings of the narrator that they are for

    Raises BadData if the file does not hold such features.
    """
    with open_features(source.path, source.tensor) as (x, header):
        check_finite(source.path, x)
        check_fit(source.given, float(header.get("fps", config.fps)), x.shape, config)
        config.vision_mark = encoder_mark(header, config, f"the features of {source}")
    return x


# ----------------------------------------------------------------------------- pictures to features


def check_inputs(sources: list[Source]) -> None:
    """BadData if none of the files can be read; a video's first pictures are decoded.

    If at least one of several can be read, the others are reported when their turn comes.
    """
    first_problem = None
    for source in sources:
        try:
            if source.kind == "video":
                Video(source.given)
                return
            with open_features(source.path, source.tensor):
                return
        except BadData as error:
            first_problem = first_problem or error
    raise first_problem


def open_frames(source: Source, config, encode: Encode, batch: int = 1,
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
    if source.kind == "features":
        x = load_features(source, config)
        return iter(x[skip:]), len(x), None
    # in a thread, because Ctrl-C does not reach FFmpeg while it waits for a pipe
    video = next(next_one_ready([lambda: open_video(source.given, config.fps, largest)]))
    pictures = video
    if isinstance(video, Video):               # other sources have a thread already
        pictures = prefetch(video, 2 * batch)
    # Whole batches are skipped: the last bits of a picture's tokens depend on its batch.
    skipped = skip // batch * batch
    frames = encode_pictures(islice(pictures, skipped, None), encode, batch)
    return islice(frames, skip - skipped, None), video.frames, video


def encode_pictures(pictures: Iterable[np.ndarray], vision: Encode, batch: int = 1,
                    ) -> Iterator[Tensor]:
    """Frame tokens [J, D] of each picture (uint8 [H, W, 3], all of one size).

    vision      uint8 [B, H, W, 3] -> [B, J, D]
    batch       pictures per call of `vision`
    """
    for x in encode_batches(pictures, vision, batch):
        yield from x


def encode_batches(pictures: Iterable[np.ndarray], vision: Encode, batch: int,
                   ) -> Iterator[Tensor]:
    """The same, a batch at a time [B, J, D]: on a GPU, one copy there and one back."""
    pictures = iter(pictures)
    while chunk := list(islice(pictures, batch)):
        yield vision(torch.from_numpy(np.stack(chunk)))


# ---------------------------------------------------------------------------- a data set's features


def feature_file(root: Path, video: str) -> Path:
    """Where `data.py encode` puts the features of a video."""
    return root / "features" / f"{video}.safetensors"


INDEX_FPS = 2.0                                # of features that features_metadata.json names
# How far the number of rows may be from what the duration says: frames, and a share of all
SPARE = 4
SPARE_SHARE = 0.02


@dataclass
class Features:
    """The features of one video, and what is known of it without reading them."""
    path: Path
    duration: float                            # of the video [s]
    fps: float | None = None                   # these two only of files of `data.py encode`:
    frames: int | None = None                  # number of frames in the file

    @cached_property
    def about(self) -> tuple[Header, tuple[int, ...]]:
        """What the file says of itself, and [T, J, D]: it is opened once, and no frame is read."""
        with open_features(self.path) as (x, header):
            rows = len(x)
        # of files of `data.py encode` the number is known. Others are told by their index: with more
        # or less than that, frames would be taken for those of other times
        wanted = int(self.duration * INDEX_FPS) + 1
        if self.frames is None and abs(rows - wanted) > max(SPARE, SPARE_SHARE * wanted):
            raise BadData(f"{self.path}: has {rows} rows, and for the {self.duration:g} s of its "
                          f"index {wanted} are needed, {INDEX_FPS:g} a second; are they of another "
                          f"rate or another video? Get them or their features_metadata.json again")
        return header, tuple(x.shape)

    @property
    def header(self) -> Header:
        return self.about[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.about[1]

    def mark(self) -> str:
        """Of all frames. BadData if some are not finite."""
        with open_features(self.path) as (x, _):
            check_finite(self.path, x)
            return mark_of_numbers(x)

    def read(self, start: int, stop: int) -> Tensor:
        """Frames start .. stop [stop - start, J, D] in fp32.

        Raises BadData if the file is damaged, or too short for the range.
        """
        rows = self.shape[0]
        if rows < stop:
            raise BadData(f"{self.path}: ends at frame {rows}, its annotations need {stop}; get "
                          f"the features again")
        with open_features(self.path) as (x, _):
            # always a copy, because a view of the file would keep it mapped
            x = x[start:stop].to(torch.float32, copy=True)
            check_finite(self.path, x)
            return x


def read_header(path: Path) -> Features:
    """What a file that `data.py encode` wrote says of itself.

    Raises BadData if the file is damaged, or was written by another program.
    """
    with open_features(path) as (x, header):
        if not header:
            raise BadData(f"{path}: was not written by data.py encode; delete it and encode its "
                          f"video again, or choose another --output")
        return Features(path, float(header["duration"]), float(header["fps"]), len(x))


class Store:
    """The features of a data set.

    root        folder with features/VIDEO.safetensors, as `data.py encode` writes them; or with
                features_metadata.json and the files that it names, there, in root/features or in a
                folder of that
    names       {name in the annotations: name in the features}, where they differ (EgoExo4D's
                takes)
    """

    def __init__(self, root: Path, names: dict[str, str]):
        self.root = root
        self.names = names
        self.index = {}                        # video -> (duration [s], its file)
        file = root / "features_metadata.json"
        if file.is_file():
            with expecting(file, '{video: {"duration": seconds, "path": file}, ...}'):
                for video, entry in read_json(file).items():
                    duration, name = entry["duration"], entry["path"]
                    if not 0 < duration < 1e12:
                        raise ValueError(f"{duration} is no duration")
                    self.index[video] = duration, Path(name)
        # listed once, because a large folder is slow to list
        self.folders = [root, root / "features", *sorted((root / "features").glob("*/"))]
        self.find = cache(self.look_for)       # many tracks have one video

    def look_for(self, video: str) -> Features | None:
        """The features of a video; None if there are none."""
        for name in (video, self.names.get(video, video)):
            encoded = feature_file(self.root, name)
            files = {encoded} if encoded.is_file() else set()
            if name in self.index:
                duration, path = self.index[name]
                # an absolute path is the same in all folders
                named = {folder / path for folder in self.folders if (folder / path).is_file()}
                files |= named
                if len(files) > 1:
                    raise BadData(f"{' and '.join(map(str, sorted(files)))}: which of them is meant "
                                  f"by {path} of features_metadata.json cannot be known")
                if named:
                    return Features(named.pop(), duration)
            if files:
                return read_header(encoded)
        return None
