"""python data.py: toy videos, statistics, features, rewritten narrations."""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from data import PAPER, Sample, number_of_words, load_dataset, statistics, toy_sample
from narrator import Config, VisionEncoder
from streams.checks import check_inputs
from support.common.devices import device_and_dtype, rank
from support.common.disk import read_json, write_json
from support.common.errors import BadData, command_line
from support.common.options import (
    DATASETS, Parser, dataset, dataset_folder, frame_rate, non_negative_int, parse_shard,
    positive_float, positive_int,
)
from support.common.progress import progress
from support.engine.checkpoint import load_tokenizer, token_ids
from support.engine.training import portable_path
from support.files import own_videos
from support.files.encoding import encode_videos
from support.files.rewrite import rewrite
from support.files.tracks import time_of
from support.files.video import write_video
from toy import world


def write_toy(seed: int, minutes: float, output: str | Path, variant: str = "plain") -> Sample:
    """Write a video of the named world, about `minutes` long, to OUTPUT.mp4, and its narrations to
    OUTPUT.json. Each file appears when it is complete.
    """
    output = Path(output)
    truth = truth_beside(output)
    sample = lasting_sample(seed, minutes, variant)
    frames = progress(sample.frames(), output.name, sample.num_frames, "frame", leave=False)
    write_video(output, frames, sample.fps)
    write_json(truth, sidecar(sample, output.name))
    return sample


def truth_beside(video: Path) -> Path:
    """The file of a toy video's narrations. BadData unless the video's name ends in .mp4."""
    if video.suffix.lower() != ".mp4":
        raise BadData(f"{video}: the name of the output must end in .mp4")
    return video.with_suffix(".json")


def add_toy(seed: int, minutes: float, output: Path, variant: str) -> Sample:
    """`write_toy`, unless it is done. Raises BadData if another video has the name."""
    truth = truth_beside(output)               # written last: the video is finished
    if not (output.exists() and truth.exists()):
        return write_toy(seed, minutes, output, variant)
    sample = lasting_sample(seed, minutes, variant)
    if read_json(truth) != sidecar(sample, output.name):
        raise BadData(f"{output}: is another video, or of another length or world; delete it, or "
                      "choose another --output")
    return sample


def lasting_sample(seed: int, minutes: float, variant: str) -> Sample:
    if not 0 < minutes <= 24 * 60:
        raise BadData(f"--minutes must be more than 0 and at most {24 * 60}, not {minutes}")
    return toy_sample(world.lasting(seed, 60 * minutes, world.find_world(variant)))


def sidecar(sample: Sample, video: str) -> dict:
    """The .json file beside a video of the toy."""
    narrations = []
    for (frame, text), memory_words in zip(sample.narrations, sample.memory_words):
        narration = {"time": time_of(frame, sample.fps), "text": text}
        if memory_words:
            narration["memory"] = list(memory_words)
        narrations.append(narration)
    return {"video": video, "fps": sample.fps, "duration": sample.duration,
            "narrations": narrations}


# ---------------------------------------------------------------------- the four commands


def toy_command(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if options.count == 1:
        truth = truth_beside(output)
        if output.exists() and not truth.exists():
            raise BadData(f"{output}: is there already, without {truth}: not a video of the toy; "
                          "choose another --output")
        if truth.exists() and not output.exists():
            raise BadData(f"{truth}: is there already, without {output}; delete it, or choose "
                          "another --output")
        sample = add_toy(options.seed, options.minutes, output, options.world)
        print(f"{output}, {truth}: "
              f"{sample.duration:g} s, {len(sample.narrations)} narrations")
        return
    if output.suffix.lower() == ".mp4":
        raise BadData(f"{options.count} videos need a folder as --output, not {output}")
    output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.count)
    for seed in progress(seeds, str(output), unit="video"):
        add_toy(seed, options.minutes, output / f"toy-{seed:07d}.mp4", options.world)
    print(f"{output}: {options.count} videos")


def stats_command(options: argparse.Namespace) -> None:
    if not options.split:
        options.split = "val" if options.data in DATASETS else "all"
    samples = load_dataset(options.data, options.root, options.split, options.limit)
    if options.llm:
        tokenizer = load_tokenizer(options.llm)
        unit = "tokens"

        def count(text: str) -> int:
            return len(token_ids(tokenizer, text))
    else:
        unit = "words"
        count = number_of_words

    stats = statistics(progress(samples, options.data, unit="video"), count)
    print(f"        videos   length [s]          segments  seg. dur. [s]  "
          f"{unit} / narration  memory narrations")
    print("here   {videos:7d}  {length_mean:7.1f} +- {length_std:5.1f}  {segments_per_video:9.1f}  "
          "{segment_duration:13.2f}  {words_per_narration:17.1f}  {memory_share:17.1%}"
          .format_map(stats))
    if options.data in PAPER:
        train, val, mean, deviation, segments, duration, tokens = PAPER[options.data]
        videos = train if options.split == "train" else val
        note = "" if options.llm else "  (tokens of Llama: --llm)"
        print(f"paper  {videos:7d}  {mean:7.1f} +- {deviation:5.1f}  {segments:9.1f}  "
              f"{duration:13.2f}  {tokens:17.1f}{note}")
    print(own_videos.advice(stats))
    if options.json:
        print(json.dumps({"data": options.data, "split": options.split, "unit": unit} | stats))


def encode_command(options: argparse.Namespace) -> None:
    settings = own_videos.encoder_settings(options.model, vision=options.vision, fps=options.fps,
                                           grid=options.grid)
    config = Config(**settings)
    if options.data:
        config.vision = portable_path(config.vision)
        videos, output = own_videos.to_encode(Path(options.data))
    else:
        videos = options.videos
        output = options.output

    def load() -> VisionEncoder:
        return VisionEncoder(config.vision, config.grid, *device_and_dtype(options.device))

    encode_videos(videos, Path(output), load, config.vision, config.fps, config.grid, options.batch,
                  options.shard or rank(), renew=bool(options.data), check=check_inputs)
    print(f"{output}: {len(videos)} videos")


def rewrite_command(options: argparse.Namespace) -> None:
    root = dataset_folder(options.data, options.root)
    device, dtype = device_and_dtype(options.device)
    rewrite(options.data, root, options.split or "val", options.limit, options.llm, device, dtype)


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
                     help=f"default %(default)s; {', '.join(world.WORLDS)}")

    stats = commands.add_parser("stats",
                                help="size, length and narrations of a data set (App. B.4)")
    stats.set_defaults(command=stats_command)
    stats.add_argument("--llm", help="count the tokens of this model's tokenizer, not words")
    stats.add_argument("--json", action="store_true", help="one JSON object as the last line")
    stats.add_argument("--data", required=True, type=dataset,
                       help=" | ".join(DATASETS) + " | FOLDER")
    sample_options(stats)

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
    encoding.add_argument("--vision", help=f"default: {Config.vision}")
    encoding.add_argument("--fps", type=frame_rate, help=f"default: {Config.fps}")
    encoding.add_argument("--grid", type=non_negative_int,
                          help=f"pooled tokens per side (default: {Config.grid})")
    encoding.add_argument("--batch", type=positive_int, default=32,
                          help="frames at once (default: %(default)s)")
    encoding.add_argument("--shard", type=parse_shard,
                          help="I/N: only part I of N (under torchrun: by process)")
    device_option(encoding)

    rewriting = commands.add_parser("rewrite",
                                    help="raw narrations as sentences, by a language model")
    rewriting.set_defaults(command=rewrite_command)
    rewriting.add_argument("--llm", required=True,
                           help="hub id or folder of an instruction-tuned model")
    device_option(rewriting)
    published = [name for name in DATASETS if name != "toy"]
    rewriting.add_argument("--data", required=True, choices=published, help=" | ".join(published))
    sample_options(rewriting)

    options = parser.parse_args(arguments)
    if options.command is encode_command:
        if options.data:
            is_clear = not options.videos and not options.output
        else:
            is_clear = options.videos and options.output
        if not is_clear:
            encoding.error("give VIDEO... and --output FOLDER, or --data FOLDER")
    options.command(options)


def device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, mps (default: the best there is)")


def sample_options(parser: argparse.ArgumentParser) -> None:
    """Which samples of a data set."""
    parser.add_argument("--root",
                        help="folder of the data set (default: data/NAME; the toy is rendered)")
    parser.add_argument("--split", help="default: val; of a folder, all")
    parser.add_argument("--limit", type=positive_int, help="at most this many samples")


def main() -> None:
    command_line(run)
