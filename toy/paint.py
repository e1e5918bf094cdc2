"""The pictures of the miniature kitchen: furniture, things, hands and effects, without any file.

A sprite is a small picture with transparency, [pixels, pixels, 4]: red, green, blue and alpha. It
is painted from masks in flat colours, from back to front, at five times its resolution, and then
averaged. Furniture is grey or brown: colours belong to things.
"""
from functools import lru_cache

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
CORNER = (7, 25)                               # clutter

# The coordinates of a cell's fine pixels: 0 in the middle, -16 .. 16. V is down, U to the right.
FINE = 5                                       # fine pixels in a pixel, both ways
GRID = (np.arange(CELL * FINE) + 0.5) / FINE - CELL / 2
V, U = np.meshgrid(GRID, GRID, indexing="ij")                  # [160, 160] each

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
    below = canvas[max(top, 0):max(top + h, 0), max(left, 0):max(left + w, 0)]
    above = picture[max(-top, 0):, max(-left, 0):][:below.shape[0], :below.shape[1]]
    below *= 1 - above[..., 3:]                # `below` is a view: this changes the canvas
    below += above[..., :3]


# ------------------------------------------------------------- shapes: masks, bool [160, 160]

def ellipse(x: float, y: float, rx: float, ry: float) -> np.ndarray:
    return ((U - x) / rx) ** 2 + ((V - y) / ry) ** 2 <= 1


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
    along = np.clip(((U - x0) * dx + (V - y0) * dy) / (dx * dx + dy * dy), 0, 1)
    distance = np.hypot(U - x0 - along * dx, V - y0 - along * dy)
    return distance <= r + along * (r1 - r)


# ------------------------------------------------------------- sprites

def tone(rgb: tuple, by: float) -> tuple:
    """A darker colour (by < 1) or, towards white, a lighter one (by > 1)."""
    if by <= 1:
        return tuple(by * c for c in rgb)
    return tuple(c + (by - 1) * (255 - c) for c in rgb)


def paint(layers: list[tuple[np.ndarray, tuple]], outline: float = 0.0,
          pixels: int = CELL) -> np.ndarray:
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
    step = len(U) // pixels
    picture = picture.reshape(pixels, step, pixels, step, 4)
    return picture.mean((1, 3))                # [pixels, pixels, 4]


@lru_cache(maxsize=None)
def sprite(kind: int, rgb: tuple[int, int, int], small: bool = False) -> np.ndarray:
    """A thing of type 1..6: [32, 32, 4], or [20, 20, 4] if it is small (carried, or clutter)."""
    white = min(rgb) > 200
    dark = tone(rgb, 0.55)
    light = tone(rgb, 0.8 if white else 1.55)  # nothing is lighter than white: there, light is grey
    blade = METAL if white else tone(rgb, 1.45)
    layers = {
        "cup": [
            (ellipse(-6, 1, 5.5, 5.5) & ~ellipse(-6, 1, 2.6, 2.6), rgb),
            (stroke(2, -6, 2, 6, 8, 6) & box(-16, -9, 16, 10), rgb),
            (ellipse(2, -8.5, 7.2, 2.3), dark),
            (box(-2.5, -4, -0.5, 7), light),
        ],
        "bowl": [
            (ellipse(0, -3, 11, 11) & (V >= -3), rgb),
            (box(-5, 7, 5, 10), dark),
            (ellipse(0, -3, 11, 3), dark),
            (stroke(-6.5, 2.5, -4, 5.5, 0.9), light),
        ],
        "pan": [
            (stroke(-10, -10, -4, -4, 1.9), INK),
            (ellipse(2.5, 2.5, 8.8, 8.8), rgb),
            (ellipse(2.5, 2.5, 6.2, 6.2), dark),
            (ellipse(2.5, 2.5, 5.2, 5.2), tone(rgb, 0.8)),
        ],
        "knife": [
            (stroke(-1, 1, 10.5, -10.5, 3.2, 0.4), blade),
            (stroke(-9, 9, -3, 3, 3), rgb),
            (ellipse(-8, 8, 1, 1), dark),
            (ellipse(-4.5, 4.5, 1, 1), dark),
        ],
        "bottle": [
            (box(-1.8, -9, 1.8, 0), rgb),
            (ellipse(0, -1, 5, 4.5), rgb),
            (box(-5, -1, 5, 11), rgb),
            (box(-2.4, -11, 2.4, -8.4), INK),
            (box(-5, 2.5, 5, 7), light),
        ],
        "apple": [
            (ellipse(-3.6, 2, 6.6, 8.2) | ellipse(3.6, 2, 6.6, 8.2), rgb),
            (ellipse(-4.5, -1.5, 1.7, 2.4), light),
            (stroke(0, -4, 1.2, -9.5, 0.9), (92, 58, 30)),
            (stroke(1.6, -7, 6.5, -9.5, 1.8, 0.5), (70, 130, 40)),
        ],
    }
    return paint(layers[TYPES[kind - 1]], outline=0.8, pixels=20 if small else CELL)


@lru_cache(maxsize=None)
def effect_sprite(effect: int, phase: int) -> np.ndarray:
    """[32, 32, 4]; phase 0..2 animates it."""
    layers = []
    if effect == WATER:
        for i, x in enumerate((-12, -7.5, -2.5, 2.5, 7.5, 12)):
            y = -13 + (i * 9 + phase * 6) % 20
            layers.append((stroke(x, y, x, y + 3, 0.5, 1.6), (120, 205, 250)))
            layers.append((ellipse(x - 0.5, y + 3, 0.5, 0.7), (255, 255, 255)))
        return paint(layers, outline=0.4)
    if effect == FLAMES:
        inner = []                             # in front of all outer flames
        for i, x in enumerate((-12, -7, -2, 3, 8)):
            y = 3.5 + (i * 2 + phase) % 3 * 2
            layers.append((stroke(x, 14.5, x, y, 2.6, 0.4), (250, 110, 10)))
            inner.append((stroke(x, 15, x, y + 5, 1.4, 0.3), (255, 232, 90)))
        return paint(layers + inner)
    if effect == SHAKE:
        for x, half in ((-14, 3), (-11.5, 6), (11.5, 6), (14, 3)):
            layers.append((stroke(x, -half, x, half, 0.7), (250, 250, 250)))
        return paint(layers, outline=0.4)
    if effect == CLOTH:
        cloth = stroke(-5, 8.5, 5, 8.5, 4.5) | box(-8, 5.5, 8, 12.5)
        checks = cloth & ((U % 5 < 1.1) | (V % 5 < 1.1))
        layers = [(cloth, (244, 244, 240)), (checks, (120, 140, 170))]
        return paint(layers, outline=0.7)
    # A knock: rays around a point.
    start = 5.5 + phase
    end = 10 + phase
    for angle in np.pi * np.array([0.75, 1.0, 1.25, 1.5, 1.75]):
        x = np.cos(angle)
        y = np.sin(angle)
        ray = stroke(4 + start * x, 6 + start * y, 4 + end * x, 6 + end * y, 1.1)
        layers.append((ray, (255, 240, 150)))
    return paint(layers, outline=0.6)


@lru_cache(maxsize=None)
def hand_sprite(pose: str) -> np.ndarray:
    """[32, 32, 4], the palm in the middle. Your pose, or "glove" for the other cook."""
    rgb = TEAL if pose == "glove" else SKIN
    if pose == "act":                          # a fist; lines part its fingers
        layers = [(ellipse(0, 0, 5.4, 5), rgb)]
        for x in (-3, -0.5, 2):
            layers.append((stroke(x, -4.2, x + 0.4, 0.5, 0.45), tone(rgb, 0.7)))
        return paint(layers, outline=0.7)
    if pose == "reach":
        palm = ellipse(1, 1, 4.6, 4.6)
        fingertips = ((-6, -1), (-5, -5), (-1, -6))
        width = 1.5
    elif pose == "lift":
        palm = ellipse(0, 2, 4, 4.2)
        fingertips = ((-6.5, 1), (-5, -4.5), (-1.6, -7), (2, -7), (5, -4.5))
        width = 1.2
    else:
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
    alpha = np.ones(7, np.float32)
    row = np.stack([*(c * shade for c in rgb), alpha], -1)                     # [7, 4]
    return np.broadcast_to(row, (SIZE + 2, 7, 4))


@lru_cache(maxsize=None)
def tile(name: str, opened: bool) -> np.ndarray:
    """A piece of furniture: [32, 32, 4]; `opened` shows its inside, if it is a container."""
    cell = box(-16, -16, 16, 16)
    inside = box(-14, -14, 14, 14)
    if opened:
        # The colours of the inside and of the door, and the door, which is seen edge-on.
        wall, wood, door = {
            "fridge": ((112, 122, 128), (214, 218, 220), box(-16, -16, -13, 16)),
            "drawer": ((92, 74, 58), (178, 144, 108), box(-16, 12.5, 16, 16)),
            "cupboard": ((74, 66, 62), (134, 98, 72),
                         box(-16, -16, -13.5, 16) | box(13.5, -16, 16, 16)),
        }[name]
        layers = [
            (cell, tone(wall, 0.55)),
            (inside, wall),
            (box(-14, 11, 14, 12), tone(wall, 0.7)),
            (door, wood),
        ]
        return paint(layers)

    bars = [(box(x, -16, x + 1.2, 16), (164, 168, 172)) for x in range(-14, 16, 5)]
    rings = [(ellipse(0, 0, r, r) & ~ellipse(0, 0, r - 1.3, r - 1.3), (118, 112, 108))
             for r in (8, 13)]
    boards = [(box(-16, y, 16, y + 0.9), (110, 82, 60)) for y in range(-13, 16, 6)]
    xs = (-12, -9, -3, 2, 6, 11, -13, 13, -6, 4, 9, -1)
    ys = (-11, 3, -13, -4, 9, -8, 11, 4, 8, 13, 1, 3)
    speckles = [(ellipse(x, y, 1, 0.7), (132, 126, 120)) for x, y in zip(xs, ys)]
    layers = {
        "shelf": [
            (cell, (176, 150, 122)),
            (box(-16, 10, 16, 13.5) | box(-16, -16, 16, -13.5), (120, 93, 67)),
        ],
        "rack": [(cell, (112, 116, 120)), *bars],
        "fridge": [
            (cell, (196, 200, 204)),
            (box(-16, -5, 16, -4), (140, 144, 148)),
            (box(-13, -1, -11, 10) | box(-13, -12, -11, -7), (90, 94, 98)),
        ],
        "stove": [(cell, (70, 70, 74)), *rings],
        "counter": [(cell, (174, 170, 162)), *speckles],
        "sink": [
            (cell, (136, 142, 148)),
            (stroke(-8, 0, 8, 0, 13) & inside, (174, 182, 188)),
            (ellipse(0, 0, 2, 2), (90, 94, 98)),
        ],
        "drawer": [
            (cell, (178, 144, 108)),
            (inside & ~box(-12.8, -12.8, 12.8, 12.8), (134, 104, 76)),
            (box(-6, -2, 6, 0.5), (80, 76, 72)),
        ],
        "table": [(cell, (136, 104, 78)), *boards],
        "cupboard": [
            (cell, (134, 98, 72)),
            (box(-0.6, -16, 0.6, 16), (82, 58, 42)),
            (ellipse(-3, 2, 1.3, 1.3) | ellipse(3, 2, 1.3, 1.3), (158, 162, 166)),
        ],
    }
    edge = (cell & ~box(-15.3, -15.3, 15.3, 15.3), (88, 82, 78))
    return paint([*layers[name], edge])
