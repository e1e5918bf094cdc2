"""Is this still what it was made from? States, predictions, trainings, narrators, features and probes
keep what they were made from, and are refused where that has changed.

What is kept is a dict of names and values: settings, and digests of what has no short name. A model's
or a file's digest is its mark: of all that is read of it, wherever it lies. Where nothing is kept, as
by the authors' checkpoints and features, nothing is compared, and that is said.
"""
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import torch

from support.common.errors import BadData
from support.common.progress import say_as_one
from support.common.text import listed

PIECE = 2 ** 20                         # numbers or bytes that are looked at together
# of the features of a data set, at each start of a run: 4 GB take about 2 seconds
WHOLE = 4e9                             # bytes

MARKS = "2"                             # the version of all marks of models and features


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
        raise BadData(f"{what} was made with {listed(changed, '; ')}; {advice}")


def what_differs(kept: dict, present: dict) -> list[str]:
    """The present entries that are not as they were, in words."""
    return [f"{name} = {str(kept.get(name))[:60]}, here {str(now)[:60]}"
            for name, now in present.items() if kept.get(name) != now]


def known_mark(what: str, of: str, kept: str | None, present: str | None, advice: str) -> str | None:
    """The mark of a model that something was made with, as far as it is known. BadData if it is not
    the present one's; if it cannot be compared, that is said.

    what        what was made with it
    of          the kind of the model
    """
    if kept and present and kept.partition(":")[0] != MARKS:
        raise BadData(f"{what}: the mark of its {of}, {kept}, is of another version of this program "
                      f"and cannot be compared; make it again, or take the mark out of a narrator's "
                      f"narrator.json if you know that the model is the same")
    if kept and present:
        refuse_if_changed(what, {of: kept}, {of: present}, advice)
    else:
        silent = what if present else "the narrator"
        say_as_one(f"{silent}: does not say which {of} it was made with; that it is this one is not "
                   f"compared")
    return present or kept


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
            for frame in pictures_or_features:
                hashed.update(mark_of_numbers(torch.as_tensor(frame)).encode())
    return f"{len(samples)} of hash {hashed.hexdigest()[:16]}"


def digest_of_features(samples: Sequence, finite: bool = False) -> str:
    """Of the features of samples: of all bytes of their files. Where these are more than WHOLE
    together, of their sizes and the times when they were changed, and that is told.

    finite      BadData if some are not: made whole again, they would be others
    """
    files = {sample.features.path: sample.features for sample in samples if sample.features}
    if sum(path.stat().st_size for path in files) > WHOLE:
        say_as_one(f"more than {WHOLE / 1e9:g} GB of features: that they stay the same is seen by the "
                   f"sizes and dates of their files; copies keep these by cp -p, rsync -a or tar")
        marks = {}
        for path in files:
            status = path.stat()
            marks[path] = f"{status.st_size} bytes of {status.st_mtime_ns}"
    elif finite:
        marks = {path: features.mark() for path, features in files.items()}
    else:
        marks = {path: digest_of_file(path) for path in files}
    of_samples = [marks[sample.features.path] if sample.features else None for sample in samples]
    return f"{len(samples)} of hash {digest_of(str(of_samples))[:16]}"


def marks_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """{name of a tensor: its mark}."""
    return {name: mark_of_numbers(tensor) for name, tensor in tensors}


def mark_of_numbers(tensor: torch.Tensor) -> str:
    """Of a tensor: its shape, and the CRC-32 of all numbers; their format, but that numbers of bfloat16
    have the same mark where they are stored in float32.

    A change within 4 bytes is always seen; a larger one, two rows that were exchanged for example, is
    missed once in 2^32.
    """
    form = "" if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.dtype
    checksum = 0
    for numbers in tensor.detach().cpu().flatten().split(PIECE):
        if numbers.dtype == torch.float32:
            narrow = numbers.to(torch.bfloat16)
            if torch.equal(narrow.float(), numbers):
                numbers = narrow
        # as bytes: numpy has no bfloat16
        checksum = crc32(numbers.contiguous().view(torch.uint8).numpy(), checksum)
    return f"{form}{[list(tensor.shape)]} {checksum:08x}"


def digest_of_file(path: str | Path) -> str:
    """Of a file's size and all its bytes (CRC-32): it may have been moved."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            checksum = crc32(piece, checksum)
        return f"{file.tell()} bytes, {checksum:08x}"


def digest_of_program() -> str:
    """Of the program's sources."""
    root = Path(__file__).parents[2]
    sources = [*root.glob("*.py")]
    for room in ("support", "beyond", "toy"):
        sources += (root / room).rglob("*.py")
    return digest_of("".join(source.read_text("utf-8") for source in sorted(sources)))[:16]


def digest_of(text: str) -> str:
    """SHA-256."""
    return sha256(text.encode()).hexdigest()
