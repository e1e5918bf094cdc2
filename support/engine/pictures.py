"""Pictures in the form that a vision model takes."""
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F


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
