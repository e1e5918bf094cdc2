"""Figures and tables."""
from pathlib import Path

from support.common.disk import replacing
from support.common.progress import say


def pyplot():
    """matplotlib, which draws to files only. It is imported here because most commands do not
    draw."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save_figure(figure, png: str | Path) -> None:
    with replacing(png) as part:
        figure.savefig(part, dpi=100, format="png", bbox_inches="tight")
    pyplot().close(figure)
    say(f"written: {png}")


def print_table(rows: list[tuple[str, dict]]):
    """Print a table with one column for each (label, {name: value}); a single label is left out.

    The names of the first column are the table's lines.
    """
    if len(rows) > 1:
        print(" " * 26 + "".join(f"{label:>17}" for label, _ in rows))
    for name in rows[0][1]:
        cells = [table_cell(values.get(name)) for _, values in rows]
        print(f"{name.replace('_', ' '):26}" + "".join(f"{cell:>17}" for cell in cells))


def table_cell(value) -> str:
    """Shares and scores with three digits; "-" if the value was not computed."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)
