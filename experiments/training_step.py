"""What a training step costs (paper §3.5): time and memory of FlowNar, FlowNar-C, VideoLLM-online and VideoLLM-MoD.

    python -m experiments.training_step --frames 1200

One language model of random weights and one video for all: frames, and a narration after every few. A step is the loss
and its gradient. The variants run in turn, a step each, each in a process of its own, so that its peak memory is its
own. FlowNar feeds more tokens, those of the memory, and attends to fewer.

    step        median of the processor's seconds; on a GPU, of seconds
    memory      peak of the process, or of the GPU, and how much of it the steps add to the weights
"""
import argparse
import json
import multiprocessing
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

import narrator as nar
from baselines.variants import new_narrator
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
    sizes = LlamaConfig(vocab_size=max(args.vocabulary, len(tokenizer)), hidden_size=args.width,
                        intermediate_size=args.inner, num_hidden_layers=args.layers, num_attention_heads=args.heads,
                        num_key_value_heads=args.kv_heads, max_position_embeddings=131072)
    torch.manual_seed(0)
    with torch.device(device):
        llm = LlamaForCausalLM(sizes).to(dtype)
    config = replace(nar.Config(lora_rank=args.rank, lora_alpha=2 * args.rank), **VARIANTS[name])
    if name in args.checkpointing:
        llm.gradient_checkpointing_enable({"use_reentrant": False})
    return new_narrator(llm, tokenizer, config).to(device).train()


def steps(connection, args: argparse.Namespace, name: str):
    """One variant's process: a step for each True that arrives -> its seconds; after False, tokens and bytes."""
    narrator = variant_of_size(args, name)
    device, config = narrator.device, narrator.config
    x = torch.randn(args.frames, config.J, config.width, device=device)
    narrations = [(t, (narrator.layout.newline * args.words)[:args.words])
                  for t in [0, *range(args.every - 1, args.frames, args.every)]]
    before = peak_memory(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with suppress(EOFError):                                                              # nobody asks any more
        while connection.recv():
            narrator.zero_grad()
            began = clock()
            loss, learned = narrator.loss(x, narrations)
            (loss / learned).backward()
            synchronise(device)
            connection.send(clock() - began)
    connection.send({"tokens": len(narrator.layout.sequence(narrations)), "peak_bytes": peak_memory(device),
                     "weights_bytes": before})


def in_turn(args: argparse.Namespace) -> dict[str, dict]:
    """What each variant's process measures: tokens, bytes, seconds of each step but the first, and their median."""
    context, running, results = multiprocessing.get_context("spawn"), {}, {}
    with ExitStack() as stack:
        for name in VARIANTS:
            here, there = context.Pipe()
            process = context.Process(target=command_line, args=(partial(steps, there, args, name),))
            process.start()
            there.close()                                                                 # so that its end is noticed
            stack.callback(process.join)
            stack.callback(here.close)                                                    # which ends the process
            running[name] = here, []
        try:
            for _ in range(args.steps + 1):
                for name, (connection, seconds) in running.items():
                    connection.send(True)
                    seconds.append(connection.recv())
            for name, (connection, seconds) in running.items():
                connection.send(False)
                results[name] = connection.recv() | {"step_s": median(seconds[1:]), "steps_s": seconds[1:]}
        except (EOFError, ConnectionError) as error:
            raise BadData(f"{name}: its process has ended, out of memory?") from error
    return results


def run_steps(args: argparse.Namespace):
    device_and_dtype(args.device, args.dtype)                                                       # refused here, if at all
    if args.width % (2 * args.heads) or args.heads % args.kv_heads:
        raise BadData("the width must be a multiple of twice the number of heads, and that one of --kv-heads")
    results = in_turn(args)
    base = results["VideoLLM-online"]
    print_table([(name, {"tokens": r["tokens"], "step, s": r["step_s"], "to the baseline": r["step_s"] / base["step_s"],
                         "peak memory, MB": r["peak_bytes"] / 1e6,
                         "of it, the step, MB": (r["peak_bytes"] - r["weights_bytes"]) / 1e6})
                 for name, r in results.items()])
    if args.json:
        print(json.dumps({"frames": args.frames, "every": args.every, "words": args.words, "variants": results}))


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="python -m experiments.training_step",
                    description="Time and memory of a training step of each variant (§3.5).")
    for name, default, text in (("frames", 400, "frames of the video"), ("every", 8, "frames between two narrations"),
                                ("words", 12, "tokens of a narration"), ("steps", 3, "steps that are timed"),
                                ("layers", 2, "of the language model"), ("width", 1024, "of its hidden states"),
                                ("inner", 4096, "width of its feed-forward layers"), ("heads", 16, "of queries"),
                                ("kv-heads", 8, "of keys and values"), ("vocabulary", 2000, "its words, at least"),
                                ("rank", 16, "of LoRA")):
        found.add_argument(f"--{name}", type=positive_int, default=default, help=f"{text} (default %(default)s)")
    found.add_argument("--checkpointing", nargs="+", choices=list(VARIANTS), default=[], metavar="NAME",
                       help=f"variants that recompute activations in the backward pass: {', '.join(VARIANTS)}")
    found.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    found.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    found.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return found


def main():
    args = parser().parse_args()
    command_line(lambda: run_steps(args))


if __name__ == "__main__":
    main()
