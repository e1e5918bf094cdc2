"""Every table of the paper in miniature, our numbers beside the paper's.

    python -m experiments.tables                     all results that are there
    python -m experiments.tables T5 T13              train and evaluate what these lack; show them
    python -m experiments.tables T5 --show           only show them
    python -m experiments.tables --list              how many results each has, and should have
    python -m experiments.tables --page              write all into README.md and earlier.md

Trained narrators and predictions are kept in --output; an interrupted run goes on where it stopped.
For several processors start several of these, each with seeds of its own and an --output of its own.
Results are lines of experiments/results/*.jsonl. Results of other commands are not shown, and are
made anew when the table is completed. Dated tables have no results of today's commands.
"""
import argparse
import re
from pathlib import Path

from experiments.paper import TABLES
from experiments.runs import FOLDER, carry_out, needed, result
from experiments.show import markdown
from support.common.disk import write_text
from support.common.errors import BadData, command_line
from support.common.options import Parser, non_negative_int

HERE = Path(__file__).parent
PAGES = [HERE / "README.md", HERE / "earlier.md"]
# A name, and its table. Tables that stay as they are have two words there: "dated T13".
TABLE_OF_PAGE = re.compile(r"<!-- (?!end )([\w-]+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def update_pages() -> None:
    """Write the tables of PAGES anew, each between its two comments."""
    for page in PAGES:
        text = TABLE_OF_PAGE.sub(
            lambda match: f"<!-- {match[1]} -->\n{markdown(match[1])}\n<!-- end -->",
            page.read_text(encoding="utf-8"))
        write_text(page, text)


def list_tables(names: list[str]) -> None:
    """Print how many results each table has, of how many."""
    for name in names:
        table = TABLES[name]
        experiments = needed(table)
        made = [experiment for experiment in experiments if result(experiment)]
        dated = f"; the page has that of commit {table.dated}" if table.dated else ""
        print(f"{name:13} {table.title}: {len(made)} of {len(experiments)} results{dated}")


def run_tables(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in TABLES:
            raise BadData(f"there is no table {name}; choose of {', '.join(TABLES)}")
    if args.list:
        list_tables(args.names or list(TABLES))
        return
    if args.page:
        update_pages()
        return
    if not args.show:
        for name in args.names:                # without names, no table is completed
            for experiment in needed(TABLES[name], args.seeds):
                carry_out(experiment, args.output)
    names = args.names or [name for name, table in TABLES.items() if not table.dated]
    print("\n\n".join(markdown(name) for name in names))


def main():
    parser = Parser(prog="python -m experiments.tables",
                    description="The paper's tables in miniature.")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"tables to complete: {', '.join(TABLES)}")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true",
                        help="show what is there of the named tables, and run nothing")
    action.add_argument("--page", action="store_true",
                        help="only write all tables of README.md and earlier.md anew")
    action.add_argument("--list", action="store_true", help="only say how many results there are")
    parser.add_argument("--seeds", nargs="+", type=non_negative_int, metavar="N",
                        help="trainings to make; default: those of each row (paper.json)")
    parser.add_argument("--output", default=FOLDER,
                        help=f"folder of trained narrators (default {FOLDER})")
    args = parser.parse_args()
    if args.page and args.names:
        parser.error("--page writes all tables")
    if args.seeds and (args.show or not args.names):
        parser.error("--seeds: of the trainings that the named tables lack")
    command_line(lambda: run_tables(args))


if __name__ == "__main__":
    main()
