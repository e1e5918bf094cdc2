"""Settings and options: what is said of each, once, and the types of their values."""
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import get_args, get_type_hints

from support.common.devices import DTYPES
from support.common.errors import BadData
from support.common.text import without_secrets
from support.common.version import versions


DEFAULT_MODEL = str(Path(__file__).parents[2] / "toy" / "checkpoint")   # the bundled narrator
TOY_TITLE = "A miniature kitchen of FlowNar"       # by which a video says that it is one of the toy
THAT_OF_CHECKPOINT = "that of the checkpoint"
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

LEAST = 1e-9                                    # of numbers above 0
LARGEST = 10 ** 9                               # libraries and loops fail beyond it


def in_range(convert: type, low: float, high: float, none: str = "") -> Callable[[str], float]:
    """An argparse type: convert(text), refused (exit code 2) unless low <= value <= high.

    none        the word for None, if there is one
    """
    number = "a whole number" if convert is int else "a number"
    says = f"{number} from {low:,} to {high:,}" + (f', or "{none}"' if none else "")

    def parse(text: str):
        if none and text == none:
            return None
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:    # nan is in no range
            raise ArgumentTypeError(f"must be {says}, not {text!r}")
        return value
    return parse


positive_int = in_range(int, 1, LARGEST)
non_negative_int = in_range(int, 0, LARGEST)
positive_float = in_range(float, LEAST, LARGEST)


# ---------------------------------------------------------------------- the table of settings

# what an option needs that the toy has not
FILES = "data from files (the toy is rendered; it trains on the CPU in float32)"


def setting(default, text: str, values: tuple | Mapping | None = None, *, needs: str = "",
            compared: bool = True, none: str = ""):
    """A field of a dataclass: a setting of a narrator (narrator.py: Config), or of a training.

    Most are options of a command. All that is to be known of one stands in its metadata:

    help        what it is
    values      the smallest and the largest number, or the words that it can be. None: any word, a
                whole number from 1, a number above 0
    needs       without what it has no effect, in words with commas between: where this is missing,
                the option is refused
    compared    what goes on later (--resume, --state) must have been begun with the same value
    none        how None is written
    """
    about = {"help": text, "values": values, "needs": needs, "compared": compared, "none": none}
    return field(default=default, metadata=about)


def limits_of(f: Field, kind: type) -> tuple[float, float]:
    """The smallest and the largest value of a setting that is a number."""
    return f.metadata["values"] or (1 if kind is int else LEAST, LARGEST)


def kinds_of(table: type) -> dict[str, tuple]:
    """The types that each setting of a dataclass can have, with NoneType if it can be None."""
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(table).items()}


def names_of(table: type) -> set[str]:
    """The names of all settings of a dataclass."""
    return {f.name for f in fields(table)}


def flag_of(name: str, value=None) -> str:
    """How an option is written: val_limit -> --val-limit, and prune = False -> --no-prune."""
    words = name.replace("_", "-")
    return f"--no-{words}" if value is False else f"--{words}"


def needs_of(*tables: type) -> dict[str, str]:
    """{name: what it needs} of the settings of dataclasses."""
    return {f.name: f.metadata.get("needs", "") for table in tables for f in fields(table)}


def refuse_without_effect(given: Mapping, needs: Mapping[str, str], holds: Mapping[str, bool]):
    """BadData if an option has no effect, because something that it needs is not there.

    given       {name: value} of options; None: it is not given
    needs       {name: what it needs}, with commas between
    holds       {what is needed: whether it is there}
    """
    for name, value in given.items():
        for need in needs.get(name, "").split(", "):
            if value is not None and not holds.get(need, True):
                raise BadData(f"{flag_of(name, value)} needs {need}")


def add_settings(group, table: type, names: Iterable[str], default: str | None = None,
                 defaults: Mapping = {}) -> None:
    """Add settings of a dataclass to the options of a command. What is not given is not in the
    parser's result.

    default     says what holds if an option is not given; None: the default of its field
    defaults    those of the toy, which differ
    """
    kinds = kinds_of(table)
    for f in fields(table):
        if f.name not in names or not f.metadata:
            continue
        kind = kinds[f.name][0]
        text = f.metadata["help"]
        values = f.metadata["values"]
        if kind is bool:
            action = "store_false" if f.default else "store_true"
            flag = flag_of(f.name, not f.default)
            group.add_argument(flag, help=text, action=action, dest=f.name, default=SUPPRESS)
            continue
        if default or f.default is not None:
            text += f"; default {default or f.default}"
        if f.name in defaults:
            text += f" (toy: {defaults[f.name]})"
        if kind is not str:
            allowed = {"type": in_range(kind, *limits_of(f, kind), f.metadata["none"])}
        else:
            allowed = {"choices": values and tuple(values)}
        group.add_argument(flag_of(f.name), help=text, default=SUPPRESS, **allowed)


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


def data_options(parser: ArgumentParser, split: str = "test for the toy, else val"):
    """split: says what it is by default."""
    parser.add_argument("--data", required=True,
                        help=" | ".join(DATASETS) + " | FOLDER of videos")
    parser.add_argument("--root", help="folder of the data set (default: data/NAME; the toy is rendered)")
    parser.add_argument("--split", help=f"train, val or test (default: {split})")
    parser.add_argument("--limit", type=positive_int, help="use at most this many videos")
    parser.add_argument("--world",
                        help="of the toy's rendered videos: plain (the default), idle, still or night "
                             "(toy/README.md)")


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


def model_options(parser: ArgumentParser, config: type, **model):
    """Of commands that have a narrator.

    config      the class of its settings (narrator.py: Config)
    model       arguments of --model for argparse, such as its default
    """
    options = {"help": "checkpoint folder or hub id (default: the bundled toy)"} | model
    parser.add_argument("--model", **options)
    add_settings(parser, config, ("last_k", "llm", "vision"), THAT_OF_CHECKPOINT)
    device_option(parser)
    dtype_option(parser)


def trigger_options(parser: ArgumentParser, config: type):
    add_settings(parser, config, ("theta", "theta_low", "refractory"), THAT_OF_CHECKPOINT)
    parser.add_argument("--static", action="store_true", help="one threshold only, theta")


def trigger_has(args: Namespace) -> dict[str, bool]:
    """What `trigger_options` leave, for `refuse_without_effect`."""
    given = vars(args)
    return {
        "two thresholds": not given.get("static"),
        "a refractory time": given.get("refractory") != 0,
    }


def settings_given(args: Namespace, config: type) -> dict:
    """The settings of a narrator (narrator.py: Config) that a command line gives."""
    names = names_of(config)
    given = {name: value for name, value in vars(args).items() if name in names}
    if "theta" in given and getattr(args, "static", False):
        given["theta_low"] = given["theta"]     # it is not used, and must not be above theta
    return given
