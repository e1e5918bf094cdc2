"""What FlowNar costs: operations, memory and time of a stream (§4.1, Fig. 1, App. C.3).

    python -m beyond.experiments.cost stream --frames 3000
    python -m beyond.experiments.cost stream --config 1b

FlowNar, FlowNar-C and the baselines VideoLLM-online and VideoLLM-MoD stream around one language
model, with the same frames and narrations. The narrations are given, and fed word by word, so only
the context differs, and in VideoLLM-MoD the tokens that a layer computes. Sizes matter here, values
of weights do not. The frames are made beforehand.

Bytes in use are those of keys and values in the cache, of CLAM's state and of memory tokens.
"""
import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

import narrator as nar
import stream
from narrator import load
from beyond.streams.bounds import open_stream
from support.common.devices import device_and_dtype
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import (
    DEFAULT_MODEL, Parser, device_option, dtype_option, json_option, positive_int,
)
from support.common.progress import progress
from support.engine.frozen import load_tokenizer
from support.engine.cpu import speed_up
from support.engine.registry import make_config, new_narrator

VARIANTS = {                               # the settings in which each one differs from FlowNar
    "FlowNar-C": {"last_k": 10},
    "FlowNar": {},
    "VideoLLM-online": {"memory": "none", "prune": False},
    "VideoLLM-MoD": {"memory": "none", "prune": False, "mod_keep": 0.2},
}


# Llamas, as transformers.LlamaConfig has their sizes
SIZES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "vocab_size": 128256},
}
EVERY, SENTENCE = 8, 12                    # a narration of so many words every so many frames
WINDOW = 500                               # frames after which speed and memory are reported


def random_narrator(size: dict[str, int], device: str, dtype: torch.dtype,
                    **settings) -> nar.Narrator:
    """A narrator around a Llama with random weights, with the toy's tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    config = LlamaConfig(
        **size, num_key_value_heads=8, max_position_embeddings=131072,
        tie_word_embeddings=size["hidden_size"] <= 2048, bos_token_id=0, eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device(device):
        llm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    tokenizer = load_tokenizer(str(Path(DEFAULT_MODEL) / "llm"))
    return new_narrator(llm, tokenizer, make_config(**settings)).to(device)


def given_narrations(narrator: nar.Narrator, frames: int) -> dict[int, list[int]]:
    """{frame: ids}: one of frame 0, and then of the last of every EVERY frames."""
    ids = (narrator.layout.newline * SENTENCE)[:SENTENCE]
    return {t: ids for t in [0, *range(EVERY - 1, frames, EVERY)]}


# ------------------------------------------------------------------------------- a stream

def narrators(args: argparse.Namespace) -> Iterator[tuple[str, nar.Narrator]]:
    """The narrators that are measured, one after the other, as stream.py runs them: LoRA merged,
    connector and CLAM in fp32. A trained one, or the variants."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    if args.model:
        yield args.model, load(args.model, None, device, dtype).merge()
        return
    for name, changes in VARIANTS.items():
        changes = {"last_k": None} | changes
        if args.config:
            narrator = random_narrator(SIZES[args.config], device, dtype, **changes)
        else:
            toy = load(DEFAULT_MODEL, dtype=dtype).merge()
            config = make_config(**asdict(toy.config) | changes)
            narrator = new_narrator(toy.llm, toy.layout.tokenizer, config).to(device)
        yield name, narrator.eval().requires_grad_(False).merge()


def random_frames(narrator: nar.Narrator, frames: int) -> Iterator[Tensor]:
    """Frame tokens [J, D]: 64 random ones, again and again."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(64, narrator.config.J, narrator.config.width, generator=generator)
    return islice(cycle(list(pool)), frames)


def state_bytes(context: stream.Context) -> int:
    """Bytes of a stream's memories: their states, and the tokens read from them."""
    tensors = [context.state]
    if hasattr(context, "history_state"):               # Table 15
        tensors += [context.history_state, *context.memory]
    elif context.memory is not None:
        tensors.append(context.memory)
    return sum(tensor.nbytes for tensor in tensors)


def measure_stream(narrator: nar.Narrator, frames: int, lookahead: int) -> dict[str, float]:
    """Stream so many frames. The speed of a window is that of all that happens in it, narrations
    included.
    """
    context = open_stream(narrator, lookahead=lookahead, guesses=0)
    decisions = stream.narrate(narrator, random_frames(narrator, frames),
                               given=given_narrations(narrator, frames), context=context)
    times = [time.perf_counter()]              # of the beginning, and after each frame
    used = []                                  # bytes in use after each frame
    most_tokens = 0
    for decision in progress(decisions, "stream", frames, "frame", leave=False):
        times.append(time.perf_counter())
        used.append(context.cache.bytes() + state_bytes(context))
        most_tokens = max(most_tokens, decision.most_tokens)
    costs = {
        "cache and state, MB": used[-1] / 1e6,
        "largest cache, tokens": most_tokens,
        "frames/s": frames / (times[-1] - times[0]),
    }
    window = min(WINDOW, frames)
    for end in range(window, frames + 1, window):
        costs[f"frames/s up to {end}"] = window / (times[end] - times[end - window])
        costs[f"MB after {end}"] = used[end - 1] / 1e6
    return costs


def macs(narrator: nar.Narrator, frames: int) -> int:
    """Multiply-accumulates of connector, CLAM and language model over so many frames (without the
    vision encoder)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    context = open_stream(narrator, guesses=0)     # computes CLAM's queries, once: not counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in stream.narrate(narrator, random_frames(narrator, frames),
                                given=given_narrations(narrator, frames), context=context):
            pass
    return counter.get_total_flops() // 2


def run_streams(args: argparse.Namespace) -> None:
    counted = min(240, args.frames)
    results = {}
    for name, narrator in narrators(args):
        # before the weights are put into another order
        costs = {
            "GMACs": macs(narrator, counted) / 1e9,
            "weights, MB": sum(p.nbytes for p in narrator.parameters()) / 1e6,
        }
        speed_up(narrator)
        measure_stream(narrator, 5 * EVERY, args.lookahead)    # the first calls allocate
        results[name] = costs | measure_stream(narrator, args.frames, args.lookahead)
        del narrator                           # before the next one is built
    print(f"{args.frames} frames; GMACs of the first {counted}")
    print_table(list(results.items()))
    if args.json:
        print(json.dumps(results[args.model] if args.model else results))


# ------------------------------------------------------------------------------- the command line

def main() -> None:
    parser = Parser(prog="python -m beyond.experiments.cost", description="What FlowNar costs.")
    # the only one: what a training step costs was another, up to commit a904de8
    parser.add_argument("command", choices=["stream"], help="a stream of each variant")
    parser.add_argument("--frames", type=positive_int, default=2000,
                        help="frames to stream (default 2000)")
    parser.add_argument("--lookahead", type=positive_int, default=4,
                        help="frames in one pass of the models; 1: live (default 4)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--config", choices=list(SIZES),
                     help="a Llama of this size with random weights, instead of the toy's")
    one.add_argument("--model", metavar="DIR", help="a trained narrator instead of the variants")
    json_option(parser)
    device_option(parser)
    dtype_option(parser)
    args = parser.parse_args()
    command_line(lambda: run_streams(args))


if __name__ == "__main__":
    main()
