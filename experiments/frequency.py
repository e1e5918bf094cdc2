"""How often a narrator narrates with several settings (paper Fig. 9).

    python evaluate.py stream --data toy --world hard --json > dynamic.json
    python evaluate.py stream --data toy --world hard --static --json > static.json
    python -m experiments.figures frequency dynamic.json static.json --png frequency.png
"""
import argparse
import json
from pathlib import Path

from support.common.disk import check_distinct, is_number, read_text
from support.common.errors import BadData
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import named_file

PANELS = {"narrations_per_minute": "narrations a minute", "segment_s": "mean segment, seconds"}


def read_pace(file: Path) -> dict[str, float | None]:
    """The values of PANELS, predicted and true, from what `evaluate.py stream` or `score` printed
    with --json.

    A value is None where there is nothing to average. BadData if the file's last line is something
    else.
    """
    lines = read_text(file).splitlines()
    keys = [*PANELS, *(f"true_{key}" for key in PANELS)]
    try:
        result = json.loads(lines[-1])
        pace = {key: result[key] for key in keys}
        is_pace = all(value is None or is_not_negative(value) for value in pace.values())
    except (ValueError, LookupError, TypeError, RecursionError):
        is_pace = False
    if not is_pace:
        raise BadData(f"{file}: its last line must be what evaluate.py stream (or score) prints "
                      "with --json")
    return pace


def is_not_negative(value) -> bool:
    """A number, 0 or more."""
    return is_number(value) and value >= 0


def plot_frequency(rows: list[tuple[str, dict[str, float | None]]], png: str) -> None:
    """Bars of (setting, pace), the first on top. A line across each bar is the truth's value."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9, 1 + 0.35 * len(rows)), sharey=True)
    for axes, (key, label) in zip(panels, PANELS.items()):
        for height, (_, pace) in enumerate(rows):
            value = pace[key]
            true = pace[f"true_{key}"]
            first = height == 0                # one entry for all bars in the legend
            axes.barh(height, value or 0, 0.6, color="#e8a04c",
                      label="predicted" if first else None)
            if true is not None:
                axes.vlines(true, height - 0.42, height + 0.42, color="black",
                            label="truth" if first else None)
            text = "-" if value is None else f"{value:.1f}"
            axes.annotate(text, (0, height), (4, 0), textcoords="offset points", va="center",
                          fontsize=8)
        axes.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
        axes.spines[["top", "right"]].set_visible(False)
    settings = [setting for setting, _ in rows]
    panels[0].set_yticks(range(len(rows)), settings, parse_math=False)
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    save_figure(figure, png)


def run_frequency(args: argparse.Namespace) -> None:
    for _, file in args.files:
        check_distinct(args.png or "", file)
    rows = [(setting, read_pace(file)) for setting, file in args.files]
    print_table([(setting[-16:], pace) for setting, pace in rows])     # 16: the width of a column
    if args.png:
        plot_frequency(rows, args.png)


def frequency_options(parser: argparse.ArgumentParser):
    parser.set_defaults(run=run_frequency)
    parser.add_argument("files", nargs="+", type=named_file, metavar="NAME=FILE",
                        help="a setting and what evaluate.py stream printed for it with --json; "
                             "without NAME=, the setting is called as its file")
    parser.add_argument("--png", metavar="FILE", help="also draw them")
