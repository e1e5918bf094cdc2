"""Several streams at once (not in the paper): each runs in a thread of its own, as if it were alone; they share passes.

    def job(ask):                               # ask(function, request) is function([request])[0]
        yield ask(double, 21)
        frame = ask.wait(camera)                # what camera(seconds) gives, when it is there

    for number, item in side_by_side([job, job], width=2): ...      # one call double([21, 21])

A job that asks waits until every other one has asked, too, has ended, or waits for something else, such as the next
frame of a camera. Then each function is called once, with the requests of all who asked for it, in the thread that
iterates. So a stream waits at most for one round of passes, and never for another one's camera.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any


POLL = 0.1                              # seconds: how often a job that waits looks whether it shall end


@dataclass
class Failed:
    """The last item of a job that ended with an error."""
    error: Exception


class Stopped(Exception):
    """Ends the jobs that are left when nobody iterates any more."""


class Ask:
    """What a job is given to reach the others: requests for passes, and word that it waits for something else."""

    def __init__(self, events: SimpleQueue):
        self.events, self.stopped = events, Event()

    def __call__(self, function: Callable[[list], list], request) -> Any:
        answer = Future()
        self.events.put(("ask", function, request, answer))
        return answer.result()

    def wait(self, ready: Callable[[float], Any]) -> Any:
        """What ready(seconds) gives, called until that is not None; meanwhile the others go on without this job."""
        if (found := ready(0)) is not None:
            return found
        self.events.put(("away", 1))
        try:
            while found is None:
                if self.stopped.is_set():
                    raise Stopped()
                found = ready(POLL)
            return found
        finally:
            self.events.put(("away", -1))


class Alone:
    """The same for a job without others."""

    def __call__(self, function: Callable[[list], list], request) -> Any:
        return function([request])[0]

    def wait(self, ready: Callable[[float], Any]) -> Any:
        while (found := ready(POLL)) is None:
            pass
        return found


def side_by_side(jobs: Iterable[Callable[[Ask], Iterable]], width: int) -> Iterator[tuple[int, Any]]:
    """Run jobs, at most `width` at a time; gives (number of the job, item) as items come. A job that fails gives
    Failed; the others go on. With width 1 there are no threads."""
    if width == 1:
        yield from one_by_one(jobs)
        return
    events, waiting, running, away, asked = SimpleQueue(), zip(count(), jobs), 0, 0, []
    ask = Ask(events)

    def run(number: int, job: Callable):
        try:
            for item in job(ask):
                events.put(("item", number, item))
            events.put(("end", number, None))
        except Exception as error:                                         # of any kind: it is not lost, but handed on
            events.put(("end", number, error))

    try:
        while True:
            while running < width and (following := next(waiting, None)):
                Thread(target=run, args=following, daemon=True).start()
                running += 1
            if not running:
                return
            what, *event = events.get()
            if what == "ask":
                asked.append(event)
            elif what == "item":
                yield tuple(event)
            elif what == "away":
                away += event[0]
            else:
                number, error = event
                running -= 1
                if error is not None:
                    yield number, Failed(error)
            if asked and len(asked) == running - away:
                answer(asked)
                asked = []
    finally:
        ask.stopped.set()
        while running:
            for *_, future in asked:
                if not future.done():
                    future.set_exception(Stopped())
            what, *event = events.get()
            asked, running = [event] if what == "ask" else [], running - (what == "end")


def one_by_one(jobs: Iterable[Callable[[Alone], Iterable]]) -> Iterator[tuple[int, Any]]:
    for number, job in enumerate(jobs):
        try:
            for item in job(Alone()):
                yield number, item
        except Exception as error:
            yield number, Failed(error)


def answer(asked: list[tuple[Callable, Any, Future]]) -> None:
    """Call each function once, with all requests for it; if that fails, with each alone: only its own fails then."""
    groups = defaultdict(list)
    for function, request, future in asked:
        groups[function].append((request, future))
    for function, group in groups.items():
        try:
            for result, (_, future) in zip(function([request for request, _ in group]), group, strict=True):
                future.set_result(result)
        except Exception:
            for request, future in group:
                try:
                    future.set_result(function([request])[0])
                except Exception as error:
                    future.set_exception(error)
