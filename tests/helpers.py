"""Small narrators, random videos, damaged files, and the published parallel form."""
import json
import os
import random
import shutil
import socket
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from pathlib import Path

import av
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrator as nar
import stream
from beyond.baselines.narration_memory import HistoryNarrator
from forks import Forked
from beyond.streams.bounds import open_stream
from support.engine.frozen import load_llm, load_tokenizer
from support.engine.registry import make_config, new_narrator
from support.engine.first_weights import start_memory
from support.files.video import Video

ROOT = Path(__file__).parent.parent
TOY = ROOT / "toy" / "checkpoint"
LLM = str(TOY / "llm")
GOLDEN = ROOT.parent / "shared" / "golden"


def tiny(seed: int = 0, llm=None, **changes) -> nar.Narrator:
    """A narrator with the toy's language model, or a given one; all other weights are random."""
    if llm is not None:
        return new_tiny(seed, llm, load_tokenizer(LLM), changes)
    # hundreds of tests ask for a few: each is made once, and so are the random numbers that follow
    model, random_state = known_tiny(seed, tuple(changes.items()))
    torch.set_rng_state(random_state)
    return deepcopy(model)


@lru_cache(64)
def known_tiny(seed: int, changes: tuple) -> tuple[nar.Narrator, torch.Tensor]:
    return new_tiny(seed, *load_llm(LLM), dict(changes)), torch.get_rng_state()


def new_tiny(seed: int, llm, tokenizer, changes: dict) -> nar.Narrator:
    torch.manual_seed(seed)
    options = {"width": 32, "memory_tokens": 10, "memory_heads": 2, "memory_dropout": 0.0,
               "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    config = make_config(llm=LLM, **(options | changes))
    model = new_narrator(llm, tokenizer, config)
    # B of LoRA and, as published, the memory start near 0: tests would not see them
    for name, parameter in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    start_memory(model.memory, torch.randn(50, model.config.J, model.config.width))
    if isinstance(model, HistoryNarrator):
        start_memory(model.narration_memory, model.llm.get_input_embeddings().weight[:, None])
    return model.eval()


def ranks(processes: int) -> list[dict[str, str]]:
    """The environments of processes under torchrun, which itself takes seconds to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def start_together(*lines, folders=None) -> list[Forked]:
    """Start a command in several processes; each has a line of its own.

    folders     where each runs; default: the project's root
    """
    folders = folders or [ROOT] * len(lines)
    return [Forked(line, folder, environment)
            for line, environment, folder in zip(lines, ranks(len(lines)), folders)]


def run_together(*lines, folders=None) -> list[tuple[int, list[str]]]:
    """The same, to their ends -> exit code and lines on stderr of each."""
    return [process.end() for process in start_together(*lines, folders=folders)]


def grouped(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small Llama with grouped-query attention: four heads of queries, two of keys."""
    llm = small("Llama")
    # buffers are not converted: with from_pretrained, too, rotations are in float32
    for parameter in llm.parameters():
        parameter.data = parameter.data.to(dtype)
    return llm


def small(family: str, **changes) -> nn.Module:
    """A small language model of one of transformers' families, random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "attn_implementation": "sdpa"}
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    llm = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in llm.parameters():
        if parameter.dim() == 1:            # norms and biases: at their usual values none is missed
            nn.init.normal_(parameter, 1.0, 0.3)
    return llm


def video(model: nar.Narrator, frames: int = 20, at: tuple[int, ...] = (0, 3, 9, 15),
          seed: int = 0):
    """Random frame tokens [T, J, D], and random narrations (frame, words) at the given frames."""
    generator = torch.Generator().manual_seed(seed)
    numbers = random.Random(seed)
    x = torch.randn(frames, model.config.J, model.config.width, generator=generator)
    vocabulary = len(model.layout.tokenizer)
    narrations = []
    for frame in at:
        length = numbers.randint(1, 8)
        narrations.append((frame, [numbers.randrange(2, vocabulary) for _ in range(length)]))
    return x, narrations


@lru_cache
def kitchen_tokens(frames: int | None = None) -> torch.Tensor:
    """Frame tokens [T, J, D] of toy/kitchen.mp4, or of its first frames."""
    encoder = nar.VisionEncoder(str(TOY / "vision"))
    pictures = islice(Video(ROOT / "toy" / "kitchen.mp4", nar.Config.fps), frames)
    return torch.cat([encoder(torch.from_numpy(picture)[None]) for picture in pictures])


def published(model: nar.Narrator, x: torch.Tensor, case: dict):
    """The published parallel forward, for comparison only. Returns as Narrator.forward.

    It has the published token ids (the instruction's full stop and the newline are one token) and
    the published, looser training mask. `case` is one of golden/*/teacher_forced.json.
    """
    tokens, mask = published_mask(model, case["input_ids"])
    memory = None
    if model.layout.M:
        # after the CLS token
        J = model.config.J
        read_at = torch.tensor([[frame * J + 1 for frame in case["mem_frame_indices"]]])
        frames = x.reshape(1, -1, model.config.width)           # [T, J, D] -> [1, T J, D]
        memory, _ = model.memory(frames, read_at)
    e = model.embed(tokens.ids, x, memory)
    hidden = model.run(e, torch.arange(len(tokens)), mask)
    return hidden, torch.tensor(case["labels"]), tokens


def published_mask(model: nar.Narrator, ids: list[int]):
    """The published training mask [L, L], with the tokens.

    Rows from a block's `[` on do not see the frame block before it, nor the memory block before its
    own; rows from narration n's `Assistant` on do not see narration n - k - 1. The tokens that open
    a segment still see the block before.

    The tokens get such kinds and numbers that, for a segment's last frame, `visible` agrees with
    this mask.
    """
    layout = model.layout
    # the published code appends the ids of memory and frame tokens to the vocabulary
    memory_id = model.llm.config.vocab_size if layout.M else None
    frame_id = model.llm.config.vocab_size + (1 if layout.M else 0)
    tokens = nar.Tokens()
    segment = 0
    for published_id in ids:
        token = {frame_id: nar.FRAME, memory_id: nar.MEMORY}.get(published_id, published_id)
        tokens.add([token], nar.PROMPT, segment)
        if published_id == layout.eot:
            segment += 1
    ids = tokens.ids
    L = len(ids)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    if not model.config.prune:
        return tokens, mask

    # blocks [...] of frame or memory tokens, as (first, end)
    frames, memory = [], []
    for first, token in enumerate(ids):
        if token == layout.open[0]:
            end = ids.index(layout.close[0], first) + 1
            if nar.FRAME in ids[first:end]:
                frames.append((first, end))
            if nar.MEMORY in ids[first:end]:
                memory.append((first, end))
    for first, end in frames + memory:
        tokens.kind[first:end] = [nar.VISUAL] * (end - first)
    for n in range(1, len(frames)):
        begin, _ = frames[n]
        first, end = frames[n - 1]
        mask[begin:, first:end] = False
        if n >= 2:
            first, end = memory[n - 2]
            mask[begin:, first:end] = False

    starts = [i for i, token in enumerate(ids) if token == layout.assistant[0]]
    ends = [i + 1 for i, token in enumerate(ids) if token == layout.eot]
    # numbered from 1: the published code keeps one narration more than k
    for n, (first, end) in enumerate(zip(starts, ends)):
        tokens.kind[first:end] = [nar.NARRATION] * (end - first)
        tokens.number[first:end] = [n + 1] * (end - first)
    if model.config.last_k is not None:
        for n in range(model.config.last_k + 1, len(starts)):
            removed = n - model.config.last_k - 1
            mask[starts[n]:, starts[removed]:ends[removed]] = False
    return tokens, mask


class Sizes(TorchDispatchMode):
    """Within it, `largest` is the number of elements of the largest tensor made (not meta)."""
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else [result]:
            if isinstance(output, torch.Tensor) and output.device.type != "meta":
                self.largest = max(self.largest, output.numel())
        return result


def narrate(model, frames, static=False, given=None, context=None, **options):
    """stream.py's `narrate` with the Context of the commands, which reads ahead, or a given one.

    options     of `open_stream`. Given words are fed as they are: none is guessed.
    """
    if context is None:
        if given is not None:
            options.setdefault("guesses", 0)
        context = open_stream(model, **options)
    return stream.narrate(model, frames, static, given, context)


def record(model) -> list[torch.Tensor]:
    """A list that gets the logits of all tokens from now on, until `del model.run`."""
    logits = []
    run = model.run

    def recording(*arguments, **options):
        hidden = run(*arguments, **options)
        logits.extend(model.logits(hidden))
        return hidden

    model.run = recording
    return logits


def lively(llm=None, seed=0, frames=30, **changes):
    """A tiny narrator that narrates every few frames, and frames for it.

    Its thresholds lie between two p([SKIP]), so that rounding decides nothing.
    """
    model = tiny(seed, llm=llm, **{"max_new_tokens": 6} | changes)
    x, _ = video(model, frames, seed=seed)
    model.config.theta = model.config.theta_low = -1.0          # only the first frame is narrated
    steps = narrate(model, x[:30], lookahead=8)
    p_skip = sorted(step.p_skip for step in steps if step.p_skip is not None)

    def below(share):
        i = int(len(p_skip) * share)
        return (p_skip[i - 1] + p_skip[i]) / 2

    model.config.theta = below(1 / 3)
    model.config.theta_low = below(1 / 5)
    return model, x


def row_of(step) -> tuple:
    """Frame, ids fed, ids of the narration, counter, lengths of the cache, tokens pruned."""
    ids = step.narration and step.narration.tokens
    return (step.frame, step.fed.ids, ids, step.position, step.text_tokens, step.visual_tokens, step.pruned)


def assert_same_stream(steps, others, tolerance=1e-5):
    assert [row_of(step) for step in steps] == [row_of(other) for other in others]
    for step, other in zip(steps, others):
        assert step.p_skip == pytest.approx(other.p_skip, abs=tolerance)


def save_features(root: Path, x_of: dict[str, torch.Tensor]) -> None:
    (root / "features").mkdir(exist_ok=True)
    for video, x in x_of.items():
        torch.save(x.clone(), root / "features" / f"{video}.pt")


def saved_features(root: Path) -> dict[str, torch.Tensor]:
    return {path.stem: torch.load(path, weights_only=True) for path in sorted((root / "features").glob("*.pt"))}


def golden_data(name: str, root: Path) -> Path:
    """The small copy of a data set: its files are kept in one, and written one a video."""
    kept = ROOT / "tests" / "golden" / "data" / name
    shutil.copytree(kept, root, ignore=shutil.ignore_patterns("*.safetensors"))
    save_features(root, load_file(kept / "features.safetensors"))
    return root


def with_tensors(file: str, change):
    """A function of a folder: change(tensors) of a .safetensors file in it, whose header stays."""
    def damage(folder: Path):
        path = folder / file
        with safe_open(path, "pt") as opened:
            header = opened.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, header)
    return damage


def with_entries(file: str, **entries):
    """A function of a folder: other entries of a JSON file in it."""
    def damage(folder: Path):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return damage


def with_text(file: str, text: str):
    return lambda folder: (folder / file).write_text(text)


def resident_bytes() -> int:
    """What this process holds in memory, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def copy_packets(source: Path, target: Path) -> None:
    """The pictures of a video in another container, as they are."""
    with av.open(str(source)) as video, av.open(str(target), "w") as copy:
        stream = copy.add_stream_from_template(video.streams.video[0])
        for packet in video.demux(video=0):
            if packet.size:
                packet.stream = stream
                copy.mux(packet)
