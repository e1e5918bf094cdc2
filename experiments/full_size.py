"""A narrator of the published size on this machine: what it costs (not in the paper).

    python -m experiments.full_size                                      # random weights, float32
    python -m experiments.full_size --dtype bfloat16
    python -m experiments.full_size --dtype int8 --vision-dtype int8
    python -m experiments.full_size --published DIR --vision DIR         # real weights

Makes a narrator with random weights in a folder: Llama-3.2-1B's shape with a tied head, LoRA of
rank 128, SigLIP-L/16-384, in the published format. Then narrates 40 frames of a made 720p clip,
from pixels. The sentences are given (12 words every 8 frames), and are fed word by word as a model
says them.

    load        from the first file to the first frame: reading, merging LoRA, checks
    peak        the most memory of the process until then, and until the end
    held        its memory after loading (on CUDA, peak and held are those of the device)
    encoder     the vision encoder
    frame       the language model reads a frame
    word        the language model reads a word
    wall        seconds on the clock; `processor` are those of all threads, which other programs on
                the machine change less
"""
from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import narrator as nar
import stream
from baselines.variants import load_narrator
from experiments.efficiency import WORDS, peak_memory
from experiments.timing import Timed
from support.common.devices import (
    DTYPES_OF_STREAMS, device_and_dtype, synchronise, vision_dtype,
)
from support.common.disk import write_json
from support.common.errors import command_line
from support.common.options import DEFAULT_MODEL, Parser, positive_int
from support.engine import checkpoint
from support.files.features import encode_pictures
from support.files.video import Video, write_video

# Llama-3.2-1B and SigLIP-L/16-384
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192},
}
SIGLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16}
PICTURE = {"image_size": 384, "patch_size": 16}
# the half that no narrator needs
TEXT = {"vocab_size": 32000, "max_position_embeddings": 64,
        "bos_token_id": 0, "eos_token_id": 1}
PREPROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
RANK = 128
EVERY, SENTENCE = 8, 12                         # a sentence of so many words every so many frames


# ---------------------------------------------------------------------- random weights

def make_narrator(folder: Path, layers: int | None, llama: dict = LLAMA, siglip: dict = SIGLIP,
                  rank: int = RANK) -> None:
    """Write a narrator into a folder, in the published format, tensor by tensor: little is held.

    layers      of the language model and of the vision encoder; None: all of them
    """
    from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, SiglipConfig
    if layers is not None:
        llama = llama | {"num_hidden_layers": min(layers, llama["num_hidden_layers"])}
        siglip = siglip | {"num_hidden_layers": min(layers, siglip["num_hidden_layers"])}
    config = LlamaConfig(**llama, bos_token_id=0, eos_token_id=1)
    both = SiglipConfig(text_config=TEXT | siglip, vision_config=PICTURE | siglip)
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config)
        vision = AutoModel.from_config(both)
    write_model(folder / "llm", llm)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / "llm" / file, folder / "llm")
    write_model(folder / "vision", vision)
    write_json(folder / "vision" / "preprocessor_config.json", PREPROCESSOR)
    settings = nar.Config(width=siglip["hidden_size"], lora_rank=rank, lora_alpha=2 * rank,
                          memory_target=False, readout="cls")
    tokenizer = checkpoint.load_tokenizer(str(folder / "llm"))
    with torch.device("meta"):
        shapes = nar.Narrator(llm, tokenizer, settings).trainable()
    write_random_weights(folder / checkpoint.WEIGHTS, shapes)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "llm", "r": rank,
               "lora_alpha": 2 * rank}
    write_json(folder / checkpoint.ADAPTER, adapter)            # last: all others are there


def write_model(folder: Path, model: torch.nn.Module) -> None:
    """The settings of a model of transformers and random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    shapes = dict(model.named_parameters())                     # a tied head is none of them
    write_random_weights(folder / "model.safetensors", shapes)


def write_random_weights(path: Path, shapes: dict[str, torch.Tensor]) -> None:
    """A safetensors file of bf16 weights, tensor by tensor.

    Matrices are N(0, 0.02), so that the numbers of a deep model stay small; norms 1, biases 0.
    """
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            weight = torch.empty(shape.numel(), dtype=torch.bfloat16)
            if shape.dim() > 1:
                weight.normal_(0, 0.02)
            else:
                weight.fill_(name.endswith(".weight"))
            weight.view(torch.uint8).numpy().tofile(file)


def make_clip(path: Path, frames: int, fps: float) -> None:
    """A 720p clip of stripes that move."""
    stripes = np.linspace(0, 8 * np.pi, 1280)
    rows = np.linspace(0.5, 1, 720)[:, None, None]
    colours = np.array([0.0, 2.0, 4.0])

    def picture(t: int) -> np.ndarray:
        waves = 127 + 127 * np.sin(stripes[:, None] + colours + 0.7 * t)         # [1280, 3]
        return (rows * waves).astype(np.uint8)

    write_video(path, map(picture, range(frames)), fps)


# ---------------------------------------------------------------------- what it costs

class Watch:
    """Wall and processor seconds of each stage, without those of stages inside it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.wall = Counter()
        self.processor = Counter()
        self.stages = []                        # those that are running, the innermost last
        self.since = (0.0, 0.0)                 # the clocks when the innermost one was resumed

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.count()
        self.stages.append(stage)
        yield
        self.count()
        self.stages.pop()

    def count(self) -> None:
        """Add the time since the last call to the innermost stage."""
        synchronise(self.device)
        now = time.perf_counter(), time.process_time()
        if self.stages:
            self.wall[self.stages[-1]] += now[0] - self.since[0]
            self.processor[self.stages[-1]] += now[1] - self.since[1]
        self.since = now


def held_memory(device: torch.device) -> int | None:
    """Bytes of memory that are held now: of the device on CUDA, else of the process. None where the
    system does not say."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def most(known: int | None, device: torch.device) -> int | None:
    """Peak memory, which the system counts a little late."""
    return max(known or 0, peak_memory(device) or 0) or None


def measure(model: str, vision: str | None, clip: Path, frames: int, lookahead: int, device: str,
            dtype: str, vision_format: torch.dtype) -> dict:
    """Load a narrator, narrate a clip; what both cost."""
    device, number_format = device_and_dtype(device, dtype)
    watch = Watch(torch.device(device))
    imported = held_memory(watch.device)
    with watch("load"):
        narrator = load_narrator(model, None, device, number_format).merge()
        encoder = narrator.vision_encoder(vision, vision_format)
    held = held_memory(watch.device)
    costs = {"imported": imported, "held": held, "load peak": most(held, narrator.device)}
    watched = TimedEncoder(encoder, watch)
    context = Timed(narrator, watch, lookahead=lookahead, guesses=0)
    pictures = Video(clip, narrator.config.fps, largest=2 * encoder.image_size)
    x = encode_pictures(pictures, watched, lookahead)
    ids = (narrator.layout.newline * SENTENCE)[:SENTENCE]
    forced = {t: ids for t in [0, *range(EVERY - 1, frames, EVERY)]}
    with watch("stream"):
        steps = list(stream.narrate(narrator, x, given=forced, context=context))
    passes = sum(len(step.narration.tokens) + 1 for step in steps if step.narration)
    costs |= {"peak": most(costs["load peak"], narrator.device), "frames": len(steps)}
    for clock, seconds in (("wall", watch.wall), ("processor", watch.processor)):
        streaming = seconds.total() - seconds["load"]
        costs[clock] = {
            "load s": seconds["load"],
            "encoder s a frame": seconds["encoder"] / len(steps),
            "ms a frame": 1e3 * seconds["frame"] / len(steps),
            "ms a word": 1e3 * seconds["text"] / passes,
            "frames/s": len(steps) / streaming,
        }
    return costs


class TimedEncoder:
    """A vision encoder whose work is timed."""

    def __init__(self, encoder: torch.nn.Module, watch: Watch):
        self.encoder = encoder
        self.watch = watch

    def __call__(self, pictures: torch.Tensor) -> torch.Tensor:
        with self.watch("encoder"):
            return self.encoder(pictures)


def show_costs(costs: dict) -> None:
    """The costs, one a line."""
    for name in ("imported", "held", "load peak", "peak"):
        size = "-" if costs[name] is None else f"{costs[name] / 1e9:.2f} GB"
        print(f"{name:20}{size:>12}")
    print(f"{'':20}{'wall':>12}{'processor':>12}")
    for name, value in costs["wall"].items():
        print(f"{name:20}{value:12.3f}{costs['processor'][name]:12.3f}")


def run_full_size(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as temporary:
        model = args.published
        vision = args.vision
        if model is None:
            folder = Path(args.folder or temporary)
            model = str(folder)
            vision = vision or str(folder / "vision")
            if not (folder / checkpoint.ADAPTER).exists():
                # in a process of its own, so that its memory does not count
                making = multiprocessing.get_context("spawn").Process(
                    target=make_narrator, args=(folder, args.layers, LLAMA, SIGLIP, RANK))
                making.start()
                making.join()
                if making.exitcode:
                    sys.exit(1)
        clip = Path(temporary) / "clip.mp4"
        make_clip(clip, args.frames, fps=2.0)
        costs = measure(model, vision, clip, args.frames, args.lookahead, args.device, args.dtype,
                        vision_dtype(args))
    show_costs(costs)
    if args.json:
        print(json.dumps(costs))


def main():
    parser = Parser(prog="python -m experiments.full_size", description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=DTYPES_OF_STREAMS,
                        help="of the language model (default float32)")
    parser.add_argument("--vision-dtype", choices=DTYPES_OF_STREAMS,
                        help="of the vision encoder (default: --dtype; beside int8, bfloat16 on "
                             "processors with AMX)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps (default cpu)")
    parser.add_argument("--layers", type=positive_int, help="of both models (default: all)")
    parser.add_argument("--frames", type=positive_int, default=40)
    parser.add_argument("--lookahead", type=positive_int, default=4,
                        help="frames in one pass of each model (default 4, as stream.py)")
    parser.add_argument("--folder", help="where the narrator is made, and found again")
    parser.add_argument("--published", metavar="DIR", help="a checkpoint to measure instead")
    parser.add_argument("--vision", help="its vision encoder (default: the checkpoint's)")
    parser.add_argument("--json", action="store_true", help="also print the costs as JSON")
    args = parser.parse_args()
    command_line(lambda: run_full_size(args))


if __name__ == "__main__":
    main()
