"""Sentences that are said again, and sentences that come late: properties, on made-up videos."""
import random
from dataclasses import replace

import pytest

from beyond.commands.evaluate_command import measures_of
from beyond.training.delays import course_of
from support.files.sentences import NarratedVideo, Sentence

SEEDS = range(8)


def story(seed: int, words: str, sentences: int = 30) -> list[Sentence]:
    """Sentences of few words, so that some follow themselves."""
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
def test_who_narrates_like_an_annotator_repeats_nothing_and_is_not_late(seed):
    """Nor who narrates a little late, or with other words that repeat where the truth does."""
    annotators = [story(seed, "ab"), story(seed + 100, "abc")]
    truth = NarratedVideo(annotators)
    for annotator in annotators:
        in_other_words = [replace(sentence, text=sentence.text * 2) for sentence in annotator]
        for said in (annotator, moved(annotator, 0.4), in_other_words):
            repeated, _ = course_of(truth, said)
            assert not any(repeated)
        alone = NarratedVideo([annotator])
        assert course_of(alone, annotator)[1] == [0] * len(annotator)
        early = course_of(alone, moved(annotator, -0.5))[1]
        assert early == pytest.approx([-0.5] * len(annotator))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_of_a_loop_but_its_first_sentence_is_repeated(seed):
    true = [replace(sentence, text=f"{sentence.text} {n}")            # no two alike
            for n, sentence in enumerate(story(seed, "abc"))]
    start = random.Random(seed).randint(0, 20)
    said = true[:start] + [replace(sentence, text="x") for sentence in true[start:]]
    repeated, _ = course_of(NarratedVideo([true]), said)
    assert repeated == [n > start for n in range(len(said))]


def test_twice_is_repeated_where_it_happens_once():
    truth = NarratedVideo([[Sentence(4, "a"), Sentence(8, "b"), Sentence(12, "b")]])
    said = [Sentence(4, "a"), Sentence(6, "b"), Sentence(7, "b"), Sentence(8, "b"), Sentence(12, "b")]
    assert course_of(truth, said)[0] == [False, False, True, True, False]
    assert course_of(truth, []) == ([], [])


def test_delays_are_of_segments_that_match():
    truth = NarratedVideo([[Sentence(4, "a"), Sentence(8, "b"), Sentence(40, "c")]])
    said = [Sentence(5, "a"), Sentence(8.5, "b"), Sentence(16, "c")]
    assert course_of(truth, said)[1] == [1, 0.5]


def test_of_several_videos_every_sentence_counts_alike():
    truths = {"v": NarratedVideo([[Sentence(4, "a"), Sentence(8, "b")]]),
              "w": NarratedVideo([[Sentence(900, "a")]])}
    said = {"v": [Sentence(5, "x"), Sentence(8.5, "x")],
            "w": [Sentence(float(n), "y") for n in range(1, 7)]}
    result, each = measures_of(truths, said)
    assert result["repeated"] == (1 + 5) / 8 and result["delay_s"] == each["v"]["delay_s"] == 0.75
    assert each["w"]["delay_s"] is None
