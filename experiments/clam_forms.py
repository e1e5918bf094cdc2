"""The three forms of CLAM (clam.py): that they agree, and what each costs.

    OMP_NUM_THREADS=1 python -m experiments.clam_forms

The recurrent form is Eq. 2 token by token; the published code reads the memory out after every token and then selects.
"""
import argparse
import json
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from clam import CLAM
from support.common import command_line, positive_int, synchronise
from support.measure import distance, profile


def compare_forms(clam: CLAM, x: Tensor, read_at: Tensor, compiled: bool) -> dict:
    """Training: forward and backward of each form, against the recurrent one."""
    everywhere = torch.arange(1, x.shape[1] + 1)[None]

    def published(x, read_at):                            # reads out after every token and then selects
        memory, state = clam.recurrent(x, everywhere)
        return memory[:, read_at[0] - 1], state

    results = {"recurrent, every token read out": profile(published, clam, x, 1, read_at),
               "recurrent": profile(clam.recurrent, clam, x, 1, read_at),
               "chunked": profile(clam.chunked, clam, x, 5, read_at)}
    if compiled:
        clam.compile()
        clam.chunked(x, read_at)[0].mean().backward()     # compilation is not timed
        results["chunked, compiled"] = profile(clam.chunked, clam, x, 5, read_at)
    oracle, summary = results["recurrent"], {}
    for name, result in results.items():
        error = max(distance(result["grads"][n], g) for n, g in oracle["grads"].items()
                    if g.norm() > 1e-6 * max(map(torch.norm, oracle["grads"].values())))
        row = {"seconds": result["seconds"], "kept_mb": result["bytes"] / 1e6,
               "output_error": distance(result["output"], oracle["output"]), "gradient_error": error}
        summary[name] = {key: float(f"{value:.3g}") for key, value in row.items()}
        print(f"{name:31} forward + backward {row['seconds']:7.3f} s   kept for backward {row['kept_mb']:7.1f} MB   "
              f"relative error: outputs {row['output_error']:.1e}, gradients {row['gradient_error']:.1e}")
    return summary


@torch.no_grad()
def compare_step(clam: CLAM, x: Tensor, read_at: Tensor, frame: int = 10) -> dict:
    """Streaming: `step` frame by frame with `read` where read_at says, against `chunked`; milliseconds of each."""
    ends = torch.unique(read_at // frame * frame)         # read-outs at the ends of frames
    ends = ends[ends > 0]
    state, reads, seconds = clam.initial_state(), [], Counter()

    def timed(name: str, function: Callable, *args) -> Tensor:
        synchronise(x)
        start = time.perf_counter()
        result = function(*args)
        synchronise(x)
        seconds[name] += time.perf_counter() - start
        return result

    for end in range(frame, x.shape[1] + 1, frame):
        state = timed("step", clam.step, x[:, end - frame:end], state)
        if end in ends:
            reads.append(timed("read", clam.read, state))
    parallel, _ = clam.chunked(x, ends[None])
    return {"step_ms": round(1e3 * seconds["step"] / (x.shape[1] // frame), 3),
            "read_ms": round(1e3 * seconds["read"] / len(reads), 3),
            "step_error": float(f"{distance(torch.stack(reads, 1), parallel):.3g}")}


def main():
    parser = argparse.ArgumentParser(prog="python -m experiments.clam_forms",
                                     description="Show that CLAM's three forms agree, and how fast each is.")
    for name, value in (("width", 1024), ("heads", 8), ("tokens", 20), ("length", 2400), ("reads", 40)):
        parser.add_argument(f"--{name}", type=positive_int, default=value, help=f"default {value}")
    parser.add_argument("--no-compile", action="store_true", help="skip the compiled form, which needs a C++ compiler")
    args = parser.parse_args()
    if args.width % (2 * args.heads) or args.length < max(10, args.reads):
        parser.error("--width must be a multiple of twice --heads, and --length 10 or more and at least --reads")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    clam = CLAM(args.width, args.tokens, args.heads, dropout=0.0).to(device)
    x = torch.randn(1, args.length, args.width, device=device)
    read_at = torch.linspace(0, args.length, args.reads + 1).long()[None, 1:]
    print(f"D = {args.width}, {args.heads} heads, M = {args.tokens}, {args.length} tokens, {args.reads} read-outs, "
          f"{device}, {torch.get_num_threads()} threads")
    summary = compare_forms(clam, x, read_at, not args.no_compile) | compare_step(clam, x, read_at)
    print(f"step {summary['step_ms']} ms a frame of 10 tokens, read {summary['read_ms']} ms a narration, without "
          f"gradients; relative error: outputs {summary['step_error']:.1e}")
    print(json.dumps(summary))


if __name__ == "__main__":
    command_line(main)
