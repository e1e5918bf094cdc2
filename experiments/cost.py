"""What FlowNar costs: operations, memory and time of a stream, of a training step, and of the
paper's size (§4.1, Fig. 1, App. C.3).

    python -m experiments.cost stream --frames 3000
    python -m experiments.cost stream --config 1b
    python -m experiments.cost training --frames 1200 --variant FlowNar-C
    python -m experiments.cost full-size --dtype bfloat16
    python -m experiments.cost speed --compile
    python -m experiments.cost operators

stream      FlowNar, FlowNar-C and the baselines VideoLLM-online and VideoLLM-MoD around one
            language model, with the same frames and narrations. The narrations are given, and fed
            word by word, so only the context differs, and in VideoLLM-MoD the tokens that a layer
            computes. Sizes matter here, values of weights do not. The frames are made beforehand
training    the loss of one video and its gradient
full-size   a narrator of the paper's size with random weights, from pixels to sentences
speed       frames/s of such a narrator, made where it computes: from features and from pictures,
            with each --lookahead. One JSON object a line
operators   how many operators of torch a frame of a stream launches, and a training step, with the
            layers of the paper's size: on a GPU, the launch of each takes about 5 us. Views launch
            nothing, and a norm is one, as on a GPU

"ms a frame" and "ms a word" are of the passes of the language model that read a frame, and a word of
a narration (without guessed words). Bytes in use are those of keys and values in the cache, of
CLAM's state and of memory tokens. A window is the number of frames after which speed and memory are
reported.
"""
import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrator as nar
import stream
from narrator import VisionEncoder, load, make_config, new_narrator
from streams.bounds import open_stream
from streams.suspend import memory_tensors
from support.common.devices import device_and_dtype, synchronise
from support.common.disk import write_json
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import (
    DEFAULT_MODEL, Parser, device_option, dtype_option, json_option, positive_int,
)
from support.common.progress import progress
from support.engine.checkpoint import load_tokenizer
from support.engine.compiled import compile_narrator
from support.engine.cpu import speed_up
from support.engine.norms import fuse_norms
from support.files.features import encode_pictures

VARIANTS = {                               # the settings in which each one differs from FlowNar
    "FlowNar-C": {"last_k": 10},
    "FlowNar": {},
    "VideoLLM-online": {"memory": "none", "prune": False},
    "VideoLLM-MoD": {"memory": "none", "prune": False, "mod_keep": 0.2},
}


class Size(NamedTuple):
    """Of a Llama."""
    hidden: int
    inner: int                             # feed-forward
    layers: int
    heads: int
    kv_heads: int = 8
    words: int = 128256                    # in Llama 3's vocabulary


LLAMA = {"1b": Size(2048, 8192, 16, 32), "8b": Size(4096, 14336, 32, 32)}
SIGLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16}       # SigLIP-L/16-384
SMALL_LORA = {"lora_rank": 16, "lora_alpha": 32}
EVERY, SENTENCE = 8, 12                    # a narration of so many words every so many frames


def random_llm(size: Size, device: str, dtype: torch.dtype):
    """A Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    config = LlamaConfig(
        vocab_size=size.words, hidden_size=size.hidden, intermediate_size=size.inner,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, max_position_embeddings=131072,
        tie_word_embeddings=size.hidden <= 2048, bos_token_id=0, eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device(device):
        llm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    fuse_norms(llm)                  # as when one is loaded
    return llm


def random_narrator(size: Size, device: str, dtype: torch.dtype, **settings) -> nar.Narrator:
    """A narrator around such a Llama, with the toy's tokenizer."""
    llm = random_llm(size, device, dtype)
    tokenizer = load_tokenizer(str(Path(DEFAULT_MODEL) / "llm"))
    return new_narrator(llm, tokenizer, make_config(**settings)).to(device)


def given_narrations(narrator: nar.Narrator, frames: int) -> dict[int, list[int]]:
    """{frame: ids}: one of frame 0, and then of the last of every EVERY frames."""
    ids = (narrator.layout.newline * SENTENCE)[:SENTENCE]
    return {t: ids for t in [0, *range(EVERY - 1, frames, EVERY)]}


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the device on CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource                        # not on Windows
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ------------------------------------------------------------------------------- a stream

def narrators(args: argparse.Namespace) -> Iterator[tuple[str, nar.Narrator]]:
    """The narrators that are measured, one after the other, as stream.py runs them: LoRA merged,
    connector and CLAM in fp32. A trained one, or the variants."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    if args.model:
        yield args.model, load(args.model, None, device, dtype).merge()
        return
    for name in args.variants:
        changes = {"last_k": None} | VARIANTS[name]
        if args.config:
            narrator = random_narrator(LLAMA[args.config], device, dtype, **changes)
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


def time_passes(context: stream.Context) -> Counter:
    """Seconds that the context spends in passes with frames, and word by word, from now on."""
    seconds = Counter()
    feed = context.feed

    def timed(tokens: nar.Tokens, x: Tensor | None = None) -> Tensor:
        began = time.perf_counter()
        logits = feed(tokens, x)
        synchronise(context.narrator.llm.device)       # a GPU works on after the call has returned
        seconds["word" if x is None else "frame"] += time.perf_counter() - began
        return logits

    context.feed = timed
    return seconds


def state_bytes(context: stream.Context) -> int:
    """Bytes of a stream's memories: their states, and the tokens read from them."""
    tensors = [context.state]
    if hasattr(context, "history_state"):               # Table 15
        tensors.append(context.history_state)
    if context.memory is not None:
        tensors += memory_tensors(context).values()
    return sum(tensor.nbytes for tensor in tensors)


def measure_stream(narrator: nar.Narrator, x: Iterable[Tensor], frames: int, window: int,
                   lookahead: int) -> dict:
    """Stream frames x, each [J, D]; `frames` is their number.

    windows     of each: frames until its end, frames/s, and bytes in use at its end
    """
    context = open_stream(narrator, lookahead=lookahead, guesses=0)
    passes = time_passes(context)
    given = given_narrations(narrator, frames)
    seconds = []                               # of each frame
    used = []                                  # bytes in use after each frame
    most_tokens = 0
    began = time.perf_counter()
    decisions = stream.narrate(narrator, x, given=given, context=context)
    for decision in progress(decisions, "stream", frames, "frame", leave=False):
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
        used.append(context.cache.bytes() + state_bytes(context))
        # with the tokens that were removed after the narration
        tokens = decision.text_tokens + decision.visual_tokens + decision.pruned
        most_tokens = max(most_tokens, tokens)

    windows = []
    for end in range(window, frames + 1, window):
        windows.append({"frames": end, "fps": window / sum(seconds[end - window:end]),
                        "used_bytes": used[end - 1]})
    words = len(given) * (SENTENCE + 1)                                # with "Assistant:"
    return {
        "frames": frames,
        "fps": frames / sum(seconds),
        "ms_a_frame": 1e3 * passes["frame"] / frames,
        "ms_a_word": 1e3 * passes["word"] / words,
        "cache_tokens": most_tokens,
        "cache_mb": used[-1] / 1e6,
        "windows": windows,
    }


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


def lines_of_stream(costs: dict) -> dict:
    """The lines of a narrator in the table. The speed of a window is that of all that happens in
    it, narrations included."""
    lines = {
        "GMACs": costs["gmacs"],
        "weights, MB": costs["weights_bytes"] / 1e6,
        "cache and state, MB": costs["cache_mb"],
        "largest cache, tokens": costs["cache_tokens"],
        "frames/s": costs["fps"],
        "ms a frame": costs["ms_a_frame"],
        "ms a word": costs["ms_a_word"],
    }
    for window in costs["windows"]:
        lines[f"frames/s up to {window['frames']}"] = window["fps"]
        lines[f"MB after {window['frames']}"] = window["used_bytes"] / 1e6
    return lines


def run_streams(args: argparse.Namespace) -> None:
    counted = min(240, args.frames)
    window = min(args.window, args.frames)
    results = {}
    for name, narrator in narrators(args):
        # before the weights are put into another order
        sizes = {"gmacs": macs(narrator, counted) / 1e9,
                 "weights_bytes": sum(p.nbytes for p in narrator.parameters())}
        speed_up(narrator)
        # the first calls allocate
        first = random_frames(narrator, 5 * EVERY)
        measure_stream(narrator, first, 5 * EVERY, EVERY, args.lookahead)
        x = random_frames(narrator, args.frames)
        costs = measure_stream(narrator, x, args.frames, window, args.lookahead)
        results[name] = costs | sizes
        del narrator                           # before the next one is built
    print(f"{args.frames} frames; GMACs of the first {counted}")
    print_table([(name, lines_of_stream(costs)) for name, costs in results.items()])
    if args.json:
        print(json.dumps(results[args.model] if args.model else results))


# ------------------------------------------------------------------------------- a training step

def run_training(args: argparse.Namespace) -> None:
    """The median time of a variant's steps, and the peak memory of the process.

    On a processor, other programs may interrupt a step: only its own time counts there.
    """
    device, dtype = device_and_dtype(args.device, args.dtype)
    if args.width % 128:
        raise BadData("--width must be a multiple of 128: heads of 64, and half as many of keys")
    torch.manual_seed(0)
    settings = VARIANTS[args.variant]
    if args.config:
        size = LLAMA[args.config]
    else:
        heads = args.width // 64
        size = Size(args.width, 4 * args.width, args.layers, heads, heads // 2, words=2000)
        settings = settings | SMALL_LORA
    narrator = random_narrator(size, device, dtype, **settings).train()
    if args.checkpointing:
        narrator.llm.gradient_checkpointing_enable({"use_reentrant": False})
    config = narrator.config
    x = torch.randn(args.frames, config.J, config.width, device=device)        # [T, J, D]
    narrations = list(given_narrations(narrator, args.frames).items())
    before = peak_memory(narrator.llm.device)
    clock = time.process_time if narrator.llm.device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(args.steps + 1):
        narrator.zero_grad()
        began = clock()
        loss, learned = narrator.loss(x, narrations)
        (loss / learned).backward()
        synchronise(narrator.llm.device)
        seconds.append(clock() - began)
    peak = peak_memory(narrator.llm.device)
    costs = {
        "tokens": len(narrator.layout.sequence(narrations)),
        "step, s": median(seconds[1:]),        # the first step also allocates
        "peak memory, MB": peak / 1e6,
        "of it, the step, MB": (peak - before) / 1e6,
    }
    print_table([(args.variant, costs)])
    if args.json:
        print_json(narrator, costs)


# ------------------------------------------------------------------------------- the paper's size

def make_narrator(folder: Path, layers: int | None) -> None:
    """A checkpoint of the paper's size with random weights: Llama-3.2-1B's shape, LoRA of rank
    128, SigLIP-L/16-384. With `layers`, both models have only so many."""
    llm = random_llm(llama_1b(layers), "cpu", torch.bfloat16)
    llm.save_pretrained(folder / "llm")         # before it has LoRA
    tokenizer = load_tokenizer(str(Path(DEFAULT_MODEL) / "llm"))
    tokenizer.save_pretrained(folder / "llm")
    make_vision_model(folder / "vision", layers)
    config = nar.Config(llm="llm", vision="vision", memory_target=False, readout="cls")
    new_narrator(llm, tokenizer, config).save(folder)


def llama_1b(layers: int | None) -> Size:
    """Of Llama-3.2-1B, or of its first layers."""
    return LLAMA["1b"]._replace(layers=layers or LLAMA["1b"].layers)


def make_vision_model(folder: Path, layers: int | None, device: str = "cpu") -> None:
    """SigLIP-L/16-384 in bf16 with random weights, made on a device, in a folder."""
    from transformers import SiglipConfig, SiglipModel
    size = SIGLIP | {"num_hidden_layers": layers or SIGLIP["num_hidden_layers"]}
    # needed by no narrator
    text = {"vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 1,
            "num_attention_heads": 16, "bos_token_id": 0, "eos_token_id": 1}
    with torch.device(device):
        vision = SiglipModel(SiglipConfig(
            text_config=text, vision_config=size | {"image_size": 384, "patch_size": 16}))
    vision.to(torch.bfloat16).save_pretrained(folder)
    write_json(folder / "preprocessor_config.json",
               {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})


def measure_full_size(model: str, args: argparse.Namespace) -> dict:
    """Load a narrator and narrate pictures, as stream.py does. Times are those of the clock on the
    wall."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    began = time.perf_counter()
    narrator = load(model, None, device, dtype).merge()
    encoder = narrator.vision_encoder(dtype)
    speed_up(narrator)
    speed_up(encoder)
    loading = time.perf_counter() - began

    pictures = np.random.default_rng(0).integers(0, 256, (args.frames, 720, 1280, 3), np.uint8)
    began = time.perf_counter()
    x = list(encode_pictures(pictures, encoder, args.lookahead))
    synchronise(narrator.llm.device)
    encoding = time.perf_counter() - began
    costs = measure_stream(narrator, x, args.frames, args.frames, args.lookahead)
    return {
        "load, s": loading,
        "peak memory, GB": peak_memory(narrator.llm.device) / 1e9,
        "encoder, s a frame": encoding / args.frames,
        "ms a frame": costs["ms_a_frame"],
        "ms a word": costs["ms_a_word"],
        "frames/s": args.frames / (encoding + args.frames / costs["fps"]),
    }


def run_full_size(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        # made in a process of its own, so that its memory does not count
        making = multiprocessing.get_context("spawn").Process(
            target=make_narrator, args=(Path(folder), args.layers))
        making.start()
        making.join()
        if making.exitcode:
            raise BadData("the narrator could not be made: is memory or the disk full?")
        print_table([("all", measure_full_size(folder, args))])


def run_speed(args: argparse.Namespace) -> None:
    """Print the speeds, each as soon as it is measured. The pictures have the size in which
    `stream.py` decodes a video of 16:9."""
    device, dtype = device_and_dtype(args.device, args.dtype)
    torch.manual_seed(0)
    narrator = random_narrator(llama_1b(args.layers), device, dtype)
    narrator = narrator.eval().requires_grad_(False).merge()
    with TemporaryDirectory() as folder:
        make_vision_model(Path(folder), args.layers, device)
        encoder = VisionEncoder(folder, narrator.config.grid, device, dtype)
    pictures = np.random.default_rng(0).integers(0, 256, (64, 432, 768, 3), np.uint8)
    if args.compile:
        compile_narrator(narrator)

    def frames(source: str, count: int, lookahead: int) -> Iterator[Tensor]:
        if source == "features":
            return random_frames(narrator, count)
        return encode_pictures(islice(cycle(pictures), count), encoder, lookahead)

    for lookahead, source in product(args.lookahead, ("features", "pictures")):
        began = time.perf_counter()
        first = 5 * EVERY                                   # the first calls allocate, and compile
        measure_stream(narrator, frames(source, first, lookahead), first, first, lookahead)
        warm_up = time.perf_counter() - began
        x = frames(source, args.frames, lookahead)
        costs = measure_stream(narrator, x, args.frames, args.frames, lookahead)
        print_json(narrator, {
            "from": source,
            "lookahead": lookahead,
            "compiled": args.compile,
            "frames/s": costs["fps"],
            "ms a frame": costs["ms_a_frame"],
            "ms a word": costs["ms_a_word"],
            "warm-up, s": warm_up,
        })


def print_json(narrator: nar.Narrator, costs: dict) -> None:
    """A line of JSON: what was measured, on which device, with which language model."""
    llm = narrator.llm
    name = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "cpu"
    where = {"device": name, "dtype": str(llm.dtype), "layers": llm.config.num_hidden_layers,
             "width": llm.config.hidden_size}
    print(json.dumps(where | costs), flush=True)


# ------------------------------------------------------------------------------- launches

class Operators(TorchDispatchMode):
    """Counts the operators of torch within it that launch something on a GPU."""

    NO_LAUNCH = ("empty", "new_empty", "_unsafe_view")

    def __init__(self, narrator: nar.Narrator):
        super().__init__()
        self.count = 0
        self.norms = [module for module in narrator.modules() if isinstance(module, nn.RMSNorm)]
        self.inside = False                     # a norm: on a processor, it is six operators
        for norm in self.norms:
            norm.register_forward_pre_hook(self.enter)
            norm.register_forward_hook(self.leave)

    def enter(self, *_) -> None:
        self.count += 1
        self.inside = True

    def leave(self, *_) -> None:
        self.inside = False

    def __torch_dispatch__(self, function, types, args=(), options=None):
        launches = not function.is_view and not function.__name__.startswith(self.NO_LAUNCH)
        self.count += launches and not self.inside
        return function(*args, **(options or {}))


def count_operators(frames: int, layers: int = LLAMA["1b"].layers) -> dict[str, float]:
    """Of a narrow narrator with so many layers: the widths do not matter. A narration of SENTENCE
    words ends every EVERY frames.
    """
    def narrator() -> nar.Narrator:
        size = Size(256, 512, layers, heads=4, kv_heads=2, words=2000)
        return random_narrator(size, "cpu", torch.float32, **SMALL_LORA)

    counts = {}
    for lookahead in (1, 4):
        merged = narrator().eval().requires_grad_(False).merge()
        with Operators(merged) as operators:
            for _ in stream.narrate(merged, random_frames(merged, frames),
                                    given=given_narrations(merged, frames),
                                    context=open_stream(merged, lookahead=lookahead, guesses=0)):
                pass
        counts[f"a frame, --lookahead {lookahead}"] = operators.count / frames
    learner = narrator().train()
    x = torch.stack(list(random_frames(learner, frames)))
    with Operators(learner) as operators:
        loss, learned = learner.loss(x, list(given_narrations(learner, frames).items()))
        (loss / learned).backward()
    return counts | {f"a training step of {frames} frames": operators.count}


def run_operators(args: argparse.Namespace) -> None:
    print_table([(f"{args.layers} layers", count_operators(args.frames, args.layers))])


# ------------------------------------------------------------------------------- the command line

def whole_number(parser: argparse.ArgumentParser, name: str, default: int | None, meaning: str):
    parser.add_argument(f"--{name}", type=positive_int, default=default,
                        help=f"{meaning} (default {default or 'all'})")


def main() -> None:
    parser = Parser(prog="python -m experiments.cost", description="What FlowNar costs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    streams = commands.add_parser("stream", help="a stream of each variant")
    streams.set_defaults(run=run_streams)
    whole_number(streams, "frames", 2000, "frames to stream")
    whole_number(streams, "window", 500, "frames after which speed and memory are reported")
    streams.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS),
                         metavar="NAME",
                         help=f"which are measured: {', '.join(VARIANTS)} (default: all)")
    streams.add_argument("--config", choices=list(LLAMA),
                         help="a Llama of this size with random weights, instead of the toy's")
    streams.add_argument("--model", metavar="DIR", help="a trained narrator instead")

    training = commands.add_parser("training", help="a training step of a variant (§3.5)")
    training.set_defaults(run=run_training)
    whole_number(training, "frames", 400, "frames of the video")
    whole_number(training, "steps", 3, "steps that are timed")
    whole_number(training, "layers", 2, "of the language model")
    whole_number(training, "width", 1024, "of its hidden states")
    training.add_argument("--config", choices=list(LLAMA),
                          help="a Llama of this size, and LoRA of the paper's rank")
    training.add_argument("--variant", choices=list(VARIANTS), default="FlowNar",
                          help="default: FlowNar")
    training.add_argument("--checkpointing", action="store_true",
                          help="compute activations again in the backward pass")

    full_size = commands.add_parser("full-size", help="a narrator of the paper's size")
    full_size.set_defaults(run=run_full_size)
    whole_number(full_size, "frames", 40, "pictures")
    whole_number(full_size, "layers", None, "of both models")

    speed = commands.add_parser("speed", help="frames/s of a narrator of the paper's size")
    speed.set_defaults(run=run_speed)
    whole_number(speed, "frames", 400, "frames of each stream")
    whole_number(speed, "layers", None, "of both models")
    speed.add_argument("--lookahead", type=positive_int, nargs="+", default=[1, 4], metavar="K",
                       help="frames in one pass of the models (default: 1 and 4)")
    speed.add_argument("--compile", action="store_true", help="as in stream.py")

    operators = commands.add_parser("operators", help="what a frame and a training step launch")
    operators.set_defaults(run=run_operators)
    whole_number(operators, "frames", 400, "frames")
    whole_number(operators, "layers", LLAMA["1b"].layers, "of the language model")

    for command in (streams, training):
        json_option(command)
    for command in (streams, full_size):
        whole_number(command, "lookahead", 4, "frames in one pass of the models; 1: live")
    for command in (streams, training, full_size, speed):
        device_option(command)
        dtype_option(command)
    args = parser.parse_args()
    command_line(lambda: args.run(args))


if __name__ == "__main__":
    main()
