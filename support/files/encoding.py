"""The features of a data set's videos, each encoded once (paper §3.1, App. B.6): one file per video and an index."""
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from support.common.disk import check_writable, write_json, write_tensors
from support.common.errors import BadData
from support.common.progress import progress
from support.files import own_videos
from support.files.features import encode_pictures, read_header
from support.files.video import Video

METADATA = "features_metadata.json"


def encode_videos(videos: list[str], output: Path, load: Callable, vision: str, fps: float, grid: int, batch: int,
                  shard: tuple[int, int] = (0, 1), renew: bool = False,
                  check: Callable[[list[str]], None] = lambda sources: None):
    """Features of videos, one bf16 file per video and features_metadata.json; BadData at the end if any failed.

    check: raises BadData if none of the videos can be read; load: makes the encoder (narrator.py: VisionEncoder), if there is a video to encode; vision, fps and grid are its
    settings. batch: frames at once; shard: (i, n), only every n-th video from the i-th on.

    Files appear when they are complete, and finished ones are not made again: after a kill, repeat the command. BadData
    at once if the folder holds a damaged file, or one made with other settings; with `renew`, videos that have changed
    and files with other settings are made again.
    """
    for name, count in Counter(Path(source).stem for source in videos).items():
        if count > 1:
            raise BadData(f"{count} of the videos are named {name}; features are kept by that name")
    paths = {source: output / f"{Path(source).stem}.safetensors" for source in videos}
    sources = {path: source for source, path in paths.items()}
    check_writable(output / METADATA)
    settings = {"vision": vision, "fps": str(fps), "grid": str(grid)}
    for path in output.glob("*.safetensors"):
        made = read_header(path)[1]
        if not renew and any(made.get(key) != value for key, value in settings.items()):
            raise BadData(f"{path}: was made with other settings ({made}); delete it, or choose another --output")
        here = own_videos.file_signature(sources[path]) if path in sources else {}
        if not renew and here and made.get("size", here["size"]) != here["size"]:
            raise BadData(f"{path}: was made of another video than {sources[path]}; delete it, or choose another "
                          f"--output")
    done = lambda source: own_videos.up_to_date(paths[source], settings | own_videos.file_signature(source) if renew else {})
    mine, failed = [source for source in videos[shard[0]::shard[1]] if not done(source)], []
    if mine:
        check(mine)
    encoder = load() if mine else None
    output.mkdir(parents=True, exist_ok=True)
    for source in progress(mine, f"encoding {shard[0] + 1}/{shard[1]}", unit="video"):
        try:
            video = Video(source, fps, largest=2 * encoder.image_size)
            x = torch.stack([tokens.to("cpu", torch.bfloat16) for tokens in encode_pictures(video, encoder, batch)])
        except BadData as error:
            failed.append(str(error))
            continue
        video.report()
        write_tensors(paths[source], {"features": x}, settings | {"duration": str(len(x) / fps)} | own_videos.file_signature(source))
    write_metadata(output)
    if failed:
        print(*failed, sep="\n", file=sys.stderr)
        raise BadData(f"{len(failed)} of {len(mine)} videos could not be encoded (listed above); the others are done")


def write_metadata(output: Path):
    """features_metadata.json of all feature files in a folder, whichever process has made them.

    Several processes may end at the same time. Each lists the files again after writing, so the last one to write has
    seen the files of all the others: none is lost, in whatever order they run, on any file system.
    """
    seen, files = None, sorted(output.glob("*.safetensors"))
    while files != seen:
        headers = {path: read_header(path) for path in files}
        write_json(output / METADATA, {
            path.stem: {"duration": float(settings["duration"]), "path": path.name, "frames": frames}
            for path, (frames, settings) in headers.items()})
        seen, files = files, sorted(output.glob("*.safetensors"))
