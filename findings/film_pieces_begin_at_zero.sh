#!/usr/bin/env bash
# Expected: get_axial_freqs(4, 8, 8, offsets=(4, 0, 0)) gives the rotations of pictures 4 to 7 of a film.
# Rotations are kept by length alone: a later call of no greater length gets the kept ones, whatever its offset.
# So each further piece of a film gets the places of the first; a first piece with an offset spoils calls without one.
# Versions: rotary-embedding-torch 0.9.1, torch 2.13.0. With cache_if_possible=False (or "pixel") it is right.
# Who meets it: whoever turns a film's pictures by time and place and works through it piece by piece.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 rotary-embedding-torch==0.9.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from rotary_embedding_torch import RotaryEmbedding

print("rotary-embedding-torch", version("rotary-embedding-torch"), "torch", torch.__version__)


def times(rotary, offset):
    """The angle of the first channel, which turns by 1 with each picture."""
    return rotary.get_axial_freqs(4, 8, 8, offsets=(offset, 0, 0))[:, 0, 0, 0].tolist()


film, plain, later = RotaryEmbedding(dim=12), RotaryEmbedding(dim=12, cache_if_possible=False), RotaryEmbedding(dim=12)
pieces = [times(film, offset) for offset in (0, 4, 8)]
right = [times(plain, offset) for offset in (0, 4, 8)]
later.get_axial_freqs(4, 4, 4, offsets=(100, 0, 0))
spoiled = later.get_axial_freqs(4, 4, 4)[:, 0, 0, 0].tolist()
print("pieces of a film at 0, 4, 8:  ", *pieces)
print("the same, nothing kept:       ", *right)
print("without offset, after one of 100:", spoiled)
begun = [[0.0, 1.0, 2.0, 3.0]] * 3
if pieces != begun or right != [[first + more for more in range(4)] for first in (0.0, 4.0, 8.0)]:
    raise SystemExit("changed: pieces get other places than before")
if spoiled != [100.0, 101.0, 102.0, 103.0]:
    raise SystemExit("changed: an offset no longer spoils later calls")
PYTHON
