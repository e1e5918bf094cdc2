"""Evaluation (paper §4, App. B.5, C): both protocols, efficiency, and what the model attends to, as commands.

    score       predictions and ground truth, both from files -> all measures of metrics.py
    stream      self-conditioned: the model narrates a split of a data set by itself, then `score`
    teacher     teacher-forced: the true narrations and segment ends are given, the model predicts token by token
    efficiency  multiply-accumulates, cache, memory, speed against frames: FlowNar, FlowNar-C, VideoLLM-online (Fig. 1)
    attention   where a narration looks: past narrations, current frames, past frames, memory (App. C.2)
    timeline    one video as a picture: segments, p([SKIP]) with its thresholds, the size of the cache

`--json` prints one JSON object as the last line. What is measured is defined in metrics.py (`score`, `stream`), in `Turn`
(`teacher`), in efficiency.py and in figures.py. Does not include: the paper's other baselines.
"""
import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import data
from experiments import efficiency
from experiments import figures
from support import captions as metrics
import narrator as nar
import stream
from support.common import BadData, choose, command_line, rank, read_json, write_json, write_text
from support.captions import Told, Truth

DURATIONS = (2, 4, 8)         # minutes: the groups of the paper's duration tables


# ---------------------------------------------------------------------- python evaluate.py score

def read_lines(path: Path) -> list[dict]:
    """The objects of a JSONL file."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise BadData(f"{path}, line {number}: is not JSON ({error})") from None
    return lines


def told(rows, where: str) -> list[Told]:
    """[{"time" or "end": seconds, "text": str, ("memory": [words])}, ...] -> narrations."""
    narrations = []
    for i, row in enumerate(rows if isinstance(rows, list) else [None]):
        seconds = row.get("time", row.get("end")) if isinstance(row, dict) else None
        if not isinstance(seconds, int | float) or not np.isfinite(seconds) or not isinstance(row.get("text"), str):
            raise BadData(f'{where}, narration {i}: expected {{"time": seconds, "text": "..."}}, not {str(row)[:60]}')
        narrations.append(Told(float(seconds), row["text"], tuple(row.get("memory", ()))))
    return narrations


def files(path: Path) -> list[Path]:
    found = sorted(f for f in path.iterdir() if f.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
    if not found:
        raise BadData(f"{path}: has no .json or .jsonl files")
    return found


def read_predictions(path: Path) -> dict[str, list[Told]]:
    """{video: [{"time", "text"}]} in one JSON file; or stream.py's JSONL, one file per video, or a folder of them."""
    predictions = {}
    for file in files(path):
        if file.suffix == ".jsonl":
            predictions[file.stem] = told(read_lines(file), str(file))
            continue
        content = read_json(file)
        if not isinstance(content, dict):
            raise BadData(f'{file}: expected an object {{video: [{{"time", "text"}}, ...]}}')
        predictions |= {name: told(rows, f"{file}, video {name}") for name, rows in content.items()}
    return predictions


def read_truth(path: Path) -> dict[str, Truth]:
    """{video: [{"time", "text"}]}, {video: [[one annotator], [another], ...]} or {video: {"start": s, "annotators":
    [[...], ...]}} in one JSON file; or the .json beside a toy video, or a folder of them."""
    truths = {}
    for file in files(path):
        content = read_json(file)
        if not isinstance(content, dict):
            raise BadData(f"{file}: expected an object with one entry per video")
        if isinstance(content.get("narrations"), list) and "fps" in content:
            content = {file.stem: content["narrations"]}
        for name, entry in content.items():
            where, start = f"{file}, video {name}", 0.0
            if isinstance(entry, dict):
                start, entry = entry.get("start", 0.0), entry.get("annotators")
                if not isinstance(start, int | float) or not isinstance(entry, list):
                    raise BadData(f'{where}: expected {{"start": seconds, "annotators": [[...], ...]}}')
            elif isinstance(entry, list) and not all(isinstance(row, list) for row in entry):
                entry = [entry]
            if not isinstance(entry, list):
                raise BadData(f"{where}: expected a list of narrations")
            truths[name] = Truth([told(rows, where) for rows in entry], start)
    return truths


def run_score(args: argparse.Namespace):
    truths, predictions = read_truth(Path(args.gt)), read_predictions(Path(args.pred))
    missing, extra = truths.keys() - predictions.keys(), predictions.keys() - truths.keys()
    if missing and not args.partial or extra or not truths:
        names = sorted(missing or extra)
        raise BadData("there is nothing to score" if not names else
                           f"{len(names)} videos of {args.gt if missing else args.pred} are not in "
                           f"{args.pred if missing else args.gt}: {', '.join(names[:3])}{' ...' if names[3:] else ''}"
                           + (" (--partial scores the others)" if missing and len(missing) < len(truths) else ""))
    truths = {name: truth for name, truth in truths.items() if name in predictions}
    report(truths, predictions, {}, args)


def report(truths: dict[str, Truth], predictions: dict[str, list[Told]], minutes: dict[str, float], args):
    """Print the table of a self-conditioned evaluation; all videos, and by length if asked."""
    if args.ptb and (problem := metrics.java_problem()):
        raise BadData(f"--ptb {problem}")
    rows, result, each = [], *metrics.evaluate(truths, predictions, args.ptb)
    rows.append(("all", result))
    if getattr(args, "by_duration", False):
        for label, names in by_duration(minutes):
            part = metrics.evaluate({n: truths[n] for n in names}, {n: predictions[n] for n in names}, args.ptb)[0]
            rows.append((label, part))
        result = result | {"by_duration": dict(rows[1:])}
    table(rows)
    if result["meteor"] is None:
        print(f"METEOR is not computed: {metrics.java_problem() or 'there is nothing to score'}", file=sys.stderr)
    if args.per_video:
        write_json(args.per_video, each)
    if args.json:
        print(json.dumps(result))


def by_duration(minutes: dict[str, float]) -> list[tuple[str, list[str]]]:
    """Videos grouped by length as in the paper's duration tables; groups without videos are left out."""
    edges = [0, *DURATIONS, float("inf")]
    labels = [f"<= {edges[1]} min", *(f"{a} - {b} min" for a, b in zip(edges[1:-2], edges[2:-1])), f"> {edges[-2]} min"]
    groups = [[name for name, length in minutes.items() if low < length <= high] for low, high in zip(edges, edges[1:])]
    return [(label, names) for label, names in zip(labels, groups) if names]


def table(rows: list[tuple[str, dict]]):
    """One column for each row's label; shares and scores with three digits, what was not computed as -."""
    form = lambda value: "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(rows) > 1:
        print(" " * 22 + "".join(f"{label:>17}" for label, _ in rows))
    for name in rows[0][1]:
        print(f"{name.replace('_', ' '):22}" + "".join(f"{form(row.get(name)):>17}" for _, row in rows))


# ---------------------------------------------------------------------- python evaluate.py stream (§4.1, self-conditioned)

def prepare(args: argparse.Namespace, model: str | None = None) -> tuple[nar.Narrator, nar.VisionEncoder | None]:
    """The narrator with the settings of the command line, and its vision encoder where there are pictures to encode."""
    device, dtype = choose(args.device, args.dtype)
    changes = {name: getattr(args, name) for name in ("theta", "theta_low", "refractory", "last_k")
               if getattr(args, name, None) is not None}
    narrator = nar.Narrator.load(model or args.model, args.llm, device, dtype, **changes)
    if getattr(args, "data", "toy") != "toy":
        return narrator, None
    return narrator, nar.VisionEncoder(args.vision or narrator.config.vision, narrator.config.grid, device, dtype)


def samples(args: argparse.Namespace, narrator: nar.Narrator, streaming: bool = False) -> Iterator[data.Sample]:
    shape = narrator.config.J, narrator.config.width
    return data.load_dataset(args.data, args.root, args.split, args.limit, streaming, shape=shape)


def truth_of(sample: data.Sample) -> Truth:
    if sample.tracks is not None:
        return Truth([[Told(time, text) for time, text in track] for track in sample.tracks], sample.origin)
    return Truth([[Told(data.time_of(frame, sample.fps), text, tuple(memory))
                   for (frame, text), memory in zip(sample.narrations, sample.memory)]])


def keep_settings(folder: Path, settings: dict):
    """Finished videos are kept only for the same settings: the predictions of two models must not be mixed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if file.exists() and read_json(file) != settings:
        raise BadData(f"{folder} holds predictions made with other settings: choose another --output, or delete it")
    write_json(file, settings)


def run_stream(args: argparse.Namespace):
    """Every narration depends on the model's own narrations before it. One video in memory at a time."""
    me, world = rank()
    if world > 1:
        if not args.output:
            raise BadData("several processes need --output, a folder where they put their predictions")
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    narrator, vision = prepare(args)
    every = list(samples(args, narrator, streaming=True))
    folder = Path(args.output) if args.output else None
    if folder and me == 0:
        keep_settings(folder, {name: getattr(args, name) for name in
                               ("data", "split", "model", "llm", "vision", "static")} | asdict(narrator.config))
    if world > 1:
        torch.distributed.barrier()
    (folder / "predictions").mkdir(exist_ok=True) if folder else None
    truths, predictions, minutes = {}, {}, {}
    for sample in every:
        truths[sample.name], minutes[sample.name] = truth_of(sample), sample.num_frames / sample.fps / 60
    for sample in tqdm(every[me::world], unit="video", desc="streaming"):
        file = folder / "predictions" / f"{sample.name}.jsonl" if folder else None
        if file and file.exists():
            continue
        steps = stream.narrate(narrator, sample.tokens(vision), args.static)
        lines = [vars(step.narration) for step in steps if step.narration]
        for line in lines:                                                            # seconds of the video
            line["start"], line["end"] = line["start"] + sample.offset, line["end"] + sample.offset
        if file:
            write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
        predictions[sample.name] = told(lines, sample.name)
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        if me:
            return
    for name in truths:
        if name not in predictions:
            file = folder / "predictions" / f"{name}.jsonl"
            predictions[name] = told(read_lines(file), str(file))
    report(truths, predictions, minutes, args)


# ---------------------------------------------------------------------- python evaluate.py teacher (§4.1, teacher-forced)

@dataclass
class Turn:
    """One narration under teacher forcing.

    ppl             perplexity of its words, exp(mean cross entropy)
    correctness     LM-Correctness: share of its words before the first wrong one
    difference      frames by which the model would end the segment too early (> 0) or too late (< 0); None for the first
    fluency         share of all decisions (frames and words) before the first wrong one; None for the first
    """
    ppl: float
    correctness: float
    difference: int | None = None
    fluency: float | None = None


@torch.no_grad()
def turns(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]], theta: float = 0.0,
          forward: Callable | None = None) -> list[Turn]:
    """Teacher-forced evaluation of a video x [T, J, D] with its true narrations (frame, ids).

    The model ends a segment at the first frame where its likeliest next token is not [SKIP], or where p([SKIP]) <
    theta (published figures: 0, that is, never). If it does not by the true end, frames of the next segment follow
    until it does: at most as many as there are, and fewer than its own segment has.
    """
    hidden, labels, tokens = (forward or narrator)(x, narrations)
    segment, ids = torch.tensor(tokens.segment, device=labels.device), torch.tensor(tokens.ids, device=labels.device)
    skip, found = narrator.layout.sep[0], []

    def replies(hidden: Tensor) -> list[bool]:
        logits = narrator.logits(hidden)
        return ((logits.argmax(-1) != skip) | (logits.softmax(-1)[:, skip] < theta)).tolist()

    for n, (frame, _) in enumerate(narrations):
        mine = (segment == n) & (labels != -100)
        words, decisions = mine & (ids != nar.FRAME), mine & (ids == nar.FRAME)
        logits, target = narrator.logits(hidden[words]), labels[words]
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
            turn.difference = -late(narrator, x, narrations[:n + 1], more, replies) if more else 0
        correct = (count + right if turn.difference == 0 else
                   count - turn.difference if turn.difference > 0 else count - 1)
        turn.fluency = correct / (len(target) + count)
    return found


def late(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]], more: int, replies: Callable) -> int:
    """How many of `more` further frames it takes until the model ends the last segment; all of them if it does not."""
    *before, (frame, ids) = narrations
    hidden, _, tokens = narrator(x, [*before, (frame + more, ids)])
    ends = [i for i, (token, n) in enumerate(zip(tokens.ids, tokens.segment)) if token == nar.FRAME and n == len(before)]
    reply = replies(hidden[ends[narrator.config.J - 1::narrator.config.J]][-more:])   # the last token of each frame
    return reply.index(True) + 1 if True in reply else more


def summary(found: list[Turn], fps: float) -> dict[str, float]:
    """A sample's values: means over its turns, as published (what has no turns counts as perfect)."""
    mean = lambda values, empty: float(np.mean(values)) if values else empty
    differences = [abs(turn.difference) for turn in found if turn.difference is not None]
    return {"ppl": mean([turn.ppl for turn in found], 1.0), "time_diff": mean(differences, 0.0) / fps,
            "fluency": mean([turn.fluency for turn in found if turn.fluency is not None], 1.0),
            "lm_correctness": mean([turn.correctness for turn in found], 1.0)}


def run_teacher(args: argparse.Namespace):
    """PPL, TimeDiff (s), Fluency, LM-Correctness: means over samples."""
    narrator, vision = prepare(args)
    each, minutes = {}, {}
    for sample in tqdm(samples(args, narrator), unit="video", desc="teacher"):
        x = torch.stack(list(sample.tokens(vision)))
        narrations = [(frame, narrator.layout.encode(" " + text)) for frame, text in sample.narrations]
        each[sample.name] = summary(turns(narrator, x, narrations, args.reply_theta), sample.fps)
        minutes[sample.name] = sample.num_frames / sample.fps / 60
    if not each:
        raise BadData(f"no videos in the {args.split} split of {args.data}")
    mean = lambda names: {"videos": len(names)} | {
        key: float(np.mean([each[name][key] for name in names])) for key in next(iter(each.values()))}
    rows = [("all", mean(list(each)))]
    if args.by_duration:
        rows += [(label, mean(names)) for label, names in by_duration(minutes)]
    table(rows)
    if args.per_video:
        write_json(args.per_video, each)
    if args.json:
        print(json.dumps(rows[0][1] | ({"by_duration": dict(rows[1:])} if args.by_duration else {})))


# ---------------------------------------------------------------------- python evaluate.py efficiency (Fig. 1, App. C.3)

def run_efficiency(args: argparse.Namespace):
    results = {}
    for name, narrator in efficiency.variants(args):
        efficiency.measure(narrator, 2 * args.every, args.every, args.words, args.every)  # the first calls are not counted
        results[name] = efficiency.measure(narrator, args.frames, args.every, args.words, args.window)
        results[name]["macs"] = efficiency.macs(narrator, min(args.macs_frames, args.frames), args.every, args.words)
        del narrator
    frontend = efficiency.decoding(args)
    shown = [(name, {"frames": r["frames"], f"GMACs, {min(args.macs_frames, args.frames)} frames": round(r["macs"] / 1e9, 1),
                     "cache, MB": r["windows"][-1]["cache_bytes"] / 1e6, "held, MB": r["windows"][-1]["held_bytes"] / 1e6,
                     "FPS": r["fps"], "FPS, last window": r["windows"][-1]["fps"],
                     "frame, ms, p50": r["frame_ms_p50"], "frame, ms, p95": r["frame_ms_p95"],
                     "narration, ms, p50": r["narration_ms_p50"], "narration, ms, p95": r["narration_ms_p95"]}
              | {f"{stage}, ms a frame": 1e3 * seconds / r["frames"] for stage, seconds in r["stages_s"].items()}
              | ({"out of memory": "yes"} if r["out_of_memory"] else {})) for name, r in results.items() if r["windows"]]
    if not shown:
        raise BadData("the device's memory is full before the first window of frames; choose a smaller model")
    table(shown)
    print("before that, ms a frame: " + ", ".join(f"{stage} {1e3 * s:.2f}" for stage, s in frontend.items()))
    if args.png:
        efficiency.plot(results, args.png)
    if args.json:
        print(json.dumps({"frames": args.frames, "every": args.every, "words": args.words, "variants": results,
                          "frontend_s": frontend}))


# ---------------------------------------------------------------------- python evaluate.py attention (App. C.2)

def run_attention(args: argparse.Namespace):
    results = {}
    for model in args.model:
        narrator, vision = prepare(args, model)
        means = []
        for sample in tqdm(samples(args, narrator), unit="video", desc=model, leave=False):
            x = torch.stack(list(sample.tokens(vision)))
            said = [step.narration for step in stream.narrate(narrator, x, args.static) if step.narration]
            if len(said) > 1:
                means.append(figures.attention(narrator, x, [(y.frame, y.tokens) for y in said]))
        if not means:
            raise BadData(f"{model} narrates nothing but the first frame of these videos")
        results[model] = dict(zip(figures.GROUPS, np.mean(means, axis=0).tolist()))
    table([(Path(model).name[-16:], row) for model, row in results.items()])
    if args.png:
        figures.plot_attention(results, args.png)
    if args.json:
        print(json.dumps(results))


# ---------------------------------------------------------------------- python evaluate.py timeline

def run_timeline(args: argparse.Namespace):
    """A video, or a trace that stream.py has written (with its --jsonl as --pred), as one picture."""
    source = Path(args.input)
    said, fps = [], args.fps
    if source.suffix == ".jsonl":
        trace = read_lines(source)
        if args.pred:
            said = told(read_lines(Path(args.pred)), args.pred)
    else:
        narrator, _ = prepare(args)
        device, dtype = choose(args.device, args.dtype)
        fps = narrator.config.fps
        frames, _, _ = stream.features(args.input, narrator, args.vision, fps, device, dtype)
        steps = {step.frame: step for step in stream.narrate(narrator, frames, args.static)}
        trace = [step.trace() for step in steps.values()]
        said = [Told(step.narration.end, step.narration.text) for step in steps.values() if step.narration]
    keys = ("frame", "p_skip", "theta", "narrate", "text_tokens", "visual_tokens")
    if not trace or any(not isinstance(row, dict) or key not in row for row in trace for key in keys):
        raise BadData(f"{source}: is no trace of stream.py (it needs {', '.join(keys)} in every line)")
    truth, beside = args.gt, source.with_suffix(".json")
    if truth is None and source.suffix != ".jsonl" and beside.exists():
        truth = str(beside)
    true = next(iter(read_truth(Path(truth)).values())).annotators[0] if truth else []
    figures.plot_timeline(trace, said or [Told((row["frame"] + 1) / fps, "") for row in trace if row["narrate"]], true, fps,
                          args.png or str(source.with_suffix(".png")))


# ---------------------------------------------------------------------- the command line

def main():
    parser = argparse.ArgumentParser(description="Evaluate a narrator.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        return one

    score = command("score", run_score, "score predictions against ground truth, both from files")
    score.add_argument("--pred", required=True, help='JSON {video: [{"time", "text"}]}, JSONL of stream.py, or a folder of such files')
    score.add_argument("--gt", required=True, help="JSON {video: [...]}, with several annotators {video: [[...], ...]}, or the toy's .json")
    score.add_argument("--partial", action="store_true", help="score only the videos that have predictions")
    streams = command("stream", run_stream, "self-conditioned protocol over a split of a data set")
    streams.add_argument("--output", help="keep the predictions in this folder; finished videos are not done again")
    teacher = command("teacher", run_teacher, "teacher-forced protocol: PPL, TimeDiff, Fluency, LM-Correctness")
    teacher.add_argument("--reply-theta", type=float, default=0.0,
                         help="also end a segment where p([SKIP]) is below (default 0, as published: only where it is not the likeliest)")
    speed = command("efficiency", run_efficiency, "FlowNar, FlowNar-C and VideoLLM-online: MACs, cache, memory, speed")
    speed.add_argument("--config", choices=list(efficiency.LLAMA), help="a language model of this size, random weights",
                       type=lambda name: {"1b": "llama-3.2-1b", "8b": "llama-3-8b"}.get(name, name))
    speed.add_argument("--frames", type=stream.count, default=2000, help="frames to stream (default 2000)")
    speed.add_argument("--macs-frames", type=stream.count, default=240, help="length of the video whose MACs are counted (default 240)")
    speed.add_argument("--every", type=stream.count, default=8, help="frames between two narrations (default 8)")
    speed.add_argument("--words", type=stream.count, default=12, help="tokens of a narration (default 12)")
    speed.add_argument("--window", type=stream.count, default=500, help="frames of a row of the curve (default 500)")
    speed.add_argument("--video", default=str(stream.TOY.parent / "kitchen.mp4"), help="for the time of decoding and encoding")
    look = command("attention", run_attention, "where narrations look, for one or more models")
    line = command("timeline", run_timeline, "one video as a picture")
    line.add_argument("input", metavar="VIDEO_OR_TRACE", help="a video, frame features, or a trace of stream.py (.jsonl)")
    line.add_argument("--pred", help="with a trace: the narrations, stream.py's --jsonl")
    line.add_argument("--gt", help="ground truth (default: the .json beside a video, if there is one)")
    line.add_argument("--fps", type=stream.positive, default=2.0, help="of a trace (default 2)")
    shared_options(score, streams, teacher, speed, look, line)
    args = parser.parse_args()
    if "split" in args and args.split is None:
        args.split = "test" if args.data == "toy" else "val"
    command_line(lambda: args.run(args))


def shared_options(score, streams, teacher, speed, look, line):
    """Options that several commands have, each written once."""
    for one in (streams, teacher, look):
        one.add_argument("--data", required=True, help="toy | ego4d | egoexo4d | ek100")
        one.add_argument("--root", help="folder of the data set (toy: rendered by seed without it)")
        one.add_argument("--split", help="train, val or test (default: test for the toy, else val)")
        one.add_argument("--limit", type=stream.count, help="use only so many videos")
    for one in (streams, teacher, look, line):
        kind = {"nargs": "+", "default": [str(stream.TOY)]} if one is look else {"default": str(stream.TOY)}
        one.add_argument("--model", help="checkpoint folder or hub id (default: the bundled toy)", **kind)
        one.add_argument("--last-k", type=stream.count, help="FlowNar-C: keep only the last k narrations")
    for one in (streams, look, line):
        one.add_argument("--theta", type=float, help="narrate when p([SKIP]) <= theta (default 0.8)")
        one.add_argument("--theta-low", type=float, help="the same soon after a narration (default 0.5)")
        one.add_argument("--refractory", type=float, help="how soon, in seconds (default 4)")
        one.add_argument("--static", action="store_true", help="one threshold, theta, all the time")
    for one in (streams, teacher, speed, look, line):
        one.add_argument("--llm", help="base language model (default: what the checkpoint names)")
        one.add_argument("--vision", help="vision encoder (default: what the checkpoint names)")
        one.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
        one.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    for one in (score, streams, teacher):
        one.add_argument("--per-video", metavar="FILE", help="write each video's results as JSON")
    for one in (score, streams):
        one.add_argument("--ptb", action="store_true", help="split sentences by the Penn Treebank tokeniser (needs Java, pycocoevalcap)")
    for one in (streams, teacher):
        one.add_argument("--by-duration", action="store_true", help="also by video length: up to 2, 4, 8 minutes, and longer")
    for one in (speed, look, line):
        one.add_argument("--png", metavar="FILE", help="also as a picture")
    for one in (score, streams, teacher, speed, look):
        one.add_argument("--json", action="store_true", help="one JSON object as the last line")


if __name__ == "__main__":
    main()
