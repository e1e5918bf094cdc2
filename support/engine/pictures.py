"""Pictures in the form that a vision model takes, and which models take them."""
from collections.abc import Callable
from copy import deepcopy

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from support.common.errors import BadData, first_line


def letterbox(frames: Tensor, size: int) -> Tensor:
    """[T, H, W, 3] in 0..1 -> [T, 3, size, size]: longer side scaled to `size`, the rest black."""
    frames = rearrange(frames, "t h w c -> t c h w")
    height, width = frames.shape[2:]
    if (height, width) == (size, size):
        return frames
    scale = size / max(height, width)
    new_height = max(1, round(height * scale))
    new_width = max(1, round(width * scale))
    frames = F.interpolate(frames, (new_height, new_width), mode="bicubic", antialias=True)
    frames = frames.clamp(0, 1)
    top = (size - new_height) // 2
    left = (size - new_width) // 2
    bottom = size - new_height - top
    right = size - new_width - left
    return F.pad(frames, (left, right, top, bottom))       # [T, 3, size, size]


@torch.no_grad()
def check_encoder(model: nn.Module, frame_tokens: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
    """BadData if a vision model of transformers does not encode single pictures: tried on a small one
    of its kind, with random weights.

    frame_tokens    (model, normalised pictures, grid) -> tokens (narrator.py)
    """
    config = deepcopy(model.config)
    try:
        for name in ("image_size", "patch_size", "hidden_size"):
            if not isinstance(getattr(config, name, None), int):
                raise BadData(f"it has no {name}, as vision transformers with square patches have")
        config.image_size = 4 * config.patch_size
        config.intermediate_size = config.hidden_size
        config.num_hidden_layers = 1
        with torch.random.fork_rng([]):         # other random numbers stay as they are
            small = type(model)(config).eval()
            pictures = torch.randn(3, 3, config.image_size, config.image_size)
        pictures[0] = 0
        alone = frame_tokens(small, pictures[:1], 2)
        among_others = frame_tokens(small, pictures, 2)[:1]
        if not torch.allclose(alone, among_others, 1e-4, 1e-4):
            raise BadData("its tokens of a picture depend on those beside it")
    except Exception as error:                  # models of other inputs raise anything
        raise BadData(f"{type(model).__name__} does not encode single pictures as a narrator needs "
                      f"them: {first_line(error)}; use SigLIP, CLIP or DINOv2") from error
