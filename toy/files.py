"""Toy videos on disk: an .mp4 and, beside it, a .json with what happens in it, its ground truth.

    {"video": "kitchen.mp4", "seed": 7, "fps": 2, "duration": 151.5, "pictures": "c4ec6cc2",
     "narrations": [
        {"time": 0.5, "text": "You fill the rack.", "memory": ["green", "bowl"]}, ...]}

"seed" is that of its Kitchen. "pictures" is a hash, by which a video is known that was painted
otherwise. "memory" are the words that only visual memory can give.
"""
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np

from data import Sample
from support.common.disk import expecting, read_json, write_json
from support.common.errors import BadData
from support.common.options import TOY_TITLE
from support.common.progress import progress
from support.files.sentences import frame_at, time_of
from support.files.video import Video, write_video
from toy.words import ToySentence, true_sentences
from toy.world import FPS, SEEDS, Kitchen, find_world, kitchens


def write_kitchen(kitchen: Kitchen, output: Path) -> None:
    """Write a video, and its .json. Each file appears when it is complete, the .json last.

    What is there already is kept. Raises BadData if it is something else.
    """
    if output.suffix.lower() != ".mp4":
        raise BadData(f"{output}: the name of the output must end in .mp4")
    truth = output.with_suffix(".json")
    content = ground_truth(kitchen, output.name)
    if output.exists() and truth.exists() and read_json(truth) == content:
        return
    for file in (output, truth):
        if file.exists():
            raise BadData(f"{file}: is there already, and not this video of the toy; "
                          f"delete it, or choose another --output")
    pictures = progress(map(kitchen.render, range(len(kitchen))), output.name, len(kitchen), "frame",
                        leave=False)
    write_video(output, pictures, FPS, title=TOY_TITLE)
    write_json(truth, content)


def ground_truth(kitchen: Kitchen, video: str) -> dict:
    """The content of the .json file."""
    narrations = []
    for narration in kitchen.narrations:
        row = {"time": time_of(narration.frame, FPS), "text": narration.text}
        if narration.memory_words:
            row["memory"] = list(narration.memory_words)
        narrations.append(row)
    return {"video": video, "seed": kitchen.seed, "fps": FPS, "duration": len(kitchen) / FPS,
            "pictures": hash_of_pictures(kitchen), "narrations": narrations}


def hash_of_pictures(kitchen: Kitchen) -> str:
    """Of some pictures, which stand for all: in them is seen how the world is made and painted."""
    mark = 0
    for frame in range(0, len(kitchen), 8):
        mark = crc32(kitchen.render(frame), mark)
    return f"{mark:08x}"


def toy_samples(
    root: str | Path | None = None,
    split: str = "val",
    limit: int | None = None,
    world: str = "plain",
) -> Iterator[Sample]:
    """The videos of a split: rendered while they are seen, in the named world. Or, of a folder `root`,
    all that are in it, sorted by name.

    limit: the largest number; None: all, or world.VIDEOS of the split. BadData if there are none.
    """
    if root is None:
        if split not in SEEDS:
            raise BadData(f"unknown split {split!r}; choose one of {', '.join(SEEDS)}")
        return map(rendered, kitchens(split, limit, find_world(world)))
    folder = Path(root)
    files = sorted(folder.glob("[!.]*.json"))[:limit]            # no hidden ones, as macOS has
    if not files:
        missing = "has no toy videos" if folder.is_dir() else "no such folder"
        raise BadData(f"{folder}: {missing}; "
                      f"make some: python data.py toy --count 10 --output {folder}")
    return map(filmed, files)


def rendered(kitchen: Kitchen) -> Sample:
    """A video whose pictures are rendered while they are seen."""
    sentences = [ToySentence(time_of(narration.frame, FPS), narration.text, narration.memory_words)
                 for narration in kitchen.narrations]
    return Sample(
        [sentences],
        name=f"toy-{kitchen.seed}",
        fps=FPS,
        num_frames=len(kitchen),
        duration=len(kitchen) / FPS,
        source=lambda: map(kitchen.render, range(len(kitchen))),
    )


def filmed(path: Path) -> Sample:
    """The video that a .json file describes. BadData names the file if it does not."""
    sentences = true_sentences(path)
    with expecting(path, f'{{"video": file, "fps": {FPS}, "duration": seconds, "narrations": [...]}}'):
        content = read_json(path)
        video = path.parent / content["video"]
        num_frames = round(content["duration"] * FPS)
        if content["fps"] != FPS or frame_at(sentences[-1].time, FPS) >= num_frames:
            raise ValueError("another rate, or a narration after the end")
    return Sample(
        [sentences],
        name=path.stem,
        fps=FPS,
        num_frames=num_frames,
        duration=num_frames / FPS,
        source=partial(decode, video, num_frames),
    )


def decode(path: Path, num_frames: int) -> Iterator[np.ndarray]:
    """The pictures of a video. BadData if it has fewer than num_frames."""
    video = Video(path, FPS)
    count = 0
    for picture in islice(video, num_frames):
        count += 1
        yield picture
    video.report()
    if count < num_frames:
        raise BadData(f"{path}: has {count} frames, its .json promises {num_frames}")
