"""What summaries and objects of narrations share: their options, and who answers questions."""
import argparse

from support.common.disk import check_distinct, check_writable
from support.files.answers import Answers


def question_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pred", required=True, help="predictions, as for evaluate.py score")
    parser.add_argument("--llm", default="none",
                        help="language model: folder or hub id; none: by rule (default)")
    parser.add_argument("--answers", default="answers.jsonl", metavar="FILE",
                        help="the language model's answers; none is asked for twice "
                             "(default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def language_model(args: argparse.Namespace) -> Answers | None:
    """None with --llm none. BadData if the file of answers is read as something else, too, or
    cannot be written."""
    if args.llm == "none":
        return None
    check_distinct(args.answers, args.pred)
    check_distinct(args.answers, args.gt or "")
    check_writable(args.answers)
    return Answers(args.llm, args.answers)
