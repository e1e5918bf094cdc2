"""A miniature kitchen, seen by a camera and narrated in sentences: endless narrated videos.

A video is a function of its seed. It is first simulated in symbols, one small record a frame; a
frame is rendered only when it is needed (in about half a millisecond). Two sentences of five can only
be written by someone who *remembers* what the camera saw: neither the frames of the last two segments
nor the text so far give them away.

place       one of 3x3 cells of 32x32 px, row-major, always at the same position
container   a place with a door (fridge, drawer, cupboard): its content shows only while it is open
thing       an object: one of 6 types in one of 6 colours; last `seen` at a frame, `named` or not
you         the bare hand from below, whose acts are narrated; poses reach, act, lift
other cook  the teal glove from above; silently restocks containers, takes things away, sets new
            ones down
segment     one event of yours: approach (1-2 frames), act (1-7), lift (2); it nominally ends at the
            second lift frame
narration   the sentence of a segment, annotated within a frame of its nominal end, as people would
memory      the words (colour, type) of a narration that only visual memory can give:
              tap    what a closed door hides     "You tap the drawer hiding the green bowl."
              wipe   what stood here before       "You wipe the shelf after the red cup."
            The thing was last seen before the previous segment, and no sentence named it: see
            `Kitchen._recallable`.
idle time   a stretch of frames in which you do nothing; it belongs to the segment that follows,
            whose end is far
world       a kind of kitchens, by the idle time that they have: `WORLDS`
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, log
from typing import NamedTuple

import numpy as np

from support.common.errors import BadData
from toy.paint import (
    GLOVE, HAND_ACT, HAND_LIFT, MIDDLE, RED, SIZE, SMALL, TYPES, anchor, arm_strip, blend, sprite,
)

FPS = 2
NOISE = np.float32(5)                          # sigma of the pixel noise, of 255
LIGHTS_OUT = 0.03                              # share of the daylight in idle time "dark"
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
PLACES = ("shelf", "rack", "fridge", "stove", "counter", "sink", "drawer", "table", "cupboard")
CONTAINERS = {"fridge", "drawer", "cupboard"}

# The last axis of `Kitchen.labels`; 0 is none
TYPE, COLOUR, DOOR = range(3)
CLOSED, OPEN = 1, 2                            # of DOOR
REACH, ACT, LIFT = "reach", "act", "lift"      # poses of your hand


@dataclass(frozen=True)
class Event:
    """Something that you can do."""
    sentence: str
    weight: float                              # how often it is chosen, among the possible events
    effect: str | None = None                  # on the picture
    least: int = 1                             # the least number of frames in pose ACT


EVENTS = {
    "wash": Event("You wash the {thing}.", 6, "water"),
    "heat": Event("You heat the {thing}.", 6, "flames"),
    "shake": Event("You shake the {thing}.", 6, "shake"),
    "polish": Event("You polish the {thing}.", 6, "cloth"),
    "check": Event("You check the {place}.", 6, least=2),
    "fill": Event("You fill the {place}.", 6, least=2),
    "clear": Event("You clear the {place}.", 7, least=2),
    # Tap and wipe are rarely possible. With these weights they are half of all events.
    "tap": Event("You tap the {place} hiding the {thing}.", 200, "knock"),
    "wipe": Event("You wipe the {place} after the {thing}.", 300, "cloth"),
}
NEED_MEMORY = ("tap", "wipe")                  # their sentences name what is out of sight
OPENING = "You look around the kitchen."
OCCUPIED = 0.6                                 # share of the open places with a thing at the start
ACT_FRAMES = {1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 1}        # frames of an act: weight
PAUSE = 0.2                                    # share of longer acts with a frame like the end
JITTER = {-1: 0.30, 0: 0.55, 1: 0.15}          # annotated minus nominal end [frames]: weight
COOKING = 0.75                                 # share of the segments in which the other cook works
CARE = 0.9                                     # share of the chores that leave more to remember
CHORES = {"restock": 5, "take": 7, "set": 5}   # the other cook's work: weight
RGB = (                                        # of COLOURS
    RED,
    (38, 150, 52),
    (44, 84, 214),
    (246, 208, 36),
    (138, 50, 172),
    (246, 246, 246),
)

# Kinds of idle time: your hand rests or is away, or the picture is frozen, unlit, or covered.
IDLE = ("rest", "away", "still", "dark", "covered")
STRETCHES = {(5, 30): 0.9, (30, 120): 0.1}     # log-uniform in these bounds [s]: weight
PER_STRETCH = 8                                # segments for each stretch of idle time
ENTRY = (SIZE - 8.0, SIZE - 4.0)               # x, y at which your hand enters the picture [px]


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
    named: bool = False                        # has a sentence named it?

    @classmethod
    def random(cls, rng: np.random.Generator) -> Thing:
        return cls(*rng.integers(1, 7, 2).tolist())

    @property
    def unnamed(self) -> bool:
        """Whether the camera saw it and no sentence has named it: memory alone knows it."""
        return self.seen >= 0 and not self.named


@dataclass(frozen=True)
class Move:
    """What you or the other cook do in one frame."""
    place: int
    content: Thing | None                      # of the place, from this frame on
    pose: str = ACT
    opened: bool = False                       # is the door open (if there is one)?
    effect: str | None = None
    held: Thing | None = None                  # in the hand


@dataclass(frozen=True)
class Frame:
    """All that `render` needs to know."""
    cells: np.ndarray                          # int8 [9, 3], the labels
    moment: int                                # the frame whose light, noise and shake are shown:
                                               # itself, or the last one that did not stand still
    you: Move | None = None
    cook: Move | None = None
    hand: tuple[float, float] | None = None    # x, y of your hand [px]
    idle: str | None = None                    # the kind of idle time


# ------------------------------------------------------------------------- kinds of kitchens

class World(NamedTuple):
    """What can differ between kitchens; the defaults are those of the plain one."""
    idle: float = 0.0                          # share of the videos that have idle time
    kinds: tuple[str, ...] = IDLE              # of idle time
    stretches: dict[tuple[float, float], float] = STRETCHES


def name_of_thing(kind: int, colour: int) -> str:
    """ "red cup"; "" if one of the two is none."""
    if kind == 0 or colour == 0:
        return ""
    return f"{COLOURS[colour - 1]} {TYPES[kind - 1]}"


TWO_MINUTES = {(120, 120): 1}
WORLDS = {
    "plain": World(),
    "idle": World(idle=1.0),
    # In every video the picture stands still for two minutes.
    "still": World(idle=1.0, kinds=("still",), stretches=TWO_MINUTES),
    # In every video the lights are out for two minutes.
    "night": World(idle=1.0, kinds=("dark",), stretches=TWO_MINUTES),
}


def find_world(name: str) -> World:
    """A world by its name; BadData if there is none."""
    if name not in WORLDS:
        raise BadData(f"unknown world {name!r}; choose one of {', '.join(WORLDS)}")
    return WORLDS[name]


# ------------------------------------------------------------------------- what happens

class Kitchen:
    """One video of `segments` events after the opening: a function of (seed, segments, world).

    narrations: in order; narration 0 is the opening, at frame 0; the last one is at the last frame

    Each purpose has a random generator of its own, so that a new kind of world leaves the rest as
    it was. Events use the seed alone, the others (seed, n): n is 1 for a frame's noise, 2 for the
    furniture, 3 for the light, 4 for idle time, 5 for what covers the camera.
    """

    def __init__(self, seed: int, segments: int = 12, world: World = World()):
        self.seed = seed
        self.world = world
        self.narrations = [Annotation(0, OPENING)]

        self._rng = np.random.default_rng(seed)
        self._content: list[Thing | None] = []                 # of each place
        self._before: list[Thing | None] = [None] * 9          # the last thing that left each place
        self._hand = ENTRY
        self._frames: list[Frame] = []

        for name in PLACES:
            occupied = name in CONTAINERS or self._rng.random() < OCCUPIED
            self._content.append(Thing.random(self._rng) if occupied else None)

        extras = np.random.default_rng((seed, 4))
        extras.random(6)                       # not used: the videos of later draws are well known
        idle_segments = set()                                  # with idle time before them
        if extras.random() < world.idle:
            stretches = max(1, segments // PER_STRETCH)
            idle_segments = set(extras.choice(segments, stretches, replace=False))

        self._record()
        for n in range(segments):
            if n in idle_segments:
                self._idle(extras)
            self._segment()
        self._end_at_nominal()
        del self._frames[self.narrations[-1].frame + 1:]

    def __len__(self) -> int:
        return len(self._frames)

    def labels(self) -> np.ndarray:
        """What is *visible* in each cell: int8 [T, 9, 3].

        TYPE    1..6 as TYPES
        COLOUR  1..6 as COLOURS
        DOOR    CLOSED, OPEN, or 0: no container
        There is no label for what a closed door hides, nor for hands and what they carry.
        """
        return np.stack([frame.cells for frame in self._frames])

    def _idle(self, rng: np.random.Generator) -> None:
        """A stretch in which you do nothing; the other cook may work while the camera sees it."""
        last = self._frames[-1]
        kind = str(rng.choice(self.world.kinds))
        low, high = weighted_choice(rng, self.world.stretches)
        count = round(FPS * exp(rng.uniform(log(low), log(high))))
        you = None
        hand = None
        if kind in ("rest", "still"):
            you = last.you
            hand = last.hand
        self._end_at_nominal()
        # Where nothing can be seen to change, nothing does.
        chore = [None] * count
        if kind in ("rest", "away") and rng.random() < COOKING:
            chore = self._chore(count, busy=you.place if you else None)
        for cook in chore:
            self._record(you, cook, hand, kind)
        self._hand = ENTRY if hand is None else hand

    def _end_at_nominal(self) -> None:
        """Move the last narration to the last frame so far, if it is annotated later.

        After the nominal end of its segment nothing is left to see.
        """
        last = self.narrations[-1]
        frame = min(last.frame, len(self) - 1)
        self.narrations[-1] = replace(last, frame=frame)

    def _segment(self) -> None:
        """One event of yours, perhaps one chore of the other cook beside it, one narration."""
        rng = self._rng
        name, place = self._choose()
        event = EVENTS[name]
        thing = self._before[place] if name == "wipe" else self._content[place]
        poses = self._schedule(event.least)
        moves = your_moves(name, place, poses, self._content[place], Thing.random(rng))
        chore = [None] * len(moves)
        if rng.random() < COOKING:
            chore = self._chore(len(moves), busy=place)
        for you, cook, hand in zip(moves, chore, self._travel(moves)):
            self._record(you, cook, hand)

        # Annotations stray from the nominal end. (They stay in order: a segment has 4 frames or more.)
        frame = len(self) - 1 + weighted_choice(rng, JITTER)
        if "{thing}" in event.sentence:
            thing.named = True
        words = "" if thing is None else name_of_thing(thing.type, thing.colour)
        memory_words = words.split() if name in NEED_MEMORY else ()
        text = event.sentence.format(place=PLACES[place], thing=words)
        self.narrations.append(Annotation(frame, text, tuple(memory_words)))

    def _choose(self) -> tuple[str, int]:
        """An event among those possible now, then one of the places where it is possible."""
        places = {}
        for name in EVENTS:
            places[name] = [place for place in range(9) if self._possible(name, place)]
        weights = {name: event.weight for name, event in EVENTS.items() if places[name]}
        name = weighted_choice(self._rng, weights)
        return name, int(self._rng.choice(places[name]))

    def _possible(self, name: str, place: int) -> bool:
        door = PLACES[place] in CONTAINERS
        content = self._content[place]
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
        """Whether a thing was last seen before the previous segment, and no sentence named it."""
        if thing is None or not thing.unnamed or len(self.narrations) < 2:
            return False
        return thing.seen <= self.narrations[-2].frame

    def _schedule(self, least: int) -> list[str]:
        """The pose in each frame: REACH.., ACT.., LIFT LIFT; sometimes a LIFT amid the acts."""
        rng = self._rng
        lengths = {n: weight for n, weight in ACT_FRAMES.items() if n >= least}
        acts = [ACT] * weighted_choice(rng, lengths)
        if len(acts) >= 3 and rng.random() < PAUSE:
            # Neither at the first nor at the last act: it looks like the end, but acts follow.
            at = rng.integers(1, len(acts) - 1)
            acts[at] = LIFT
        return [REACH] * int(rng.integers(1, 3)) + acts + [LIFT] * 2

    def _chore(self, length: int, busy: int | None) -> list[Move | None]:
        """What the other cook does in `length` frames: one chore, done before the last frame.

        It is never at the place `busy`, where you are.
        """
        rng = self._rng
        careful = rng.random() < CARE

        # The places where each chore is possible. Tap and wipe need things that were seen and never
        # named: behind a door, or taken away from an open place. A careful cook keeps these, and
        # adds to them.
        places = {"restock": [], "take": [], "set": []}
        for place in range(9):
            if place == busy:
                continue
            content = self._content[place]
            before = self._before[place]
            if PLACES[place] in CONTAINERS:
                if not (careful and content.unnamed):
                    places["restock"].append(place)
            elif content is not None:
                if content.unnamed or not careful:
                    places["take"].append(place)
            elif not (careful and before is not None and before.unnamed):
                places["set"].append(place)

        weights = {name: weight for name, weight in CHORES.items() if places[name]}
        if not weights:
            return [None] * length
        name = weighted_choice(rng, weights)
        place = int(rng.choice(places[name]))
        old = self._content[place]
        new = Thing.random(rng)
        n = int(rng.integers(1, 3))
        if name == "restock":
            moves = [Move(place, old)] + [Move(place, new, opened=True)] * (n + 1)
        elif name == "take":
            moves = [Move(place, old)] + [Move(place, None, held=old)] * n
        else:
            moves = [Move(place, None, held=new)] * n + [Move(place, new)]
        # A short segment has no time for all of it.
        moves = moves[:length - 1]
        start = int(rng.integers(0, length - len(moves)))
        return [None] * start + moves + [None] * (length - start - len(moves))

    def _travel(self, moves: list[Move]) -> list[tuple[float, float]]:
        """x, y of your hand in each frame [px]: first on its way from the last place."""
        hands = []
        for move in moves:
            offset = HAND_LIFT if move.pose == LIFT else HAND_ACT
            hands.append(anchor(move.place, offset))
        x0, y0 = self._hand
        x1, y1 = anchor(moves[0].place, HAND_ACT)
        steps = sum(move.pose == REACH for move in moves)
        for n in range(steps):
            share = 0.85 * (n + 1) / steps     # of the way: it arrives when the act begins
            hands[n] = (x0 + share * (x1 - x0), y0 + share * (y1 - y0))
        self._hand = hands[-1]
        return hands

    def _record(self, you: Move | None = None, cook: Move | None = None,
                hand: tuple[float, float] | None = None, idle: str | None = None) -> None:
        """One more frame: apply the moves, and keep what can be seen."""
        now = len(self)
        cells = np.zeros((9, 3), np.int8)
        moment = self._frames[-1].moment if idle == "still" else now
        if idle in ("dark", "covered"):                        # nothing can be seen
            self._frames.append(Frame(cells, moment, idle=idle))
            return

        # The moves come first, so that a frame shows what they have changed.
        opened = set()
        for move in filter(None, (you, cook)):
            old = self._content[move.place]
            self._content[move.place] = move.content
            if old is not None and old is not move.content:
                self._before[move.place] = old
            if move.held is not None:
                move.held.seen = now
            if move.opened:
                opened.add(move.place)

        for place, thing in enumerate(self._content):
            if PLACES[place] in CONTAINERS:
                cells[place, DOOR] = OPEN if place in opened else CLOSED
            if thing is not None and cells[place, DOOR] != CLOSED:
                thing.seen = now
                cells[place, TYPE] = thing.type
                cells[place, COLOUR] = thing.colour
        self._frames.append(Frame(cells, moment, you, cook, hand, idle))

    # --------------------------------------------------------------------- how it looks

    def render(self, frame: int) -> np.ndarray:
        """The picture of one frame: uint8 [96, 96, 3], RGB."""
        now = self._frames[frame]
        rng = np.random.default_rng((self.seed, 1, now.moment))
        background = self._cover if now.idle == "covered" else self._room
        canvas = background.copy()                             # [98, 98, 3]: a border of 1 px
        for place, (kind, colour, door) in enumerate(now.cells.tolist()):
            x, y = anchor(place, MIDDLE)
            effect = now.you.effect if now.you and now.you.place == place else None
            if door == OPEN:
                blend(canvas, sprite(f"open-{PLACES[place]}") * self._tints[place], x, y)
            if kind:
                shaken = now.moment % 2 * 6 - 3 if effect == "shake" else 0
                blend(canvas, sprite(TYPES[kind - 1], RGB[colour - 1]), x + shaken, y - 1)
            if effect:
                rubbed = now.moment % 3 * 3 - 3 if effect == "cloth" else 0
                blend(canvas, sprite(f"{effect}-{now.moment % 3}"), x + rubbed, y)
        # Hands tremble by a pixel.
        if now.cook is not None:
            glove = anchor(now.cook.place, GLOVE) + rng.integers(-1, 2, 2)
            self._arm(canvas, glove, "glove", now.cook.held)
        if now.you is not None:
            hand = now.hand + rng.integers(-1, 2, 2)
            self._arm(canvas, hand, now.you.pose, now.you.held)
        # The camera shakes by a pixel: that is what the border is for.
        dy, dx = rng.integers(0, 3, 2)
        canvas = canvas[dy:dy + SIZE, dx:dx + SIZE] * self.light(now)          # [96, 96, 3]
        canvas += NOISE * rng.standard_normal(canvas.shape, np.float32)
        return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8)

    def light(self, now: Frame) -> np.float32:
        """The brightness of a frame: daylight drifts slowly around the level of the video.

        It is within 0.7 .. 1.15.
        """
        rng = np.random.default_rng((self.seed, 3))
        level = rng.uniform(0.75, 1.1)
        phase = rng.uniform(0, 2 * np.pi)
        period = rng.uniform(60, 240)                          # frames
        wave = np.sin(phase + 2 * np.pi * now.moment / period)
        light = level + 0.05 * wave
        if now.idle == "dark":
            light *= LIGHTS_OUT
        return np.float32(light)

    def _arm(self, canvas: np.ndarray, at: np.ndarray, pose: str, held: Thing | None) -> None:
        """A hand at x, y, and what it holds. Its arm hides nothing: it lies between two columns."""
        x, y = (round(float(value)) for value in at)
        if held is not None:
            dx, dy = (7, 5) if pose == "glove" else (-7, -5)
            rgb = RGB[held.colour - 1]
            blend(canvas, sprite(TYPES[held.type - 1], rgb, SMALL), x + dx, y + dy)
        # The strip of an arm is as long as the picture: paint what is above or below the hand.
        if pose == "glove":
            blend(canvas[:max(y, 0) + 1], arm_strip("glove"), x - 3, SIZE // 2)
        else:
            blend(canvas[y + 1:], arm_strip("hand"), x + 4, SIZE // 2)
        blend(canvas, sprite(pose), x, y)

    @cached_property
    def _tints(self) -> np.ndarray:
        """Factors of the colours of each place's furniture in this video: float32 [9, 4]."""
        rng = np.random.default_rng((self.seed, 2))
        room = rng.uniform(0.88, 1.08, 3)
        places = rng.uniform(0.93, 1.05, (9, 3))
        tints = np.concatenate([room * places, np.ones((9, 1))], 1)
        return tints.astype(np.float32)                        # [9, rgb and alpha]

    @cached_property
    def _room(self) -> np.ndarray:
        """The furniture, doors closed: float32 [98, 98, 3]."""
        room = np.zeros((SIZE + 2, SIZE + 2, 3), np.float32)
        for place, name in enumerate(PLACES):
            blend(room, sprite(name) * self._tints[place], *anchor(place, MIDDLE))
        # The border continues what is next to it.
        return np.pad(room[1:-1, 1:-1], ((1, 1), (1, 1), (0, 0)), mode="edge")

    @cached_property
    def _cover(self) -> np.ndarray:
        """What a covered camera sees: one dark colour, light at one edge; float32 [98, 98, 3]."""
        rng = np.random.default_rng((self.seed, 5))
        colour = rng.uniform(10, 100) * rng.uniform(0.8, 1.2, 3)
        edge = rng.uniform(0.5, 1.5)
        rows = np.linspace(1, edge, SIZE + 2)[:, None, None]                   # [98, 1, 1]
        return (rows * np.tile(colour, (SIZE + 2, 1))).astype(np.float32)


def your_moves(name: str, place: int, poses: list[str], old: Thing | None,
               new: Thing) -> list[Move]:
    """What you do, frame by frame, at a place that holds `old`; to fill it, you bring `new`."""
    moves = []
    begin = poses.index(ACT)
    lifted = False                                             # has the hand been raised so far?
    for n, pose in enumerate(poses):
        acting = pose == ACT
        lifted = lifted or pose == LIFT
        content = old
        held = None
        if name == "fill":
            # The thing is still in your hand when the door opens.
            if n <= begin:
                held = new
            if n == begin:
                content = None
            elif n > begin:
                content = new
        elif name == "clear" and n > begin:
            # The thing is in your hand until the first lift, then out of sight.
            content = None
            held = None if lifted else old
        opened = acting and name in ("check", "fill")
        effect = EVENTS[name].effect if acting else None
        moves.append(Move(place, content, pose, opened, effect, held))
    return moves


def weighted_choice(rng: np.random.Generator, weights: dict):
    """A key of `weights`, with a probability in proportion to its weight."""
    keys = list(weights)
    p = np.array(list(weights.values()), float)
    return keys[rng.choice(len(p), p=p / p.sum())]


# ------------------------------------------------------------------------- the splits

# Seeds below a million are free: for demonstrations (`data.py toy --seed 7`) and tests of the code.
SEEDS = {
    "train": range(1_000_000, 2_000_000),
    "val": range(2_000_000, 2_100_000),
    "test": range(3_000_000, 3_100_000),                       # for reported numbers only
}
VIDEOS = {"train": 800, "val": 30, "test": 30}                 # of a split, if no number is given
SEGMENTS = (8, 12)                                             # least and most segments of a video
MEAN_SEGMENT = 3.5                                             # seconds


def kitchens(split: str, count: int | None = None, world: World = World()) -> Iterator[Kitchen]:
    """The first `count` videos of a split. The number of segments is drawn from the seed."""
    low, high = SEGMENTS
    for seed in SEEDS[split][:count or VIDEOS[split]]:
        rng = np.random.default_rng((seed, 0))
        yield Kitchen(seed, int(rng.integers(low, high + 1)), world)


def lasting(seed: int, seconds: float, world: World = World()) -> Kitchen:
    """A video of about so many seconds, up to the end of a segment."""
    segments = ceil(seconds / MEAN_SEGMENT)
    # Segments vary in length: correct their number.
    frames = len(Kitchen(seed, segments, world))
    return Kitchen(seed, max(1, round(segments * seconds * FPS / frames)), world)
