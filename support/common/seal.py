"""Is this still what it was made from? States, predictions, features and probes keep what they were
made from, and are refused where that has changed.

What is kept is a dict of names and values: settings, sizes of files, digests of models.
"""
from __future__ import annotations

import json
from collections.abc import Container, Iterable
from hashlib import sha256
from itertools import chain
from pathlib import Path

import torch

from support.common.disk import hash_tensors
from support.common.errors import BadData


def what_differs(kept: dict, present: dict, but: Container[str] = ()) -> list[str]:
    """The present entries that are not as they were, in words; `but`: names that are not compared."""
    found = []
    for name, now in present.items():
        before = kept.get(name)
        if name not in but and before != now:
            found.append(f"{name} = {str(before)[:60]}, here {str(now)[:60]}")
    return found


def refuse_if_changed(
    what: str,
    kept: dict,
    present: dict,
    advice: str,
    but: Container[str] = (),
) -> None:
    """BadData that names the first entries that differ, with both values.

    what        what would be used: a file, or the things in a folder
    advice      what the user can do
    """
    changed = what_differs(kept, present, but)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise BadData(f"{what} was made with {'; '.join(changed[:3])}{more}; {advice}")


def digest_of_program() -> str:
    """SHA-256 of the program's sources, shortened."""
    root = Path(__file__).parents[2]
    sources = [*root.glob("*.py")]
    for room in ("support", "baselines", "streams", "commands", "toy"):
        sources += (root / room).rglob("*.py")
    hashed = sha256()
    for source in sorted(sources):
        hashed.update(source.read_bytes())
    return hashed.hexdigest()[:16]


def digest_of(text: str, tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> str:
    """SHA-256 of a text and of tensors with their names, dtypes and shapes."""
    hashed = sha256(text.encode())
    hash_tensors(hashed, tensors)
    return hashed.hexdigest()


def digest_of_model(model: torch.nn.Module) -> str:
    """SHA-256 of all that a model computes with: its numbers, with names, dtypes and shapes, and
    the settings of the models of transformers in it. (Before `speed_up`, which packs weights.)
    """
    hashed = sha256()
    hash_tensors(hashed, chain(model.named_parameters(), model.named_buffers()))
    for part in model.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "to_diff_dict"):
            settings = config.to_diff_dict()
            settings.pop("transformers_version", None)      # of the program, not of the model
            hashed.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return hashed.hexdigest()
