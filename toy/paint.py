"""The pictures of the miniature kitchen: its furniture, things, hands and effects, painted without any file.

A sprite is painted five times finer than it is shown, as masks in flat colours from back to front, then averaged.
Furniture is grey or brown: colours belong to things.
"""
from functools import lru_cache

import numpy as np

SIZE = 96                                                      # pixels, both ways
CELL = SIZE // 3
TYPES = ("cup", "bowl", "pan", "knife", "bottle", "apple")
WATER, FLAMES, SHAKE, CLOTH, KNOCK = range(1, 6)               # effects
MIDDLE, HAND_ACT, HAND_LIFT, GLOVE = (16, 16), (25, 26), (28, 18), (4, 5)      # px from a cell's upper left corner
CORNER = (7, 25)                                               # where clutter lies
FINE = 5                                                       # sprites are painted 5 times finer than shown
GRID = (np.arange(CELL * FINE) + 0.5) / FINE - CELL / 2        # a cell's coordinates: 0 in the middle, -16 .. 16
V, U = np.meshgrid(GRID, GRID, indexing="ij")                  # V down, U to the right, [160, 160]
SKIN, TEAL, INK, METAL = (226, 168, 130), (0, 138, 136), (34, 30, 30), (200, 204, 208)


def anchor(place: int, offset: tuple[int, int]) -> tuple[int, int]:
    """x, y of a point of a cell."""
    return place % 3 * CELL + offset[0], place // 3 * CELL + offset[1]


def nearest(hand: tuple[float, float]) -> int:
    """The place that a travelling hand is nearest to."""
    column, row = (min(max(round((value - at) / CELL), 0), 2) for value, at in zip(hand, HAND_ACT))
    return row * 3 + column


def blend(canvas: np.ndarray, picture: np.ndarray, x: float, y: float) -> None:
    """Lay a picture [h, w, rgb and alpha, premultiplied] over the canvas, centred at (x, y), clipped to it."""
    h, w = picture.shape[:2]
    top, left = int(y) - h // 2 + 1, int(x) - w // 2 + 1       # + 1: the canvas has a border
    part = canvas[max(top, 0):max(top + h, 0), max(left, 0):max(left + w, 0)]
    piece = picture[max(-top, 0):, max(-left, 0):][:part.shape[0], :part.shape[1]]
    part *= 1 - piece[..., 3:]
    part += piece[..., :3]


def ellipse(x: float, y: float, rx: float, ry: float) -> np.ndarray:
    return ((U - x) / rx) ** 2 + ((V - y) / ry) ** 2 <= 1


def box(x0: float, y0: float, x1: float, y1: float) -> np.ndarray:
    return (x0 <= U) & (U < x1) & (y0 <= V) & (V < y1)


def stroke(x0: float, y0: float, x1: float, y1: float, r: float, r1: float | None = None) -> np.ndarray:
    """A round-ended line of radius r, tapering to r1."""
    dx, dy = x1 - x0, y1 - y0
    f = np.clip(((U - x0) * dx + (V - y0) * dy) / (dx * dx + dy * dy), 0, 1)
    return np.hypot(U - x0 - f * dx, V - y0 - f * dy) <= r + f * ((r if r1 is None else r1) - r)


def tone(rgb: tuple, by: float) -> tuple:
    """Darker (by < 1) or, towards white, lighter (by > 1)."""
    return tuple(by * c if by <= 1 else c + (by - 1) * (255 - c) for c in rgb)


def paint(layers: list[tuple[np.ndarray, tuple]], outline: float = 0.0, pixels: int = CELL) -> np.ndarray:
    """Masks and their colours, from back to front -> float32 [pixels, pixels, 4], alpha 0..1, premultiplied."""
    picture = np.zeros((*U.shape, 4), np.float32)
    if outline:                                                # dark, and `outline` px wide
        shape, reach = np.any([mask for mask, _ in layers], axis=0), int(outline * FINE)
        for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            picture[np.roll(shape, (dy * reach, dx * reach), (0, 1))] = *INK, 1
    for mask, rgb in layers:
        picture[mask] = *rgb, 1
    step = len(U) // pixels
    return picture.reshape(pixels, step, pixels, step, 4).mean((1, 3))


@lru_cache(maxsize=None)
def sprite(kind: int, c: tuple[int, int, int], small: bool = False) -> np.ndarray:
    """A thing of colour c, RGB: [32, 32, 4], or [20, 20, 4] in a hand."""
    white = min(c) > 200
    dark, light = tone(c, 0.55), tone(c, 0.8 if white else 1.55)
    layers = {
        "cup": [(ellipse(-6, 1, 5.5, 5.5) & ~ellipse(-6, 1, 2.6, 2.6), c),
                (stroke(2, -6, 2, 6, 8, 6) & box(-16, -9, 16, 10), c), (ellipse(2, -8.5, 7.2, 2.3), dark),
                (box(-2.5, -4, -0.5, 7), light)],
        "bowl": [(ellipse(0, -3, 11, 11) & (V >= -3), c), (box(-5, 7, 5, 10), dark), (ellipse(0, -3, 11, 3), dark),
                 (stroke(-6.5, 2.5, -4, 5.5, 0.9), light)],
        "pan": [(stroke(-10, -10, -4, -4, 1.9), INK), (ellipse(2.5, 2.5, 8.8, 8.8), c),
                (ellipse(2.5, 2.5, 6.2, 6.2), dark), (ellipse(2.5, 2.5, 5.2, 5.2), tone(c, 0.8))],
        "knife": [(stroke(-1, 1, 10.5, -10.5, 3.2, 0.4), METAL if white else tone(c, 1.45)),
                  (stroke(-9, 9, -3, 3, 3), c), (ellipse(-8, 8, 1, 1), dark), (ellipse(-4.5, 4.5, 1, 1), dark)],
        "bottle": [(box(-1.8, -9, 1.8, 0), c), (ellipse(0, -1, 5, 4.5), c), (box(-5, -1, 5, 11), c),
                   (box(-2.4, -11, 2.4, -8.4), INK), (box(-5, 2.5, 5, 7), light)],
        "apple": [(ellipse(-3.6, 2, 6.6, 8.2) | ellipse(3.6, 2, 6.6, 8.2), c), (ellipse(-4.5, -1.5, 1.7, 2.4), light),
                  (stroke(0, -4, 1.2, -9.5, 0.9), (92, 58, 30)), (stroke(1.6, -7, 6.5, -9.5, 1.8, 0.5), (70, 130, 40))],
    }[TYPES[kind - 1]]
    return paint(layers, outline=0.8, pixels=20 if small else CELL)


@lru_cache(maxsize=None)
def effect_sprite(effect: int, phase: int) -> np.ndarray:
    """[32, 32, 4]; phase 0..2 animates it."""
    if effect == WATER:
        drops = [(x, -13 + (i * 9 + phase * 6) % 20) for i, x in enumerate((-12, -7.5, -2.5, 2.5, 7.5, 12))]
        return paint([layer for x, y in drops for layer in (
            (stroke(x, y, x, y + 3, 0.5, 1.6), (120, 205, 250)), (ellipse(x - 0.5, y + 3, 0.5, 0.7), (255,) * 3))], 0.4)
    if effect == FLAMES:
        tips = [(x, 3.5 + (i * 2 + phase) % 3 * 2) for i, x in enumerate((-12, -7, -2, 3, 8))]
        return paint([(stroke(x, 14.5, x, y, 2.6, 0.4), (250, 110, 10)) for x, y in tips]
                     + [(stroke(x, 15, x, y + 5, 1.4, 0.3), (255, 232, 90)) for x, y in tips])
    if effect == SHAKE:
        lines = ((-14, 3), (-11.5, 6), (11.5, 6), (14, 3))
        return paint([(stroke(x, -h, x, h, 0.7), (250, 250, 250)) for x, h in lines], 0.4)
    if effect == CLOTH:
        cloth = stroke(-5, 8.5, 5, 8.5, 4.5) | box(-8, 5.5, 8, 12.5)
        checks = cloth & ((U % 5 < 1.1) | (V % 5 < 1.1))
        return paint([(cloth, (244, 244, 240)), (checks, (120, 140, 170))], 0.7)
    rays = [(np.cos(a), np.sin(a)) for a in np.pi * np.array([0.75, 1.0, 1.25, 1.5, 1.75])]
    r0, r1 = (5.5 + phase, 10 + phase)
    return paint([(stroke(4 + r0 * x, 6 + r0 * y, 4 + r1 * x, 6 + r1 * y, 1.1), (255, 240, 150)) for x, y in rays], 0.6)


@lru_cache(maxsize=None)
def hand_sprite(pose: str) -> np.ndarray:
    """[32, 32, 4], the palm in the middle."""
    rgb = TEAL if pose == "glove" else SKIN
    if pose == "act":                                          # a fist; the others have fingers, drawn to their tips
        return paint([(ellipse(0, 0, 5.4, 5), rgb)] + [(stroke(x, -4.2, x + 0.4, 0.5, 0.45), tone(rgb, 0.7))
                                                       for x in (-3, -0.5, 2)], outline=0.7)
    palm, tips, width = {
        "reach": (ellipse(1, 1, 4.6, 4.6), ((-6, -1), (-5, -5), (-1, -6)), 1.5),
        "lift": (ellipse(0, 2, 4, 4.2), ((-6.5, 1), (-5, -4.5), (-1.6, -7), (2, -7), (5, -4.5)), 1.2),
        "glove": (ellipse(0, 0, 5, 4.6), ((6, 5), (0, 6.5)), 2.0),
    }[pose]
    return paint([(palm, rgb)] + [(stroke(0.3 * x, 1, x, y, width), rgb) for x, y in tips], outline=0.7)


@lru_cache(maxsize=None)
def arm_strip(whose: str) -> np.ndarray:
    """A forearm from edge to edge of the picture, rounded by its shading: [98, 7, 4]."""
    rgb = tone(TEAL, 0.75) if whose == "glove" else SKIN
    shade = np.array([0.45, 0.85, 1, 1, 0.95, 0.82, 0.4], np.float32)
    return np.broadcast_to(np.stack([*(c * shade for c in rgb), np.ones(7, np.float32)], -1), (SIZE + 2, 7, 4))


@lru_cache(maxsize=None)
def tile(name: str, opened: bool) -> np.ndarray:
    """A piece of furniture: [32, 32, 4]. Greys and browns only: colours belong to things."""
    cell, inside, front = (box(-r, -r, r, r) for r in (16, 14, 12.8))
    if opened:                                                 # the colours of the inside and of the door, seen edge-on
        wall, wood, door = {
            "fridge": ((112, 122, 128), (214, 218, 220), box(-16, -16, -13, 16)),
            "drawer": ((92, 74, 58), (178, 144, 108), box(-16, 12.5, 16, 16)),
            "cupboard": ((74, 66, 62), (134, 98, 72), box(-16, -16, -13.5, 16) | box(13.5, -16, 16, 16)),
        }[name]
        return paint([(cell, tone(wall, 0.55)), (inside, wall), (box(-14, 11, 14, 12), tone(wall, 0.7)), (door, wood)])
    speckles = zip((-12, -9, -3, 2, 6, 11, -13, 13, -6, 4, 9, -1), (-11, 3, -13, -4, 9, -8, 11, 4, 8, 13, 1, 3))
    return paint({
        "shelf": [(cell, (176, 150, 122)), (box(-16, 10, 16, 13.5) | box(-16, -16, 16, -13.5), (120, 93, 67))],
        "rack": [(cell, (112, 116, 120))] + [(box(x, -16, x + 1.2, 16), (164, 168, 172)) for x in range(-14, 16, 5)],
        "fridge": [(cell, (196, 200, 204)), (box(-16, -5, 16, -4), (140, 144, 148)),
                   (box(-13, -1, -11, 10) | box(-13, -12, -11, -7), (90, 94, 98))],
        "stove": [(cell, (70, 70, 74))] + [(ellipse(0, 0, r, r) & ~ellipse(0, 0, r - 1.3, r - 1.3), (118, 112, 108))
                                           for r in (8, 13)],
        "counter": [(cell, (174, 170, 162))] + [(ellipse(x, y, 1, 0.7), (132, 126, 120)) for x, y in speckles],
        "sink": [(cell, (136, 142, 148)), (stroke(-8, 0, 8, 0, 13) & inside, (174, 182, 188)),
                 (ellipse(0, 0, 2, 2), (90, 94, 98))],
        "drawer": [(cell, (178, 144, 108)), (inside & ~front, (134, 104, 76)), (box(-6, -2, 6, 0.5), (80, 76, 72))],
        "table": [(cell, (136, 104, 78))] + [(box(-16, y, 16, y + 0.9), (110, 82, 60)) for y in range(-13, 16, 6)],
        "cupboard": [(cell, (134, 98, 72)), (box(-0.6, -16, 0.6, 16), (82, 58, 42)),
                     (ellipse(-3, 2, 1.3, 1.3) | ellipse(3, 2, 1.3, 1.3), (158, 162, 166))],
    }[name] + [(cell & ~box(-15.3, -15.3, 15.3, 15.3), (88, 82, 78))])
