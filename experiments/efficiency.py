"""What a stream costs (paper §4.1, Fig. 1, App. C.3): operations, cache, memory and speed.

    python -m experiments.efficiency --frames 10000 --png efficiency.png
    python -m experiments.efficiency --config llama-3.2-1b

FlowNar, FlowNar-C and the baselines VideoLLM-online and VideoLLM-MoD run as stream.py runs them,
around language models of one size, with the same frames and the same narrations. The narrations are
given, at the rate of a data set, so that all do the same work: only the context differs, and in
VideoLLM-MoD the tokens that a layer computes. Sizes matter here, values of weights do not. The
frames are made beforehand.

    used        bytes of the keys and values in the cache, of CLAM's state and memory tokens, and of
                the frames that wait for CLAM
    held        the same with the free slots of the cache's buffers
    window      the number of frames after which memory and speed are reported
    stages      parts of the loop, which is timed as a whole: memory (CLAM's step and read-out),
                frame (passes of the language model with frames, and the trigger), text (its passes
                word by word), rest. decode and encode, which come before, are timed separately
    live        with --lookahead 1, no frame waits for the next. With K, a pass reads K frames, and
                the first of them takes the time of all
    at once     --streams live streams, and one for comparison: frames for each second of processor
                time
"""
import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import narrator as nar
import stream
from baselines.variants import load_narrator, make_config, new_context, new_narrator
from experiments.timing import Meter, Work, at_once, flatness, total
from support.common.devices import device_and_dtype, synchronise, vision_dtype
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import DEFAULT_MODEL, Parser, device_options, positive_int
from support.common.progress import progress
from support.engine import checkpoint
from support.engine.compiled import compile_memory
from support.files.features import encode_pictures
from support.files.video import Video

WORDS = 128256                             # in Llama 3's vocabulary
LLAMA = {                                  # hidden, feed-forward, layers, heads; 8 key and value heads
    "llama-3.2-1b": (2048, 8192, 16, 32),
    "llama-3-8b": (4096, 14336, 32, 32),
}
SHORT_NAMES = {"1b": "llama-3.2-1b", "8b": "llama-3-8b"}
VARIANTS = {                               # the settings in which each one differs from FlowNar
    "FlowNar-C": {"last_k": 10},
    "FlowNar": {},
    "VideoLLM-online": {"memory": "none", "prune": False},
    "VideoLLM-MoD": {"memory": "none", "prune": False, "mod_keep": 0.2},
}


# ------------------------------------------------------------------------------- narrators

def random_llama(size: str, device: str, dtype: torch.dtype):
    """A Llama of one of the sizes of LLAMA with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    hidden, feed_forward, layers, heads = LLAMA[size]
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=feed_forward,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        max_position_embeddings=131072, tie_word_embeddings=size.endswith("1b"),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def build(args: argparse.Namespace, changes: dict) -> nar.Narrator:
    """A variant as stream.py runs it: LoRA merged, connector and CLAM in fp32. Weights that no file
    gives are random."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    tokenizer = checkpoint.load_tokenizer(str(Path(DEFAULT_MODEL) / "llm"))
    config = nar.Config()
    if args.config:
        llm = random_llama(args.config, device, dtype)
    elif args.llm:
        llm, tokenizer = checkpoint.load_llm(args.llm, dtype)
    else:
        toy = load_narrator(DEFAULT_MODEL, dtype=dtype)
        llm = toy.llm
        config = replace(toy.config, last_k=None)
    narrator = new_narrator(llm, tokenizer, make_config(**asdict(config) | changes))
    return narrator.to(device).eval().requires_grad_(False).merge()


def narrators(args: argparse.Namespace) -> Iterator[tuple[str, nar.Narrator]]:
    """The narrators that are measured, one after the other, with their names: trained ones
    (--model, named by their folders), or the variants."""
    if args.model:
        for folder in args.model:
            device, dtype = device_and_dtype(args.device, args.dtype)
            yield folder, load_narrator(folder, args.llm, device, dtype).merge()
    else:
        for name in args.variants:
            yield name, build(args, VARIANTS[name])


# ------------------------------------------------------------------------------- measurements

def measure_stream(narrator: nar.Narrator, work: Work, window: int) -> dict:
    """Stream the work's frames, or as many as the device has memory for.

    Returns the speed; the seconds of each stage; the largest cache in tokens; the median and 95th
    percentile of the time of a frame without narration, and of a narration's words; for each window
    of frames its speed, and the memory at its end; "memory": pairs of a number of frames and the
    largest memory until then, weights and used bytes.
    """
    if narrator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(narrator.device)
    meter = Meter(narrator, work)
    out_of_memory = False
    try:
        for _ in progress(range(work.frames), unit="frame", leave=False):
            meter.advance(1)
    except torch.OutOfMemoryError:
        out_of_memory = True

    rows = meter.rows
    windows = []
    for begin in range(0, len(rows), window):
        window_rows = rows[begin:begin + window]
        last = window_rows[-1]
        windows.append({
            "frames": begin + len(window_rows),
            "fps": len(window_rows) / total(window_rows, "seconds"),
            "cache_tokens": last["cache_tokens"],
            "cache_bytes": last["cache_bytes"],
            "used_bytes": last["used_bytes"],
            "held_bytes": last["held_bytes"],
        })

    frame_times = [row["seconds"] for row in rows if row["text_s"] is None]
    narration_times = [row["text_s"] for row in rows if row["text_s"] is not None]
    weights = sum(p.nbytes for p in narrator.parameters())
    memory = []
    if rows:
        largest = np.maximum.accumulate([weights + row["used_bytes"] for row in rows])
        # About 60 numbers of frames, evenly spaced on a logarithmic axis.
        for frames in sorted({round(mark) for mark in np.geomspace(1, len(rows), 60)}):
            memory.append((frames, int(largest[frames - 1])))
    return {
        "frames": len(rows),
        "narrations": len(narration_times),
        "out_of_memory": out_of_memory,
        "windows": windows,
        "fps": len(rows) / total(rows, "seconds") if rows else 0.0,
        "seconds": total(rows, "seconds"),
        "stages_s": dict(meter.stages),
        "cache_tokens_peak": meter.tokens,
        "peak_bytes": peak_memory(narrator.device),
        "frame_ms_p50": quantile_ms(frame_times, 0.5),
        "frame_ms_p95": quantile_ms(frame_times, 0.95),
        "narration_ms_p50": quantile_ms(narration_times, 0.5),
        "narration_ms_p95": quantile_ms(narration_times, 0.95),
        "weights_bytes": weights,
        "memory": memory,
    }


def quantile_ms(seconds: list[float], q: float) -> float | None:
    """A quantile of times in seconds, in milliseconds."""
    return float(np.quantile(seconds, q)) * 1e3 if seconds else None


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of the device on CUDA, else of the process. None where neither is
    known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:                    # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others count units of 1,024 bytes.
    return peak if sys.platform == "darwin" else 1024 * peak


def macs(narrator: nar.Narrator, work: Work) -> int:
    """Multiply-accumulates of connector, CLAM and language model for the work (without the vision
    encoder).

    Counted in the modules of transformers: a captured CUDA graph shows no operations.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    frames, forced = work.given(narrator)
    context = new_context(narrator)        # computes CLAM's queries, once: they are not counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in stream.narrate(narrator, frames, given=forced, context=context):
            pass
    return counter.get_total_flops() // 2


def decoding(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a frame for decoding a video and for its vision encoder, in batches as stream.py
    makes them."""
    device, _ = device_and_dtype(args.device, args.dtype)
    folder = args.vision or str(Path(DEFAULT_MODEL) / "vision")
    vision = nar.VisionEncoder(folder, device=device, dtype=vision_dtype(args))
    began = time.perf_counter()
    frames = list(islice(Video(args.video, 2.0, largest=2 * vision.image_size), 64))
    decode = time.perf_counter() - began
    if not frames:
        raise BadData(f"{args.video} has no frames")

    list(encode_pictures(frames[:args.lookahead], vision, args.lookahead))     # not counted
    synchronise(torch.device(device))
    began = time.perf_counter()
    list(encode_pictures(frames, vision, args.lookahead))
    synchronise(torch.device(device))
    encode = time.perf_counter() - began
    return {"decode": decode / len(frames), "encode": encode / len(frames)}


# ------------------------------------------------------------------------------- figure and table

def plot_efficiency(results: dict[str, dict], png: str, limit: float | None) -> None:
    """Fig. 1, middle (memory, with a line at `limit` bytes) and right (speed), and the speed over
    frames of App. C.3."""
    plt = pyplot()
    figure, (memory, bars, speed) = plt.subplots(1, 3, figsize=(13, 3.6))
    unit, size = ("GB", 1e9) if limit else ("MB", 1e6)
    for name, costs in results.items():
        frames = [mark for mark, _ in costs["memory"]]
        used = [used_bytes / size for _, used_bytes in costs["memory"]]
        line, = memory.plot(frames, used, label=name)
        if costs["out_of_memory"]:
            memory.plot(frames[-1], used[-1], "x", color=line.get_color(), label="out of memory")
        windows = costs["windows"]
        speed.plot([window["frames"] for window in windows],
                   [window["fps"] for window in windows], label=name)
    if limit:
        memory.axhline(limit / size, linestyle="--", color="grey")
    memory.set(xlabel="processed frames", xscale="log", ylim=(0, None), title="Memory",
               ylabel=f"weights, cache and state, {unit}")
    memory.legend()

    labels = [name.replace("LLM-", "LLM-\n") for name in results]
    colours = [f"C{i}" for i in range(len(results))]
    shown = bars.bar(labels, [costs["fps"] for costs in results.values()], color=colours)
    bars.bar_label(shown, fmt="%.0f")
    bars.margins(y=0.1)
    most_frames = max(costs["frames"] for costs in results.values())
    bars.set(ylabel="frames per second", title=f"Throughput over {most_frames} frames")

    speed.set(xlabel="processed frames", ylabel="frames per second", ylim=(0, None), title="Speed")
    figure.tight_layout()
    save_figure(figure, png)


def cost_column(costs: dict, macs_frames: int) -> dict:
    """The column of a variant in the table of `print_costs`."""
    windows = costs["windows"]
    column = {
        "frames": costs["frames"],
        f"GMACs, {macs_frames} frames": round(costs["macs"] / 1e9, 1),
        "weights, MB": costs["weights_bytes"] / 1e6,
        "cache, MB": windows[-1]["cache_bytes"] / 1e6,
        "used, MB": windows[-1]["used_bytes"] / 1e6,
        "held, MB": windows[-1]["held_bytes"] / 1e6,
        "cache, tokens, at most": costs["cache_tokens_peak"],
        "FPS": costs["fps"],
    }
    speeds = [window["fps"] for window in windows]
    column["ms a frame, window 1"] = 1e3 / speeds[0]
    if len(speeds) > 1:
        column["ms a frame, window 2"] = 1e3 / speeds[1]
        column["ms a frame, slowest from 2"] = 1e3 / min(speeds[1:])
    column["ms a frame, last window"] = 1e3 / speeds[-1]
    column["last window / window 2"] = costs["flatness"]
    column["one live stream, FPS"] = costs["live_fps"]
    column[f"{costs['streams']} at once, FPS"] = costs["streams_fps"]
    for kind in ("frame", "narration"):
        for quantile in ("p50", "p95"):
            column[f"{kind}, ms, {quantile}"] = costs[f"{kind}_ms_{quantile}"]
    rest = costs["seconds"] - sum(costs["stages_s"].values())
    for stage, seconds in {**costs["stages_s"], "rest": rest}.items():
        column[f"{stage}, ms a frame"] = 1e3 * seconds / costs["frames"]
    if costs["out_of_memory"]:
        column["out of memory"] = "yes"
    return column


def print_costs(results: dict[str, dict], macs_frames: int) -> None:
    """The table, one column per variant. "ms a frame" is the mean of all that a frame costs,
    narrations included."""
    print_table([(name, cost_column(costs, macs_frames)) for name, costs in results.items()])


# ------------------------------------------------------------------------------- the command line

def run_efficiency(args: argparse.Namespace) -> None:
    check_writable(args.png)
    frontend = decoding(args)
    work = Work(args.frames, args.every, args.words, args.lookahead)
    counted = replace(work, frames=min(args.macs_frames, args.frames), lookahead=1)
    results = {}
    for name, narrator in narrators(args):
        if narrator.slow_because:
            print(f"the language model {narrator.slow_because}: it takes the plain path, which is "
                  "slower", file=sys.stderr)
        if args.compile:
            compile_memory(narrator.memory)
            narrator.decoder.compile()
        # The first calls are not counted: they compile and allocate.
        measure_stream(narrator, replace(work, frames=5 * args.every), args.every)
        costs = measure_stream(narrator, work, args.window)
        live, together = at_once(narrator, replace(work, frames=min(args.frames, 160)),
                                 args.streams)
        costs |= {"live_fps": live, "streams_fps": together, "streams": args.streams}
        # Only with the last k narrations a frame's cost stays the same.
        costs["flatness"] = None
        if narrator.config.last_k is not None and args.frames > 2 * args.window:
            costs["flatness"] = flatness(narrator, work, args.window)
        costs["macs"] = macs(narrator, counted)
        results[name] = costs
        del narrator                       # before the next one is built
    results = {name: costs for name, costs in results.items() if costs["windows"]}
    if not results:
        raise BadData("the device's memory is full after the first frame; choose a smaller model")

    print_costs(results, counted.frames)
    times = [f"{stage} {1e3 * seconds:.2f}" for stage, seconds in frontend.items()]
    print("before that, ms a frame: " + ", ".join(times))
    if args.png:
        plot_efficiency(results, args.png, limit=24e9 if args.config else None)
    if args.json:
        print(json.dumps(vars(work) | {"variants": results, "frontend_s": frontend}))


NUMBERS = (                                # options: name, default, help
    ("frames", 2000, "frames to stream"),
    ("every", 8, "frames between two narrations"),
    ("macs-frames", 240, "frames whose MACs are counted"),
    ("words", 12, "tokens of a narration"),
    ("window", 500, "frames per point of the curves"),
    ("lookahead", 4, "frames in one pass of the language model; 1: live"),
    ("streams", 16, "live streams that share their passes, over 160 frames"),
)


def main():
    parser = Parser(prog="python -m experiments.efficiency", description="FlowNar, FlowNar-C, "
                    "VideoLLM-online, VideoLLM-MoD: multiply-accumulates, cache, memory, speed.")
    parser.add_argument("--config", choices=list(LLAMA),
                        type=lambda name: SHORT_NAMES.get(name, name),
                        help="a language model of this size, random weights")
    for name, default, text in NUMBERS:
        parser.add_argument(f"--{name}", type=positive_int, default=default,
                            help=f"{text} (default %(default)s)")
    parser.add_argument("--video", default=str(Path(DEFAULT_MODEL).parent / "kitchen.mp4"),
                        help="video for the times of decoding and encoding (default: the toy's)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS),
                        metavar="NAME",
                        help=f"which are measured: {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--model", nargs="+", metavar="DIR",
                        help="trained narrators instead: checkpoints, or hub ids")
    parser.add_argument("--compile", action="store_true",
                        help="compile the passes of the language model, and CLAM")
    device_options(parser)
    parser.add_argument("--png", metavar="FILE", help="also write the curves as a picture")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_efficiency(args))


if __name__ == "__main__":
    main()
