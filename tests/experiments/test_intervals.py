"""Intervals of claims: a bootstrap over videos and seeds."""
import numpy as np
import pytest

from experiments.intervals import compare_means


def result(values) -> dict[str, float]:
    return {f"video {number}": float(value) for number, value in enumerate(values)}


def test_a_difference_that_all_videos_have_is_shown():
    """However much videos differ: they are drawn in pairs."""
    values = np.random.default_rng(0).normal(0, 10, 50)
    interval = compare_means([result(values + 0.1)], [result(values)])
    assert interval.mean == pytest.approx(0.1)
    assert interval.low == pytest.approx(0.1)
    assert interval.high == pytest.approx(0.1)
    assert interval.shown


def test_the_interval_is_that_of_a_mean():
    """For many videos, 1.96 standard errors on each side."""
    noise = np.random.default_rng(1).normal(0, 1, 400)
    interval = compare_means([result(noise)], [result(np.zeros(400))])
    error = 1.96 * noise.std() / 20
    assert interval.high - interval.low == pytest.approx(2 * error, rel=0.1)
    assert interval.low < interval.mean < interval.high


def test_seeds_that_differ_widen_the_interval():
    equal = compare_means([result([0.9] * 20)] * 3, [result([0.8] * 20)] * 3)
    assert equal.shown
    unequal = [result([value] * 20) for value in (1.0, 0.9, 0.5)]
    interval = compare_means(unequal, [result([0.8] * 20)] * 3)
    assert interval.mean == pytest.approx(0.0)
    assert not interval.shown
    assert interval.seeds == (3, 3)


@pytest.mark.parametrize("seeds", [(3, 3), (2, 2), (5, 3)])
def test_it_covers_the_true_difference(seeds):
    """Where only trainings differ, 95 of 100 intervals hold the truth, 0, also with few seeds."""
    generator = np.random.default_rng(2)
    covered = []
    for _ in range(200):
        trainings = [generator.normal(0, 1, count) for count in seeds]
        interval = compare_means(*([result([value] * 4) for value in row] for row in trainings))
        covered.append(not interval.shown)
    assert np.mean(covered) > 0.91


def test_the_same_trainings_are_drawn_together():
    """Trainings that differ much do not hide what another threshold changes in each of them."""
    values = np.random.default_rng(3).normal(0, 1, 3)
    first = [result([value + 0.1] * 20) for value in values]
    second = [result([value] * 20) for value in values]
    assert not compare_means(first, second).shown
    interval = compare_means(first, second, same_trainings=True)
    assert interval.low == pytest.approx(0.1)
    assert interval.high == pytest.approx(0.1)


def test_only_videos_that_all_results_measure_count():
    first = {"a": 1.0, "b": None, "c": 0.5}
    second = {"a": 0.5, "b": 1.0}
    assert compare_means([first], [second]).mean == pytest.approx(0.5)
    assert compare_means([first], []) is None
    assert compare_means([{"a": None}], [{"a": 1.0}]) is None
