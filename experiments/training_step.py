"""What a training step costs (paper §3.5): time and memory of FlowNar, FlowNar-C, VideoLLM-online
and VideoLLM-MoD.

    python -m experiments.training_step --frames 1200

All have one language model of random weights, and one video: frames, and a narration after every
few. A step is the loss and its gradient. The variants run in turn, one step each, in a process of
their own, so that each has a peak memory of its own. FlowNar feeds more tokens, those of the
memory, and attends to fewer.

    step        median of the processor's seconds; on a GPU, of seconds
    memory      peak of the process, or of the GPU, and how much of it the steps add to the weights
"""
import argparse
import json
import multiprocessing
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch

import narrator as nar
from baselines.variants import make_config, new_narrator
from experiments.efficiency import VARIANTS, peak_memory
from support.common.devices import DTYPES, device_and_dtype, synchronise
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser, positive_int
from support.engine import checkpoint


def variant_of_size(args: argparse.Namespace, name: str) -> nar.Narrator:
    """A variant around a language model of the given size with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    device, dtype = device_and_dtype(args.device, args.dtype)
    tokenizer = checkpoint.load_tokenizer(str(Path(DEFAULT_MODEL) / "llm"))
    sizes = LlamaConfig(
        vocab_size=max(args.vocabulary, len(tokenizer)), hidden_size=args.width,
        intermediate_size=args.inner, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        max_position_embeddings=131072)
    torch.manual_seed(0)
    with torch.device(device):
        llm = LlamaForCausalLM(sizes).to(dtype)
    if name in args.checkpointing:
        llm.gradient_checkpointing_enable({"use_reentrant": False})
    config = nar.Config(lora_rank=args.rank, lora_alpha=2 * args.rank)
    config = make_config(**asdict(config) | VARIANTS[name])
    narrator = new_narrator(llm, tokenizer, config).to(device).train()
    return narrator


def steps(connection, args: argparse.Namespace, name: str) -> None:
    """The process of one variant. For each True that arrives, it takes a step and sends its
    seconds; after False, it sends its tokens and bytes."""
    narrator = variant_of_size(args, name)
    device = narrator.device
    config = narrator.config
    x = torch.randn(args.frames, config.J, config.width, device=device)        # [T, J, D]
    words = (narrator.layout.newline * args.words)[:args.words]
    narrations = [(t, words) for t in [0, *range(args.every - 1, args.frames, args.every)]]
    weights = peak_memory(device)              # before the first step
    # On a CPU, other processes may interrupt a step: only its own time counts.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with suppress(EOFError):                   # the parent process has ended
        while connection.recv():
            narrator.zero_grad()
            began = clock()
            loss, learned = narrator.loss(x, narrations)
            (loss / learned).backward()
            synchronise(device)
            connection.send(clock() - began)
    connection.send({
        "tokens": len(narrator.layout.sequence(narrations)),
        "peak_bytes": peak_memory(device),
        "weights_bytes": weights,
    })


def in_turn(args: argparse.Namespace) -> dict[str, dict]:
    """What each variant's process measures: tokens, bytes, the seconds of each step but the first,
    and their median."""
    context = multiprocessing.get_context("spawn")
    connections = {}
    seconds = {name: [] for name in VARIANTS}
    results = {}
    with ExitStack() as stack:
        for name in VARIANTS:
            ours, theirs = context.Pipe()
            process = context.Process(target=command_line, args=(partial(steps, theirs, args, name),))
            process.start()
            theirs.close()                     # else its end would not be noticed here
            stack.callback(process.join)
            stack.callback(ours.close)         # called first: it ends the process
            connections[name] = ours
        try:
            for _ in range(args.steps + 1):
                for name, connection in connections.items():
                    connection.send(True)
                    seconds[name].append(connection.recv())
            for name, connection in connections.items():
                connection.send(False)
                timed = seconds[name][1:]      # the first step also allocates
                results[name] = connection.recv() | {"step_s": median(timed), "steps_s": timed}
        except (EOFError, ConnectionError) as error:
            raise BadData(f"{name}: its process has ended, out of memory?") from error
    return results


def run_steps(args: argparse.Namespace) -> None:
    # a wrong device is refused before processes start
    device_and_dtype(args.device, args.dtype)
    if args.width % (2 * args.heads) or args.heads % args.kv_heads:
        raise BadData("the width must be a multiple of twice the number of heads, and that one of "
                      "--kv-heads")
    results = in_turn(args)
    baseline = results["VideoLLM-online"]
    columns = []
    for name, costs in results.items():
        columns.append((name, {
            "tokens": costs["tokens"],
            "step, s": costs["step_s"],
            "to the baseline": costs["step_s"] / baseline["step_s"],
            "peak memory, MB": costs["peak_bytes"] / 1e6,
            "of it, the step, MB": (costs["peak_bytes"] - costs["weights_bytes"]) / 1e6,
        }))
    print_table(columns)
    if args.json:
        print(json.dumps({"frames": args.frames, "every": args.every, "words": args.words,
                          "variants": results}))


SIZES = (                                      # options: name, default, help
    ("frames", 400, "frames of the video"),
    ("every", 8, "frames between two narrations"),
    ("words", 12, "tokens of a narration"),
    ("steps", 3, "steps that are timed"),
    ("layers", 2, "of the language model"),
    ("width", 1024, "of its hidden states"),
    ("inner", 4096, "width of its feed-forward layers"),
    ("heads", 16, "of queries"),
    ("kv-heads", 8, "of keys and values"),
    ("vocabulary", 2000, "its words, at least"),
    ("rank", 16, "of LoRA"),
)


def parser() -> argparse.ArgumentParser:
    options = Parser(prog="python -m experiments.training_step",
                     description="Time and memory of a training step of each variant (§3.5).")
    for name, default, text in SIZES:
        options.add_argument(f"--{name}", type=positive_int, default=default,
                             help=f"{text} (default %(default)s)")
    options.add_argument("--checkpointing", nargs="+", choices=list(VARIANTS), default=[],
                         metavar="NAME",
                         help="variants that recompute activations in the backward pass: "
                              f"{', '.join(VARIANTS)}")
    options.add_argument("--device", default="auto",
                         help="cpu, cuda, mps (default: the best there is)")
    options.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    options.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return options


def main():
    args = parser().parse_args()
    command_line(lambda: run_steps(args))


if __name__ == "__main__":
    main()
