"""Options that several commands have, each written once, and the types of their values."""
from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

from support.common.devices import DTYPES
from support.common.errors import BadData
from support.common.text import without_secrets
from support.common.version import versions


DEFAULT_MODEL = str(Path(__file__).parents[2] / "toy" / "checkpoint")   # the bundled narrator
DATASETS = ("toy", "ego4d", "egoexo4d", "ek100")


class Version(Action):
    """--version: git is asked when it is given, not whenever a command starts."""

    def __call__(self, parser: ArgumentParser, *given):
        words = [f"{name} {version}" for name, version in versions().items()]
        print("FlowNar, " + ", ".join(words))
        parser.exit()


class Parser(ArgumentParser):
    """The parser of every command.

    A wrong command line gets one line, which names --help: the usage has 20 lines. Secrets are
    hidden, because the wrong argument may be an address with a password.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.add_argument("--version", action=Version, nargs=0, dest=SUPPRESS, default=SUPPRESS,
                          help="print the commit, and the versions of Python and packages")

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {without_secrets(message)}; see --help\n")


# ---------------------------------------------------------------------- types of values


def in_range(convert: type, low: float, high: float, says: str) -> Callable[[str], float]:
    """An argparse type: convert(text), refused (exit code 2) unless low <= value <= high.

    says: the values that are allowed, for the message.
    """
    def parse(text: str):
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:    # nan is in no range
            raise ArgumentTypeError(f"must be {says}, not {text!r}")
        return value
    return parse


LARGEST = 10 ** 9                                        # libraries and loops fail beyond it
positive_int = in_range(int, 1, LARGEST, "a whole number, 1 or more (at most a billion)")
non_negative_int = in_range(int, 0, LARGEST, "a whole number, 0 or more (at most a billion)")
positive_float = in_range(float, 1 / LARGEST, LARGEST,
                          "a number above 0 (from a billionth to a billion)")
non_negative = in_range(float, 0, LARGEST, "a number, 0 or more (at most a billion)")
probability = in_range(float, 0, 1, "a number from 0 to 1")
frame_rate = in_range(float, 1e-3, 1e3, "a number from 0.001 to 1000")


def kept_narrations(text: str) -> int | str:
    """An argparse type: a number of narrations, or "all"."""
    return text if text == "all" else non_negative_int(text)


def dataset_folder(name: str, root: str | Path | None) -> Path:
    """The folder of a data set; of your own videos, `name` itself (support/files/own_videos.py).

    BadData if there is no such data set.
    """
    if name in DATASETS:
        return Path(root or f"data/{name}")
    if not name or not Path(name).is_dir():
        raise BadData(f"--data {name}: no such folder; choose one of {', '.join(DATASETS)}, or a "
                      f"folder of videos with narrations beside them")
    if root:
        raise BadData(f"--root {root} is for the data sets with names; "
                      f"the videos of --data {name} are in it")
    return Path(name)


# ---------------------------------------------------------------------- options


def data_options(parser: ArgumentParser, required: bool = True):
    parser.add_argument("--data", required=required,
                        help=" | ".join(DATASETS) + " | FOLDER of videos")
    parser.add_argument("--root", help="folder of the data set (toy: rendered by seed without it)")
    parser.add_argument("--split", help="train, val or test (default: test for the toy, else val)")
    parser.add_argument("--limit", type=positive_int, help="use at most this many videos")
    parser.add_argument("--world", default="plain",
                        help="of the toy's videos: plain, idle, still or night (toy/README.md)")


def json_option(parser: ArgumentParser):
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def device_option(parser: ArgumentParser):
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, mps (default: the best there is)")


def dtype_option(parser: ArgumentParser):
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES],
                        help="number format of both models (default: bfloat16 on CUDA, else "
                             "float32; stream.py takes bfloat16 for a large model on a processor "
                             "that multiplies it)")


def model_options(parser: ArgumentParser, **model):
    """`model`: arguments of --model for argparse, such as its default."""
    options = {"help": "checkpoint folder or hub id (default: the bundled toy)"} | model
    parser.add_argument("--model", **options)
    parser.add_argument("--last-k", type=kept_narrations, metavar="K",
                        help='FlowNar-C: keep only the last K narrations, or "all" '
                             '(default: what the checkpoint says)')
    parser.add_argument("--llm", help="base language model: folder or hub id "
                                      "(default: the checkpoint's)")
    parser.add_argument("--vision",
                        help="vision encoder: folder or hub id (default: the checkpoint's)")
    device_option(parser)
    dtype_option(parser)


def trigger_options(parser: ArgumentParser):
    parser.add_argument("--theta", type=probability,
                        help="narrate when p([SKIP]) <= theta (default 0.8)")
    parser.add_argument("--theta-low", type=probability,
                        help="the threshold soon after a narration (default 0.5; not used with "
                             "--static)")
    parser.add_argument("--refractory", type=non_negative,
                        help="seconds after a narration with theta-low (default 4; not used with "
                             "--static)")
    parser.add_argument("--static", action="store_true", help="one threshold only, theta")


def config_changes(args: Namespace) -> dict:
    """The settings of a narrator (narrator.py: Config) that the command line changes."""
    changes = {}
    for name in ("fps", "theta", "theta_low", "refractory", "last_k", "max_segment",
                 "max_position", "vision"):
        value = getattr(args, name, None)                # None: the command lacks it, or not given
        if value is not None:
            changes[name] = value
    if changes.get("last_k") == "all":
        changes["last_k"] = None
    return changes
