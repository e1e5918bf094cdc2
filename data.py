"""Narrated videos: Ego4D, EgoExo4D, EPIC-Kitchens-100 and the toy world (paper §4.1, App. B.4).

    python data.py toy --seed 7 --minutes 3 --output kitchen.mp4     a toy video and its ground truth, kitchen.json
    python data.py stats --data NAME                                 a data set's row of Table 8 (App. B.4)
    python data.py encode VIDEO... --output ROOT/features            frame features of videos
    python data.py encode --data FOLDER --model MODEL                those of your own videos (support/own.py)
    python data.py rewrite --data NAME --llm ID                      raw narrations as sentences, by a language model

Glossary
fps         frames a second that the narrator sees (2 in the paper), whatever the rate of the file
frame i     the picture on screen i / fps seconds after the first one; it stands for the time up to (i + 1) / fps
narration   (frame, text): the sentence written after its frame; the first is at frame 0
segment     the frames after one narration up to the next: as many segments as narrations
memory      words of a narration that only visual memory can give; () if there are none, as in all but the toy

support/ reads annotation files (annotations.py), videos (video.py) and features (features.py).
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from narrator import Config, VisionEncoder
from support import annotations, own
from support.annotations import Notes, frame_at, time_of
from support.common import (BadData, choose, command_line, positive_float, positive_int, progress, rank, read_json,
                            whole, write_json)
from support.encoding import encode_videos
from support.features import Store, encode_pictures
from support.narrations import read_described
from support.options import DATASETS, WHICH, Parser, dataset, home, is_dataset, parse_shard
from support.rewrite import rewrite
from support.training import located
from support.video import Video, write_video
from toy import world


# ------------------------------------------------------------------------------------------------- samples

@dataclass
class Sample:
    """A narrated video; nothing is decoded or rendered before `frames()` is called, and never all at once."""
    name: str
    narrations: list[tuple[int, str]]          # (frame, text), frames strictly increasing
    memory_words: list[tuple[str, ...]]        # one per narration: the words that only visual memory can give
    fps: float
    num_frames: int
    duration: float                            # seconds of the whole video, of which the sample may be a part
    source: Callable[[], Iterator[np.ndarray]] | None                 # pictures, or
    read: Callable[[int, int], Tensor] | None = None                  # (start, stop) -> features [stop - start, J, D]
    tracks: list[list[tuple[float, str]]] | None = None               # ground truth in seconds, if it is more than that
    offset: float = 0.0                                               # seconds of the video at the sample's first frame
    origin: float = 0.0                                               # seconds at which its first segment begins

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return self.source()

    def tokens(self, vision: Callable[[Tensor], Tensor] | None = None, batch: int = 1) -> Iterator[Tensor]:
        """Frame tokens [J, D], frame by frame, never all at once; `vision` encodes pictures, `batch` at a time."""
        if self.read is None:
            yield from encode_pictures(self.frames(), vision, batch)
        else:
            for start in range(0, self.num_frames, 256):
                yield from self.read(start, min(start + 256, self.num_frames))


def make_sample(name: str, narrations: Iterable[tuple[int, str, tuple]], fps: float, num_frames: int,
                source: Callable[[], Iterator[np.ndarray]]) -> Sample:
    """A Sample from (frame, text, memory) in any order; of two on one frame the later replaces the earlier."""
    by_frame = {frame: (text, memory) for frame, text, memory in narrations}
    order = sorted(by_frame)
    return Sample(name, [(frame, by_frame[frame][0]) for frame in order], [by_frame[frame][1] for frame in order],
                  fps, num_frames, num_frames / fps, source)


def shorten(sample: Sample, max_frames: int | None) -> Sample:
    """At most so many frames (None: any number) of a sample: as published, up to the last narration that fits."""
    if max_frames is None or sample.num_frames <= max_frames:
        return sample
    narrations = [(frame, text) for frame, text in sample.narrations if frame < max_frames]
    count = narrations[-1][0] + 1 if narrations else max_frames
    return replace(sample, narrations=narrations, memory_words=sample.memory_words[:len(narrations)], num_frames=count,
                   source=sample.source and (lambda: islice(sample.source(), count)))


def read_sample(path: str | Path) -> Sample:
    """The sample that a .json file beside a video describes (support/narrations.py: `read_described`)."""
    video, fps, duration, sentences = read_described(Path(path))
    num_frames = frame_at(duration, fps) + 1
    frames = [(frame_at(y.time, fps), y.text, y.memory_words) for y in sentences]
    for n, (frame, _, _) in enumerate(frames):
        if frame >= num_frames:
            raise BadData(f"{path}: narrations[{n}]: {sentences[n].time} s is after the end ({duration} s)")
    return make_sample(Path(path).stem, frames, fps, num_frames, lambda: _decoded(video, fps, num_frames))


def _decoded(path: Path, fps: float, num_frames: int) -> Iterator[np.ndarray]:
    video, count = Video(path, fps), 0
    for count, frame in enumerate(islice(video, num_frames), 1):
        yield frame
    video.report()
    if count < num_frames:
        raise BadData(f"{path}: has {count} frames, its .json promises {num_frames}; truncated? get the video again")


# ------------------------------------------------------------------------------------------- the toy world

def toy_sample(kitchen: world.Kitchen) -> Sample:
    """A toy video, rendered as its frames are read."""
    narrations = ((n.frame, n.text, n.memory_words) for n in kitchen.narrations)
    return make_sample(f"toy-{kitchen.seed}", narrations, world.FPS, len(kitchen),
                       lambda: map(kitchen.render, range(len(kitchen))))


def write_toy(seed: int, minutes: float, output: str | Path, variant: str = "plain") -> Sample:
    """Write OUTPUT.mp4, then OUTPUT.json, each when complete; a video of the named world, about `minutes` long."""
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
    narrations = [{"time": time_of(frame, sample.fps), "text": text} | ({"memory": list(words)} if words else {})
                  for (frame, text), words in zip(sample.narrations, sample.memory_words)]
    return {"video": video, "fps": sample.fps, "duration": sample.duration, "narrations": narrations}


# ------------------------------------------------------------------------------------------- any data set

def load_dataset(name: str, root: str | Path | None = None, split: str = "val", limit: int | None = None,
                 streaming: bool = False, max_frames: int | None = None,
                 shape: tuple = (None, None), variant: str = "plain") -> Iterator[Sample]:
    """The samples of a data set, one after the other.

    name        "toy": without a root it is rendered on the fly; with one, it is read from ROOT/SPLIT if there is such a
                folder, else from ROOT, in the order of the names of the .json files (each beside its .mp4). The others:
                one sample per annotator and video, from the first narration to the last; root is data/NAME by default.
                A folder: your own videos (support/own.py), without a root
    limit       at most so many; None: all in the root, or world.VIDEOS of the split
    streaming   for the self-conditioned protocol: each video once, with the tracks of all its annotators
    max_frames  a sample ends with the last narration that fits into so many frames (streamed samples are never cut)
    shape       (J, D) that features must have
    variant     name of the world (toy/world.py: WORLDS) of the toy's rendered videos
    Raises BadData for unknown names and splits, for a root without samples, and for damaged files.
    """
    if not is_dataset(name):
        raise BadData(f"unknown data set {name!r}; {WHICH}")
    for value in (limit, max_frames):
        if value is not None and value < 1:
            raise BadData(f"the limit of videos or frames must be 1 or more, not {value}")
    if variant != "plain" and (name != "toy" or root):
        raise BadData(f"--world {variant} is for the toy's rendered videos, without --root")
    max_frames = None if streaming else max_frames
    if name != "toy":
        return annotated(name, home(name, root), split, limit, streaming, max_frames, shape)
    if split not in world.SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(world.SEEDS)}")
    if root is None:
        videos = world.kitchens(split, limit, world=world.find_world(variant))
        return (shorten(toy_sample(kitchen), max_frames) for _, kitchen in videos)
    folder = Path(root) / split if (Path(root) / split).is_dir() else Path(root)
    files = sorted(folder.glob("*.json"))[:limit]
    if not files:
        raise BadData(f"{folder}: {'has no .json files' if folder.is_dir() else 'no such folder'}; "
                      f"make some: python data.py toy --count 10 --output {root}")
    return (shorten(read_sample(file), max_frames) for file in files)


def annotated(name: str, root: Path, split: str, limit: int | None, streaming: bool, max_frames: int | None,
              shape: tuple) -> Iterator[Sample]:
    """All but the toy: annotations joined with features; what was corrected is reported on stderr."""
    notes = Notes()
    if name not in DATASETS:
        samples = [own_sample(one, shape) for one in own.read_folder(root, split, limit, notes)]
    else:
        found = (annotations.intervals if streaming else annotations.tracks)(name, root, split, notes)[:limit]
        store = Store(root, annotations.take_names(root) if name == "egoexo4d" else None)
        samples = [interval_sample(one, store, shape) if streaming else track_sample(one, store, shape, notes)
                   for one in found]
    before = sum(len(sample.narrations) for sample in samples)
    samples = [shorten(sample, max_frames) for sample in samples]
    notes.add("narrations cut off by the limit of frames", before - sum(len(sample.narrations) for sample in samples))
    if not samples:
        raise BadData(f"{root}: the {split} split of {name} has no narrations")
    if rank()[0] == 0:
        print(f"{name} {split}: {len(samples)} samples{'; ' if str(notes) else ''}{notes}", file=sys.stderr)
    return iter(samples)


def track_sample(track: annotations.Track, store: Store, shape: tuple, notes: Notes) -> Sample:
    """One annotator's narrations of one video, from the first to the last."""
    entry = store.entry(track.video)
    placed = annotations.assign_frames(track.narrations, entry["duration"], world.FPS, notes, entry.get("frames"))
    first = placed[0][0]
    narrations = [(frame - first, text) for frame, text in placed]
    return Sample(f"{track.video}/{track.annotator}", narrations, [()] * len(narrations), world.FPS,
                  narrations[-1][0] + 1, entry["duration"], None,
                  lambda start, stop: store.read(track.video, first + start, first + stop, *shape))


def interval_sample(interval: annotations.Interval, store: Store, shape: tuple) -> Sample:
    """An interval of a video with all its tracks; its narrations' times count from the start of the video."""
    video, first, stop = interval.video, int(interval.start * world.FPS), int(interval.end * world.FPS) + 1
    count = min(stop, store.rows(video)) - first
    if count < 1:
        raise BadData(f"{store.locate(video)[0]}, video {video}: ends before its narrations begin ({interval.start} s)")
    return Sample(f"{video}_{first}_{stop}", [], [], world.FPS, count, store.entry(video)["duration"], None,
                  lambda start, stop: store.read(video, first + start, first + stop, *shape),
                  [one.narrations for one in interval.tracks], interval.start, interval.origin)


def own_sample(video: own.Narrated, shape: tuple) -> Sample:
    """A video of a folder, from its first narration to its end, for training and streaming alike."""
    first, fps = video.first, video.fps
    rows = ((frame - first, y.text, y.memory_words) for frame, y in video.narrations)
    return replace(make_sample(video.name, rows, fps, video.frames - first, None), duration=video.frames / fps,
                   offset=first / fps, origin=first / fps,
                   read=lambda start, stop: video.store.read(video.name, first + start, first + stop, *shape))


# ------------------------------------------------------------------------------------------- features and statistics

# Table 8 (App. B.4): videos for training and validation, then as in `statistics`; narrations in Llama's tokens
PAPER = {"ego4d": (102986, 17059, 237.7, 92.0, 53, 4.5, 12), "egoexo4d": (3219, 826, 151.4, 232.7, 58, 2.6, 17),
         "ek100": (495, 138, 493.9, 621.3, 112, 4.4, 10)}


def statistics(samples: Iterable[Sample], words_in: Callable[[str], int] = lambda text: len(text.split())) -> dict:
    """The columns of Table 8: seconds, counts and words (mean over videos; durations and words over all narrations),
    and the `spread` of segments."""
    lengths, counts, words, recalled, parts = [], [], [], 0, []
    for sample in samples:
        lengths.append(sample.num_frames / sample.fps)
        counts.append(len(sample.narrations))
        words += [words_in(text) for _, text in sample.narrations]
        recalled += sum(map(bool, sample.memory_words))
        parts += (np.diff([frame for frame, _ in sample.narrations]) / sample.fps).tolist()
    each = max(1, len(words))                                      # videos without narrations have no segments
    return {"videos": len(lengths), "length_mean": float(np.mean(lengths)), "length_std": float(np.std(lengths)),
            "segments_per_video": float(np.mean(counts)), "segment_duration": sum(lengths) / each,
            "words_per_narration": sum(words) / each, "memory_share": recalled / each} | own.spread(parts)


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
        there = video.with_suffix(".json")                                     # comes last: finished
        if not (video.exists() and there.exists()):
            write_toy(seed, options.minutes, video, options.world)
        elif read_json(there) != sidecar(lasting_sample(seed, options.minutes, options.world), video.name):
            raise BadData(f"{video}: is of another length or world; delete it, or choose another --output")
    print(f"{output}: {options.count} videos")


def stats_command(options: argparse.Namespace) -> None:
    options.split = options.split or ("val" if options.data in DATASETS else "all")
    samples, more, unit = load_dataset(options.data, options.root, options.split, options.limit), {}, "words"
    if options.llm:
        from support.checkpoint import load_tokenizer, token_ids
        tokenizer, unit = load_tokenizer(options.llm), "tokens"
        more = {"words_in": lambda text: len(token_ids(tokenizer, text))}
    stats = statistics(progress(samples, options.data, unit="video"), **more)
    print(f"        videos   length [s]          segments  seg. dur. [s]  {unit} / narration  memory narrations")
    print("here   {videos:7d}  {length_mean:7.1f} +- {length_std:5.1f}  {segments_per_video:9.1f}  "
          "{segment_duration:13.2f}  {words_per_narration:17.1f}  {memory_share:17.1%}".format_map(stats))
    if options.data in PAPER:
        train, val, mean, deviation, segments, duration, tokens = PAPER[options.data]
        videos, note = train if options.split == "train" else val, "" if options.llm else "  (tokens of Llama: --llm)"
        print(f"paper  {videos:7d}  {mean:7.1f} +- {deviation:5.1f}  {segments:9.1f}  {duration:13.2f}  {tokens:17.1f}"
              f"{note}")
    print(own.advice(stats))
    if options.json:
        print(json.dumps({"data": options.data, "split": options.split, "unit": unit} | stats))


def encode_command(options: argparse.Namespace) -> None:
    config, videos = Config(**own.eyes(options.model, **{k: getattr(options, k) for k in own.EYES})), options.videos
    if options.data:
        config.vision, videos, options.output = located(config.vision), *own.to_encode(Path(options.data))
    load = lambda: VisionEncoder(config.vision, config.grid, *choose(options.device))
    encode_videos(videos, Path(options.output), load, config.vision, config.fps, config.grid, options.batch,
                  options.shard or rank(), renew=bool(options.data))
    print(f"{options.output}: {len(videos)} videos")


def rewrite_command(options: argparse.Namespace) -> None:
    rewrite(options.data, home(options.data, options.root), options.split or "val", options.limit, options.llm,
            *choose(options.device))


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="data.py", description="Data sets: statistics, features, the toy.")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write toy videos with their ground truth")
    toy.add_argument("--seed", type=whole, default=7, help="which video (default: %(default)s)")
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
    encoding.add_argument("--grid", type=whole, help=f"pooled tokens per side (default: {Config.grid})")
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


if __name__ == "__main__":
    command_line(main)
