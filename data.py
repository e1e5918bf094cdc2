"""Narrated videos: Ego4D, EgoExo4D, EPIC-Kitchens-100 and the toy world (paper §4.1, App. B.4).

    python data.py toy --seed 7 --minutes 3 --output kitchen.mp4     a toy video and its ground truth, kitchen.json
    python data.py stats --data NAME                                 App. B.4's table for a data set
    python data.py encode VIDEO... --output ROOT/features            frame features of videos (features.py)
    python data.py rewrite --data NAME --llm ID                      raw narrations as sentences, by a language model

Glossary
fps         frames a second that the narrator sees (2 in the paper), whatever the rate of the file
frame i     the picture on screen i / fps seconds after the first one; it stands for the time up to (i + 1) / fps
narration   (frame, text): the sentence written after its frame; the first is at frame 0
segment     the frames after one narration up to the next: as many segments as narrations
memory      words of a narration that only visual memory can give; () where there are none (all but the toy)

Annotation files are read in annotations.py, videos in video.py, features in features.py.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from support import annotations
from support.annotations import Notes
from support.common import BadData, choose, command_line, rank, read_json, replacing, write_json
from support.features import Store, encode
from toy import world
from support.video import Video, write_video


# ----------------------------------------------------------------------------------------- time and frames

def frame_at(time: float, fps: float) -> int:
    """The frame whose span (i / fps, (i + 1) / fps] holds a time in seconds; frame 0 for anything earlier."""
    return max(0, ceil(time * fps - 1e-6) - 1)                     # 1e-6: time_of(i) * fps may exceed i + 1 by a rounding


def time_of(frame: int, fps: float) -> float:
    """The end of a frame's span in seconds."""
    return (frame + 1) / fps


# ------------------------------------------------------------------------------------------------- samples

@dataclass
class Sample:
    """A narrated video; nothing is decoded or rendered before `frames()` is called, and never all at once."""
    name: str
    narrations: list[tuple[int, str]]          # (frame, text), frames strictly increasing
    memory: list[tuple[str, ...]]              # one per narration: the words that only visual memory can give
    fps: float
    num_frames: int
    source: Callable[[], Iterator[np.ndarray]] | None                 # pictures, or
    read: Callable[[int, int], Tensor] | None = None                  # (start, stop) -> features [stop - start, J, D]
    tracks: list[list[tuple[float, str]]] | None = None               # ground truth in seconds, if it is more than that
    offset: float = 0.0                                               # seconds of the video at the sample's first frame
    origin: float = 0.0                                               # seconds at which its first segment begins

    def frames(self) -> Iterator[np.ndarray]:
        """num_frames pictures, uint8 [H, W, 3]."""
        return self.source()

    def tokens(self, vision: Callable[[Tensor], Tensor] | None = None) -> Iterator[Tensor]:
        """Frame tokens [J, D], one frame after the other, never all at once; `vision` encodes where there are pictures."""
        if self.read is None:
            for picture in self.frames():
                yield vision(torch.from_numpy(picture)[None])[0]
        else:
            for start in range(0, self.num_frames, 256):
                yield from self.read(start, min(start + 256, self.num_frames))


def make_sample(name: str, told: Iterable[tuple[int, str, tuple]], fps: float, num_frames: int,
                source: Callable[[], Iterator[np.ndarray]]) -> Sample:
    """A Sample from (frame, text, memory) in any order; of two on one frame the later replaces the earlier."""
    by_frame = {frame: (text, memory) for frame, text, memory in told}
    order = sorted(by_frame)
    return Sample(name, [(frame, by_frame[frame][0]) for frame in order], [by_frame[frame][1] for frame in order],
                  fps, num_frames, source)


def read_sample(path: str | Path) -> Sample:
    """The sample that a .json file describes; times are in seconds, "video" is relative to the file's folder.

        {"video": "kitchen.mp4", "fps": 2, "duration": 151.5,
         "narrations": [{"time": 0.5, "text": "You fill the rack.", "memory": ["green", "bowl"]}, ...]}

    "memory" may be left out. Raises BadData naming the file and the entry that is wrong.
    """
    path = Path(path)
    content = read_json(path)

    def check(right: bool, what: str) -> None:
        if not right:
            raise BadData(f"{path}: {what}")

    check(isinstance(content, dict), 'must be an object with "video", "fps", "duration" and "narrations"')
    check(isinstance(content.get("video"), str), '"video" must be the name of a file')
    for key in ("fps", "duration"):
        check(is_number(content.get(key)) and content[key] > 0, f'"{key}" must be a number above 0')
    check(isinstance(content.get("narrations"), list), '"narrations" must be a list')
    fps, num_frames, told = content["fps"], frame_at(content["duration"], content["fps"]) + 1, []
    for n, entry in enumerate(content["narrations"]):
        check(isinstance(entry, dict), f"narrations[{n}] must be an object")
        time, text, memory = entry.get("time"), entry.get("text"), entry.get("memory", [])
        check(is_number(time) and time >= 0, f'narrations[{n}]: "time" must be a number of seconds, 0 or more')
        check(frame_at(time, fps) < num_frames, f"narrations[{n}]: {time} s is after the end ({content['duration']} s)")
        check(isinstance(text, str) and text.strip(), f'narrations[{n}]: "text" must be a sentence')
        check(isinstance(memory, list) and all(isinstance(word, str) for word in memory),
              f'narrations[{n}]: "memory" must be a list of words')
        told.append((time, text, tuple(memory)))
    told.sort(key=lambda entry: entry[0])      # stable: "the later" of one frame is the later in time, then in the file
    frames = ((frame_at(time, fps), text, memory) for time, text, memory in told)
    video = path.parent / content["video"]
    return make_sample(path.stem, frames, fps, num_frames, lambda: _decoded(video, fps, num_frames))


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _decoded(path: Path, fps: float, num_frames: int) -> Iterator[np.ndarray]:
    video, count = Video(path, fps), 0
    for count, frame in enumerate(islice(video, num_frames), 1):
        yield frame
    video.report()
    if count < num_frames:
        raise BadData(f"{path}: has {count} frames, its .json promises {num_frames}; truncated? get the video again")


# ------------------------------------------------------------------------------------------- the toy world

# Seeds below a million are free: for demonstrations (`data.py toy --seed 7`) and tests of the code.
TOY_SEEDS = {"train": range(1_000_000, 2_000_000), "val": range(2_000_000, 2_100_000),
             "test": range(3_000_000, 3_100_000)}                  # test: for reported numbers only
TOY_COUNT = {"train": 800, "val": 30, "test": 30}                  # videos if no limit is given
TOY_SEGMENTS = (8, 12)                                             # least and most segments of a video
MEAN_SEGMENT = 3.5                                                 # seconds


def toy_sample(seed: int, segments: int) -> Sample:
    """The toy video of a seed; rendered while its frames are asked for."""
    kitchen = world.Kitchen(seed, segments)
    told = ((n.frame, n.text, tuple(n.memory)) for n in kitchen.narrations)
    return make_sample(f"toy-{seed}", told, world.FPS, len(kitchen), lambda: map(kitchen.render, range(len(kitchen))))


def toy_samples(split: str, count: int, segments: tuple[int, int] = TOY_SEGMENTS) -> Iterator[Sample]:
    """The first `count` toy videos of a split, each of lo to hi segments (inclusive), drawn from its own seed."""
    if split not in TOY_SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(TOY_SEEDS)}")
    seeds, (low, high) = TOY_SEEDS[split], segments
    if not 1 <= count <= len(seeds):
        raise BadData(f"toy {split}: give from 1 to {len(seeds)} videos, not {count}")
    if not 1 <= low <= high:
        raise BadData(f"toy {split}: segments must be (least, most), from 1 up, not {segments}")
    draw = lambda seed: int(np.random.default_rng((seed, 0)).integers(low, high + 1))
    return (toy_sample(seed, draw(seed)) for seed in seeds[:count])


def write_toy(seed: int, minutes: float, output: str | Path) -> Sample:
    """Writes OUTPUT.mp4 and, last, OUTPUT.json, each when complete; of about `minutes`, up to the end of a segment."""
    output = Path(output)
    if output.suffix.lower() != ".mp4":
        raise BadData(f"{output}: the name of the output must end in .mp4")
    if seed < 0 or not (isfinite(minutes) and minutes > 0):
        raise BadData(f"--seed must be 0 or more and --minutes more than 0, not {seed} and {minutes}")
    segments = ceil(60 * minutes / MEAN_SEGMENT)
    sample = toy_sample(seed, segments)
    segments = max(1, round(segments * 60 * minutes * sample.fps / sample.num_frames))     # segments vary: correct once
    sample = toy_sample(seed, segments)
    narrations = [{"time": time_of(frame, sample.fps), "text": text} | ({"memory": list(words)} if words else {})
                  for (frame, text), words in zip(sample.narrations, sample.memory)]
    content = {"video": output.name, "fps": sample.fps, "duration": sample.num_frames / sample.fps,
               "narrations": narrations}
    with replacing(output.with_suffix(".json")) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        bar = tqdm(sample.frames(), total=sample.num_frames, desc=output.name, unit="frame", leave=False, disable=None)
        write_video(output, bar, sample.fps)
    return sample


DATASETS = ("toy", "ego4d", "egoexo4d", "ek100")


def load_dataset(name: str, root: str | Path | None = None, split: str = "val", limit: int | None = None,
                 streaming: bool = False, max_frames: int | None = None, shape: tuple = (None, None)) -> Iterator[Sample]:
    """The samples of a data set, one after the other.

    name        "toy": without a root it is rendered on the fly; with one, it is read from ROOT/SPLIT if there is such a
                folder, else from ROOT, in the order of the names of the .json files (each beside its .mp4). The others:
                one sample per annotator and video, from the first narration to the last; root is data/NAME by default
    limit       at most so many; None: all in the root, or TOY_COUNT of the split
    streaming   what the self-conditioned protocol runs over: a video once, with the tracks of all its annotators
    max_frames  a sample ends with the last narration before so many frames
    shape       (J, D) that features must have
    Raises BadData for unknown names and splits, for a root without samples, and for what is damaged in it.
    """
    if name not in DATASETS:
        raise BadData(f"unknown data set {name!r}; choose one of {', '.join(DATASETS)}")
    if limit is not None and limit < 1:
        raise BadData(f"the limit must be 1 video or more, not {limit}")
    if name != "toy":
        return annotated(name, Path(root or f"data/{name}"), split, limit, streaming, max_frames, shape)
    if split not in TOY_SEEDS:
        raise BadData(f"unknown split {split!r}; choose one of {', '.join(TOY_SEEDS)}")
    if root is None:
        return toy_samples(split, limit or TOY_COUNT[split])
    folder = Path(root) / split if (Path(root) / split).is_dir() else Path(root)
    files = sorted(folder.glob("*.json"))[:limit]
    if not files:
        raise BadData(f"{folder}: {'has no .json files' if folder.is_dir() else 'no such folder'}; "
                      f"make some: python data.py toy --count 10 --output {root}")
    return map(read_sample, files)


def annotated(name: str, root: Path, split: str, limit: int | None, streaming: bool, max_frames: int | None,
              shape: tuple) -> Iterator[Sample]:
    """Ego4D, EgoExo4D, EPIC: annotations and features put together; what was put right is said on stderr."""
    notes = Notes()
    found = (annotations.intervals if streaming else annotations.tracks)(name, root, split, notes)[:limit]
    store = Store(root, annotations.take_names(root) if name == "egoexo4d" else None)
    samples = [(streamed if streaming else told)(one, store, shape, notes, max_frames) for one in found]
    if not samples:
        raise BadData(f"{root}: the {split} split of {name} has no narrations")
    if rank()[0] == 0:
        print(f"{name} {split}: {len(samples)} samples{'; ' if str(notes) else ''}{notes}", file=sys.stderr)
    return iter(samples)


def told(track: annotations.Track, store: Store, shape: tuple, notes: Notes, max_frames: int | None = None) -> Sample:
    """One annotator's narrations of one video, from the first to the last."""
    entry = store.entry(track.video)
    placed = annotations.place(track.narrations, entry["duration"], world.FPS, notes, entry.get("frames"))
    first = placed[0][0]
    narrations = [(frame - first, text) for frame, text in placed if max_frames is None or frame - first < max_frames]
    notes.add("narrations cut off by the limit of frames", len(placed) - len(narrations))
    return Sample(f"{track.video}/{track.annotator}", narrations, [()] * len(narrations), world.FPS, narrations[-1][0] + 1,
                  None, lambda start, stop: store.read(track.video, first + start, first + stop, *shape))


def streamed(interval: annotations.Interval, store: Store, shape: tuple, *_) -> Sample:
    """An interval of a video with all its tracks; its narrations' times count from the start of the video."""
    first, stop = int(interval.start * world.FPS), int(interval.end * world.FPS) + 1
    count = min(stop, store.rows(interval.video)) - first
    if count < 1:
        raise BadData(f"{store.locate(interval.video)[0]}, video {interval.video}: ends before its narrations begin "
                      f"({interval.start} s)")
    return Sample(f"{interval.video}_{first}_{stop}", [], [], world.FPS, count, None,
                  lambda start, stop: store.read(interval.video, first + start, first + stop, *shape),
                  [one.narrations for one in interval.tracks], interval.start, interval.origin)


# What App. B.4 says of the data sets, in the order of `statistics`; narrations are counted in Llama's tokens
PAPER = {"ego4d": (102986, 17059, 237.7, 92.0, 53, 4.5, 12), "egoexo4d": (3219, 826, 151.4, 232.7, 58, 2.6, 17),
         "ek100": (495, 138, 493.9, 621.3, 112, 4.4, 10)}


def statistics(samples: Iterable[Sample], count: Callable[[str], int] = lambda text: len(text.split())) -> dict:
    """App. B.4's columns: seconds, counts and words (mean over videos; durations and words over all narrations)."""
    lengths, counts, words, recalled = [], [], [], 0
    for sample in samples:
        lengths.append(sample.num_frames / sample.fps)
        counts.append(len(sample.narrations))
        words += [count(text) for _, text in sample.narrations]
        recalled += sum(map(bool, sample.memory))
    each = max(1, len(words))                                      # videos without narrations have no segments
    return {"videos": len(lengths), "length_mean": float(np.mean(lengths)), "length_std": float(np.std(lengths)),
            "segments_per_video": float(np.mean(counts)), "segment_duration": sum(lengths) / each,
            "words_per_narration": sum(words) / each, "memory_share": recalled / each}


# -------------------------------------------------------------------------------------------- command line

def toy_command(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if options.count == 1:
        sample = write_toy(options.seed, options.minutes, output)
        print(f"{output}, {output.with_suffix('.json')}: {sample.num_frames / sample.fps:g} s, "
              f"{len(sample.narrations)} narrations")
        return
    if options.count < 1 or output.suffix.lower() == ".mp4":
        raise BadData(f"--count must be 1 or more, and from 2 on --output is a folder, not {output} for {options.count}")
    output.mkdir(parents=True, exist_ok=True)
    for seed in tqdm(range(options.seed, options.seed + options.count), desc=str(output), unit="video"):
        video = output / f"toy-{seed:07d}.mp4"
        if not (video.exists() and video.with_suffix(".json").exists()):       # the .json comes last: finished
            write_toy(seed, options.minutes, video)
    print(f"{output}: {options.count} videos")


def stats_command(options: argparse.Namespace) -> None:
    samples, count, unit = load_dataset(options.data, options.root, options.split, options.limit), {}, "words"
    if options.llm:
        from support.checkpoint import load_tokenizer
        tokenizer, unit = load_tokenizer(options.llm), "tokens"
        count = {"count": lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])}
    stats = statistics(tqdm(samples, desc=options.data, unit="video", disable=None), **count)
    print(f"        videos   length [s]          segments  seg. dur. [s]  {unit} / narration  memory narrations")
    print("here   {videos:7d}  {length_mean:7.1f} +- {length_std:5.1f}  {segments_per_video:9.1f}  {segment_duration:13.2f}  "
          "{words_per_narration:17.1f}  {memory_share:17.1%}".format_map(stats))
    if options.data in PAPER:
        train, val, mean, deviation, segments, duration, tokens = PAPER[options.data]
        print(f"paper  {train if options.split == 'train' else val:7d}  {mean:7.1f} +- {deviation:5.1f}  {segments:9.1f}  "
              f"{duration:13.2f}  {tokens:17.1f}" + ("" if options.llm else "  (tokens of Llama; --llm counts them here, too)"))
    if options.json:
        print(json.dumps({"data": options.data, "split": options.split, "unit": unit} | stats))


def encode_command(options: argparse.Namespace) -> None:
    shard = rank()
    if options.shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", options.shard)
        shard = (int(match[1]) - 1, int(match[2])) if match else (-1, 0)
        if not 0 <= shard[0] < shard[1]:
            raise BadData(f"--shard is i/n with i from 1 to n, such as 1/4, not {options.shard}")
    encode(options.videos, Path(options.output), options.vision, options.fps, options.grid, options.batch, options.device,
           shard)


REWRITE = ("Rewrite the note about what the camera wearer does as one short English sentence in the second person and the "
           'present tense, with articles and a full stop. Add nothing. Answer with the sentence alone.\nNote: open fridge\n'
           "Sentence: You open the fridge.\nNote: C puts the knife on the table\nSentence: You put the knife on the table.\n"
           "Note: {note}\nSentence:")


def rewrite_command(options: argparse.Namespace) -> None:
    """Write the published layout's annotation file from raw annotations; the sentences of a language model.

    Kept in a .jsonl beside it as they come, so that it goes on where it was stopped.
    """
    from support.checkpoint import load_llm
    name, root, notes = options.data, Path(options.root or f"data/{options.data}"), Notes()
    target = root / "annotations" / annotations.PUBLISHED[name].format(split=options.split)
    if there := annotations.find(root, target.name):
        raise BadData(f"{there} is there already")
    tracks = annotations.tracks(name, root, options.split, notes)[:options.limit]
    texts = sorted({text for track in tracks for _, text in track.narrations})
    device, dtype = choose(options.device)
    llm, tokenizer = load_llm(options.llm, dtype)
    llm, done = llm.to(device).eval(), target.with_suffix(".jsonl")
    done.parent.mkdir(parents=True, exist_ok=True)
    sentences = dict(map(json.loads, done.read_text().splitlines())) if done.exists() else {}
    with done.open("a") as file, torch.no_grad():
        for text in tqdm([text for text in texts if text not in sentences], desc="rewriting", unit="sentence"):
            ids = tokenizer(REWRITE.format(note=text.strip(".")), return_tensors="pt")["input_ids"].to(device)
            written = llm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                                   pad_token_id=tokenizer.eos_token_id)[0, ids.shape[1]:]
            lines = tokenizer.decode(written, skip_special_tokens=True).strip().splitlines()
            sentences[text] = lines[0].strip() if lines and lines[0].strip() else text
            file.write(json.dumps([text, sentences[text]]) + "\n")
            file.flush()
    rewritten = lambda track: [{"time": time, "text": sentences[text]} for time, text in track.narrations]
    content: dict = {}
    for track in tracks:
        if name == "ek100":
            content[track.video] = rewritten(track)
        elif name == "ego4d":
            content.setdefault(track.video, {})[track.annotator] = rewritten(track)
        else:
            rows = [{"timestamp": row["time"], "text": row["text"], "ego_visible": True} for row in rewritten(track)]
            content.setdefault(track.video, []).append({"descriptions": rows})
    write_json(target, content)
    print(f"{target}: {len(texts)} sentences, {len(tracks)} annotators")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="data.py", description="Data sets: statistics, features, the toy.")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write toy videos with their ground truth")
    toy.add_argument("--seed", type=int, default=7, help="which video (default: %(default)s)")
    toy.add_argument("--minutes", type=float, default=3, help="about how long (default: %(default)s)")
    toy.add_argument("--output", required=True, help="FILE.mp4 (FILE.json comes beside it); a folder with --count")
    toy.add_argument("--count", type=int, default=1, help="videos of SEED, SEED + 1, ...; finished ones are kept")
    toy.set_defaults(command=toy_command)
    stats = commands.add_parser("stats", help="size, length and narrations of a data set (App. B.4)")
    stats.set_defaults(command=stats_command)
    stats.add_argument("--llm", help="count the tokens of this model's tokenizer, not words")
    stats.add_argument("--json", action="store_true", help="one JSON object as the last line")
    encoding = commands.add_parser("encode", help="frame features of videos; finished ones are kept")
    encoding.add_argument("videos", nargs="+", metavar="VIDEO")
    encoding.add_argument("--output", required=True, help="folder; ROOT/features of a data set")
    encoding.add_argument("--vision", default="google/siglip-large-patch16-384", help="hub id or folder (default: %(default)s)")
    encoding.add_argument("--fps", type=float, default=2.0, help="default: %(default)s")
    encoding.add_argument("--grid", type=int, default=3, help="pooled tokens per side (default: %(default)s)")
    encoding.add_argument("--batch", type=int, default=32, help="frames at once (default: %(default)s)")
    encoding.add_argument("--shard", metavar="I/N", help="only the I-th of N parts (under torchrun: by process)")
    encoding.set_defaults(command=encode_command)
    rewriting = commands.add_parser("rewrite", help="raw narrations as sentences, by a language model")
    rewriting.add_argument("--llm", required=True, help="hub id or folder of an instruction-tuned model")
    rewriting.set_defaults(command=rewrite_command)
    for one in (encoding, rewriting):
        one.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    for one in (stats, rewriting):
        one.add_argument("--data", required=True, choices=None if one is stats else DATASETS[1:], help=" | ".join(DATASETS))
        one.add_argument("--root", help="folder of the data set (default: data/NAME; the toy is rendered)")
        one.add_argument("--split", default="val", help="default: %(default)s")
        one.add_argument("--limit", type=int, help="at most so many samples")
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    command_line(main)
