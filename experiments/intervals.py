"""Is one narrator above another? A bootstrap over test videos and seeds.

Two narrators are compared on the same videos. The interval says how far the difference of their
means would vary with other videos and other seeds: both are drawn anew, with replacement, and the
difference is computed again. A difference is shown only where the interval does not contain 0.

With one seed for each, the interval knows nothing about how much trainings differ: it is of the
videos alone. With few seeds, draws of them vary too little. So how far each seed is from the mean
of the seeds is enlarged before: an expanded percentile interval (Hesterberg, What teachers should
know about the bootstrap, The American Statistician, 2015).
"""
from typing import NamedTuple

import numpy as np

DRAWS = 2000
NORMAL = 1.96                   # 97.5 % quantile of the normal distribution
# and of Student's t distribution with 1, 2, ... degrees of freedom; with more, that of the last
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class ConfidenceInterval(NamedTuple):
    mean: float                                # the difference
    low: float                                 # 95 % of the draws lie between these
    high: float
    seeds: tuple[int, int]                     # of the first narrator, and of the second

    @property
    def shown(self) -> bool:
        """Whether the difference has one sign in the whole interval."""
        return self.low > 0 or self.high < 0


def enlarged(values: np.ndarray, freedom: int) -> np.ndarray:
    """Enlarge how far the mean of each seed is from the mean of the n seeds.

    values      of each seed and video, [n, videos]
    freedom     degrees of freedom of these distances

    The mean of n values that are drawn from n has (n - 1) / n of the variance that the mean of n
    trainings has; and from few values, a deviation is not known well (Student's t).
    """
    n = len(values)
    if n == 1:
        return values
    student = STUDENT[min(freedom, len(STUDENT)) - 1]
    factor = np.sqrt(n / (n - 1)) * student / NORMAL
    distances = values.mean(1, keepdims=True) - values.mean()                  # [n, 1]
    return values + (factor - 1) * distances


def shares(generator: np.random.Generator, count: int) -> np.ndarray:
    """For each draw of `count` things out of as many, the share of each thing: [DRAWS, count]."""
    return generator.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count


def compare_means(first: list[dict[str, float | None]], second: list[dict[str, float | None]],
                  same_trainings: bool = False) -> ConfidenceInterval | None:
    """The difference first - second of the means over videos of a measure, with its interval.

    first, second       of each seed, {video: the measure; None where the video has nothing to
                        measure}
    same_trainings      both are of the same trainings, seed by seed: seeds are drawn for both at
                        once, as videos always are

    None without a result of both. Videos count that have the measure in every result.
    """
    if not first or not second:
        return None
    results = [*first, *second]
    names = []
    for name in results[0]:
        if all(result.get(name) is not None for result in results):
            names.append(name)
    if not names:
        return None

    of_first = np.array([[result[name] for name in names] for result in first])    # [seeds, videos]
    of_second = np.array([[result[name] for name in names] for result in second])
    mean = of_first.mean() - of_second.mean()

    generator = np.random.default_rng(0)
    videos = shares(generator, len(names))
    seeds_of_first = shares(generator, len(first))
    if same_trainings:
        seeds_of_second = seeds_of_first
        freedom = len(first) - 1
    else:
        seeds_of_second = shares(generator, len(second))
        freedom = len(first) + len(second) - 2
    of_first = enlarged(of_first, freedom)
    of_second = enlarged(of_second, freedom)
    means_of_first = np.einsum("ds,sv,dv->d", seeds_of_first, of_first, videos)
    means_of_second = np.einsum("ds,sv,dv->d", seeds_of_second, of_second, videos)
    low, high = np.quantile(means_of_first - means_of_second, [0.025, 0.975])
    return ConfidenceInterval(float(mean), float(low), float(high), (len(first), len(second)))
