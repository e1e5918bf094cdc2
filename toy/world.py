"""A miniature kitchen, seen by a camera and narrated in sentences: an endless supply of narrated videos.

A video is a function of its seed. It is first simulated in symbols, one small record a frame; a frame is rendered
only when it is needed (in about half a millisecond). Half of the sentences can only be written by someone who
*remembers* what the camera saw: neither the frames of the last two segments nor the text so far give them away.

place       one of 3x3 cells of 32x32 px, row-major, always at the same position
container   a place with a door (fridge, drawer, cupboard): its content shows only while the door is open
thing       an object: one of 6 types in one of 6 colours; last `seen` at a frame, `named` in a narration or not
you         the bare hand from below, whose acts are narrated; poses reach, act, lift
other cook  the teal glove from above; silently restocks containers, takes things away, sets new ones down
segment     one event of yours: approach (1-2 frames), act (1-7), lift (2), nominal end at the second lift frame
narration   the sentence of a segment, annotated within a frame of its nominal end, as people would annotate
memory      the words (colour, type) of a narration that only visual memory can give:
              tap    what a closed door hides     "You tap the drawer hiding the green bowl."
              wipe   what stood here before       "You wipe the shelf after the red cup."
            The thing was last seen before the previous segment and was never named: see `Kitchen._recallable`.
idle time   a stretch of frames in which you do nothing; it belongs to the segment that follows, whose end is far
world       a kind of kitchens: with idle time, with ends that are hard to see, dark, ...: see `WORLDS`
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, log
from typing import NamedTuple

import numpy as np

from support.common import BadData
from toy.paint import (CLOTH, CORNER, FLAMES, GLOVE, HAND_ACT, HAND_LIFT, KNOCK, MIDDLE, SHAKE, SIZE, TYPES, WATER,
                       anchor, arm_strip, blend, effect_sprite, hand_sprite, nearest, sprite, tile)

FPS = 2
NOISE = np.float32(5)                                                          # sigma of the pixel noise
LIGHTS_OUT = 0.03                                                              # of the light
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
PLACES = ("shelf", "rack", "fridge", "stove", "counter", "sink", "drawer", "table", "cupboard")
CONTAINERS = {"fridge", "drawer", "cupboard"}

LABELS = ("type", "colour", "door", "effect", "hand", "other", "held")         # the last axis of Kitchen.labels
TYPE, COLOUR, DOOR, EFFECT, HAND, OTHER, HELD = range(len(LABELS))
SIZES = (1 + len(TYPES), 1 + len(COLOURS), 3, 6, 4, 2, 3)                      # classes of each label, 0 = none
CLOSED, OPEN = 1, 2                                                            # door
REACH, ACT, LIFT = 1, 2, 3                                                     # hand
YOURS, THEIRS = 1, 2                                                           # held


@dataclass(frozen=True)
class Event:
    """What you can do: its sentence, its effect on the picture, how often it is chosen, its least acting frames."""
    sentence: str
    weight: float
    effect: int = 0
    least: int = 1


EVENTS = {                                     # weights among the possible ones; tap and wipe rarely are
    "wash": Event("You wash the {thing}.", 6, WATER),
    "heat": Event("You heat the {thing}.", 6, FLAMES),
    "shake": Event("You shake the {thing}.", 6, SHAKE),
    "polish": Event("You polish the {thing}.", 6, CLOTH),
    "check": Event("You check the {place}.", 6, least=2),
    "fill": Event("You fill the {place}.", 6, least=2),
    "clear": Event("You clear the {place}.", 7, least=2),
    "tap": Event("You tap the {place} hiding the {thing}.", 200, KNOCK),
    "wipe": Event("You wipe the {place} after the {thing}.", 300, CLOTH),
}
OPENING = "You look around the kitchen."
OCCUPIED = 0.6                                 # of the open places when the video starts
ACT_FRAMES = {1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 1}          # weights
PAUSE = 0.2                                    # of the longer acts hold one frame that looks like the end
JITTER = {-1: 0.30, 0: 0.55, 1: 0.15}          # annotated minus nominal end, in frames
COOKING = 0.75                                 # of the segments have the other cook at work
CARE = 0.9                                     # of the chores leave more to be remembered, not less
CHORES = {"restock": 5, "take": 7, "set": 5}   # weights of the other cook's work
RGB = ((208, 36, 34), (38, 150, 52), (44, 84, 214), (246, 208, 36), (138, 50, 172), (246, 246, 246))    # COLOURS

IDLE = ("rest", "away", "still", "dark", "covered")   # your hand rests, is away; a picture frozen, unlit, covered
STRETCHES = {(5, 30): 0.9, (30, 120): 0.1}     # seconds of idle time, log-uniform within: weights
PER_STRETCH = 8                                # segments; at least one stretch in a video that has idle time
ENTRY = SIZE - 8.0, SIZE - 4.0                 # where your hand comes from, px


@dataclass(frozen=True)
class Annotation:
    """A narration of the ground truth."""
    frame: int                                 # the last frame of its segment, as annotated
    text: str
    memory_words: tuple[str, ...] = ()         # the words that only visual memory can give


@dataclass(eq=False)
class Thing:
    """An object. Equal looks do not make equal things: each has its own history."""
    type: int                                  # 1..6, as in labels
    colour: int                                # 1..6
    seen: int = -1                             # the last frame that shows it
    named: bool = False                        # once named, it never needs memory again

    @classmethod
    def random(cls, rng: np.random.Generator) -> Thing:
        return cls(*(int(n) for n in rng.integers(1, 7, 2)))

    @property
    def unnamed(self) -> bool:
        return self.seen >= 0 and not self.named


@dataclass(frozen=True)
class Move:
    """What one agent does in one frame."""
    place: int
    content: Thing | None                      # of the place, from this frame on
    pose: int = ACT
    opened: bool = False                       # is the door open (if there is one)?
    effect: int = 0
    held: Thing | None = None                  # in the hand


@dataclass(frozen=True)
class Frame:
    """All that `render` needs to know."""
    cells: np.ndarray                          # int8 [9, A]
    moment: int                                # the frame whose light, noise and shake it has: its own, if not frozen
    you: Move | None = None
    cook: Move | None = None
    hand: tuple[float, float] | None = None    # x, y of your hand, px
    idle: str | None = None                    # the kind of idle time


# ------------------------------------------------------------------------------------------ kinds of kitchens

class World(NamedTuple):
    """What can differ between kitchens; the defaults are the plain one's."""
    pause: float = PAUSE                       # share of the longer acts that hold frames that look like the end
    longest_pause: int = 1                     # such frames in a row; two are what the end itself looks like
    jitter: dict[int, float] = JITTER
    acts: dict[int, float] = ACT_FRAMES
    idle: float = 0.0                          # share of the videos that have idle time
    kinds: tuple[str, ...] = IDLE              # of idle time
    stretches: dict[tuple[float, float], float] = STRETCHES
    dusk: float = 1.0                          # part of the daylight that is left where it is least
    clutter: float = 0.0                       # share of the open places with a small thing that is never used
    places: tuple[str, ...] = PLACES           # of the cells, row-major
    colours: tuple[str, ...] = COLOURS
    rgb: tuple[tuple[int, int, int], ...] = RGB
    tint: tuple[float, float, float] = (1.0, 1.0, 1.0)         # of the furniture
    sentences: dict[str, str] = {"open": OPENING} | {name: event.sentence for name, event in EVENTS.items()}

    def words(self, kind: int, colour: int) -> tuple[str, str]:
        """What a thing is called: colour, type."""
        return self.colours[colour - 1], TYPES[kind - 1]

    def sentence(self, name: str, place: str, thing: Thing | None) -> str:
        """The narration of an event."""
        return self.sentences[name].format(place=place, thing=thing and " ".join(self.words(thing.type, thing.colour)))


TWO_MINUTES = {(120, 120): 1}
WORLDS = {
    "plain": World(),
    "idle": World(idle=1.0),
    "still": World(idle=1.0, kinds=("still",), stretches=TWO_MINUTES),         # in every video a picture stands still
    "night": World(idle=1.0, kinds=("dark",), stretches=TWO_MINUTES),          # in every video the lights are out
    "hard": World(pause=0.8, longest_pause=3, acts={n: 1 for n in range(2, 10)},               # ends hard to see
                  jitter={-2: 0.2, -1: 0.2, 0: 0.2, 1: 0.13, 2: 0.1, 3: 0.08, 4: 0.05, 5: 0.04}),
    "second": World(                                                           # a second kitchen, told in other words
        acts={n: 1 for n in range(3, 12)}, tint=(0.82, 0.96, 1.12),
        places=("cupboard", "sink", "counter", "table", "drawer", "rack", "stove", "shelf", "fridge"),
        colours=("orange", "lime", "navy", "cyan", "maroon", "pink"),
        rgb=((246, 130, 20), (164, 222, 50), (26, 34, 110), (70, 210, 230), (126, 14, 46), (252, 156, 200)),
        sentences={"open": "You enter the room.", "wash": "You rinse the {thing}.", "heat": "You boil the {thing}.",
                   "shake": "You swing the {thing}.", "polish": "You dry the {thing}.",
                   "check": "You inspect the {place}.", "fill": "You load the {place}.",
                   "clear": "You empty the {place}.", "tap": "You knock at the {place} that holds the {thing}.",
                   "wipe": "You scrub the {place} that held the {thing}."}),
    "dark": World(dusk=0.03),                                                  # it gets dark, and light again
    "clutter": World(clutter=0.8),                                             # visible things that are not in use
}


def find_world(name: str, idle: float | None = None) -> World:
    """A world by its name; `idle` replaces its share of videos with idle time. BadData for an unknown name."""
    if name not in WORLDS:
        raise BadData(f"unknown world {name!r}; choose one of {', '.join(WORLDS)}")
    return WORLDS[name] if idle is None else WORLDS[name]._replace(idle=idle)


# ---------------------------------------------------------------------------------------------- what happens

class Kitchen:
    """One video of `segments` events after the opening. Everything is a function of (seed, segments, world, frame).

    narrations: in order; narration 0 is the opening, at frame 0; the last one is at the last frame
    clutter:    for each place, a small thing in its corner that no sentence and no label knows of, or None
    Raises ValueError for a negative seed or less than one segment.
    """

    def __init__(self, seed: int, segments: int = 12, world: World = WORLDS["plain"]):
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, not {seed}")
        if segments < 1:
            raise ValueError(f"a video needs at least one segment, not {segments}")
        self.seed, self.world = seed, world
        self.narrations = [Annotation(0, world.sentences["open"])]
        self._rng = rng = np.random.default_rng(seed)
        self._content: list[Thing | None] = [
            Thing.random(rng) if name in CONTAINERS or rng.random() < OCCUPIED else None for name in world.places]
        self._before: list[Thing | None] = [None] * 9          # the last thing that left an open place
        self._hand = ENTRY
        self._frames: list[Frame] = []
        more = np.random.default_rng((seed, 4))                # draws that the plain world does without
        self.clutter = [Thing.random(more) if name not in CONTAINERS and more.random() < world.clutter else None
                        for name in world.places]
        stretches = max(1, segments // PER_STRETCH) if more.random() < world.idle else 0
        idle = set(more.choice(segments, stretches, replace=False))
        self._record()
        for n in range(segments):
            if n in idle:
                self._idle(more)
            self._segment()
        self._end_at_nominal()
        del self._frames[self.narrations[-1].frame + 1:]

    def __len__(self) -> int:
        return len(self._frames)

    def labels(self) -> np.ndarray:
        """What is *visible* in each cell: int8 [T, 9, A], A as named in LABELS, with SIZES classes each.

        type    0 none, 1..6 as TYPES             effect  0 none, 1 water, 2 flames, 3 shake, 4 cloth, 5 knock
        colour  0 none, 1..6 as COLOURS           hand    yours: 0 absent, 1 reach, 2 act, 3 lift
        door    0 none, 1 closed, 2 open          other   the other cook's hand: 0 absent, 1 present
        held    does the hand in this cell carry something: 0 no, 1 yours, 2 the other cook's
        A hidden content is not labelled, nor what a carried thing is.
        """
        return np.stack([frame.cells for frame in self._frames])

    def idle(self) -> np.ndarray:
        """The frames of idle time: bool [T]."""
        return np.array([frame.idle is not None for frame in self._frames])

    def _idle(self, rng: np.random.Generator) -> None:
        """A stretch in which you do nothing; the other cook may work while the camera sees it."""
        last = self._frames[-1]
        kind = str(rng.choice(self.world.kinds))
        low, high = weighted_choice(rng, self.world.stretches)
        count = round(FPS * exp(rng.uniform(log(low), log(high))))
        you, hand = (last.you, last.hand) if kind in ("rest", "still") else (None, None)
        cooks = kind in ("rest", "away") and rng.random() < COOKING
        self._end_at_nominal()
        for cook in self._chore(count, you.place if you else None) if cooks else [None] * count:
            self._record(you, cook, hand, kind)
        self._hand = hand or ENTRY

    def _end_at_nominal(self) -> None:
        """After the nominal end nothing is left to see: the last narration is not annotated later, and those before it
        stay before it."""
        latest = len(self) - 1
        for n in reversed(range(len(self.narrations))):
            if self.narrations[n].frame <= latest:
                break
            self.narrations[n] = replace(self.narrations[n], frame=latest)
            latest -= 1

    def _segment(self) -> None:
        """One event of yours, perhaps one chore of the other cook beside it, one narration."""
        rng = self._rng
        name, place = self._choose()
        event, thing = EVENTS[name], self._before[place] if name == "wipe" else self._content[place]
        moves = your_moves(name, place, self._schedule(event.least), self._content[place], Thing.random(rng))
        chore = self._chore(len(moves), busy=place) if rng.random() < COOKING else [None] * len(moves)
        for you, cook, hand in zip(moves, chore, self._travel(moves)):
            self._record(you, cook, hand)
        frame = max(len(self) - 1 + weighted_choice(rng, self.world.jitter), self.narrations[-1].frame + 1)
        if "{thing}" in event.sentence:
            thing.named = True
        memory = self.world.words(thing.type, thing.colour) if name in ("tap", "wipe") else ()
        self.narrations.append(Annotation(frame, self.world.sentence(name, self.world.places[place], thing), memory))

    def _choose(self) -> tuple[str, int]:
        """An event among those possible now, then one of the places where it is possible."""
        where = {name: [place for place in range(9) if self._possible(name, place)] for name in EVENTS}
        name = weighted_choice(self._rng, {name: EVENTS[name].weight for name in EVENTS if where[name]})
        return name, int(self._rng.choice(where[name]))

    def _possible(self, name: str, place: int) -> bool:
        door, content = self.world.places[place] in CONTAINERS, self._content[place]
        if name == "check":
            return door
        if name == "fill":
            return door or content is None
        if name == "tap":
            return door and self._recallable(content)
        if name == "wipe":
            return not door and content is None and self._recallable(self._before[place])
        return not door and content is not None                # wash, heat, shake, polish, clear

    def _recallable(self, thing: Thing | None) -> bool:
        """Seen, but not since the previous segment began, and named in no sentence yet."""
        return (thing is not None and thing.unnamed and len(self.narrations) > 1
                and thing.seen <= self.narrations[-2].frame)

    def _schedule(self, least: int) -> list[int]:
        """The pose in each frame of a segment: REACH.., ACT.., LIFT LIFT; sometimes a LIFT amid the acting."""
        rng = self._rng
        acts = [ACT] * weighted_choice(rng, {n: weight for n, weight in self.world.acts.items() if n >= least})
        if len(acts) >= 3 and rng.random() < self.world.pause:
            at = rng.integers(1, len(acts) - 1)
            acts[at:at + 1] = [LIFT] * int(rng.integers(1, self.world.longest_pause + 1))
        return [REACH] * int(rng.integers(1, 3)) + acts + [LIFT] * 2

    def _chore(self, length: int, busy: int | None) -> list[Move | None]:
        """What the other cook does in `length` frames: never where you are, and done before the last frame."""
        rng, content, before = self._rng, self._content, self._before
        careful = rng.random() < CARE                          # leaves more to be remembered, not less
        free = [place for place in range(9) if place != busy]
        doors = [place for place in free if self.world.places[place] in CONTAINERS]
        full = [place for place in free if place not in doors and content[place]]
        bare = [place for place in free if place not in doors and not content[place]]
        where = {"restock": [p for p in doors if not (careful and content[p].unnamed)],
                 "take": [p for p in full if not careful or content[p].unnamed],
                 "set": [p for p in bare if not (careful and before[p] and before[p].unnamed)]}
        names = {name: weight for name, weight in CHORES.items() if where[name]}
        if not names:
            return [None] * length
        name = weighted_choice(rng, names)
        place = int(rng.choice(where[name]))
        old, new, n = content[place], Thing.random(rng), int(rng.integers(1, 3))
        moves = {"restock": [Move(place, old)] + [Move(place, new, opened=True)] * (n + 1),
                 "take": [Move(place, old)] + [Move(place, None, held=old)] * n,
                 "set": [Move(place, None, held=new)] * n + [Move(place, new)]}[name][:length - 1]
        start = int(rng.integers(0, length - len(moves)))
        return [None] * start + moves + [None] * (length - start - len(moves))

    def _travel(self, moves: list[Move]) -> list[tuple[float, float]]:
        """Your hand's position in each frame: on its way from the last place, at the new one, raised from it."""
        hands = [anchor(move.place, HAND_LIFT if move.pose == LIFT else HAND_ACT) for move in moves]
        (x0, y0), (x1, y1) = self._hand, anchor(moves[0].place, HAND_ACT)
        steps = sum(move.pose == REACH for move in moves)
        for n in range(steps):
            part = 0.85 * (n + 1) / steps                      # it arrives when the act begins
            hands[n] = x0 + part * (x1 - x0), y0 + part * (y1 - y0)
        self._hand = hands[-1]
        return hands

    def _record(self, you: Move | None = None, cook: Move | None = None, hand: tuple | None = None,
                idle: str | None = None) -> None:
        """Apply the moves and keep what can be seen: one more frame."""
        cells = np.zeros((9, len(LABELS)), np.int8)
        moment = self._frames[-1].moment if idle == "still" else len(self)
        if idle in ("dark", "covered"):                        # nothing can be seen
            self._frames.append(Frame(cells, moment, idle=idle))
            return
        moves = [move for move in (you, cook) if move]
        for move in moves:
            old, self._content[move.place] = self._content[move.place], move.content
            if old and old is not move.content:
                self._before[move.place] = old
            if move.held:
                move.held.seen = len(self)
            cells[move.place, EFFECT] = move.effect
        opened = {move.place for move in moves if move.opened}
        for place, (name, thing) in enumerate(zip(self.world.places, self._content)):
            door = 0 if name not in CONTAINERS else OPEN if place in opened else CLOSED
            shown = thing if door != CLOSED else None
            if shown:
                shown.seen = len(self)
                cells[place, [TYPE, COLOUR]] = shown.type, shown.colour
            cells[place, DOOR] = door
        if cook:
            cells[cook.place, [OTHER, HELD]] = 1, THEIRS if cook.held else 0
        if you:
            at = nearest(hand) if you.pose == REACH else you.place
            cells[at, HAND] = you.pose
            if you.held:
                cells[at, HELD] = YOURS
        self._frames.append(Frame(cells, moment, you, cook, hand, idle))

    # ------------------------------------------------------------------------------------------ how it looks

    def render(self, frame: int) -> np.ndarray:
        """The picture of one frame: uint8 [96, 96, 3], RGB."""
        if not 0 <= frame < len(self):
            raise IndexError(f"frame {frame} of a video of {len(self)} frames")
        now = self._frames[frame]
        moment, rng = now.moment, np.random.default_rng((self.seed, 1, now.moment))
        canvas = (self._cover if now.idle == "covered" else self._room).copy()     # [98, 98, 3]: a border of 1 px
        for place, (kind, colour, door, effect, *_) in enumerate(now.cells.tolist()):
            x, y = anchor(place, MIDDLE)
            if door == OPEN:
                blend(canvas, tile(self.world.places[place], True) * self._tints[place], x, y)
            if kind:
                shaken = moment % 2 * 6 - 3 if effect == SHAKE else 0
                blend(canvas, sprite(kind, self.world.rgb[colour - 1]), x + shaken, y - 1)
            if effect:
                rubbed = moment % 3 * 3 - 3 if effect == CLOTH else 0
                blend(canvas, effect_sprite(effect, moment % 3), x + rubbed, y)
        if now.cook:
            self._arm(canvas, anchor(now.cook.place, GLOVE) + rng.integers(-1, 2, 2), "glove", now.cook.held)
        if now.you:
            pose = {REACH: "reach", ACT: "act", LIFT: "lift"}[now.you.pose]
            self._arm(canvas, now.hand + rng.integers(-1, 2, 2), pose, now.you.held)
        dy, dx = rng.integers(0, 3, 2)                         # the camera shakes
        canvas = canvas[dy:dy + SIZE, dx:dx + SIZE] * self.light(frame)
        canvas += NOISE * rng.standard_normal(canvas.shape, np.float32)
        return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8)

    def light(self, frame: int) -> np.float32:
        """The brightness of a frame. Daylight drifts slowly around the level of the video, within 0.7 .. 1.15."""
        now, rng = self._frames[frame], np.random.default_rng((self.seed, 3))
        level, phase, period = rng.uniform(0.75, 1.1), rng.uniform(0, 2 * np.pi), rng.uniform(60, 240)
        wave = np.sin(phase + 2 * np.pi * now.moment / period)
        daylight = (level + 0.05 * wave) * self.world.dusk ** (0.5 - 0.5 * wave)
        return np.float32(daylight * (LIGHTS_OUT if now.idle == "dark" else 1))

    def _arm(self, canvas: np.ndarray, at: np.ndarray, pose: str, held: Thing | None) -> None:
        """A hand, its arm along the border between cells so that it hides nothing, and what it holds."""
        x, y = (int(round(float(value))) for value in at)
        if held:
            dx, dy = (7, 5) if pose == "glove" else (-7, -5)
            blend(canvas, sprite(held.type, self.world.rgb[held.colour - 1], small=True), x + dx, y + dy)
        if pose == "glove":
            blend(canvas[:max(y, 0) + 1], arm_strip("glove"), x - 3, SIZE // 2)
        else:
            blend(canvas[y + 1:], arm_strip("hand"), x + 4, SIZE // 2)
        blend(canvas, hand_sprite(pose), x, y)

    @cached_property
    def _tints(self) -> np.ndarray:
        """Each video has its own furniture: one colour for the room, one for each place; float32 [9, 4]."""
        rng = np.random.default_rng((self.seed, 2))
        tints = rng.uniform(0.88, 1.08, 3) * rng.uniform(0.93, 1.05, (9, 3)) * self.world.tint
        return np.concatenate([tints, np.ones((9, 1))], 1).astype(np.float32)      # [9, rgb and alpha]

    @cached_property
    def _room(self) -> np.ndarray:
        """The furniture, doors closed, and the clutter: float32 [98, 98, 3]."""
        room = np.zeros((SIZE + 2, SIZE + 2, 3), np.float32)
        for place, (name, thing) in enumerate(zip(self.world.places, self.clutter)):
            blend(room, tile(name, False) * self._tints[place], *anchor(place, MIDDLE))
            if thing:
                blend(room, sprite(thing.type, self.world.rgb[thing.colour - 1], small=True), *anchor(place, CORNER))
        return np.pad(room[1:-1, 1:-1], ((1, 1), (1, 1), (0, 0)), mode="edge")

    @cached_property
    def _cover(self) -> np.ndarray:
        """What the camera sees when it is covered: one dark colour, light at one edge; float32 [98, 98, 3]."""
        rng = np.random.default_rng((self.seed, 5))
        colour, edge = rng.uniform(10, 100) * rng.uniform(0.8, 1.2, 3), rng.uniform(0.5, 1.5)
        return (np.linspace(1, edge, SIZE + 2)[:, None, None] * np.tile(colour, (SIZE + 2, 1))).astype(np.float32)


def your_moves(name: str, place: int, poses: list[int], old: Thing | None, new: Thing) -> list[Move]:
    """What you do, frame by frame, at a place that holds `old`; `new` is what you bring if you fill it."""
    moves, begin = [], poses.index(ACT)
    for n, pose in enumerate(poses):
        acting = pose == ACT
        if name == "fill":                                     # still in your hand when the door opens
            now = old if n < begin else None if n == begin else new
            move = Move(place, now, pose, opened=acting, held=new if n <= begin else None)
        elif name == "clear":                                  # take it, then put it out of sight at the first lift
            taken = n > begin
            move = Move(place, None if taken else old, pose, held=old if taken and LIFT not in poses[:n + 1] else None)
        else:
            move = Move(place, old, pose, opened=name == "check" and acting, effect=EVENTS[name].effect * acting)
        moves.append(move)
    return moves


def weighted_choice(rng: np.random.Generator, weights: dict):
    """A key of `weights`, each as likely as its weight."""
    p = np.array(list(weights.values()), float)
    return list(weights)[rng.choice(len(p), p=p / p.sum())]


# ------------------------------------------------------------------------------------------------- the splits

# Seeds below a million are free: for demonstrations (`data.py toy --seed 7`) and tests of the code.
SEEDS = {"train": range(1_000_000, 2_000_000), "val": range(2_000_000, 2_100_000),
         "test": range(3_000_000, 3_100_000)}                  # test: for reported numbers only
VIDEOS = {"train": 800, "val": 30, "test": 30}                 # of a split, if no number is given
SEGMENTS = (8, 12)                                             # least and most segments of a video
MEAN_SEGMENT = 3.5                                             # seconds


def kitchens(split: str, count: int | None = None, segments: tuple[int, int] = SEGMENTS,
             world: World = WORLDS["plain"]) -> Iterator[tuple[int, Kitchen]]:
    """(seed, video) of the first `count` videos of a split; the number of segments is drawn from the seed.

    Raises BadData for an unknown split, and for a count or segments out of range.
    """
    if split not in SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(SEEDS)}")
    seeds, (low, high), count = SEEDS[split], segments, VIDEOS[split] if count is None else count
    if not 1 <= count <= len(seeds):
        raise BadData(f"toy {split}: give from 1 to {len(seeds)} videos, not {count}")
    if not 1 <= low <= high:
        raise BadData(f"toy {split}: segments must be (least, most), from 1 up, not {segments}")
    length = lambda seed: int(np.random.default_rng((seed, 0)).integers(low, high + 1))
    return ((seed, Kitchen(seed, length(seed), world)) for seed in seeds[:count])


def lasting(seed: int, seconds: float, world: World = WORLDS["plain"]) -> Kitchen:
    """A video of about so many seconds, up to the end of a segment."""
    segments = ceil(seconds / MEAN_SEGMENT)
    frames = len(Kitchen(seed, segments, world))                                           # segments vary in length
    return Kitchen(seed, max(1, round(segments * seconds * FPS / frames)), world)


# ------------------------------------------------------------------------------------- the language alone

SIGHTS = {"wash": "water", "heat": "flames", "shake": "shaking", "polish": "cloth", "check": "open", "fill": "full",
          "clear": "empty", "tap": "knocks", "wipe": "cloth"}


def documents(seed: int, world: World = WORLDS["plain"]) -> Iterator[str]:
    """Endless texts in the language of a world, without a video: inventories, and narrations true to them.

    A small language model learns from them the sentences, and to look facts up in what it has read. Where a place
    is listed more than once, the later line holds.
    """
    rng = np.random.default_rng(seed)
    while True:
        yield document(rng, world)


def document(rng: np.random.Generator, world: World) -> str:
    """3-10 lines: contents of some places, then events there: often what can be seen, always the narration."""
    now, before, lines = {}, {}, []
    size = int(rng.integers(3, 11))

    def list_thing(place: str, thing: Thing | None) -> None:
        if now.get(place):
            before[place] = now[place]
        now[place] = thing
        content = " ".join(world.words(thing.type, thing.colour)) if thing else "empty"
        lines.append(("the " if rng.random() < 0.5 else "") + f"{place}: {content}")

    for place in rng.choice(world.places, rng.integers(1, min(size, 6))):
        list_thing(str(place), Thing.random(rng) if rng.random() < 0.7 else None)
    if rng.random() < 0.3:
        lines.insert(0, world.sentences["open"])
    while len(lines) < size:
        place = str(rng.choice(list(now)))
        if rng.random() < 0.15 and len(lines) < size - 1:      # the content changes without a word
            list_thing(place, None if now[place] else Thing.random(rng))
            continue
        name, thing = what_happens(rng, place, now[place], before.get(place))
        if rng.random() < 0.7 and len(lines) < size - 1:
            lines.append(f"hand at the {place}, {SIGHTS[name]}")
        lines.append(world.sentence(name, place, thing))
        if name == "clear":
            before[place], now[place] = now[place], None
        if name == "fill":                                     # what it holds now remains to be seen
            list_thing(place, Thing.random(rng))
    return "\n".join(lines[:size])


def what_happens(rng: np.random.Generator, place: str, thing: Thing | None, before: Thing | None) -> tuple:
    """An event that the content of the place allows, and the thing that its sentence names."""
    if place in CONTAINERS:
        names = ["tap", "tap", "check", "fill"] if thing else ["check", "fill"]
    elif thing:
        names = ["wash", "heat", "shake", "polish", "clear"]
    else:
        names = ["wipe", "wipe", "fill"] if before else ["fill"]
    name = str(rng.choice(names))
    return name, before if name == "wipe" else thing
