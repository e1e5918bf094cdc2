"""The features of videos, each encoded once (paper §3.1, App. B.6): one file per video, which says
of itself how it was made.
"""
from collections.abc import Callable
from pathlib import Path

import torch

from support.common.disk import check_writable, write_tensors
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.common.locks import Locked, locked
from support.common.marks import digest_of, digest_of_file, refuse_if_changed, what_differs
from support.common.processes import KnownToAll, check_equal, in_shares, my_share, together
from support.common.progress import progress, say
from support.files.features import Header, encode_batches, read_header
from support.files.video import Video


def encode_videos(videos: list[str], output: Path, load: Callable, settings: Header,
                  vision: str, batch: int, renew: bool = False) -> None:
    """Write the features of videos, one bf16 file per video.

    load        makes the encoder (narrator.py: VisionEncoder); called if there is a video to encode
    settings    of the encoder: vision_mark, fps, grid
    vision      its folder or hub id, which is not compared
    batch       frames that are encoded at once
    renew       encode videos again that have changed, or whose files were made with other settings

    A file appears when it is complete, and finished files are not made again: after a kill, repeat
    the command. Under torchrun each process encodes a part of the videos; so do several commands
    with one `output`.

    Raises BadData at the end if a video failed; before all work if a file is damaged, or (without
    `renew`) is of another video or was made with other settings.
    """
    check_writable(output / "features.safetensors")
    sources = {}                               # file of features: its video
    for source in videos:
        name = Path(source).stem
        features = output / f"{name}.safetensors"
        if features in sources:
            raise BadData(f"{source}: another of the videos is named {name}; features are kept by "
                          f"that name")
        sources[features] = source
    names = [features.stem for features in sources]
    check_equal(settings | {"videos": f"{len(names)} of hash {digest_of(str(names)):.16}"})

    # the header of a video's features shows whether it has changed
    mine = {features: settings | {"video": digest_of_file(sources[features])}
            for features in my_share([*sources])}
    to_do = together(lambda: [features for features, wanted in mine.items()
                              if not is_made(features, wanted, renew)])

    def encode_missing() -> int:
        """-> how many videos could not be encoded."""
        encoder = load() if to_do else None
        failed = 0
        for features in progress(to_do, "encoding", unit="video"):
            source = sources[features]
            try:
                with locked(output, features.stem):
                    if not is_made(features, mine[features], renew):
                        header = mine[features] | {"vision": vision}
                        encode_video(source, features, encoder, header, batch)
            except (UnreadableVideo, Locked) as error:
                say(str(error))
                failed += 1
        return failed

    failed = sum(in_shares(encode_missing))
    if failed:
        raise KnownToAll(f"{failed} of {len(videos)} videos could not be encoded (named "
                         f"above); the others are done")


class UnreadableVideo(BadData):
    """A video that cannot be encoded; others can."""


def encode_video(source: str, features: Path, encoder: Callable, header: Header, batch: int,
                 ) -> None:
    """Write the features of one video. A thread decodes while the encoder works."""
    fps = float(header["fps"])
    try:
        video = Video(source, fps, largest=2 * encoder.image_size)
        pictures = prefetch(video, 2 * batch)
        x = torch.cat([tokens.to("cpu", torch.bfloat16)
                       for tokens in encode_batches(pictures, encoder, batch)])    # [T, J, D]
    except (BadData, OSError) as error:
        raise UnreadableVideo(str(error)) from error
    video.report()
    write_tensors(features, {"features": x}, header | {"duration": str(len(x) / fps)})


def is_made(features: Path, wanted: Header, renew: bool) -> bool:
    """Whether a file of features exists and has the wanted header.

    Raises BadData if it is damaged, or (without `renew`) has another header.
    """
    if not features.exists():
        return False
    made = read_header(features).header
    if not renew:
        refuse_if_changed(str(features), made, wanted, "delete it, or choose another --output")
    return not what_differs(made, wanted)
