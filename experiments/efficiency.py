"""What a stream costs (paper §4.1, Fig. 1, App. C.3): multiply-accumulates, cache, memory and speed against frames.

    python -m experiments.efficiency --frames 10000 --png efficiency.png
    python -m experiments.efficiency --config llama-3.2-1b

FlowNar, FlowNar-C and the baseline VideoLLM-online run around one language model, with the same frames and the same
narrations, given at a data set's rate, so that they do the same work: only the context differs. Sizes matter here,
values of weights do not.

    held        bytes of all tensors that a stream keeps from frame to frame
    window      the number of frames after which memory and speed are reported
    stages      clam (step and read-out), llm (one pass for a frame), generation (a narration, word by word);
                decode and encode, which come before them, are timed separately
"""
import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import narrator as nar
import stream
from evaluate import print_table
from support import checkpoint
from support.common import BadData, choose, command_line, positive_int, pyplot, save_figure, synchronise
from support.options import device_options
from support.video import Video

LLAMA = {                                  # hidden, feed-forward, layers, heads; 8 key and value heads, 128,256 words
    "llama-3.2-1b": (2048, 8192, 16, 32),
    "llama-3-8b": (4096, 14336, 32, 32),
}
VARIANTS = {"FlowNar-C": {"last_k": 10}, "FlowNar": {}, "VideoLLM-online": {"memory": "none", "prune": False}}


class Timed(stream.Context):
    """A stream that times its stages, and feeds given narrations word by word, as a model would generate them."""

    def __init__(self, narrator: nar.Narrator):
        super().__init__(narrator)
        self.seconds, self.peak = Counter(), 0                                        # of stages; tokens in the cache

    def run_stage(self, stage: str, function: Callable, *args):
        synchronise(self.narrator.device)
        began = time.perf_counter()
        result = function(*args)
        synchronise(self.narrator.device)
        self.seconds[stage] += time.perf_counter() - began
        self.peak = max(self.peak, self.cache.get_seq_length())
        return result

    def feed(self, tokens: nar.Tokens, x: Tensor | None = None) -> Tensor:
        if x is not None:
            return self.run_stage("llm", super().feed, tokens, x)
        assistant = next((i for i, number in enumerate(tokens.number) if number >= 0), 0)
        words = assistant + len(self.narrator.layout.assistant)
        for a, b in [(0, words)] + [(i, i + 1) for i in range(words, len(tokens))]:
            piece = nar.Tokens(*(values[a:b] for values in vars(tokens).values()))
            logits = self.run_stage("generation", super().feed, piece)
        return logits

    def update_memory(self, x: Tensor):
        self.run_stage("clam", super().update_memory, x)

    def read_memory(self):
        self.run_stage("clam", super().read_memory)

    def held(self) -> int:
        """Bytes of all tensors that this stream keeps: cache buffers with their spare room, CLAM's state and tokens."""
        kept = [y for layer in self.cache.layers for y in layer] + [self.state, self.memory]
        return sum(y.nbytes for y in kept if y is not None)


def measure_stream(narrator: nar.Narrator, frames: int, every: int, words: int, window: int) -> dict:
    """Stream `frames` random frames, with a narration of `words` tokens after every `every` frames.

    Returns the median and 95th percentile of the time of a frame and of a narration, the largest cache in tokens, and
    for each window of frames the cache and the speed. Stops early, and says so, where the device's memory is full.
    """
    context, config, device = Timed(narrator), narrator.config, narrator.device
    random = torch.Generator().manual_seed(0)
    source = (torch.randn(config.J, config.width, generator=random).to(next(narrator.connector.parameters()).dtype)
              for _ in range(frames))
    ids = (narrator.layout.newline * words)[:words]
    forced = {t: ids for t in [0, *range(every - 1, frames, every)]}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rows, plain, narrating, spent, out_of_memory = [], [], [], Counter(), False
    decisions = stream.narrate(narrator, source, forced=forced, context=context)
    try:
        for decision in tqdm(decisions, total=frames, unit="frame", leave=False):
            now = Counter(context.seconds)
            used, spent = {stage: now[stage] - spent[stage] for stage in now}, now
            if decision.narration:
                narrating.append(used["generation"])
            else:
                plain.append(sum(used.values()))
            streamed = decision.frame + 1
            if streamed % window == 0 or streamed == frames:
                done = sum(now.values())
                since = done - (rows[-1]["seconds"] if rows else 0.0)
                count = streamed - (rows[-1]["frames"] if rows else 0)
                rows.append({"frames": streamed, "seconds": done, "fps": count / since,
                             "cache_tokens": decision.text_tokens + decision.visual_tokens,
                             "cache_bytes": context.cache.bytes(),
                             "held_bytes": context.held(), "peak_bytes": peak_memory(device)})
    except torch.OutOfMemoryError:
        out_of_memory = True
    quantile = lambda values, q: float(np.quantile(values, q)) * 1e3 if values else None
    return {"frames": rows[-1]["frames"] if rows else 0, "narrations": len(narrating), "out_of_memory": out_of_memory,
            "fps": rows[-1]["frames"] / rows[-1]["seconds"] if rows else 0.0, "stages_s": dict(context.seconds),
            "cache_tokens_peak": context.peak,
            "frame_ms_p50": quantile(plain, 0.5), "frame_ms_p95": quantile(plain, 0.95),
            "narration_ms_p50": quantile(narrating, 0.5), "narration_ms_p95": quantile(narrating, 0.95),
            "windows": rows}


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of the device on CUDA, else of the process; None where neither is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def macs(narrator: nar.Narrator, frames: int, every: int, words: int) -> int:
    """Multiply-accumulates of connector, CLAM and language model for `frames` frames (without the vision encoder)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        measure_stream(narrator, frames, every, words, frames)
    return counter.get_total_flops() // 2


def variants(args: argparse.Namespace) -> Iterator[tuple[str, nar.Narrator]]:
    """The three variants around one language model, with random weights where only sizes matter."""
    device, dtype = choose(args.device, args.dtype)
    if args.config:
        from transformers import LlamaConfig, LlamaForCausalLM
        hidden, inner, layers, heads = LLAMA[args.config]
        sizes = LlamaConfig(vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                            num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072,
                            tie_word_embeddings=args.config.endswith("1b"), attn_implementation="sdpa",
                            rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        with torch.device(device):
            llm = LlamaForCausalLM(sizes).to(dtype)
        tokenizer, base = checkpoint.load_tokenizer(str(stream.TOY / "llm")), nar.Config()
    elif args.llm:
        (llm, tokenizer), base = checkpoint.load_llm(args.llm, dtype), nar.Config()
    else:
        toy = nar.Narrator.load(str(stream.TOY))
        llm, tokenizer, base = toy.llm, toy.layout.tokenizer, replace(toy.config, last_k=None)
    for name, changes in VARIANTS.items():
        narrator = nar.Narrator(llm, tokenizer, replace(base, **changes)).to(device, dtype)
        yield name, narrator.eval().requires_grad_(False)


def decoding(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a frame for decoding a video and for its vision encoder."""
    device, dtype = choose(args.device, args.dtype)
    vision = nar.VisionEncoder(args.vision or str(stream.TOY / "vision"), device=device, dtype=dtype)
    began = time.perf_counter()
    frames = [torch.from_numpy(frame) for frame in islice(Video(args.video, 2.0), 64)]
    middle = time.perf_counter()
    if not frames:
        raise BadData(f"{args.video} has no frames")
    vision(frames[0][None])
    synchronise(torch.device(device))
    start = time.perf_counter()
    for frame in frames:
        vision(frame[None])
    synchronise(torch.device(device))
    return {"decode": (middle - began) / len(frames), "encode": (time.perf_counter() - start) / len(frames)}


def plot_efficiency(results: dict, png: str):
    """Fig. 1, middle and right, and the speed over frames of App. C.3."""
    plt = pyplot()
    figure, (memory, bars, speed) = plt.subplots(1, 3, figsize=(13, 3.6))
    for name, r in results.items():
        frames = [row["frames"] for row in r["windows"]]
        memory.plot(frames, [row["held_bytes"] / 1e6 for row in r["windows"]], label=name)
        speed.plot(frames, [row["fps"] for row in r["windows"]], label=name)
    bars.bar(list(results), [r["fps"] for r in results.values()], color=[f"C{i}" for i in range(len(results))])
    memory.set(xlabel="frames", ylabel="cache and state, MB", yscale="log", title="Memory")
    bars.set(ylabel="frames per second", title=f"Throughput over {max(r['frames'] for r in results.values())} frames")
    speed.set(xlabel="frames", ylabel="frames per second", ylim=(0, None), title="Speed")
    speed.legend()
    figure.tight_layout()
    save_figure(figure, png)


def print_costs(results: dict[str, dict], macs_frames: int):
    """The table, one column per variant; "ms a frame" is the mean of all that a frame costs, narrations included."""
    columns = []
    for name, r in results.items():
        windows = r["windows"]
        row = {"frames": r["frames"], f"GMACs, {macs_frames} frames": round(r["macs"] / 1e9, 1),
               "cache, MB": windows[-1]["cache_bytes"] / 1e6, "held, MB": windows[-1]["held_bytes"] / 1e6,
               "cache, tokens, at most": r["cache_tokens_peak"], "FPS": r["fps"]}
        speeds = [window["fps"] for window in windows]
        second = {"window 2": speeds[1], "slowest from 2": min(speeds[1:])} if len(speeds) > 1 else {}
        for label, fps in ({"window 1": speeds[0]} | second | {"last window": speeds[-1]}).items():
            row[f"ms a frame, {label}"] = 1e3 / fps
        for what in ("frame", "narration"):
            for q in ("p50", "p95"):
                row[f"{what}, ms, {q}"] = r[f"{what}_ms_{q}"]
        row |= {f"{stage}, ms a frame": 1e3 * seconds / r["frames"] for stage, seconds in r["stages_s"].items()}
        columns.append((name, row | ({"out of memory": "yes"} if r["out_of_memory"] else {})))
    print_table(columns)


def run_efficiency(args: argparse.Namespace):
    results, macs_frames, frontend = {}, min(args.macs_frames, args.frames), decoding(args)
    for name, narrator in variants(args):
        measure_stream(narrator, 2 * args.every, args.every, args.words, args.every)  # the first calls are not counted
        results[name] = measure_stream(narrator, args.frames, args.every, args.words, args.window)
        results[name]["macs"] = macs(narrator, macs_frames, args.every, args.words)
        del narrator
    shown = {name: r for name, r in results.items() if r["windows"]}
    if not shown:
        raise BadData("the device's memory is full before the first window of frames; choose a smaller model")
    print_costs(shown, macs_frames)
    print("before that, ms a frame: " + ", ".join(f"{stage} {1e3 * s:.2f}" for stage, s in frontend.items()))
    if args.png:
        plot_efficiency(results, args.png)
    if args.json:
        print(json.dumps({"frames": args.frames, "every": args.every, "words": args.words, "variants": results,
                          "frontend_s": frontend}))


def main():
    parser = argparse.ArgumentParser(prog="python -m experiments.efficiency", description="FlowNar, FlowNar-C and "
                                     "VideoLLM-online: multiply-accumulates, cache, memory, speed (Fig. 1).")
    parser.add_argument("--config", choices=list(LLAMA), help="a language model of this size, random weights",
                        type=lambda name: {"1b": "llama-3.2-1b", "8b": "llama-3-8b"}.get(name, name))
    for name, default, text in (("frames", 2000, "frames to stream"), ("every", 8, "frames between two narrations"),
                                ("macs-frames", 240, "frames whose MACs are counted"),
                                ("words", 12, "tokens of a narration"),
                                ("window", 500, "frames per point of the curves")):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--video", default=str(stream.TOY.parent / "kitchen.mp4"),
                        help="video for the times of decoding and encoding (default: the toy's)")
    device_options(parser)
    parser.add_argument("--png", metavar="FILE", help="also write the curves as a picture")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_efficiency(args))


if __name__ == "__main__":
    main()
