"""Is this still what it was made from? States, predictions, trainings, narrators, features and probes
keep what they were made from, and are refused where that has changed.

What is kept is a dict of names and values: settings, and digests of what has no short name. A digest
of a large file is its mark: of some of its bytes, wherever it lies. Where nothing is kept, as by the
authors' checkpoints and features, nothing is compared.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch

from support.common.disk import hash_tensors
from support.common.errors import BadData

PLACE = 4096                            # bytes at each place of a file of which a digest is


def refuse_if_changed(
    what: str,
    kept: dict,
    present: dict,
    advice: str,
) -> None:
    """BadData that names the first entries that differ, with both values.

    what        what would be used: a file, or the things in a folder
    advice      what the user can do
    """
    changed = what_differs(kept, present)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise BadData(f"{what} was made with {'; '.join(changed[:3])}{more}; {advice}")


def what_differs(kept: dict, present: dict) -> list[str]:
    """The present entries that are not as they were, in words."""
    found = []
    for name, now in present.items():
        before = kept.get(name)
        if before != now:
            found.append(f"{name} = {str(before)[:60]}, here {str(now)[:60]}")
    return found


# ---------------------------------------------------------------------- digests


def digest_of_samples(samples: Sequence, frames: bool = False) -> str:
    """Of names, times and true sentences of the samples of a data set (data.py: Sample), wherever
    they lie.

    frames      and of all their frames, in their order
    """
    hashed = sha256()
    for sample in samples:
        # plain tuples: a data set has millions of sentences
        sentences = [[(sentence.time, sentence.text) for sentence in rows]
                     for rows in sample.annotators]
        about = (sample.name, sample.num_frames, sample.fps, sample.origin, sample.start,
                 sample.end, sentences)
        hashed.update(repr(about).encode())
        if frames:
            pictures_or_features = sample.frames() if sample.source else sample.tokens()
            hash_tensors(hashed, (("", torch.as_tensor(frame)) for frame in pictures_or_features))
    return f"{len(samples)} of hash {hashed.hexdigest()[:16]}"


def digest_of_features(samples: Sequence) -> str:
    """Of the marks of the features of samples."""
    marks = [sample.features.mark if sample.features else None for sample in samples]
    return f"{len(marks)} of hash {digest_of(str(marks))[:16]}"


def marks_of_tensors(path: Path) -> dict[str, str]:
    """{name of a tensor in a .safetensors file: its dtype, shape, and a digest of three places}. No
    more of it is read.
    """
    marks = {}
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, stop = tensor["data_offsets"]
            data = digest_of_places(file, 8 + size + start, 8 + size + stop)
            marks[name] = f"{tensor['dtype']} {tensor['shape']} {data}"
    return marks


def digest_of_places(file: BinaryIO, start: int, stop: int) -> str:
    """Of the first, the middle and the last bytes between two places of a file, and their number."""
    hashed = sha256(str(stop - start).encode())
    for place in (start, (start + stop - PLACE) // 2, stop - PLACE):
        place = max(start, place)
        file.seek(place)
        hashed.update(file.read(min(PLACE, stop - place)))
    return hashed.hexdigest()


def digest_of_file(path: str | Path) -> str:
    """Of a file's size and of three places in it: it may be large, and have been moved."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        return f"{size} bytes, {digest_of_places(file, 0, size)[:12]}"


def digest_of_program() -> str:
    """Of the program's sources."""
    root = Path(__file__).parents[2]
    sources = [*root.glob("*.py")]
    for room in ("support", "beyond", "toy"):
        sources += (root / room).rglob("*.py")
    hashed = sha256()
    for source in sorted(sources):
        hashed.update(source.read_bytes())
    return hashed.hexdigest()[:16]


def digest_of(text: str, tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> str:
    """SHA-256 of a text, and of tensors with their names, dtypes and shapes."""
    hashed = sha256(text.encode())
    hash_tensors(hashed, tensors)
    return hashed.hexdigest()
