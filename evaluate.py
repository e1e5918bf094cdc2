"""Evaluation (paper §4.1, App. B.5): both protocols, and the measures of streamed narrations.

    score       predictions and ground truth, both from files -> alignment in time and caption scores
    stream      self-conditioned: the model narrates a split of a data set by itself, then `score`
    teacher     teacher-forced: true narrations and segment ends are given, and the model predicts the next token

Every narration closes a segment that began at the one before it. Segments give precision, recall and F1; the sentence
of every true segment is compared with that of the predicted segment that fits it best (GIoU), by the caption scores of
support/captions.py. Videos without a true narration are left out, and their number is reported.

Glossary (P predicted, N true segments):
    segments    (start, end) in seconds                                   [P or N, 2]
    iou, giou   of every true with every predicted segment                [N, P]
    turn        a segment and its narration under teacher forcing

`--json` prints one JSON object as the last line. Does not include: what streaming costs and what narrations attend to
(experiments/efficiency.py, experiments/figures.py).
"""
import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import data
import narrator as nar
import stream
from support import captions, own
from support.annotations import Notes
from support.checks import check_vision
from support.common import (BadData, check_writable, choose, command_line, positive_int,
                            print_table, probability, progress, rank, write_json)
from support.features import pairs
from support.narrations import Sentence, Truth, paired, read_predictions, read_truth, to_sentences
from support.options import (DATASETS, Parser, config_changes, data_options, home, lookahead_option,
                             model_options, trigger_options)
from support.predictions import Predictions, digest
from support.together import Failed, side_by_side

TAU = 0.5                     # IoU from which two segments match
DURATIONS = (2, 4, 8)         # minutes: the groups of the paper's duration tables


# ---------------------------------------------------------------------- temporal alignment (App. B.5)

def segments(times: list[float], start: float = 0.0) -> np.ndarray:
    """Narration times -> segments (previous time, time), the first from `start`; reversed bounds are swapped."""
    bounds = np.array([start, *times], dtype=float)
    return np.sort(np.stack([bounds[:-1], bounds[1:]], axis=1), axis=1)


def overlaps(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU and generalised IoU of true [N, 2] with predicted [P, 2] segments -> [N, P] each."""
    latest, earliest = (f(truth[:, None], predicted[None]) for f in (np.maximum, np.minimum))      # [N, P, 2]
    intersection = np.clip(earliest[..., 1] - latest[..., 0], 0, None)
    union = np.clip(np.diff(truth) + np.diff(predicted).T - intersection, 1e-8, None)
    enclosing = np.clip(latest[..., 1] - earliest[..., 0], 1e-8, None)
    iou = intersection / union
    return iou, iou - (enclosing - union) / enclosing


def alignment(iou: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 at TAU of one video from iou [N, P]; all 0 where nothing is predicted."""
    if iou.size == 0:
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    precision, recall = float((iou >= TAU).any(0).mean()), float((iou >= TAU).any(1).mean())
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-8)}


def match(truth: Truth, predicted: list[Sentence]) -> tuple[dict[str, float | None], list[tuple[Sentence, str]]]:
    """Alignment, narrations a minute and mean segment lengths (s, Fig. 9) of one video, and each true sentence with the
    one whose segment fits its own best, whatever the overlap ("" if nothing is predicted). Each annotator's narrations
    make their own segments. Of files (`score`), a video's length is the span of its true narrations."""
    sentences = [sentence for annotator in truth.annotators for sentence in annotator]
    true = np.concatenate([segments([y.time for y in annotator], truth.start) for annotator in truth.annotators])
    found = segments([y.time for y in predicted], truth.start)
    iou, giou = overlaps(true, found)
    matched = [predicted[i].text for i in giou.argmax(1)] if predicted else [""] * len(sentences)
    minutes = (truth.seconds or max(y.time for y in sentences) - truth.start) / 60
    rate = lambda count: count / minutes if minutes > 0 else None
    pace = {"narrations_per_minute": rate(len(predicted)), "segment_s": average(np.diff(found)),
            "true_narrations_per_minute": rate(len(sentences) / sum(map(bool, truth.annotators))),
            "true_segment_s": average(np.diff(true))}
    return alignment(iou) | pace, list(zip(sentences, matched))


def average(values) -> float | None:
    """None if there is nothing to average."""
    return float(np.mean(values)) if len(values) else None


def evaluate(truths: dict[str, Truth], predictions: dict[str, list[Sentence]],
             tokenise: bool = False) -> tuple[dict, dict[str, dict]]:
    """All measures of a set of videos, and of each video: temporal alignment is a mean over videos, captions are scored
    over the pairs of all videos. METEOR is None where it cannot be computed. A video without any true narration is left
    out, as published; BadData if no video is left.

    Where the truth says which words need visual memory (the toy): `exact`, the share of sentences that equal their
    match; the same over those that need no memory; and the share of memory words that the match contains.
    """
    rows, matches = {}, {}
    for name, truth in truths.items():
        if any(truth.annotators):
            rows[name], matches[name] = match(truth, predictions[name])
    if not rows:
        raise BadData("there is nothing to score: no video has a true narration")
    every = [pair for matched in matches.values() for pair in matched]
    pairs = [(sentence.text, text) for sentence, text in every]
    corpus, each = captions.captions(captions.ptb(pairs) if tokenise else pairs, captions.java_problem() is None)
    result = {"videos": len(rows), "without_truth": len(truths) - len(rows), "narrations": len(pairs),
              "predicted": sum(len(predictions[name]) for name in rows)}
    for measure in next(iter(rows.values())):
        result[measure] = average([row[measure] for row in rows.values() if row[measure] is not None])
    result |= {"meteor": None} | corpus
    begin = 0
    for name, matched in matches.items():
        end = begin + len(matched)
        rows[name] |= {"narrations": len(matched)}
        rows[name] |= {score: average(values[begin:end]) for score, values in each.items()}
        begin = end
    if any(sentence.memory_words for sentence, _ in every):
        result |= recall_of_words(every)
        for name, matched in matches.items():
            rows[name] |= recall_of_words(matched)
    return result, rows


def recall_of_words(matched: list[tuple[Sentence, str]]) -> dict[str, float | None]:
    """The toy's own measures; None where there is nothing to measure."""
    exact = [(sentence.text == text, bool(sentence.memory_words)) for sentence, text in matched]
    words = [word in text.rstrip(".").split() for sentence, text in matched for word in sentence.memory_words]
    return {"exact": average([right for right, _ in exact]), "memory_words": average(words),
            "exact_without_memory": average([right for right, needs in exact if not needs])}


# ---------------------------------------------------------------------- evaluate.py score

def run_score(args: argparse.Namespace):
    truths, predictions = paired(read_truth(Path(args.gt)), read_predictions(Path(args.pred)), args.gt, args.pred,
                                 args.partial)
    print_scores(truths, predictions, {}, args)


def print_scores(truths: dict[str, Truth], predictions: dict[str, list[Sentence]], minutes: dict[str, float], args):
    """The table of a self-conditioned evaluation: all videos and, with --by-duration, groups of them."""
    if args.ptb and (problem := captions.java_problem()):
        raise BadData(f"--ptb {problem}")
    result, each = evaluate(truths, predictions, args.ptb)
    rows = [("all", result)]
    if getattr(args, "by_duration", False):
        for label, names in by_duration({name: minutes[name] for name in each}):
            rows.append((label, evaluate({name: truths[name] for name in names}, predictions, args.ptb)[0]))
        result = result | {"by_duration": dict(rows[1:])}
    print_table(rows)
    if result["without_truth"]:
        print(f"left out: {result['without_truth']} of {len(truths)} videos, no true narration", file=sys.stderr)
    if result["meteor"] is None:
        print(f"METEOR is not computed: {captions.java_problem()}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    if args.per_video:
        write_json(args.per_video, each)


def by_duration(minutes: dict[str, float]) -> list[tuple[str, list[str]]]:
    """Videos grouped by length as in the paper's duration tables (Tables 6, 7); groups without videos are left out."""
    labels = ["<= 2 min", "2 - 4 min", "4 - 8 min", ">= 8 min"]
    group = lambda length: 3 if length >= DURATIONS[-1] else sum(length > edge for edge in DURATIONS)
    groups = [[name for name, length in minutes.items() if group(length) == i] for i in range(len(labels))]
    return [(label, names) for label, names in zip(labels, groups) if names]


# ---------------------------------------------------------------------- evaluate.py stream (§4.1, self-conditioned)

def load_narrator(args: argparse.Namespace, model: str) -> nar.Narrator:
    """A narrator with the settings of the command line. What it narrates, and with what, is looked for before."""
    if getattr(args, "data", None):
        check_data(args)
        if args.data == "toy":
            check_vision(model, args.vision, nar.Config.vision)
    return nar.Narrator.load(model, args.llm, *choose(args.device, args.dtype), **config_changes(args))


def check_data(args: argparse.Namespace) -> None:
    """BadData if the data set is not there. Of the toy, nothing is rendered yet; what can be long is not read twice."""
    root = home(args.data, args.root)
    if args.data == "toy" or not root.is_dir():
        data.load_dataset(args.data, args.root, split_of(args), args.limit, variant=args.world)
    elif args.data not in DATASETS:
        own.read_folder(root, split_of(args), args.limit, Notes())


def load_vision(args: argparse.Namespace, narrator: nar.Narrator) -> nar.VisionEncoder | None:
    """The narrator's vision encoder, where there are pictures to encode: in the toy."""
    return narrator.vision_encoder(args.vision, choose(args.device, args.dtype)[1]) if args.data == "toy" else None


def split_of(args: argparse.Namespace) -> str:
    return args.split or ("test" if args.data == "toy" else "val")


def samples(args: argparse.Namespace, narrator: nar.Narrator, streaming: bool = False) -> Iterator[data.Sample]:
    shape, two = (narrator.config.J, narrator.config.width), narrator.config.width_second
    for y in data.load_dataset(args.data, args.root, split_of(args), args.limit, streaming,
                               getattr(args, "max_frames", None), shape, args.world):
        if y.fps != narrator.config.fps:
            raise BadData(f"{y.name}: has {y.fps:g} frames a second, the narrator needs {narrator.config.fps:g}")
        yield replace(y, source=lambda source=y.source: pairs(source())) if two and y.source else y


def truth_of(sample: data.Sample) -> Truth:
    streamed = sample.num_frames / sample.fps
    if sample.tracks is not None:
        tracks = [[Sentence(time, text) for time, text in track] for track in sample.tracks]
        return Truth(tracks, sample.origin, streamed)
    return Truth([[Sentence(sample.offset + data.time_of(frame, sample.fps), text, tuple(memory))
                   for (frame, text), memory in zip(sample.narrations, sample.memory_words)]], sample.origin, streamed)


def known_of(sample: data.Sample):
    """A SHA-256 that goes on: so far of the times and the ground truth of a sample."""
    known = (sample.num_frames, sample.fps, sample.offset, sample.origin, sample.narrations, sample.tracks)
    return sha256(repr(known).encode())


def watched(sample: data.Sample, mark) -> data.Sample:
    """The same sample; each frame that is read from it is added to the SHA-256 `mark`."""
    def pictures():
        for picture in sample.frames():
            mark.update(np.ascontiguousarray(picture))
            yield picture

    def read(start: int, stop: int) -> Tensor:
        x = sample.read(start, stop)
        mark.update(x.numpy())
        return x

    return replace(sample, source=sample.source and pictures, read=sample.read and read)


def fingerprint(sample: data.Sample) -> str:
    """SHA-256 of what distinguishes videos of one name: times, ground truth and all frames, in their order."""
    mark = known_of(sample)
    for _ in watched(sample, mark).tokens(lambda pictures: pictures):
        pass
    return mark.hexdigest()


def stream_settings(args: argparse.Namespace, narrator: nar.Narrator, vision: nar.VisionEncoder | None) -> dict:
    """All that the predictions of a video depend on."""
    root = None if args.data == "toy" and not args.root else home(args.data, args.root)
    return asdict(narrator.config) | {
        "data": args.data, "root": root and str(root.resolve()), "split": split_of(args), "world": args.world,
        "static": args.static, "dtype": str(next(narrator.llm.parameters()).dtype), "weights": digest(narrator),
        "vision_weights": vision and digest(vision)}


def narrated(sample: data.Sample, narrator: nar.Narrator, vision: nar.VisionEncoder | None, args: argparse.Namespace,
             folder: Predictions | None, ask: Callable) -> Iterator[tuple[str, list[dict]]]:
    """The model's own narrations of a sample, in seconds of the video; those that are kept are not made again, if they
    are of these frames. The frames of a video that is narrated are hashed as they are read."""
    if folder and folder.mark_of(sample.name).exists() and folder.finished(sample.name, fingerprint(sample)):
        lines = folder.load_rows(sample.name)
    else:
        mark = known_of(sample)
        context = stream.Context(narrator, lambda part: ask(narrator.decoder, part))
        x = watched(sample, mark).tokens(lambda pictures: ask(vision.several, pictures), args.lookahead)
        decisions = stream.narrate(narrator, x, args.static, None, context, args.lookahead)
        lines = [vars(y.narration) for y in decisions if y.narration]
        lines = [y | {"start": y["start"] + sample.offset, "end": y["end"] + sample.offset} for y in lines]
        if folder:
            folder.save_rows(sample.name, lines, mark.hexdigest())
    yield sample.name, lines


def run_stream(args: argparse.Namespace):
    """Every narration depends on the model's own narrations before it. --batch videos at a time."""
    me, world = rank()
    if world > 1:
        if not args.output:
            raise BadData("several processes need --output, a folder where they put their predictions")
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    narrator = load_narrator(args, args.model)
    vision, folder = load_vision(args, narrator), Predictions(args.output) if args.output else None
    every, lines = list(samples(args, narrator, streaming=True)), {}
    if folder and me == 0:
        folder.keep_settings(stream_settings(args, narrator, vision))
    if world > 1:
        torch.distributed.barrier()
    mine, narrator = every[me::world], narrator.merge()
    jobs = (partial(narrated, sample, narrator, vision, args, folder) for sample in mine)
    for _, item in progress(side_by_side(jobs, args.batch), "streaming", len(mine), "video"):
        if isinstance(item, Failed):
            raise item.error
        lines |= [item]
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        if me:
            return
    lines |= {sample.name: folder.load_rows(sample.name) for sample in every if sample.name not in lines}
    predictions = {name: to_sentences(rows, name) for name, rows in lines.items()}
    print_scores({sample.name: truth_of(sample) for sample in every}, predictions,
                 {sample.name: sample.duration / 60 for sample in every}, args)


# ---------------------------------------------------------------------- evaluate.py teacher (§4.1, teacher-forced)

@dataclass
class Turn:
    """One narration under teacher forcing; the first has no frames to decide on.

    ppl             perplexity of its words, exp(mean cross entropy)
    correctness     LM-Correctness: share of its words before the first wrong one
    difference      frames by which the model would end the segment too early (> 0) or too late (< 0)
    fluency         share of all decisions (frames and words) before the first wrong one
    """
    ppl: float
    correctness: float
    difference: int | None = None
    fluency: float | None = None


@torch.no_grad()
def turns(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]], reply_theta: float = 0.0,
          forward: Callable | None = None) -> list[Turn]:
    """Teacher-forced evaluation of a video x [T, J, D] with its true narrations (frame, ids).

    The model ends a segment at the first frame where its likeliest next token is not [SKIP], or where p([SKIP]) <
    reply_theta (published results: 0, that is, never). If it does not by the true end, frames of the next segment
    follow until it does: at most as many as there are, and fewer than its own segment has. `forward` replaces the
    narrator's own. Segments are never restarted: `max_segment` is for streams, where nobody says
    that a segment ends.
    """
    with keys_and_values(narrator.llm.model) as kept:
        hidden, labels, tokens = (forward or narrator)(x, narrations)
    segment, ids = torch.tensor(tokens.segment), torch.tensor(tokens.ids)                 # as labels, on the CPU
    skip, found = narrator.layout.skip, []

    def replies(hidden: Tensor) -> list[bool]:
        logits = narrator.logits(hidden)
        return ((logits.argmax(-1) != skip) | (logits.softmax(-1)[:, skip] < reply_theta)).tolist()

    for n, (frame, _) in enumerate(narrations):
        mine = (segment == n) & (labels != -100)
        words, decisions = mine & (ids != nar.FRAME), mine & (ids == nar.FRAME)
        logits, target = narrator.logits(hidden[words]), labels[words].to(hidden.device)
        right = (logits.argmax(-1) == target).long().cumprod(0).sum().item()          # before the first wrong one
        turn = Turn(torch.nn.functional.cross_entropy(logits, target).exp().item(), right / len(target))
        found.append(turn)
        if n == 0:
            continue
        reply, count = replies(hidden[decisions]), int(decisions.sum())
        if True in reply:
            turn.difference = count - reply.index(True) - 1
        else:
            more = 0 if n + 1 == len(narrations) else min(narrations[n + 1][0] - frame, count - 1)
            later = replies(further(narrator, x, tokens, kept, n, more)) if more else []
            turn.difference = -(later.index(True) + 1 if True in later else more)
        correct = count + right if turn.difference == 0 else count - max(1, turn.difference)
        turn.fluency = correct / (len(target) + count)
    return found


@contextmanager
def keys_and_values(llm: torch.nn.Module) -> Iterator:
    """A transformers cache that keeps the keys and values of the one parallel forward inside."""
    from transformers import DynamicCache
    cache = DynamicCache()
    hook = llm.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"past_key_values": cache, "use_cache": True}), with_kwargs=True)
    try:
        yield cache
    finally:
        hook.remove()


def further(narrator: nar.Narrator, x: Tensor, tokens: nar.Tokens, kept, n: int, more: int) -> Tensor:
    """The last hidden state of each of `more` frames that follow segment n in place of its closing [more, D_lm].

    They are fed in segment n, so they see what its last frame saw in the parallel forward, that frame, and each other.
    kept: the cache of `keys_and_values`.
    """
    config, cache = narrator.config, type(kept)()
    end = 1 + max(i for i, (token, m) in enumerate(zip(tokens.ids, tokens.segment)) if token == nar.FRAME and m == n)
    seen = nar.visible(*tokens.about(narrator.device)[:, :end], n, config.last_k, config.prune).nonzero()[:, 0]
    frame = tokens.ids[:end].count(nar.FRAME) // config.J
    for i, (layer, skipped) in enumerate(zip(kept.layers, narrator.routing.skipped)):
        own = seen[:len(seen) - skipped * frame]                        # fewer in the layers of VideoLLM-MoD
        cache.update(layer.keys.index_select(2, own), layer.values.index_select(2, own), i)
    extra = sum([narrator.layout.frame(n)] * more, nar.Tokens())
    L = len(extra)
    mask = torch.ones(L, len(seen) + L, dtype=torch.bool, device=narrator.device).tril(len(seen))
    e = narrator.embed(torch.tensor(extra.ids, device=narrator.device), x[frame:frame + more].to(narrator.device))
    return narrator.run(e, torch.arange(end, end + L, device=narrator.device), mask, cache)[L // more - 1::L // more]


def summary(found: list[Turn], fps: float) -> dict[str, float]:
    """A sample's values: means over its turns, as published (without any turns it counts as perfect)."""
    mean = lambda values, empty: float(np.mean(values)) if values else empty
    differences = [abs(turn.difference) for turn in found if turn.difference is not None]
    return {"ppl": mean([turn.ppl for turn in found], 1.0), "time_diff": mean(differences, 0.0) / fps,
            "fluency": mean([turn.fluency for turn in found if turn.fluency is not None], 1.0),
            "lm_correctness": mean([turn.correctness for turn in found], 1.0)}


def true_narrations(narrator: nar.Narrator, sample: data.Sample) -> list[tuple[int, list[int]]]:
    """(frame, ids) of a sample, the first at frame 0."""
    if not sample.narrations or sample.narrations[0][0] != 0:
        raise BadData(f"{sample.name}: teacher forcing needs a narration at the first frame; annotate one")
    return [(frame, narrator.layout.encode(" " + text)) for frame, text in sample.narrations]


def run_teacher(args: argparse.Namespace):
    """PPL, TimeDiff (s), Fluency, LM-Correctness: means over samples."""
    narrator = load_narrator(args, args.model)
    if narrator.config.max_segment is not None:
        print("teacher: true segments are not restarted, so max_segment has no effect",
              file=sys.stderr)
    vision, each, minutes = load_vision(args, narrator), {}, {}
    for sample in progress(samples(args, narrator), "teacher", unit="video"):
        narrations = true_narrations(narrator, sample)
        x = torch.stack(list(sample.tokens(vision)))
        each[sample.name] = summary(turns(narrator, x, narrations, args.reply_theta), sample.fps)
        minutes[sample.name] = sample.duration / 60
    mean = lambda names: {"videos": len(names)} | {
        key: float(np.mean([each[name][key] for name in names])) for key in next(iter(each.values()))}
    rows = [("all", mean(list(each)))]
    if args.by_duration:
        rows += [(label, mean(names)) for label, names in by_duration(minutes)]
    print_table(rows)
    if args.json:
        print(json.dumps(rows[0][1] | ({"by_duration": dict(rows[1:])} if args.by_duration else {})))
    if args.per_video:
        write_json(args.per_video, each)


# ---------------------------------------------------------------------- the command line

def main():
    parser = Parser(description="Evaluate a narrator.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        return one

    score = command("score", run_score, "score predictions against ground truth, both from files")
    score.add_argument("--pred", required=True,
                       help='JSON {video: [{"time", "text"}]}, JSONL of stream.py, or a folder of such files')
    score.add_argument("--gt", required=True,
                       help="JSON {video: [...]}, with several annotators {video: [[...], ...]}, or the toy's .json")
    score.add_argument("--partial", action="store_true", help="score only the videos that have predictions")
    streams = command("stream", run_stream, "self-conditioned protocol over a split of a data set")
    streams.add_argument("--output", help="keep the predictions in this folder; finished videos are skipped")
    teacher = command("teacher", run_teacher,
                      "teacher-forced protocol: PPL, TimeDiff, Fluency, LM-Correctness "
                      "(max_segment has no effect)")
    teacher.add_argument("--reply-theta", type=probability, default=0.0,
                         help="also end a segment where p([SKIP]) is below this (default 0, as published)")
    teacher.add_argument("--max-frames", type=positive_int, default=1200,
                         help="cut samples to at most this many frames (default 1200, as published)")
    trigger_options(streams)
    lookahead_option(streams)
    streams.add_argument("--batch", type=positive_int, default=1, metavar="B",
                         help="videos that are narrated at once and share the passes of the models "
                              "(default 1); the narrations are those of each alone in float32, in "
                              "bfloat16 up to rounding")
    for one in (streams, teacher):
        data_options(one)
        model_options(one, default=str(stream.TOY))
        one.add_argument("--by-duration", action="store_true",
                         help="also by the length of the videos: up to 2, 4, 8 minutes, and longer")
    for one in (score, streams):
        one.add_argument("--ptb", action="store_true",
                         help="split sentences by the Penn Treebank tokeniser (needs Java, pycocoevalcap)")
    for one in (score, streams, teacher):
        one.add_argument("--per-video", metavar="FILE", help="write each video's results as JSON")
        one.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()

    def run():
        output = getattr(args, "output", None)
        check_writable(args.per_video, output and Path(output) / "settings.json")
        args.run(args)

    command_line(run)


if __name__ == "__main__":
    main()
