"""Figures and tables."""
from __future__ import annotations

import sys
from pathlib import Path

from support.common.disk import replacing


# ---------------------------------------------------------------------- figures


def pyplot():
    """matplotlib, drawing to files only; imported when a figure is wanted."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save_figure(figure, png: str | Path) -> None:
    with replacing(png) as part:
        figure.savefig(part, dpi=100, format="png", bbox_inches="tight")
    pyplot().close(figure)
    print(f"written: {png}", file=sys.stderr)


def print_table(rows: list[tuple[str, dict]]):
    """One column for each row's label; shares and scores with three digits, what was not computed as -."""
    form = lambda value: "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(rows) > 1:
        print(" " * 26 + "".join(f"{label:>17}" for label, _ in rows))
    for name in rows[0][1]:
        print(f"{name.replace('_', ' '):26}" + "".join(f"{form(row.get(name)):>17}" for _, row in rows))
