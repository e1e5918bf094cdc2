"""Intervals of the difference of two narrators, over videos and trainings."""
import numpy as np
import pytest

from support.common.intervals import compare_means, compare_trainings


def results(measured) -> list[dict[str, float]]:
    """Of values [seeds, videos]."""
    return [{f"video {number}": float(value) for number, value in enumerate(values)}
            for values in measured]


def test_the_less_reliable_side_decides_the_degrees_of_freedom():
    """Three trainings each, whose spreads differ thirtyfold. Worked by hand with two degrees of
    freedom, t = 4.303."""
    spread = [0.481, 0.447, 0.167]
    first = results([[value] * 60 for value in (0.953, 0.959, 0.965)])
    second = results([[value] * 60 for value in spread])
    interval = compare_means(first, second)
    error = 4.303 * np.std(spread, ddof=1) / np.sqrt(3)
    assert interval.high - interval.mean == pytest.approx(error, rel=0.01)
    assert not interval.of_these_trainings


# Standard deviations of two narrators' trainings, and of the rest; videos differ by 1.
SPREADS = {
    "trainings alike": (0, 0, 1),
    "trainings and rest": (0.3, 0.3, 1),
    "trainings above all": (1, 1, 0.1),
    "one side unreliable": (1, 0.03, 0.1),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_it_covers_the_true_difference(spread):
    """95 of 100 intervals hold the truth, 0: simulated narrators on 20 videos, of six trainings and
    of three."""
    generator = np.random.default_rng(2)
    *of_trainings, rest = SPREADS[spread]
    covered = []
    for _ in range(300):
        videos = generator.normal(0, 1, 20)
        sides = []
        for count, deviation in zip((6, 3), of_trainings):
            trainings = generator.normal(0, deviation, (count, 1))
            sides.append(results(videos + trainings + generator.normal(0, rest, (count, 20))))
        covered.append(not compare_means(*sides).shown)
    assert 0.92 < np.mean(covered) < 0.985


def test_the_same_trainings_are_compared_one_by_one():
    """Trainings that differ much do not hide what another threshold changes in each of them."""
    values = np.random.default_rng(3).normal(0, 1, (3, 1)) + np.zeros((3, 20))
    first = results(values + 0.1)
    second = results(values)
    assert not compare_means(first, second).shown
    interval = compare_means(first, second, same_trainings=True)
    assert interval.low == pytest.approx(0.1)
    assert interval.high == pytest.approx(0.1)


def test_only_videos_that_all_results_measure_count():
    first = {"a": 1.0, "b": None, "c": 0.5, "d": 0.5}
    second = {"a": 0.5, "b": 1.0, "d": 0.5}
    assert compare_means([first], [second]).mean == pytest.approx(0.25)
    assert compare_means([first], []) is None
    assert compare_means([{"a": 1.0}], [{"a": 1.0}]) is None


@pytest.mark.parametrize("seeds, spread", [(2, 1), (3, 0), (6, 0.5)])
def test_it_covers_a_difference_of_the_same_trainings(seeds, spread):
    """Rows that share their trainings, which differ in how they take to one of the two. The variance
    of two or three is often small by chance."""
    generator = np.random.default_rng(4)
    covered = []
    for _ in range(400):
        first = generator.normal(0, 1, (seeds, 30))
        second = first + generator.normal(0, spread, (seeds, 1)) + generator.normal(0, 1, (seeds, 30))
        interval = compare_means(results(first), results(second), same_trainings=True)
        covered.append(not interval.shown)
    assert np.mean(covered) > 0.93


def test_an_interval_over_trainings():
    """t of two degrees of freedom, by hand; of two samples of one size it is nearly 2.776."""
    interval = compare_trainings([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], same_trainings=True)
    assert interval.mean == 2 and interval.of_these_videos
    assert interval.high - interval.mean == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    wider = compare_trainings([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], same_trainings=True, percent=99)
    assert wider.high - wider.mean == pytest.approx(9.925 / np.sqrt(3), rel=1e-3)
    unpaired = compare_trainings([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert unpaired.high == pytest.approx(2.776 * np.sqrt(2 / 3), rel=0.01)
    assert compare_trainings([1.0], [0.0, 1.0]) is None
