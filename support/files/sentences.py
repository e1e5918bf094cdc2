"""Sentences at their times, the videos that they narrate, and the frames that stand for times."""
from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import ceil, inf

from support.common.text import listed, one_line


HALF_A_MILLISECOND = 0.000501                  # and what floats add
EXAMPLES = 12
BEYOND = "narrations beyond the end of their video left out"


@dataclass(slots=True)
class Sentence:
    """A sentence and its time (seconds)."""
    time: float
    text: str


Placed = list[tuple[int, Sentence]]            # (frame, sentence), in order of time


@dataclass
class NarratedVideo:
    """A video, or a part of one, with the sentences of each annotator, sorted by time."""
    annotators: list[list[Sentence]]
    origin: float = 0.0                        # [s] where the first segment begins (App. B.5)
    seconds: float | None = None               # how much of it is streamed, if known
    name: str = ""
    video: str = ""                            # of which it is (a part)
    start: float = 0.0                         # [s] of the video where the part starts
    end: float | None = None                   # of an annotated interval [s]
    first: int = 0                             # the frame of its features with which it begins
    stop: int = 0                              # of an annotated interval: the frame behind its last
    # Ego4D: each annotator's summary of the whole interval (App. C.4)
    summaries: list[str] = field(default_factory=list)


@dataclass
class Notes:
    """Counts of corrections, by description, and the places of some."""
    counts: Counter = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, n: int = 1, place: str | None = None) -> None:
        if n > 0:
            self.counts[what] += n
            if place:
                self.places[what].append(place)

    def add_of_file(self, others: Notes, name: str) -> None:
        """What was counted in one file: with its name."""
        for what, n in others.counts.items():
            self.add(what, n, f"{name}: {n}")

    def after(self, beginning: str) -> str:
        """A line: its beginning, and what was counted."""
        return f"{beginning}; {self}" if self.counts else beginning

    def __str__(self) -> str:
        """One line, with the first EXAMPLES."""
        parts = []
        for what, n in self.counts.most_common():
            places = listed(self.places[what], most=EXAMPLES)
            parts.append(f"{what}: {n} ({places})" if places else f"{what}: {n}")
        return one_line("; ".join(parts))


def frame_at(time: float, fps: float) -> int:
    """The frame whose span (i / fps, (i + 1) / fps] contains `time` (seconds). Earlier times: 0."""
    # subtitles have whole milliseconds, so the end of frame i may be rounded up to after it
    return max(0, ceil((time - HALF_A_MILLISECOND) * fps) - 1)


def time_of(frame: int, fps: float) -> float:
    """The end of a frame's span (seconds)."""
    return (frame + 1) / fps


def assign_frames(
    sentences: list[Sentence],
    duration: float,
    fps: float,
    notes: Notes,
    frames_in_file: float = inf,
) -> Placed:
    """Sentences, sorted -> [(frame, sentence)], frames strictly increasing.

    Frames are numbered as in the feature file. Each sentence is placed at the first frame that is
    not before it. One that repeats the sentence before it is left out. `one_frame_each` then
    separates sentences that share a frame (the authors' loader loses one of the two).

    duration        of the video (seconds)
    frames_in_file  the number of frames in the feature file. In the authors' code it is not asked,
                    and a frame at the very end is assumed
    """
    last = min(int(duration * fps), frames_in_file - 1)
    placed = []
    text_before = None
    for sentence in sentences:
        if sentence.text == text_before:
            notes.add("repeated sentences left out")
            continue
        text_before = sentence.text
        frame = min(ceil(sentence.time * fps), last)
        if sentence.time > duration:
            frame = last + 1                   # `one_frame_each` counts these
        placed.append((frame, sentence))
    return one_frame_each(placed, last, notes)


def one_frame_each(
    placed: Placed,
    last: int,
    notes: Notes,
) -> Placed:
    """[(frame, sentence)] in order of time -> the same, frames strictly increasing up to `last`.

    If two sentences share a frame, the second moves to the next frame. The first one beyond the
    last frame moves to the last frame; the others beyond it are left out.
    """
    within = [(frame, sentence) for frame, sentence in placed if frame <= last]
    beyond = [(last, sentence) for frame, sentence in placed if frame > last]
    notes.add("narrations beyond the end of their video moved to its last frame", len(beyond[:1]))
    notes.add(BEYOND, len(beyond[1:]))
    wanted = within + beyond[:1]
    notes.add("narrations left out of videos with more narrations than frames",
              len(wanted[last + 1:]))
    wanted = wanted[:last + 1]

    on_frames = []
    next_free = 0
    latest = last - len(wanted) + 1            # leaves a frame for each of those that follow
    for wanted_frame, sentence in wanted:
        frame = min(max(wanted_frame, next_free), latest)
        if frame != wanted_frame:
            notes.add("narrations moved by a frame or more, because another one has their frame")
        on_frames.append((frame, sentence))
        next_free = frame + 1
        latest += 1
    return on_frames


def at_frames(placed: Placed, fps: float) -> list[Sentence]:
    """Sentences at the ends of the frames on which they were placed."""
    return [Sentence(time_of(frame, fps), sentence.text) for frame, sentence in placed]
