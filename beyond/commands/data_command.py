"""python data.py: toy videos, statistics, features."""
import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import beyond.baselines  # noqa: F401  narrators that --model can name
from data import (
    PAPER, Sample, header_of_all, load_dataset, number_of_words, statistics,
)
from narrator import Config, VisionEncoder
from support.common.devices import device_and_dtype
from support.common.errors import command_line
from support.common.options import (
    DATASETS, Parser, add_settings, data_options, dataset_folder, device_option, json_option,
    non_negative_int, positive_float, positive_int, refuse_without_effect, settings_given,
)
from support.common.processes import process_group
from support.common.progress import progress, say
from support.common.text import counted
from support.engine.checkpoint import open_checkpoint
from support.engine.cpu import speed_up
from support.engine.folders import portable_path
from support.engine.frozen import find_model, load_tokenizer, token_ids
from support.files import own_videos
from support.files.encoding import encode_videos
from support.files.sentences import Notes


# ---------------------------------------------------------------------- the three commands


def toy_command(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if options.count == 1:
        write_toy(options.seed, options.minutes, output, options.world)
    else:
        seeds = range(options.seed, options.seed + options.count)
        for seed in progress(seeds, str(output), unit="video"):
            write_toy(seed, options.minutes, output / f"toy-{seed:07d}.mp4", options.world)
    print(f"{output}: {counted(options.count, 'video')}")


def write_toy(seed: int, minutes: float, output: Path, world: str = "plain") -> None:
    """Write a video of the named world, about `minutes` long, and its ground truth."""
    from toy.files import write_kitchen
    from toy.world import find_world, lasting
    write_kitchen(lasting(seed, 60 * minutes, find_world(world)), output)


# as needs of settings (support/common/options.py)
SPLITS = "a data set with splits (a folder of toy videos has none)"
RENDERED = "rendered videos (--data toy without --root)"
NEEDS = {"split": SPLITS, "world": RENDERED}


def samples_of(args: argparse.Namespace, split: str, streaming: bool = False) -> Iterable[Sample]:
    """The samples of a data set (`data_options`); those of the toy as they are asked for. BadData if
    an option that is given would have no effect on them.
    """
    is_toy = args.data == "toy"
    refuse_without_effect(vars(args), NEEDS, {
        SPLITS: not (is_toy and args.root),
        RENDERED: is_toy and not args.root,
    })
    if is_toy:
        from toy.files import toy_samples
        return toy_samples(args.root, split, args.limit, args.world or "plain")
    return load_dataset(args.data, args.root, split, args.limit, streaming)


# Table 8: videos, length and its deviation, segments, seconds of a segment, words of a narration
ROW = " {:7d}  {:7.1f} +- {:5.1f}  {:9.1f}  {:13.2f}  {:17.1f}"


def stats_command(options: argparse.Namespace) -> None:
    split = options.split or ("val" if options.data in DATASETS else "all")
    samples = samples_of(options, split)
    if options.data != "toy":
        samples = list(samples)
        header_of_all(samples)
    unit = "words"
    count = number_of_words
    if options.llm:
        unit = "tokens"
        tokenizer = load_tokenizer(options.llm)

        def count(text: str) -> int:
            return len(token_ids(tokenizer, text))

    stats = statistics(progress(samples, options.data, unit="video"), count)
    print(f"        videos   length [s]          segments  seg. dur. [s]  "
          f"{unit} / narration")
    print("here ", ROW.format(*stats.values()))
    if options.data in PAPER:
        train, val, *columns = PAPER[options.data]
        videos = train if split == "train" else val
        note = "" if options.llm else "  (tokens of Llama: --llm)"
        print("paper", ROW.format(videos, *columns) + note)
    if options.json:
        print(json.dumps({"data": options.data, "split": split, "unit": unit} | stats))


@process_group()
def encode_command(options: argparse.Namespace) -> None:
    given = settings_given(options, Config)
    config = Config(**given)
    if options.model:
        config = open_checkpoint(options.model, **given).config
    if options.data:
        folder = dataset_folder(options.data, None)
        config.vision = portable_path(config.vision)
        notes = Notes()
        videos = own_videos.to_encode(folder, notes)
        say(notes.after(f"{folder}: {counted(len(videos), 'video')} with narrations"))
        output = folder / "features"
    else:
        videos = options.videos
        output = Path(options.output)

    vision = find_model(config.vision, "vision")
    if options.model and "vision" not in given:
        vision.known_mark(f"the narrator {options.model}", config.vision_mark)

    def load() -> VisionEncoder:
        encoder = VisionEncoder(vision, config.grid, *device_and_dtype(options.device))
        speed_up(encoder)
        return encoder

    settings = {
        "vision_mark": vision.mark,
        "fps": str(config.fps),
        "grid": str(config.grid),
    }
    encode_videos(videos, output, load, settings, config.vision, options.batch,
                  renew=bool(options.data))
    print(f"{output}: {counted(len(videos), 'video')}")


# ---------------------------------------------------------------------- the command line


def run(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="data.py", description="Data sets: statistics, features, the toy.")
    commands = parser.add_subparsers(dest="command", required=True)

    toy = commands.add_parser("toy", help="write toy videos with their ground truth")
    toy.set_defaults(command=toy_command)
    toy.add_argument("--seed", type=non_negative_int, default=7,
                     help="which video (default: %(default)s)")
    toy.add_argument("--minutes", type=positive_float, default=3,
                     help="approximate length (default: %(default)s)")
    toy.add_argument("--output", required=True,
                     help="FILE.mp4 (FILE.json comes beside it); a folder with --count")
    toy.add_argument("--count", type=positive_int, default=1,
                     help="videos, of seeds SEED, SEED + 1, ...; resumable")
    toy.add_argument("--world", default="plain",
                     help="default %(default)s; the worlds of toy/world.py")

    stats = commands.add_parser("stats",
                                help="size, length and narrations of a data set (App. B.4)")
    stats.set_defaults(command=stats_command)
    stats.add_argument("--llm", help="count the tokens of this model's tokenizer, not words")
    json_option(stats)
    data_options(stats, "val; of a folder, all")

    encoding = commands.add_parser("encode",
                                   help="frame features of videos; finished ones are kept")
    encoding.set_defaults(command=encode_command)
    encoding.add_argument("videos", nargs="*", metavar="VIDEO",
                          help="videos, with --output; or --data")
    encoding.add_argument("--output", help="folder; ROOT/features of a data set")
    encoding.add_argument("--data", metavar="FOLDER",
                          help="all videos of a folder that have narrations beside them; features "
                               "go to FOLDER/features, and are made again where a video or the "
                               "settings changed")
    encoding.add_argument("--model",
                          help="narrator whose vision encoder, fps and grid are the defaults")
    add_settings(encoding, Config, ("vision", "fps", "grid"))
    encoding.add_argument("--batch", type=positive_int, default=32,
                          help="frames at once (default: %(default)s)")
    device_option(encoding)

    options = parser.parse_args(arguments)
    if options.command is encode_command:
        given = bool(options.data), bool(options.videos), bool(options.output)
        if given not in ((True, False, False), (False, True, True)):
            encoding.error("give VIDEO... and --output FOLDER, or --data FOLDER")
    options.command(options)


def main() -> None:
    command_line(run)
