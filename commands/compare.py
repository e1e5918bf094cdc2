"""python evaluate.py compare: two evaluations of the same videos side by side."""
import argparse
import json
from pathlib import Path

from evaluate import average
from support.common.disk import expecting, read_json
from support.common.errors import BadData
from support.common.figures import print_table
from support.common.intervals import compare_means

Measures = dict[str, dict[str, float | None]]  # by name, of each video


def run_compare(args: argparse.Namespace):
    """Means over the videos in which both have a measure, their difference, and its interval."""
    first = read_json(Path(args.first))
    second = read_json(Path(args.second))
    measures = {}
    with expecting(f"{args.first}, {args.second}",
                   'files of --per-video, {"video": {"measure": number}}'):
        alone = sorted(first.keys() ^ second.keys())
        if alone:
            raise BadData(f"{len(alone)} videos are in one of the two files alone, such as "
                          f"{alone[0]}: evaluate both narrators on the same videos")
        for name in dict.fromkeys(name for row in first.values() for name in row):
            measure = side_by_side(first, second, name)
            if measure:
                measures[name] = measure
    if not measures:
        raise BadData("there is nothing to compare: no two videos have a measure in both files")

    columns = ("first", "second", "difference", "low", "high", "videos")
    print_table([(column, {name: measure[column] for name, measure in measures.items()})
                 for column in columns])
    print("low, high: 95 % interval of the difference, over videos. It is of these two narrators: "
          "how much their trainings differ is not known from one evaluation of each")
    if args.json:
        print(json.dumps(measures))


def side_by_side(first: Measures, second: Measures, name: str) -> dict | None:
    """None if fewer than two videos have the measure in both."""
    of_first = {video: row.get(name) for video, row in first.items()}
    of_second = {video: row.get(name) for video, row in second.items()}
    interval = compare_means([of_first], [of_second])
    if interval is None:
        return None
    both = [video for video in first if None not in (of_first[video], of_second[video])]
    return {
        "first": average([of_first[video] for video in both]),
        "second": average([of_second[video] for video in both]),
        "difference": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "videos": len(both),
    }
