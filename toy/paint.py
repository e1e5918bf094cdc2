"""The pictures of the miniature kitchen: furniture, things, hands and effects, without any file.

A sprite is a small picture with transparency, [pixels, pixels, 4]: red, green, blue and alpha. It
is painted from masks in flat colours, from back to front, at five times its resolution, and then
averaged. Furniture is grey or brown: only things have bright colours.
"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np

SIZE = 96                                      # height and width of a picture [px]
CELL = SIZE // 3                               # height and width of a cell [px]
TYPES = ("cup", "bowl", "pan", "knife", "bottle", "apple")
WATER, FLAMES, SHAKE, CLOTH, KNOCK = range(1, 6)               # effects

# Where things are drawn in a cell: x, y of their middle [px from the cell's upper left corner].
MIDDLE = (16, 16)
HAND_ACT = (25, 26)
HAND_LIFT = (28, 18)
GLOVE = (4, 5)

# The coordinates of a cell's fine pixels: 0 in the middle, -16 .. 16. V is down, U to the right.
FINE = 5                                       # fine pixels in a pixel, both ways
GRID = (np.arange(CELL * FINE) + 0.5) / FINE - CELL / 2
V, U = np.meshgrid(GRID, GRID, indexing="ij")                  # [160, 160] each

Colour = tuple[float, float, float]            # red, green, blue: 0 .. 255
Layers = list[tuple[np.ndarray, Colour]]       # masks and their colours, from back to front

SKIN = (226, 168, 130)
TEAL = (0, 138, 136)
INK = (34, 30, 30)
METAL = (200, 204, 208)


def anchor(place: int, offset: tuple[int, int]) -> tuple[int, int]:
    """x, y of a point of a cell in the picture [px]; `offset` is counted from the cell's corner."""
    row, column = divmod(place, 3)
    return column * CELL + offset[0], row * CELL + offset[1]


def nearest(hand: tuple[float, float]) -> int:
    """The place that a travelling hand is nearest to."""
    x, y = hand
    column = round((x - HAND_ACT[0]) / CELL)
    row = round((y - HAND_ACT[1]) / CELL)
    column = min(max(column, 0), 2)
    row = min(max(row, 0), 2)
    return row * 3 + column


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


# ------------------------------------------------------------- shapes: masks, bool [160, 160]

def ellipse(x: float, y: float, rx: float, ry: float) -> np.ndarray:
    return ((U - x) / rx) ** 2 + ((V - y) / ry) ** 2 <= 1


def ring(x: float, y: float, radius: float, inner_radius: float) -> np.ndarray:
    disc = ellipse(x, y, radius, radius)
    hole = ellipse(x, y, inner_radius, inner_radius)
    return disc & ~hole


def box(x0: float, y0: float, x1: float, y1: float) -> np.ndarray:
    return (x0 <= U) & (U < x1) & (y0 <= V) & (V < y1)


def stroke(x0: float, y0: float, x1: float, y1: float, r: float,
           r1: float | None = None) -> np.ndarray:
    """A round-ended line of radius r, tapering to r1."""
    if r1 is None:
        r1 = r
    dx = x1 - x0
    dy = y1 - y0
    # How far along the line its nearest point is, 0 .. 1.
    product = (U - x0) * dx + (V - y0) * dy
    along = np.clip(product / (dx * dx + dy * dy), 0, 1)
    distance = np.hypot(U - x0 - along * dx, V - y0 - along * dy)
    return distance <= r + along * (r1 - r)


WHOLE_CELL = box(-16, -16, 16, 16)


# ------------------------------------------------------------- painting

def tone(rgb: Colour, brightness: float) -> Colour:
    """A darker colour (brightness < 1) or, towards white, a lighter one (brightness > 1)."""
    if brightness <= 1:
        return tuple(brightness * c for c in rgb)
    return tuple(c + (brightness - 1) * (255 - c) for c in rgb)


def paint(layers: Layers, outline: float = 0.0, pixels: int = CELL) -> np.ndarray:
    """Paint masks in their colours, from back to front.

    outline    width of a dark line around all masks together [px]
    Returns float32 [pixels, pixels, 4]; alpha is 0 .. 1, and the colours are multiplied by it.
    """
    picture = np.zeros((*U.shape, 4), np.float32)
    if outline:
        # The shape in dark, moved a little in each direction, sticks out on all sides.
        shape = np.any([mask for mask, _ in layers], axis=0)
        reach = int(outline * FINE)
        for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            moved = np.roll(shape, (dy * reach, dx * reach), (0, 1))
            picture[moved] = *INK, 1
    for mask, rgb in layers:
        picture[mask] = *rgb, 1
    # Average blocks of fine pixels.
    block = len(U) // pixels
    picture = picture.reshape(pixels, block, pixels, block, 4)
    return picture.mean((1, 3))                # [pixels, pixels, 4]


# ------------------------------------------------------------- things

class Shades(NamedTuple):
    """The colours of a thing."""
    plain: Colour
    dark: Colour
    light: Colour
    blade: Colour


@lru_cache(maxsize=None)
def sprite(kind: int, rgb: Colour, small: bool = False) -> np.ndarray:
    """A thing of type 1..6: [32, 32, 4], or [20, 20, 4] if it is small (carried)."""
    if min(rgb) > 200:
        # Nothing is lighter than white: the light parts of a white thing are grey.
        shades = Shades(rgb, tone(rgb, 0.55), light=tone(rgb, 0.8), blade=METAL)
    else:
        shades = Shades(rgb, tone(rgb, 0.55), light=tone(rgb, 1.55), blade=tone(rgb, 1.45))
    things = (cup, bowl, pan, knife, bottle, apple)            # in the order of TYPES
    layers = things[kind - 1](shades)
    return paint(layers, outline=0.8, pixels=20 if small else CELL)


def cup(shades: Shades) -> Layers:
    return [
        (ring(-6, 1, 5.5, 2.6), shades.plain),                 # handle
        (stroke(2, -6, 2, 6, 8, 6) & box(-16, -9, 16, 10), shades.plain),
        (ellipse(2, -8.5, 7.2, 2.3), shades.dark),             # opening
        (box(-2.5, -4, -0.5, 7), shades.light),                # highlight
    ]


def bowl(shades: Shades) -> Layers:
    return [
        (ellipse(0, -3, 11, 11) & (V >= -3), shades.plain),
        (box(-5, 7, 5, 10), shades.dark),                      # foot
        (ellipse(0, -3, 11, 3), shades.dark),                  # opening
        (stroke(-6.5, 2.5, -4, 5.5, 0.9), shades.light),       # highlight
    ]


def pan(shades: Shades) -> Layers:
    return [
        (stroke(-10, -10, -4, -4, 1.9), INK),                  # handle
        (ellipse(2.5, 2.5, 8.8, 8.8), shades.plain),           # rim
        (ellipse(2.5, 2.5, 6.2, 6.2), shades.dark),            # wall
        (ellipse(2.5, 2.5, 5.2, 5.2), tone(shades.plain, 0.8)),
    ]


def knife(shades: Shades) -> Layers:
    return [
        (stroke(-1, 1, 10.5, -10.5, 3.2, 0.4), shades.blade),
        (stroke(-9, 9, -3, 3, 3), shades.plain),               # handle
        (ellipse(-8, 8, 1, 1), shades.dark),                   # rivets
        (ellipse(-4.5, 4.5, 1, 1), shades.dark),
    ]


def bottle(shades: Shades) -> Layers:
    return [
        (box(-1.8, -9, 1.8, 0), shades.plain),                 # neck
        (ellipse(0, -1, 5, 4.5), shades.plain),                # shoulders
        (box(-5, -1, 5, 11), shades.plain),
        (box(-2.4, -11, 2.4, -8.4), INK),                      # cap
        (box(-5, 2.5, 5, 7), shades.light),                    # label
    ]


def apple(shades: Shades) -> Layers:
    return [
        (ellipse(-3.6, 2, 6.6, 8.2) | ellipse(3.6, 2, 6.6, 8.2), shades.plain),
        (ellipse(-4.5, -1.5, 1.7, 2.4), shades.light),         # highlight
        (stroke(0, -4, 1.2, -9.5, 0.9), (92, 58, 30)),         # stem
        (stroke(1.6, -7, 6.5, -9.5, 1.8, 0.5), (70, 130, 40)),     # leaf
    ]


# ------------------------------------------------------------- effects

@lru_cache(maxsize=None)
def effect_sprite(effect: int, phase: int) -> np.ndarray:
    """[32, 32, 4]; phase 0..2 animates it."""
    if effect == WATER:
        return paint(water(phase), outline=0.4)
    if effect == FLAMES:
        return paint(flames(phase))
    if effect == SHAKE:
        return paint(shake(), outline=0.4)
    if effect == CLOTH:
        return paint(cloth(), outline=0.7)
    return paint(knock(phase), outline=0.6)


def water(phase: int) -> Layers:
    """Falling drops, each with a bright spot."""
    layers = []
    for i, x in enumerate((-12, -7.5, -2.5, 2.5, 7.5, 12)):
        y = -13 + (i * 9 + phase * 6) % 20     # drops fall at different times
        layers.append((stroke(x, y, x, y + 3, 0.5, 1.6), (120, 205, 250)))
        layers.append((ellipse(x - 0.5, y + 3, 0.5, 0.7), (255, 255, 255)))
    return layers


def flames(phase: int) -> Layers:
    """A row of orange flames, and in front of them their yellow inner parts."""
    outer = []
    inner = []
    for i, x in enumerate((-12, -7, -2, 3, 8)):
        y = 3.5 + (i * 2 + phase) % 3 * 2
        outer.append((stroke(x, 14.5, x, y, 2.6, 0.4), (250, 110, 10)))
        inner.append((stroke(x, 15, x, y + 5, 1.4, 0.3), (255, 232, 90)))
    return outer + inner


def shake() -> Layers:
    """Two lines on each side of a thing that is shaken."""
    lines = ((-14, 3), (-11.5, 6), (11.5, 6), (14, 3))         # x, half of the length
    return [(stroke(x, -half, x, half, 0.7), (250, 250, 250)) for x, half in lines]


def cloth() -> Layers:
    fabric = stroke(-5, 8.5, 5, 8.5, 4.5) | box(-8, 5.5, 8, 12.5)
    stripes = (U % 5 < 1.1) | (V % 5 < 1.1)
    return [
        (fabric, (244, 244, 240)),
        (fabric & stripes, (120, 140, 170)),
    ]


def knock(phase: int) -> Layers:
    """Rays around a point, which move outwards."""
    layers = []
    start = 5.5 + phase
    end = 10 + phase
    for angle in np.pi * np.array([0.75, 1.0, 1.25, 1.5, 1.75]):
        x = np.cos(angle)
        y = np.sin(angle)
        ray = stroke(4 + start * x, 6 + start * y, 4 + end * x, 6 + end * y, 1.1)
        layers.append((ray, (255, 240, 150)))
    return layers


# ------------------------------------------------------------- hands

@lru_cache(maxsize=None)
def hand_sprite(pose: str) -> np.ndarray:
    """[32, 32, 4], the palm in the middle. Your pose, or "glove" for the other cook."""
    if pose == "act":
        # A fist; darker lines separate its fingers.
        layers = [(ellipse(0, 0, 5.4, 5), SKIN)]
        for x in (-3, -0.5, 2):
            layers.append((stroke(x, -4.2, x + 0.4, 0.5, 0.45), tone(SKIN, 0.7)))
        return paint(layers, outline=0.7)
    if pose == "reach":
        rgb = SKIN
        palm = ellipse(1, 1, 4.6, 4.6)
        fingertips = ((-6, -1), (-5, -5), (-1, -6))
        width = 1.5
    elif pose == "lift":
        rgb = SKIN
        palm = ellipse(0, 2, 4, 4.2)
        fingertips = ((-6.5, 1), (-5, -4.5), (-1.6, -7), (2, -7), (5, -4.5))
        width = 1.2
    else:
        rgb = TEAL
        palm = ellipse(0, 0, 5, 4.6)
        fingertips = ((6, 5), (0, 6.5))
        width = 2.0
    layers = [(palm, rgb)]
    for x, y in fingertips:
        layers.append((stroke(0.3 * x, 1, x, y, width), rgb))
    return paint(layers, outline=0.7)


@lru_cache(maxsize=None)
def arm_strip(whose: str) -> np.ndarray:
    """A forearm from edge to edge of the picture, rounded by its shading: [98, 7, 4]."""
    rgb = tone(TEAL, 0.75) if whose == "glove" else SKIN
    shade = np.array([0.45, 0.85, 1, 1, 0.95, 0.82, 0.4], np.float32)
    row = np.ones((7, 4), np.float32)          # alpha is 1
    for channel in range(3):
        row[:, channel] = rgb[channel] * shade
    return np.broadcast_to(row, (SIZE + 2, 7, 4))


# ------------------------------------------------------------- furniture

@lru_cache(maxsize=None)
def tile(name: str, opened: bool) -> np.ndarray:
    """A piece of furniture: [32, 32, 4]; `opened` shows its inside, if it is a container."""
    if opened:
        wall, door, colour = INSIDES[name]
        return paint(inside(wall) + [(door, colour)])
    edge = WHOLE_CELL & ~box(-15.3, -15.3, 15.3, 15.3)
    return paint(FURNITURE[name] + [(edge, (88, 82, 78))])


BARS = [(box(x, -16, x + 1.2, 16), (164, 168, 172)) for x in range(-14, 16, 5)]
BURNERS = [(ring(0, 0, radius, radius - 1.3), (118, 112, 108)) for radius in (8, 13)]
SPECKLES = [(ellipse(x, y, 1, 0.7), (132, 126, 120)) for x, y in zip(
    (-12, -9, -3, 2, 6, 11, -13, 13, -6, 4, 9, -1),
    (-11, 3, -13, -4, 9, -8, 11, 4, 8, 13, 1, 3))]
GAPS = [(box(-16, y, 16, y + 0.9), (110, 82, 60)) for y in range(-13, 16, 6)]
FURNITURE = {                                  # with their doors closed
    "shelf": [
        (WHOLE_CELL, (176, 150, 122)),
        (box(-16, 10, 16, 13.5) | box(-16, -16, 16, -13.5), (120, 93, 67)),    # boards
    ],
    "rack": [(WHOLE_CELL, (112, 116, 120)), *BARS],
    "fridge": [
        (WHOLE_CELL, (196, 200, 204)),
        (box(-16, -5, 16, -4), (140, 144, 148)),                               # gap
        (box(-13, -1, -11, 10) | box(-13, -12, -11, -7), (90, 94, 98)),        # handles
    ],
    "stove": [(WHOLE_CELL, (70, 70, 74)), *BURNERS],
    "counter": [(WHOLE_CELL, (174, 170, 162)), *SPECKLES],
    "sink": [
        (WHOLE_CELL, (136, 142, 148)),
        (stroke(-8, 0, 8, 0, 13) & box(-14, -14, 14, 14), (174, 182, 188)),    # basin
        (ellipse(0, 0, 2, 2), (90, 94, 98)),                                   # drain
    ],
    "drawer": [
        (WHOLE_CELL, (178, 144, 108)),
        (box(-14, -14, 14, 14) & ~box(-12.8, -12.8, 12.8, 12.8), (134, 104, 76)),      # groove
        (box(-6, -2, 6, 0.5), (80, 76, 72)),                                   # handle
    ],
    "table": [(WHOLE_CELL, (136, 104, 78)), *GAPS],
    "cupboard": [
        (WHOLE_CELL, (134, 98, 72)),
        (box(-0.6, -16, 0.6, 16), (82, 58, 42)),                               # gap
        (ellipse(-3, 2, 1.3, 1.3) | ellipse(3, 2, 1.3, 1.3), (158, 162, 166)),     # knobs
    ],
}
# Of an open container: the colour of its wall, the door in front of it (seen from the edge) and the
# door's colour
INSIDES = {
    "fridge": ((112, 122, 128), box(-16, -16, -13, 16), (214, 218, 220)),
    "drawer": ((92, 74, 58), box(-16, 12.5, 16, 16), (178, 144, 108)),
    "cupboard": ((74, 66, 62), box(-16, -16, -13.5, 16) | box(13.5, -16, 16, 16), (134, 98, 72)),
}


def inside(wall: Colour) -> Layers:
    return [
        (WHOLE_CELL, tone(wall, 0.55)),
        (box(-14, -14, 14, 14), wall),                                         # back
        (box(-14, 11, 14, 12), tone(wall, 0.7)),                               # floor
    ]
