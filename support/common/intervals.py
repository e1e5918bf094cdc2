"""Is one narrator above another? The difference of two means over videos, with its 95 % interval.

Both narrators are measured on the same videos, each after one or more trainings (seeds). Other
videos and other seeds would give another difference:

    videos      the variance of the difference over videos, divided by their number
    trainings   for each narrator, the variance of its mean over seeds, divided by their number.
                Both narrators of the same trainings are compared seed by seed: one variance

Each of the two gives a half-width: a quantile of Student's t distribution times the root of the
variance, or of the sum of variances, with Welch's degrees of freedom. The interval is the difference
plus or minus the root of the sum of their squares. So a variance of few seeds, which may be small by
chance, does not lend its certainty from the many videos: simulated with two, three and six seeds,
intervals of 95 % hold the truth in 93 to 99 of 100 cases.

Chance that belongs to a single video of a single training is in both parts. It is taken out of the
second; not where narrators are compared seed by seed, where little may be left.

With one seed on a side nothing is known of how its trainings differ: the interval then holds for
that single training.
"""
import math
from typing import NamedTuple

import numpy as np

# Quantiles of Student's t distribution, by its degrees of freedom: 97.5 % and 99.5 %, beyond which
# an interval of 95 % and of 99 % ends
FREEDOMS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 15, 30, np.inf])
STUDENT = {
    95: np.array([12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.306, 2.228, 2.131, 2.042, 1.960]),
    99: np.array([63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.355, 3.169, 2.947, 2.750, 2.576]),
}


class ConfidenceInterval(NamedTuple):
    mean: float                                # the difference
    low: float                                 # with 95 % (or 99 %), it lies between these
    high: float
    seeds: tuple[int, int]                     # of the first narrator, and of the second
    of_these_videos: bool = False              # says nothing of how other videos differ

    @property
    def shown(self) -> bool:
        """Whether the difference has one sign in the whole interval."""
        return self.low > 0 or self.high < 0

    @property
    def of_these_trainings(self) -> bool:
        """Whether it says nothing of how the trainings of one side differ."""
        return min(self.seeds) == 1


def compare_means(first: list[dict[str, float | None]], second: list[dict[str, float | None]],
                  same_trainings: bool = False, percent: int = 95) -> ConfidenceInterval | None:
    """The difference first - second of the means over videos of a measure, with its interval.

    first, second       of each seed, {video: the measure; None where there is nothing to measure}
    same_trainings      both are of the same trainings, seed by seed
    percent             95 or 99: of how many intervals hold the difference

    None without results of both. Videos count that have the measure in every result; None if these
    are fewer than two.
    """
    if not first or not second:
        return None
    names = []
    for name in first[0]:
        if all(result.get(name) is not None for result in first + second):
            names.append(name)
    if len(names) < 2:
        return None

    of_first = np.array([[result[name] for name in names] for result in first])    # [seeds, videos]
    of_second = np.array([[result[name] for name in names] for result in second])
    difference = of_first.mean(0) - of_second.mean(0)                              # [videos]
    mean = float(difference.mean())
    seeds = len(first), len(second)

    of_trainings = []
    # Of a single training nothing is known.
    if same_trainings and len(first) > 1:
        of_trainings = [variance_of_mean((of_first - of_second).mean(1))]          # over seeds
    if not same_trainings:
        of_trainings = [(variance_of_trainings(measured), len(measured) - 1)
                        for measured in (of_first, of_second) if len(measured) > 1]
    error = math.hypot(half_width([variance_of_mean(difference)], percent),
                       half_width(of_trainings, percent))
    return ConfidenceInterval(mean, mean - error, mean + error, seeds)


def compare_trainings(first: list[float], second: list[float], same_trainings: bool = False,
                      percent: int = 95) -> ConfidenceInterval | None:
    """The same of one number a seed: over trainings, of these videos alone. None with fewer than two
    on a side.
    """
    if min(len(first), len(second)) < 2:
        return None
    samples = [np.array(first), np.array(second)]
    if same_trainings:
        samples = [samples[0] - samples[1]]
    mean = float(np.mean(first) - np.mean(second))
    error = half_width([*map(variance_of_mean, samples)], percent)
    seeds = len(first), len(second)
    return ConfidenceInterval(mean, mean - error, mean + error, seeds, of_these_videos=True)


def variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """With its degrees of freedom."""
    return values.var(ddof=1) / len(values), len(values) - 1


def variance_of_trainings(measured: np.ndarray) -> float:
    """Of the mean over n seeds, without the chance of single videos. measured [n, videos], n > 1"""
    n, videos = measured.shape
    of_seeds = measured.mean(1, keepdims=True)                                     # [n, 1]
    rest = measured - of_seeds - measured.mean(0) + measured.mean()
    variance_of_rest = np.square(rest).sum() / ((n - 1) * (videos - 1))
    variance = of_seeds.var(ddof=1) - variance_of_rest / videos
    return max(0.0, variance) / n


def half_width(parts: list[tuple[float, int]], percent: int) -> float:
    """Of an interval, from the parts of its variance and their degrees of freedom."""
    variances, freedoms = np.array(parts).reshape(-1, 2).T
    variance = variances.sum()
    if variance == 0:
        return 0.0
    # Welch and Satterthwaite: the freedom of the sum lies near that of its largest part.
    freedom = variance ** 2 / (np.square(variances) / freedoms).sum()
    # Over 1 / freedom, quantiles lie nearly on a line.
    student = np.interp(-1 / freedom, -1 / FREEDOMS, STUDENT[percent])
    return float(student * np.sqrt(variance))
