"""The three forms of CLAM (clam.py): that they agree, and what each costs.

    OMP_NUM_THREADS=1 python -m experiments.clam_forms

The recurrent form is Eq. 2 token by token; the published code reads the memory out after every
token and then selects.
"""
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clam import CLAM
from support.common.devices import synchronise
from support.common.errors import command_line
from support.common.options import Parser, positive_int
from support.engine.compiled import compile_memory


# ------------------------------------------------------------- what a piece of code costs

def profile(function: Callable, module: nn.Module, x: Tensor, repeats: int, *arguments) -> dict:
    """Run forward and backward of function(x, *arguments), which uses the weights of `module`.

    seconds   forward and backward, the best of `repeats`
    bytes     kept for the backward pass, less the weights
    output    the function's first output
    grads     of the weights
    """
    seconds = []
    kept = {}                                  # address of each tensor's memory: its bytes

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    for _ in range(repeats):
        module.zero_grad()
        kept.clear()
        # A GPU works in the background: wait for it before the clock is read.
        synchronise(x)
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output, _ = function(x, *arguments)
        # A gradient that differs from element to element: a sum alone would hide errors.
        factors = torch.linspace(-1, 1, output.numel(), device=x.device)
        (output * factors.view_as(output)).sum().backward()
        synchronise(x)
        seconds.append(time.perf_counter() - start)

    # Weights are kept for the backward pass, too, but they are there anyway.
    weight_bytes = 0
    gradients = {}
    for name, parameter in module.named_parameters():
        storage = parameter.untyped_storage()
        if storage.data_ptr() in kept:
            weight_bytes += storage.nbytes()
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return {
        "seconds": min(seconds),
        "bytes": sum(kept.values()) - weight_bytes,
        "output": output.detach(),
        "grads": gradients,
    }


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


# ------------------------------------------------------------- the forms

def compare_forms(clam: CLAM, x: Tensor, read_at: Tensor, compiled: bool) -> dict:
    """Training: forward and backward of each form, against the recurrent one."""

    def published(x: Tensor, read_at: Tensor) -> tuple[Tensor, Tensor]:
        """Read out after every token, then select."""
        after_every_token = torch.arange(1, x.shape[1] + 1)[None]
        memory, state = clam.recurrent(x, after_every_token)
        return memory[:, read_at[0] - 1], state

    results = {
        "recurrent, every token read out": profile(published, clam, x, 1, read_at),
        "recurrent": profile(clam.recurrent, clam, x, 1, read_at),
        "chunked": profile(clam.chunked, clam, x, 5, read_at),
    }
    if compiled:
        compile_memory(clam)
        clam.chunked(x, read_at)[0].mean().backward()          # compilation is not timed
        results["chunked, compiled"] = profile(clam.chunked, clam, x, 5, read_at)

    # Gradients that are almost zero differ by rounding alone: they are not compared.
    oracle = results["recurrent"]
    largest = max(torch.norm(gradient) for gradient in oracle["grads"].values())
    compared = []
    for name, gradient in oracle["grads"].items():
        if gradient.norm() > 1e-6 * largest:
            compared.append(name)

    summary = {}
    for name, result in results.items():
        row = {
            "seconds": result["seconds"],
            "kept_mb": result["bytes"] / 1e6,
            "output_error": distance(result["output"], oracle["output"]),
            "gradient_error": max(distance(result["grads"][weight], oracle["grads"][weight])
                                  for weight in compared),
        }
        summary[name] = {key: three_digits(value) for key, value in row.items()}
        print(f"{name:31} forward + backward {row['seconds']:7.3f} s   "
              f"kept for backward {row['kept_mb']:7.1f} MB   "
              f"relative error: outputs {row['output_error']:.1e}, "
              f"gradients {row['gradient_error']:.1e}")
    return summary


@torch.no_grad()
def compare_step(clam: CLAM, x: Tensor, read_at: Tensor, frame: int = 10) -> dict:
    """Streaming: `step` frame by frame, and `read` at the ends of frames before `read_at`.

    frame     tokens in a frame
    Returns milliseconds of a step and of a read, and the distance from what `chunked` reads.
    """
    # A stream is read only after a whole frame.
    ends = torch.unique(read_at // frame * frame)
    ends = ends[ends > 0]
    state = clam.initial_state()
    memories = []
    seconds = {"step": 0.0, "read": 0.0}

    def timed(name: str, function: Callable, *arguments) -> Tensor:
        synchronise(x)
        start = time.perf_counter()
        result = function(*arguments)
        synchronise(x)
        seconds[name] += time.perf_counter() - start
        return result

    for end in range(frame, x.shape[1] + 1, frame):
        state = timed("step", clam.step, x[:, end - frame:end], state)
        if end in ends:
            memories.append(timed("read", clam.read, state))
    expected, _ = clam.chunked(x, ends[None])
    return {
        "step_ms": round(1e3 * seconds["step"] / (x.shape[1] // frame), 3),
        "read_ms": round(1e3 * seconds["read"] / len(memories), 3),
        "step_error": three_digits(distance(torch.stack(memories, 1), expected)),
    }


def main():
    parser = Parser(
        prog="python -m experiments.clam_forms",
        description="Show that CLAM's three forms agree, and how fast each is.")
    sizes = {"width": 1024, "heads": 8, "tokens": 20, "length": 2400, "reads": 40}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=value, help=f"default {value}")
    parser.add_argument("--no-compile", action="store_true",
                        help="skip the compiled form, which needs a C++ compiler")
    args = parser.parse_args()
    if args.width % (2 * args.heads) or args.length < max(10, args.reads):
        parser.error("--width must be a multiple of twice --heads, and --length 10 or more and at "
                     "least --reads")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    clam = CLAM(args.width, args.tokens, args.heads, dropout=0.0).to(device)
    x = torch.randn(1, args.length, args.width, device=device)
    read_at = torch.linspace(0, args.length, args.reads + 1).long()[None, 1:]
    print(f"D = {args.width}, {args.heads} heads, M = {args.tokens}, {args.length} tokens, "
          f"{args.reads} read-outs, {device}, {torch.get_num_threads()} threads")
    summary = compare_forms(clam, x, read_at, not args.no_compile)
    summary |= compare_step(clam, x, read_at)
    print(f"step {summary['step_ms']} ms a frame of 10 tokens, read {summary['read_ms']} ms a "
          f"narration, without gradients; relative error: outputs {summary['step_error']:.1e}")
    print(json.dumps(summary))


if __name__ == "__main__":
    command_line(main)
