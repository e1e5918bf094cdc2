"""The clock of a video: times that pictures claim, and the times at which they are shown."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

import av

LOOKAHEAD = 2                                  # pictures that are asked about a time in doubt
NEAR = 1.0                                     # seconds by which a clock that returns may differ
LATEST_START = 600.0                           # seconds from time 0 to the first picture
BACK = 0.1                                     # seconds that a clock may go back, as in FFmpeg


@dataclass
class Decoded:
    """A picture as it leaves the decoder.

    clock       seconds, as its file has them; None: it has no time
    step        seconds until the next picture, if nothing else is known
    is_key      whether decoding can begin at it, so that it may be the first one of another video
    """
    picture: av.VideoFrame
    clock: float | None
    step: float
    is_key: bool = False


def presented(claims: Iterable[Decoded], start: float | None, longest_gap: float,
              gaps: list[float]) -> Iterator[tuple[Decoded, float]]:
    """(claim, the time at which its picture is shown), in seconds from time 0. The clock of a claim
    without a time of its own is None.

    A clock is a claim, not a fact: that pictures leave a decoder in the order in which they are
    shown is certain. So a time is believed as far as it comes after the one that was believed
    before. Otherwise, or if it comes later than expected, the pictures around it are asked:

    * One picture's time that its neighbours contradict is wrong: the next picture goes on after
      the one before it, or one of the next two stands between the two. It follows the picture
      before it, and so does one without a time.
    * Several such pictures have a new clock, as joined videos have. It goes on where the old one
      has ended. A key picture has one if the picture after it goes on from there.
    * The same time for more than two pictures is none: that clock has stopped.
    * If a clock goes on where the one before it would be by now, it is that one again. Time stands
      still until then, if a leap forward has been believed in between.
    * A clock that goes back by no more than BACK, and not at a key picture, is the same one.
    * A gap that is longer than `longest_gap` is left out, and appended to `gaps`.

    Times never decrease. A picture waits for the next LOOKAHEAD ones only if its time is in doubt.

    start       what the clock shows at time 0; None: what it shows at the first picture
    """
    claims = iter(claims)
    waiting = deque()

    def clocks_to_come() -> list[float]:
        while len(waiting) < LOOKAHEAD and (claim := next(claims, None)):
            waiting.append(claim)
        return [claim.clock for claim in waiting if claim.clock is not None]

    origin = known = start                     # `known` was believed last
    # a clock that would go on now, as what it shows at time 0; and what is `origin` then
    other = after_return = inf
    now = expected = 0.0
    before = None                              # what the picture before has claimed
    has_stopped = False
    while claim := waiting.popleft() if waiting else next(claims, None):
        clock = claim.clock
        if clock is not None and known is None:
            origin = known = clock - now
        step = expected - now                  # 0 at the first picture
        is_back = clock is not None and clock < known + min(step, 1e-6)
        is_late = clock is not None and clock - origin > expected + step / 2
        to_come = clocks_to_come() if is_back or is_late else []
        begins = claim.is_key and to_come and 0 < to_come[0] - clock <= 1.5 * claim.step
        goes_on = has_stopped or claim.is_key or to_come[:1] == [clock]
        has_stopped = clock == before and not begins and goes_on
        before = clock
        is_wrong = clock is None or has_stopped
        if to_come and not begins and not is_wrong:
            stands_between = any(known < later < clock for later in to_come)
            is_wrong = known < to_come[0] if is_back else stands_between
        time = expected
        if has_stopped:
            claim = replace(claim, clock=None)
        if not is_wrong:
            time = clock - origin
            # sound may begin long before the pictures
            is_gap = time > expected + (longest_gap if step else max(longest_gap, LATEST_START))
            # by chance, another video's first picture lands there less often
            error = step / 10 if claim.is_key else max(step, NEAR)
            leaps = time > expected + NEAR
            if (is_back or leaps) and abs(clock - other - expected) <= error:
                origin = after_return
            elif is_gap or is_back and (claim.is_key or clock < known - BACK):
                if is_gap:
                    gaps.append(time - expected)
                other = after_return = origin
                origin = clock - expected
            elif leaps:
                other, after_return = origin - (time - expected), origin
            known = clock
            time = max(now, clock - origin)
        yield claim, time
        now = time
        expected = now + claim.step
