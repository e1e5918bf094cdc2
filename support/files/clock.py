"""The clock of a video: times that pictures claim, and the times at which they are shown."""
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import av

BACK = 0.1                                     # seconds that a clock may go back, as in FFmpeg


@dataclass
class Decoded:
    """A picture as it leaves the decoder.

    clock       seconds, as its file has them; None: it has no time
    step        seconds until the next picture, if nothing else is known
    """
    picture: av.VideoFrame
    clock: float | None
    step: float


def presented(claims: Iterable[Decoded], start: float | None, longest_gap: float,
              leaps: list[float]) -> Iterator[tuple[Decoded, float]]:
    """(claim, the time at which its picture is shown), in seconds from time 0. Times never decrease.

    A clock is a claim, not a fact: that pictures leave a decoder in the order in which they are
    shown is certain. So a time is compared with the one that was believed before (`known`), and
    with that of the next picture:

    * A time that comes again is none, and one that the next picture contradicts is wrong. Such a
      picture follows the one before it, as one without a time does; its claim's clock becomes None.
    * A clock that goes back by more than BACK, or leaps by more than `longest_gap`, is another one,
      as joined videos have it. It goes on where the one before has ended, and `leaps` gets the
      seconds by which it goes back (below 0) or leaps (above 0).

    start       what the clock shows at time 0; None: what it shows at the first picture
    """
    origin = known = before = None
    now = expected = 0.0
    for claim, following in pairwise(chain(claims, [None])):
        clock = claim.clock
        later = following.clock if following else None
        if clock is not None and known is None:
            origin = known = clock - expected if start is None else min(start, clock)

        is_wrong = clock is None or clock == before
        is_back = is_gap = False
        if not is_wrong:
            is_back = clock < known - BACK
            is_gap = clock - origin > expected + longest_gap
            is_wrong = later is not None and known <= later < clock
        if is_back:                            # another clock goes on at the next picture
            is_wrong = later is None or not clock < later < known
        before = clock
        if is_wrong:
            claim.clock = None
            now = expected
        else:
            if is_back or is_gap:
                leaps.append(clock - origin - expected)
                origin = clock - expected
            known = clock
            now = max(now, clock - origin)
        yield claim, now
        expected = now + claim.step
