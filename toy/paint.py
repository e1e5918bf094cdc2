"""The pictures of the miniature kitchen: they are put together from the sprites of sprites.png.

A sprite is a small picture with transparency: furniture, a thing, a hand, an effect. In sprites.png it
is drawn at five times its size; here blocks of pixels are averaged. Furniture is grey or brown: only
things have bright colours. There they are red, and get their colours here.
"""
from functools import cache
from pathlib import Path

import numpy as np
from einops import rearrange, reduce
from PIL import Image                          # it comes with matplotlib

from support.common.errors import BadData

SIZE = 96                                      # height and width of a picture [px]
CELL = SIZE // 3                               # height and width of a cell, and of a sprite [px]
FINE = 5 * CELL                                # height and width of a sprite in sprites.png [px]
SMALL = 20                                     # height and width of a thing that is carried [px]
TYPES = ("cup", "bowl", "pan", "knife", "bottle", "apple")

# Where things are drawn in a cell: x, y of their middle [px from the cell's upper left corner].
MIDDLE = (16, 16)
HAND_ACT = (25, 26)
HAND_LIFT = (28, 18)
GLOVE = (4, 5)

SPRITES = Path(__file__).with_name("sprites.png")
ROWS = (                                       # what it shows; the pictures of an effect alternate
    "shelf rack fridge stove counter sink drawer table cupboard",
    "open-fridge open-drawer open-cupboard cup bowl pan knife bottle apple",
    "water-0 water-1 water-2 flames-0 flames-1 flames-2 shake-0 shake-1 shake-2",
    "cloth-0 cloth-1 cloth-2 knock-0 knock-1 knock-2 reach act lift glove",
)

Colour = tuple[float, float, float]            # red, green, blue: 0 .. 255
RED = (208, 36, 34)
SKIN = (226, 168, 130)
TEAL = (0, 138, 136)
METAL = (200, 204, 208)
BETWEEN = (                                    # colours between those that a .png can have
    (158.2, 117.6, 91.0),                      # fingers of a fist
    (61.6, 67.1, 70.4), (78.4, 85.4, 89.6),    # an open fridge
    (50.6, 40.7, 31.9), (64.4, 51.8, 40.6),    # an open drawer
    (40.7, 36.3, 34.1), (51.8, 46.2, 43.4),    # an open cupboard
)
BASE_256 = np.array([256 ** 2, 256, 1])        # red, green, blue -> one number


def anchor(place: int, offset: tuple[int, int]) -> tuple[int, int]:
    """x, y of a point of a cell in the picture [px]; `offset` is counted from the cell's corner."""
    row, column = divmod(place, 3)
    return column * CELL + offset[0], row * CELL + offset[1]


def blend(canvas: np.ndarray, picture: np.ndarray, x: float, y: float) -> None:
    """Lay a picture over the canvas, centred at (x, y) [px], and clip it to the canvas.

    picture [h, w, rgb and alpha], the colours multiplied by alpha
    """
    h, w = picture.shape[:2]
    top = int(y) - h // 2 + 1                  # + 1: the canvas has a border
    left = int(x) - w // 2 + 1
    bottom = max(top + h, 0)
    right = max(left + w, 0)
    below = canvas[max(top, 0):bottom, max(left, 0):right]
    # Cut off what lies above and left of the canvas, then what lies below and right of it.
    above = picture[max(-top, 0):, max(-left, 0):]
    above = above[:below.shape[0], :below.shape[1]]
    alpha = above[..., 3:]
    below *= 1 - alpha                         # `below` is a view: this changes the canvas
    below += above[..., :3]


# ------------------------------------------------------------- sprites

@cache
def sheet() -> dict[str, np.ndarray]:
    """{name: its part of sprites.png, uint8 [160, 160, red, green, blue and alpha]}.

    BadData if sprites.png has another size than 4 rows of 10.
    """
    image = np.asarray(Image.open(SPRITES).convert("RGBA"))
    width, height = 10 * FINE, 4 * FINE
    if image.shape[:2] != (height, width):
        raise BadData(f"{SPRITES}: its size must be {width} x {height}")
    parts = rearrange(image, "(row h) (column w) c -> row column h w c", h=FINE, w=FINE)
    sprites = {}
    for names, row in zip(ROWS, parts):
        sprites |= zip(names.split(), row)
    return sprites


@cache
def sprite(name: str, rgb: Colour = RED, pixels: int = CELL) -> np.ndarray:
    """float32 [pixels, pixels, 4]; alpha is 0 .. 1, and the colours are multiplied by it.

    rgb     the colour of a thing
    """
    drawn = sheet()[name]                      # [160, 160, 4]
    painted = drawn.astype(np.float32)
    numbers = drawn[..., :3] @ BASE_256                        # [160, 160]
    for old, new in zip(BETWEEN + shades(RED), BETWEEN + shades(rgb)):
        painted[numbers == np.round(old) @ BASE_256, :3] = new
    painted[..., 3] /= 255
    painted[..., :3] *= painted[..., 3:]
    # Average blocks of pixels.
    return reduce(painted, "(h a) (w b) c -> h w c", "mean", h=pixels, w=pixels)


def shades(rgb: Colour) -> tuple[Colour, ...]:
    """The colours of a thing: plain, dark, light, of a blade, of the inside of a pan."""
    inside = tone(rgb, 0.8)
    if min(rgb) > 200:
        # Nothing is lighter than white: the light parts of a white thing are grey.
        return rgb, tone(rgb, 0.55), inside, METAL, inside
    return rgb, tone(rgb, 0.55), tone(rgb, 1.55), tone(rgb, 1.45), inside


def tone(rgb: Colour, brightness: float) -> Colour:
    """A darker colour (brightness < 1) or, towards white, a lighter one (brightness > 1)."""
    if brightness <= 1:
        return tuple(brightness * c for c in rgb)
    return tuple(c + (brightness - 1) * (255 - c) for c in rgb)


@cache
def arm_strip(whose: str) -> np.ndarray:
    """A forearm from edge to edge of the picture, rounded by its shading: [98, 7, 4]."""
    rgb = tone(TEAL, 0.75) if whose == "glove" else SKIN
    shade = np.array([0.45, 0.85, 1, 1, 0.95, 0.82, 0.4], np.float32)
    row = np.outer(shade, np.float32([*rgb, 1]))
    row[:, 3] = 1                              # alpha
    return np.broadcast_to(row, (SIZE + 2, 7, 4))
