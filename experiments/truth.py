"""What experiments on narrations read: the options that they share, and the ground truth."""
import argparse
from pathlib import Path

import data
from commands.evaluate import split_of, truth_of
from support.common.devices import DTYPES
from support.common.disk import check_distinct, check_writable
from support.common.options import data_options
from support.files.narrations import Truth, read_truth


def known_truth(args: argparse.Namespace) -> dict[str, Truth]:
    """The ground truth of --gt, or of the streamed videos of --data."""
    if args.gt:
        return read_truth(Path(args.gt))
    samples = data.load_dataset(args.data, args.root, split_of(args), args.limit, streaming=True,
                                variant=args.world)
    return {sample.name: truth_of(sample) for sample in samples}


def truth_options(parser: argparse.ArgumentParser):
    """The options of all experiments on narrations: what is read, and who answers questions."""
    parser.add_argument("--pred", required=True, help="predictions, as for evaluate.py score")
    parser.add_argument(
        "--gt", help="ground truth: a file or a folder, as for evaluate.py score; or --data")
    data_options(parser, required=False)
    parser.add_argument(
        "--partial", action="store_true", help="only the videos that have predictions")
    parser.add_argument("--llm", default="none",
                        help="language model: folder or hub id; none: by rule (default)")
    parser.add_argument("--answers", default="answers.jsonl", metavar="FILE",
                        help="the language model's answers; none is asked for twice "
                             "(default %(default)s)")
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def parse_truth(parser: argparse.ArgumentParser, needed: bool) -> argparse.Namespace:
    """The command line, parsed.

    It is a usage error to give ground truth twice, or not at all though it is needed.
    """
    args = parser.parse_args()
    given_twice = args.gt and args.data
    missing = not (args.gt or args.data)
    if given_twice or (missing and needed):
        parser.error("give ground truth by --gt or by --data")
    if not args.data and (args.root or args.split or args.limit or args.world != "plain"):
        parser.error("--root, --split, --limit and --world need --data")
    return args


def protect(args: argparse.Namespace, output: str = "") -> None:
    """BadData if what is written would destroy what is read, or cannot be written."""
    answers = "" if args.llm == "none" else args.answers
    written = [Path(file) for file in (output, answers) if file]
    check_writable(*written)
    for source in (args.pred, args.gt):
        check_distinct(source or "", *written)
