"""What a stream costs (paper §4.1, Fig. 1, App. C.3): multiply-accumulates, cache, memory and speed against frames.

    python -m experiments.efficiency --frames 10000 --png efficiency.png
    python -m experiments.efficiency --config llama-3.2-1b

FlowNar, FlowNar-C and the baselines VideoLLM-online and VideoLLM-MoD run as stream.py runs them, around language models
of one size, with the same frames and the same narrations, given at a data set's rate, so that they do the same work:
only the context differs, and in VideoLLM-MoD the tokens that a layer computes. Sizes matter here, values of weights do
not. The frames are made beforehand.

    used        bytes of the keys and values in the cache, of CLAM's state and memory tokens, of frames that wait for it
    held        the same with the free slots of the cache's buffers
    window      the number of frames after which memory and speed are reported
    stages      parts of the loop, which is timed as a whole: memory (CLAM's step and read-out), frame (passes of the
                language model with frames), text (its passes word by word), trigger (softmax and its transfer); rest.
                decode and encode, which come before them, are timed separately
    live        with --lookahead 1, no frame waits for the next; with K, a pass reads K frames, and the first of them
                takes the time of all
    at once     --streams live streams, and one for comparison: frames for each second of processor time
"""
import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import narrator as nar
import stream
from baselines.narration_memory import HistoryContext, HistoryNarrator
from baselines.variants import load_narrator, new_narrator
from experiments.timing import Meter, Work, at_once, flatness, total
from support.common.devices import device_and_dtype, synchronise
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import DEFAULT_MODEL, Parser, device_options, positive_int
from support.common.progress import progress
from support.engine import checkpoint
from support.engine.passes import compile_memory
from support.files.features import encode_pictures
from support.files.video import Video

WORDS = 128256                             # in Llama 3's vocabulary
LLAMA = {                                  # hidden, feed-forward, layers, heads; 8 key and value heads
    "llama-3.2-1b": (2048, 8192, 16, 32),
    "llama-3-8b": (4096, 14336, 32, 32),
}
VARIANTS = {"FlowNar-C": {"last_k": 10}, "FlowNar": {}, "VideoLLM-online": {"memory": "none", "prune": False},
            "VideoLLM-MoD": {"memory": "none", "prune": False, "mod_keep": 0.2}}


def measure_stream(narrator: nar.Narrator, work: Work, window: int) -> dict:
    """Stream the work's frames, or as many as the device has memory for.

    Returns speed, seconds of the stages, the largest cache in tokens, the median and 95th percentile of the time of a
    frame without narration and of a narration's words, for each window of frames its speed and the memory at its end,
    and the largest memory so far against frames: weights and used bytes.
    """
    if narrator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(narrator.device)
    meter, out_of_memory = Meter(narrator, work), False
    try:
        for _ in progress(range(work.frames), unit="frame", leave=False):
            meter.advance(1)
    except torch.OutOfMemoryError:
        out_of_memory = True
    rows, windows = meter.rows, []
    for begin in range(0, len(rows), window):
        part = rows[begin:begin + window]
        last = {name: part[-1][name] for name in ("cache_tokens", "cache_bytes", "used_bytes", "held_bytes")}
        windows.append({"frames": begin + len(part), "fps": len(part) / total(part, "seconds")} | last)
    quantile = lambda values, q: float(np.quantile(values, q)) * 1e3 if values else None
    frame = [row["seconds"] for row in rows if row["text_s"] is None]
    text = [row["text_s"] for row in rows if row["text_s"] is not None]
    weights = sum(p.nbytes for p in narrator.parameters())
    largest = np.maximum.accumulate([weights + row["used_bytes"] for row in rows])
    marks = sorted({round(mark) for mark in np.geomspace(1, len(rows), 60)}) if rows else []
    return {"frames": len(rows), "narrations": len(text), "out_of_memory": out_of_memory, "windows": windows,
            "fps": len(rows) / total(rows, "seconds") if rows else 0.0, "seconds": total(rows, "seconds"),
            "stages_s": dict(meter.stages), "cache_tokens_peak": meter.tokens,
            "peak_bytes": peak_memory(narrator.device), "frame_ms_p50": quantile(frame, 0.5),
            "frame_ms_p95": quantile(frame, 0.95), "narration_ms_p50": quantile(text, 0.5),
            "narration_ms_p95": quantile(text, 0.95), "weights_bytes": weights,
            "memory": [(mark, int(largest[mark - 1])) for mark in marks]}


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of the device on CUDA, else of the process; None where neither is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def macs(narrator: nar.Narrator, work: Work) -> int:
    """Multiply-accumulates of connector, CLAM and language model for the work (without the vision encoder).

    Counted in the modules of transformers: a captured CUDA graph shows no operations.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    frames, forced = work.given(narrator)
    plain = HistoryContext if isinstance(narrator, HistoryNarrator) else stream.Context
    context = plain(narrator)                   # its queries are computed once: not counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in stream.narrate(narrator, frames, forced=forced, context=context):
            pass
    return counter.get_total_flops() // 2


def build(args: argparse.Namespace, changes: dict) -> nar.Narrator:
    """A variant as stream.py runs it: LoRA merged, connector and CLAM in fp32. What no file gives is random."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    tokenizer, base = checkpoint.load_tokenizer(str(Path(DEFAULT_MODEL) / "llm")), nar.Config()
    if args.config:
        from transformers import AutoModelForCausalLM, LlamaConfig
        hidden, inner, layers, heads = LLAMA[args.config]
        sizes = LlamaConfig(vocab_size=WORDS, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                            num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072,
                            tie_word_embeddings=args.config.endswith("1b"),
                            rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        with torch.device(device):
            llm = AutoModelForCausalLM.from_config(sizes, dtype=dtype, attn_implementation="sdpa")
    elif args.llm:
        llm, tokenizer = checkpoint.load_llm(args.llm, dtype)
    else:
        toy = load_narrator(DEFAULT_MODEL, dtype=dtype)
        llm, base = toy.llm, replace(toy.config, last_k=None)
    return new_narrator(llm, tokenizer, replace(base, **changes)).to(device).eval().requires_grad_(False).merge()


def narrators(args: argparse.Namespace) -> Iterator[tuple[str, nar.Narrator]]:
    """What is measured, one after the other: trained narrators (--model), or the variants."""
    for folder in args.model or ():
        yield Path(folder).name, load_narrator(folder, args.llm, *device_and_dtype(args.device, args.dtype)).merge()
    for name in () if args.model else args.variants:
        yield name, build(args, VARIANTS[name])


def decoding(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a frame for decoding a video and for its vision encoder, in batches as stream.py makes them."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    vision = nar.VisionEncoder(args.vision or str(Path(DEFAULT_MODEL) / "vision"), device=device, dtype=dtype)
    began = time.perf_counter()
    frames = list(islice(Video(args.video, 2.0, largest=2 * vision.image_size), 64))
    decode = time.perf_counter() - began
    if not frames:
        raise BadData(f"{args.video} has no frames")
    for part in (frames[:args.lookahead], frames):                                    # the first call is not counted
        began = time.perf_counter()
        list(encode_pictures(part, vision, args.lookahead))
        synchronise(torch.device(device))
    return {"decode": decode / len(frames), "encode": (time.perf_counter() - began) / len(frames)}


def plot_efficiency(results: dict[str, dict], png: str, limit: float | None):
    """Fig. 1, middle (memory, with a line at `limit` bytes) and right, and the speed over frames of App. C.3."""
    plt = pyplot()
    figure, (memory, bars, speed) = plt.subplots(1, 3, figsize=(13, 3.6))
    unit, size = ("GB", 1e9) if limit else ("MB", 1e6)
    for name, r in results.items():
        frames, used = zip(*r["memory"])
        line, = memory.plot(frames, [y / size for y in used], label=name)
        if r["out_of_memory"]:
            memory.plot(frames[-1], used[-1] / size, "x", color=line.get_color(), label="out of memory")
        speed.plot([row["frames"] for row in r["windows"]], [row["fps"] for row in r["windows"]], label=name)
    if limit:
        memory.axhline(limit / size, linestyle="--", color="grey")
    labels = [name.replace("LLM-", "LLM-\n") for name in results]
    shown = bars.bar(labels, [r["fps"] for r in results.values()], color=[f"C{i}" for i in range(len(results))])
    bars.bar_label(shown, fmt="%.0f")
    bars.margins(y=0.1)
    memory.set(xlabel="processed frames", xscale="log", ylabel=f"weights, cache and state, {unit}", ylim=(0, None),
               title="Memory")
    bars.set(ylabel="frames per second", title=f"Throughput over {max(r['frames'] for r in results.values())} frames")
    speed.set(xlabel="processed frames", ylabel="frames per second", ylim=(0, None), title="Speed")
    memory.legend()
    figure.tight_layout()
    save_figure(figure, png)


def print_costs(results: dict[str, dict], macs_frames: int):
    """The table, one column per variant; "ms a frame" is the mean of all that a frame costs, narrations included."""
    columns = []
    for name, r in results.items():
        windows = r["windows"]
        row = {"frames": r["frames"], f"GMACs, {macs_frames} frames": round(r["macs"] / 1e9, 1),
               "weights, MB": r["weights_bytes"] / 1e6, "cache, MB": windows[-1]["cache_bytes"] / 1e6,
               "used, MB": windows[-1]["used_bytes"] / 1e6, "held, MB": windows[-1]["held_bytes"] / 1e6,
               "cache, tokens, at most": r["cache_tokens_peak"], "FPS": r["fps"]}
        speeds = [window["fps"] for window in windows]
        second = {"window 2": speeds[1], "slowest from 2": min(speeds[1:])} if len(speeds) > 1 else {}
        for label, fps in ({"window 1": speeds[0]} | second | {"last window": speeds[-1]}).items():
            row[f"ms a frame, {label}"] = 1e3 / fps
        row["last window / window 2"] = r["flatness"]
        row |= {"one live stream, FPS": r["live_fps"], f"{r['streams']} at once, FPS": r["streams_fps"]}
        for what in ("frame", "narration"):
            for q in ("p50", "p95"):
                row[f"{what}, ms, {q}"] = r[f"{what}_ms_{q}"]
        stages = r["stages_s"] | {"rest": r["seconds"] - sum(r["stages_s"].values())}
        row |= {f"{stage}, ms a frame": 1e3 * seconds / r["frames"] for stage, seconds in stages.items()}
        columns.append((name, row | ({"out of memory": "yes"} if r["out_of_memory"] else {})))
    print_table(columns)


def run_efficiency(args: argparse.Namespace):
    check_writable(args.png)
    results, frontend = {}, decoding(args)
    work = Work(args.frames, args.every, args.words, args.lookahead)
    counted = replace(work, frames=min(args.macs_frames, args.frames), lookahead=1)
    for name, narrator in narrators(args):
        if narrator.slow_because:
            print(f"the language model {narrator.slow_because}: it takes the plain path, which is slower", file=sys.stderr)
        if args.compile:
            compile_memory(narrator.memory)
            narrator.decoder.compile()
        measure_stream(narrator, replace(work, frames=5 * args.every), args.every)    # the first calls are not counted
        results[name] = measure_stream(narrator, work, args.window)
        constant = narrator.config.last_k is not None and args.frames > 2 * args.window
        once, together = at_once(narrator, replace(work, frames=min(args.frames, 160)), args.streams)
        results[name] |= {"live_fps": once, "streams_fps": together, "streams": args.streams,
                          "flatness": flatness(narrator, work, args.window) if constant else None,
                          "macs": macs(narrator, counted)}
        del narrator
    shown = {name: r for name, r in results.items() if r["windows"]}
    if not shown:
        raise BadData("the device's memory is full after the first frame; choose a smaller model")
    print_costs(shown, counted.frames)
    print("before that, ms a frame: " + ", ".join(f"{stage} {1e3 * s:.2f}" for stage, s in frontend.items()))
    if args.png:
        plot_efficiency(shown, args.png, limit=24e9 if args.config else None)
    if args.json:
        print(json.dumps(vars(work) | {"variants": results, "frontend_s": frontend}))


def main():
    parser = Parser(prog="python -m experiments.efficiency", description="FlowNar, FlowNar-C, "
                    "VideoLLM-online, VideoLLM-MoD: multiply-accumulates, cache, memory, speed.")
    parser.add_argument("--config", choices=list(LLAMA), help="a language model of this size, random weights",
                        type=lambda name: {"1b": "llama-3.2-1b", "8b": "llama-3-8b"}.get(name, name))
    for name, default, text in (("frames", 2000, "frames to stream"), ("every", 8, "frames between two narrations"),
                                ("macs-frames", 240, "frames whose MACs are counted"),
                                ("words", 12, "tokens of a narration"),
                                ("window", 500, "frames per point of the curves"),
                                ("lookahead", 4, "frames in one pass of the language model; 1: live"),
                                ("streams", 16, "live streams that share their passes, over 160 frames")):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--video", default=str(Path(DEFAULT_MODEL).parent / "kitchen.mp4"),
                        help="video for the times of decoding and encoding (default: the toy's)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME",
                        help=f"which are measured: {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--model", nargs="+", metavar="DIR", help="trained narrators instead: checkpoints, or hub ids")
    parser.add_argument("--compile", action="store_true", help="compile the passes of the language model, and CLAM")
    device_options(parser)
    parser.add_argument("--png", metavar="FILE", help="also write the curves as a picture")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_efficiency(args))


if __name__ == "__main__":
    main()
