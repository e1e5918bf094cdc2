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
    DATASETS, Parser, dataset, dataset_folder, parse_shard, positive_float, positive_int, non_negative_int,
)
from support.common.progress import progress
from support.engine.training import portable_path
from support.files import own_videos
from support.files.encoding import encode_videos
from support.files.rewrite import rewrite
from support.files.tracks import time_of
from support.files.video import write_video
from toy import world


def write_toy(seed: int, minutes: float, output: str | Path, variant: str = "plain") -> Sample:
    """Write OUTPUT.mp4, then OUTPUT.json, each when complete; a video of the named world, about
    `minutes` long.
    """
    output = Path(output)
    if output.suffix.lower() != ".mp4":
        raise BadData(f"{output}: the name of the output must end in .mp4")
    sample = lasting_sample(seed, minutes, variant)
    bar = progress(sample.frames(), output.name, sample.num_frames, "frame", leave=False)
    write_video(output, bar, sample.fps)
    write_json(output.with_suffix(".json"), sidecar(sample, output.name))
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
    return {"video": video, "fps": sample.fps, "duration": sample.duration, "narrations": narrations}


# -------------------------------------------------------------------------------------------- command line


def toy_command(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if options.count == 1:
        sample = write_toy(options.seed, options.minutes, output, options.world)
        print(f"{output}, {output.with_suffix('.json')}: {sample.duration:g} s, {len(sample.narrations)} narrations")
        return
    if output.suffix.lower() == ".mp4":
        raise BadData(f"{options.count} videos need a folder as --output, not {output}")
    output.mkdir(parents=True, exist_ok=True)
    for seed in progress(range(options.seed, options.seed + options.count), str(output), unit="video"):
        video = output / f"toy-{seed:07d}.mp4"
        truth = video.with_suffix(".json")              # written last: the video is finished
        if not (video.exists() and truth.exists()):
            write_toy(seed, options.minutes, video, options.world)
            continue
        sample = lasting_sample(seed, options.minutes, options.world)
        if read_json(truth) != sidecar(sample, video.name):
            raise BadData(f"{video}: is of another length or world; delete it, "
                          "or choose another --output")
    print(f"{output}: {options.count} videos")


def stats_command(options: argparse.Namespace) -> None:
    options.split = options.split or ("val" if options.data in DATASETS else "all")
    samples = load_dataset(options.data, options.root, options.split, options.limit)
    unit = "words"
    count = number_of_words
    if options.llm:
        from support.engine.checkpoint import load_tokenizer, token_ids
        tokenizer = load_tokenizer(options.llm)
        unit = "tokens"

        def count(text: str) -> int:
            return len(token_ids(tokenizer, text))

    stats = statistics(progress(samples, options.data, unit="video"), count)
    print(f"        videos   length [s]          segments  seg. dur. [s]  {unit} / narration  memory narrations")
    print("here   {videos:7d}  {length_mean:7.1f} +- {length_std:5.1f}  {segments_per_video:9.1f}  "
          "{segment_duration:13.2f}  {words_per_narration:17.1f}  {memory_share:17.1%}".format_map(stats))
    if options.data in PAPER:
        train, val, mean, deviation, segments, duration, tokens = PAPER[options.data]
        videos = train if options.split == "train" else val
        note = "" if options.llm else "  (tokens of Llama: --llm)"
        print(f"paper  {videos:7d}  {mean:7.1f} +- {deviation:5.1f}  {segments:9.1f}  {duration:13.2f}  {tokens:17.1f}"
              f"{note}")
    print(own_videos.advice(stats))
    if options.json:
        print(json.dumps({"data": options.data, "split": options.split, "unit": unit} | stats))


def encode_command(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in own_videos.ENCODER_KEYS}
    config = Config(**own_videos.encoder_settings(options.model, **given))
    videos = options.videos
    if options.data:
        config.vision = portable_path(config.vision)
        videos, options.output = own_videos.to_encode(Path(options.data))
    load = lambda: VisionEncoder(config.vision, config.grid, *device_and_dtype(options.device))
    encode_videos(videos, Path(options.output), load, config.vision, config.fps, config.grid, options.batch,
                  options.shard or rank(), renew=bool(options.data), check=check_inputs)
    print(f"{options.output}: {len(videos)} videos")


def rewrite_command(options: argparse.Namespace) -> None:
    rewrite(options.data, dataset_folder(options.data, options.root), options.split or "val", options.limit, options.llm,
            *device_and_dtype(options.device))


def run(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="data.py", description="Data sets: statistics, features, the toy.")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write toy videos with their ground truth")
    toy.add_argument("--seed", type=non_negative_int, default=7, help="which video (default: %(default)s)")
    toy.add_argument("--minutes", type=positive_float, default=3, help="approximate length (default: %(default)s)")
    toy.add_argument("--output", required=True, help="FILE.mp4 (FILE.json comes beside it); a folder with --count")
    toy.add_argument("--count", type=positive_int, default=1, help="videos, of seeds SEED, SEED + 1, ...; resumable")
    toy.add_argument("--world", default="plain", help=f"default %(default)s; {', '.join(world.WORLDS)}")
    toy.set_defaults(command=toy_command)
    stats = commands.add_parser("stats", help="size, length and narrations of a data set (App. B.4)")
    stats.set_defaults(command=stats_command)
    stats.add_argument("--llm", help="count the tokens of this model's tokenizer, not words")
    stats.add_argument("--json", action="store_true", help="one JSON object as the last line")
    encoding = commands.add_parser("encode", help="frame features of videos; finished ones are kept")
    encoding.add_argument("videos", nargs="*", metavar="VIDEO", help="videos, with --output; or --data")
    encoding.add_argument("--output", help="folder; ROOT/features of a data set")
    encoding.add_argument("--data", metavar="FOLDER", help="all videos of a folder that have narrations beside them; "
                          "features go to FOLDER/features, and are made again where a video or the settings changed")
    encoding.add_argument("--model", help="narrator whose vision encoder, fps and grid are the defaults")
    encoding.add_argument("--vision", help=f"default: {Config.vision}")
    encoding.add_argument("--fps", type=positive_float, help=f"default: {Config.fps}")
    encoding.add_argument("--grid", type=non_negative_int, help=f"pooled tokens per side (default: {Config.grid})")
    encoding.add_argument("--batch", type=positive_int, default=32, help="frames at once (default: %(default)s)")
    encoding.add_argument("--shard", type=parse_shard, help="I/N: only part I of N (under torchrun: by process)")
    encoding.set_defaults(command=encode_command)
    rewriting = commands.add_parser("rewrite", help="raw narrations as sentences, by a language model")
    rewriting.add_argument("--llm", required=True, help="hub id or folder of an instruction-tuned model")
    rewriting.set_defaults(command=rewrite_command)
    for one in (encoding, rewriting):
        one.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    for one in (stats, rewriting):
        names = {"type": dataset} if one is stats else {"choices": DATASETS[1:]}
        one.add_argument("--data", required=True, **names,
                         help=" | ".join(DATASETS[one is not stats:]) + " | FOLDER" * (one is stats))
        one.add_argument("--root", help="folder of the data set (default: data/NAME; the toy is rendered)")
        one.add_argument("--split", help="default: val; of a folder, all")
        one.add_argument("--limit", type=positive_int, help="at most this many samples")
    options = parser.parse_args(arguments)
    if options.command is encode_command and (options.videos or options.output if options.data else
                                              not (options.videos and options.output)):
        encoding.error("give VIDEO... and --output FOLDER, or --data FOLDER")
    options.command(options)


def main() -> None:
    command_line(run)
