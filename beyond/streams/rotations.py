"""Keys that are moved to other positions than those at which they were fed, where the positions of a
stream without end are turned back (bounds.py).
"""
import torch
from torch import Tensor

from narrator import Narrator
from stream import Cache
from support.common.errors import BadData


def rotate_keys(cache: Cache, first: int, back: int, frequencies: Tensor) -> None:
    """Move the n tokens from number `first` on back by `back` positions (< 0: forward).

    With R(p) the rotation for position p: R(p - back) k = R(-back) R(p) k.

    frequencies     [c/2], or fewer where only the first channels rotate; fp64, because rounding
                    errors grow with the angle
    """
    half = len(frequencies)
    angles = back * frequencies                                         # [c/2]
    for keys in cache.keys.values():
        k = keys[0, :, first:]                                          # [G, n, c], a view
        cos = angles.cos().float().to(k.device)
        sin = angles.sin().float().to(k.device)
        # channel i and channel i + c/2 are the two coordinates that rotate together
        a = k[..., :half].float().clone()                               # [G, n, c/2]
        b = k[..., half:2 * half].float().clone()
        k[..., :half] = (a * cos + b * sin).to(k.dtype)
        k[..., half:2 * half] = (b * cos - a * sin).to(k.dtype)


@torch.no_grad()
def rotation_frequencies(narrator: Narrator) -> Tensor:
    """The frequencies with which a language model rotates its keys [c/2], fp64.

    They are tested in all layers: a few tokens are fed once at position 0 and once at position
    1000. The keys of the second pass, rotated back, must be those of the first pass; else BadData.
    """
    rotary = getattr(narrator.llm.model, "rotary_emb", None)
    refusal = BadData(f"max_position: the positions of {narrator.config.llm} cannot be turned "
                      f"back; leave it out")
    if getattr(rotary, "inv_freq", None) is None:
        raise refusal
    frequencies = rotary.inv_freq.cpu().double()
    ids = narrator.layout.prompt[:8]
    e = narrator.embed(ids)
    caches = []
    for start in (0, 1000):
        cache = Cache()
        positions = torch.arange(start, start + len(ids), device=e.device)
        narrator.run(e, positions, cache=cache)
        caches.append(cache)
    near, far = caches
    rotate_keys(far, 0, 1000, frequencies)
    tolerance = 1e-3 if narrator.llm.dtype == torch.float32 else 5e-2
    for layer in near.keys:
        keys = near.keys[layer].float()
        rotated = far.keys[layer].float()
        error = (keys - rotated).norm() / keys.norm()
        if not error <= tolerance:                              # NaN is refused, too
            raise refusal
    return frequencies
