"""Several streams at once (not in the paper): each runs in a thread of its own, and they share
passes of the models. A stream gives what it gives alone.

    def job(ask):                               # ask(function, request) is function([request])[0]
        yield ask(double, 21)
        frame = ask.wait(camera)                # calls camera(seconds) until it gives something

    for number, item in side_by_side([job, job], width=2): ...      # one call double([21, 21])

A job that asks waits until every other job has asked, too, has ended, or waits for something else,
such as the next frame of a camera. Then each function is called once, with the requests of all jobs
that asked for it, in the thread that iterates. So a stream waits at most for one round of passes,
and never for another stream's camera.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any


POLL = 0.1                              # seconds between two looks of a waiting job at `stopped`


@dataclass
class Failed:
    """The last item of a job that ended with an error."""
    error: Exception


class Stopped(Exception):
    """Raised in waiting jobs when the caller has stopped iterating."""


@dataclass
class Request:
    """A call that a job asks for: function([argument])[0].

    answer      gets (result, None) or (None, error). A queue, not a Future: Ctrl-C in the middle
                of Future.set_result can leave its lock taken, and the job waiting for ever.
    """
    function: Callable[[list], list]
    argument: Any
    answer: SimpleQueue


class SharedPasses:
    """What a job uses to share passes, and to tell the others that it waits for something else.

    Jobs talk to the thread that iterates by events, (kind, content):
        "request"   Request
        "away"      +1: a job has begun to wait for something else; -1: it is back
        "item"      (number of the job, item)
        "end"       (number of the job, its error or None)
    """

    def __init__(self, events: SimpleQueue):
        self.events = events
        self.stopped = Event()

    def __call__(self, function: Callable[[list], list], request) -> Any:
        answer = SimpleQueue()
        self.events.put(("request", Request(function, request, answer)))
        while True:
            try:
                result, error = answer.get(timeout=POLL)
            except Empty:
                if self.stopped.is_set():
                    raise Stopped() from None
                continue
            if error is not None:
                raise error
            return result

    def wait(self, ready: Callable[[float], Any]) -> Any:
        """Call ready(seconds) until it returns something. Meanwhile the other jobs go on."""
        result = ready(0)
        if result is not None:
            return result
        self.events.put(("away", 1))
        try:
            while result is None:
                if self.stopped.is_set():
                    raise Stopped()
                result = ready(POLL)
            return result
        finally:
            self.events.put(("away", -1))


class DirectPasses:
    """The same interface for a job without others."""

    def __call__(self, function: Callable[[list], list], request) -> Any:
        return function([request])[0]

    def wait(self, ready: Callable[[float], Any]) -> Any:
        result = None
        while result is None:
            result = ready(POLL)
        return result


def side_by_side(jobs: Iterable[Callable[[SharedPasses], Iterable]],
                 width: int) -> Iterator[tuple[int, Any]]:
    """Run jobs, at most `width` at a time; yields (number of the job, item) as items come.

    A job that fails yields Failed, and the others go on. With width 1 there are no threads.
    """
    if width == 1:
        yield from one_by_one(jobs)
        return
    events = SimpleQueue()
    ask = SharedPasses(events)
    numbered_jobs = zip(count(), jobs)
    running = 0                                # jobs that have begun and not ended
    away = 0                                   # of these, jobs that wait for something else
    threads = []                               # of the running jobs, and perhaps of some that ended
    requests = []                              # not answered yet; a job has at most one

    def run(number: int, job: Callable):
        try:
            for item in job(ask):
                events.put(("item", (number, item)))
            events.put(("end", (number, None)))
        except Exception as error:             # of any kind: the caller decides what to do
            events.put(("end", (number, error)))

    try:
        while True:
            while running < width:
                numbered_job = next(numbered_jobs, None)
                if numbered_job is None:
                    break
                thread = Thread(target=run, args=numbered_job, daemon=True)
                thread.start()
                threads = [other for other in threads if other.is_alive()]
                threads.append(thread)
                running += 1
            if not running:
                return

            kind, content = events.get()
            if kind == "request":
                requests.append(content)
            elif kind == "item":
                yield content
            elif kind == "away":
                away += content
            else:
                number, error = content
                running -= 1
                if error is not None:
                    yield number, Failed(error)

            if requests and len(requests) == running - away:
                answer_requests(requests)
                requests = []
    finally:
        # All threads have to end: a job ends when it asks or waits, or when it has no more items.
        # This looks at the threads, not at `running` and `requests`: Ctrl-C may have come between
        # an event and its count, and then they are wrong.
        ask.stopped.set()
        for thread in threads:
            thread.join()


def one_by_one(jobs: Iterable[Callable[[DirectPasses], Iterable]]) -> Iterator[tuple[int, Any]]:
    """As `side_by_side`, without threads."""
    for number, job in enumerate(jobs):
        try:
            for item in job(DirectPasses()):
                yield number, item
        except Exception as error:
            yield number, Failed(error)


def answer_requests(requests: list[Request]) -> None:
    """Call each function once, with all requests for it.

    If that fails, call it with each request alone, so that only the faulty request fails.
    """
    requests_for = defaultdict(list)           # function -> requests
    for request in requests:
        requests_for[request.function].append(request)
    for function, group in requests_for.items():
        try:
            results = function([request.argument for request in group])
            for request, result in zip(group, results, strict=True):
                request.answer.put((result, None))
        except Exception:
            for request in group:
                try:
                    request.answer.put((function([request.argument])[0], None))
                except Exception as error:
                    request.answer.put((None, error))
