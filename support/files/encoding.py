"""The features of a data set's videos, each encoded once (paper §3.1, App. B.6): one file per video
and an index.
"""
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from support.common.disk import check_name, check_writable, write_json, write_tensors
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.common.progress import progress
from support.files.features import encode_pictures, read_header, read_index
from support.files.own_videos import file_signature, up_to_date
from support.files.video import Video

METADATA = "features_metadata.json"


def encode_videos(videos: list[str], output: Path, load: Callable, vision: str, fps: float,
                  grid: int, batch: int, shard: tuple[int, int] = (0, 1), renew: bool = False,
                  check: Callable[[list[str]], None] = lambda sources: None):
    """Write the features of videos, one bf16 file per video, and features_metadata.json.

    load                makes the encoder (narrator.py: VisionEncoder); called if there is a video
                        to encode
    vision, fps, grid   settings of the encoder
    batch               frames that are encoded at once
    shard               (i, n): encode only every n-th video, from the i-th on
    renew               encode videos again that have changed, or whose files were made with other
                        settings
    check               raises BadData if none of the videos can be read

    A file appears when it is complete, and finished files are not made again: after a kill, repeat
    the command.

    Raises BadData at the end if a video failed; at once if the folder holds a damaged file, or
    (without `renew`) a file of another video or with other settings.
    """
    for name, count in Counter(Path(source).stem for source in videos).items():
        if count > 1:
            raise BadData(f"{count} of the videos are named {name}; features are kept by that name")
    for source in videos:
        check_name(Path(source))
    file_of = {source: output / f"{Path(source).stem}.safetensors" for source in videos}
    check_writable(output / METADATA)
    settings = {"vision": vision, "fps": str(fps), "grid": str(grid)}
    check_made(output, file_of, settings, renew)

    index, count = shard
    to_do = []
    for source in videos[index::count]:
        wanted = settings | file_signature(source) if renew else {}
        if not up_to_date(file_of[source], wanted):
            to_do.append(source)
    encoder = None
    if to_do:
        check(to_do)
        encoder = load()
    output.mkdir(parents=True, exist_ok=True)
    errors = []
    for source in progress(to_do, f"encoding {index + 1}/{count}", unit="video"):
        try:
            video = Video(source, fps, largest=2 * encoder.image_size)
            pictures = prefetch(video, 2 * batch)      # decoded while others are encoded
            frames = [tokens.to("cpu", torch.bfloat16)
                      for tokens in encode_pictures(pictures, encoder, batch)]
            x = torch.stack(frames)            # [T, J, D]
        except BadData as error:
            errors.append(str(error))
            continue
        video.report()
        header = settings | {"duration": str(len(x) / fps)} | file_signature(source)
        write_tensors(file_of[source], {"features": x}, header)
    write_metadata(output)
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        raise BadData(f"{len(errors)} of {len(to_do)} videos could not be encoded (listed above); "
                      f"the others are done")


def check_made(output: Path, file_of: dict[str, Path], settings: dict[str, str], renew: bool):
    """Raise BadData if a file in the folder is damaged, or (without `renew`) of another video or
    with other settings.
    """
    source_of = {file: source for source, file in file_of.items()}
    for path in output.glob("*.safetensors"):
        _, made = read_header(path)            # raises BadData if the file is damaged
        if renew:
            continue
        if any(made.get(key) != value for key, value in settings.items()):
            raise BadData(f"{path}: was made with other settings ({made}); "
                          f"delete it, or choose another --output")
        if path in source_of:
            size = file_signature(source_of[path]).get("size")
            # there may be no size, in the header or of a video that is gone
            if size is not None and made.get("size", size) != size:
                raise BadData(f"{path}: was made of another video than {source_of[path]}; "
                              f"delete it, or choose another --output")


def write_metadata(output: Path):
    """Write features_metadata.json of all feature files in a folder, whichever process made them.

    Several processes may end at the same time. Each lists the files again after writing. So the
    last process to write has seen the files of all the others: none is lost, in whatever order
    they run, on any file system. Entries of other files (published features) stay.
    """
    others = {}
    if (output / METADATA).exists():
        for video, entry in read_index(output / METADATA).items():
            path = entry.get("path") if isinstance(entry, dict) else None
            if not str(path).endswith(".safetensors"):
                others[video] = entry
    seen = None
    files = sorted(output.glob("*.safetensors"))
    while files != seen:
        metadata = dict(others)
        for path in files:
            frames, settings = read_header(path)
            entry = {"duration": float(settings["duration"]), "path": path.name, "frames": frames}
            if "fps" in settings:
                entry["fps"] = float(settings["fps"])
            metadata[path.stem] = entry
        write_json(output / METADATA, metadata)
        seen = files
        files = sorted(output.glob("*.safetensors"))
