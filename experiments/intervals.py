"""Is one narrator above another? A paired bootstrap over test videos and seeds.

Two narrators are compared on the same videos. The interval says how far the difference of their
means would vary with other videos and other seeds: both are drawn anew, with replacement, and the
difference is computed again. A difference is shown only where the interval does not contain 0.

With one seed for each, the interval knows nothing about how much trainings differ: it is of the
videos alone.
"""
from typing import NamedTuple

import numpy as np

DRAWS = 2000


class ConfidenceInterval(NamedTuple):
    mean: float                                # the difference
    low: float                                 # 95 % of the draws lie between these
    high: float
    seeds: tuple[int, int]                     # of the first narrator, and of the second

    @property
    def shown(self) -> bool:
        """Whether the difference has one sign in the whole interval."""
        return self.low > 0 or self.high < 0


def compare_means(first: list[dict[str, float | None]],
                  second: list[dict[str, float | None]]) -> ConfidenceInterval | None:
    """The difference first - second of the means over videos of a measure, with its interval.

    first, second   of each seed, {video: the measure; None where the video has nothing to measure}

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

    of_first = np.array([[result[name] for name in names] for result in first])      # [seeds, videos]
    of_second = np.array([[result[name] for name in names] for result in second])
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        videos = generator.integers(len(names), size=len(names))
        seeds_of_first = generator.integers(len(first), size=len(first))
        seeds_of_second = generator.integers(len(second), size=len(second))
        mean_of_first = of_first[seeds_of_first][:, videos].mean()
        mean_of_second = of_second[seeds_of_second][:, videos].mean()
        draws.append(mean_of_first - mean_of_second)
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = of_first.mean() - of_second.mean()
    return ConfidenceInterval(float(mean), float(low), float(high), (len(first), len(second)))
