"""How often a narrator speaks with several settings (paper Fig. 9): python -m experiments.figures frequency.

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
    """The keys of PANELS, and of the truth, in what `evaluate.py stream` or `score` printed with --json.

    None where there is nothing to average. BadData if the file's last line is something else.
    """
    lines = read_text(file).splitlines() or [""]
    try:
        result = json.loads(lines[-1])
        pace = {prefix + key: result[prefix + key] for prefix in ("", "true_") for key in PANELS}
    except (ValueError, KeyError, TypeError, RecursionError):
        pace = {"": ""}
    if not all(value is None or is_number(value) and value >= 0 for value in pace.values()):
        raise BadData(f"{file}: its last line must be what evaluate.py stream (or score) prints with --json")
    return pace


def plot_frequency(rows: list[tuple[str, dict[str, float | None]]], png: str):
    """Bars of (setting, values), the first on top; a line across each bar is the truth's value."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9, 1 + 0.35 * len(rows)), sharey=True)
    for axes, (key, label) in zip(panels, PANELS.items()):
        for y, (_, row) in enumerate(rows):
            value, true = row[key], row["true_" + key]
            axes.barh(y, value or 0, 0.6, color="#e8a04c", label=None if y else "predicted")
            if true is not None:
                axes.vlines(true, y - 0.42, y + 0.42, color="black", label=None if y else "truth")
            axes.annotate("-" if value is None else f"{value:.1f}", (0, y), (4, 0), textcoords="offset points",
                          va="center", fontsize=8)
        axes.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [name for name, _ in rows], parse_math=False)
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    save_figure(figure, png)


def run_frequency(args: argparse.Namespace):
    for _, file in args.files:
        check_distinct(args.png or "", file)
    rows = [(name, read_pace(file)) for name, file in args.files]
    print_table([(name[-16:], row) for name, row in rows])
    if args.png:
        plot_frequency(rows, args.png)


def frequency_options(parser: argparse.ArgumentParser):
    parser.set_defaults(run=run_frequency)
    parser.add_argument("files", nargs="+", type=named_file, metavar="NAME=FILE",
                        help="a setting and what evaluate.py stream printed for it with --json; without NAME=, the "
                             "setting is called as its file")
    parser.add_argument("--png", metavar="FILE", help="also draw them")
