"""Sentences said again and again, and sentences that come late: properties, on made-up videos."""
import random
from dataclasses import replace

import pytest

from streams.loops import are_repeated, course_of, delays_of, minutes_of, summary_of_course
from support.files.tracks import NarratedVideo, Sentence

SEEDS = range(20)


def story(seed: int, words: str, sentences: int = 30) -> list[Sentence]:
    """Sentences of few words, so that some follow themselves, and each other by turns."""
    numbers = random.Random(seed)
    time = 0.0
    told = []
    for _ in range(sentences):
        time += numbers.randint(4, 20) / 2
        told.append(Sentence(time, numbers.choice(words)))
    return told


def moved(sentences: list[Sentence], seconds: float) -> list[Sentence]:
    return [replace(sentence, time=sentence.time + seconds) for sentence in sentences]


@pytest.mark.parametrize("seed", SEEDS)
def test_who_narrates_like_an_annotator_has_no_loops_and_no_delay(seed):
    """Nor who narrates a little late, or with other words that repeat where the truth does."""
    annotators = [story(seed, "ab"), story(seed + 100, "abc")]
    truth = NarratedVideo(annotators)
    for annotator in annotators:
        assert not any(are_repeated(truth, annotator))
        assert not any(are_repeated(truth, moved(annotator, 0.4)))
        in_other_words = [replace(sentence, text=sentence.text * 2) for sentence in annotator]
        assert not any(are_repeated(truth, in_other_words))
        alone = NarratedVideo([annotator])
        assert delays_of(alone, annotator) == [0] * len(annotator)
        assert delays_of(alone, moved(annotator, -0.5)) == pytest.approx([-0.5] * len(annotator))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("period", [1, 2])
def test_all_of_a_loop_but_its_first_round_is_repeated(seed, period):
    """From some narration on, a model says the same one or two sentences for ever."""
    true = story(seed, "abc")
    start = random.Random(seed).randint(0, 20)
    loop = "xy"[:period]
    said = [replace(sentence, text=loop[n % period] if n >= start else sentence.text)
            for n, sentence in enumerate(true)]
    begins = start + {1: 1, 2: 3}[period]               # x x; x y x y
    truth = NarratedVideo([[replace(sentence, text=f"{sentence.text} {n}")
                            for n, sentence in enumerate(true)]])           # no two alike
    assert are_repeated(truth, said)[start:] == [n >= begins for n in range(start, len(said))]


def test_twice_is_repeated_where_it_happens_once():
    """Also if what is said is true the first time."""
    truth = NarratedVideo([[Sentence(4, "a"), Sentence(8, "b"), Sentence(12, "b")]])
    said = [Sentence(4, "a"), Sentence(6, "b"), Sentence(7, "b"), Sentence(8, "b"), Sentence(12, "b")]
    assert are_repeated(truth, said) == [False, False, True, True, False]
    assert are_repeated(truth, []) == delays_of(truth, []) == []


def test_delays_are_of_segments_that_match():
    truth = NarratedVideo([[Sentence(4, "a"), Sentence(8, "b"), Sentence(40, "c")]])
    assert delays_of(truth, [Sentence(5, "a"), Sentence(8.5, "b"), Sentence(16, "c")]) == [1, 0.5]


@pytest.mark.parametrize("start", [0.0, 600.0])
def test_minutes_are_those_of_the_stream(start):
    """Each narration counts in the minutes in which it comes, from where the stream starts."""
    truth = NarratedVideo([[Sentence(start + 900, "a")]], origin=start, start=start)
    said = [Sentence(start + time, "x") for time in (1, 60, 61, 200, 230, 600)]
    course = course_of(truth, said)
    assert course.minutes == ["1", "1", "2", "3-4", "3-4", "9-16"]
    summary = summary_of_course([course, course])
    assert list(summary) == ["delay_s", "delay_s_95", "repeated"] + [
        f"repeated_in_minutes_{minutes}" for minutes in ("1", "2", "3-4", "9-16")]
    assert list(summary.values())[2:] == [5 / 6, 0.5, 1, 1, 1]
    assert summary["delay_s"] is None
    assert minutes_of(0.0) == "1"                    # a prediction may have this time
    minutes = [minutes_of(60.0 * n) for n in range(1, 300)]
    assert all(first == second or int(second.split("-")[0]) == n
               for n, (first, second) in enumerate(zip(minutes, minutes[1:]), 2))


def test_delays_have_a_mean_and_a_quantile():
    truth = NarratedVideo([[Sentence(60.0 * n, str(n)) for n in range(1, 101)]])
    said = [Sentence(60.0 * n + n / 10, "x") for n in range(1, 101)]
    summary = summary_of_course([course_of(truth, said)])
    assert summary["delay_s"] == pytest.approx(5.05)
    assert summary["delay_s_95"] == pytest.approx(9.505)
