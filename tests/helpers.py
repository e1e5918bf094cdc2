"""What several tests use: small narrators on the toy's language model, random videos, the published parallel form."""
import os
import random
import socket
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import narrator as nar
import stream
from baselines import variants
from streams.fast import open_stream
from support.engine.checkpoint import load_llm, load_tokenizer

ROOT = Path(__file__).parent.parent
TOY = ROOT / "toy" / "checkpoint"
GOLDEN = ROOT.parent / "shared" / "golden"


def tiny(seed: int = 0, llm=None, **changes) -> nar.Narrator:
    """A narrator with the toy's language model (or a given one) and random weights everywhere else, LoRA included."""
    torch.manual_seed(seed)
    options = {"width": 32, "memory_tokens": 10, "memory_heads": 2, "memory_dropout": 0.0, "lora_rank": 4,
               "lora_alpha": 8, "lora_dropout": 0.0} | changes
    folder = str(TOY / "llm")
    pair = load_llm(folder) if llm is None else (llm, load_tokenizer(folder))
    model = variants.new_narrator(*pair, nar.Config(llm=folder, **options))
    for name, p in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.memory.initialise(torch.randn(50, model.config.J, model.config.width))   # as published it starts near nothing
    if model.config.narration_memory:
        model.narration_memory.initialise(model.llm.get_input_embeddings().weight[:, None])
    return model.eval()


def two_ranks() -> list[dict[str, str]]:
    """The environments that torchrun gives to two processes, without the seconds that it takes to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [shared | {"RANK": n, "LOCAL_RANK": n} for n in "01"]


def grouped(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A small Llama with grouped-query attention: four heads of queries, two of keys."""
    torch.manual_seed(0)
    sizes = LlamaConfig(vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    llm = LlamaForCausalLM(sizes)
    for p in llm.parameters():                      # not its buffers: rotations stay fp32, as from_pretrained has them
        p.data = p.data.to(dtype)
    return llm


def video(model: nar.Narrator, frames: int = 20, at: tuple[int, ...] = (0, 3, 9, 15), seed: int = 0):
    """Random frame tokens [T, J, D] and random narrations at the given frames."""
    generator, numbers = torch.Generator().manual_seed(seed), random.Random(seed)
    x = torch.randn(frames, model.config.J, model.config.width, generator=generator)
    vocabulary = len(model.layout.tokenizer)
    return x, [(frame, [numbers.randrange(2, vocabulary) for _ in range(numbers.randint(1, 8))]) for frame in at]


def published(model: nar.Narrator, x: torch.Tensor, case: dict):
    """The published parallel forward, for comparison only: its token ids (the instruction's full stop and the newline
    are one token) and its looser training mask. `case` is one of golden/*/teacher_forced.json. Returns as
    Narrator.forward.
    """
    tokens, mask = published_mask(model, case["input_ids"])
    memory = None
    if model.layout.M:
        read_at = torch.tensor([[model.read_at(frame) for frame in case["mem_frame_indices"]]])
        memory, _ = model.memory(x.reshape(1, -1, model.config.width), read_at)
    e = model.embed(torch.tensor(tokens.ids), x, None if memory is None else model.embed_visual(memory))
    hidden = model.run(e, torch.arange(len(tokens)), mask)
    return hidden, torch.tensor(case["labels"]), tokens


def published_mask(model: nar.Narrator, ids: list[int]):
    """Rows from a block's `[` on do not see the frame block before it nor the memory block before its own; rows from
    narration n's `Assistant` on do not see narration n - k - 1. What opens a segment still sees the block before.

    The tokens' kinds and numbers are such that a segment's last frame sees by `visible` what it sees by this mask.
    """
    layout, M = model.layout, model.layout.M
    new = model.llm.config.vocab_size                                   # they append the ids of memory and frame tokens
    v, m = (new + 1, new) if M else (new, None)
    tokens, segment = nar.Tokens(), 0
    for i in ids:
        tokens.add([nar.FRAME if i == v else nar.MEMORY if i == m else i], nar.PROMPT, segment)
        segment += i == layout.eot
    ids, L = tokens.ids, len(ids)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    if not model.config.prune:
        return tokens, mask
    blocks = [(a, ids.index(layout.close[0], a)) for a, i in enumerate(ids) if i == layout.open[0]]
    frames, memory = ([(a, b) for a, b in blocks if kind in ids[a:b]] for kind in (nar.FRAME, nar.MEMORY))
    for a, b in frames + memory:
        tokens.kind[a:b + 1] = [nar.VISUAL] * (b + 1 - a)
    for n in range(1, len(frames)):
        begin = frames[n][0]
        mask[begin:, frames[n - 1][0]:frames[n - 1][1] + 1] = False
        if n >= 2:
            mask[begin:, memory[n - 2][0]:memory[n - 2][1] + 1] = False
    starts, ends = ([i for i, token in enumerate(ids) if token == what] for what in (layout.assistant[0], layout.eot))
    for n, (a, b) in enumerate(zip(starts, ends)):                      # one narration more than k
        tokens.kind[a:b + 1], tokens.number[a:b + 1] = [nar.NARRATION] * (b + 1 - a), [n + 1] * (b + 1 - a)
    if model.config.last_k is not None:
        for n in range(model.config.last_k + 1, len(starts)):
            gone = n - model.config.last_k - 1
            mask[starts[n]:, starts[gone]:ends[gone] + 1] = False
    return tokens, mask


def narrate(model, frames, static=False, forced=None, context=None, lookahead=1, clock=None):
    """stream.py's `narrate` with the Context of the commands, which reads ahead; a given one gets lookahead and clock."""
    if context is None:
        context = open_stream(model)
    context.lookahead = lookahead
    context.clock = clock
    if forced is not None:
        context.guesses = 0
    return stream.narrate(model, frames, static, forced, context)


def record(context) -> list[torch.Tensor]:
    """The logits of all tokens that go through a Stream from now on, as they come."""
    logits = []
    run = context.run

    def recording(part):
        every_row = run(replace(part, rows=slice(None)))
        logits.extend(every_row)
        return every_row[part.rows]

    context.run = recording
    return logits


def record_plain(model) -> list[torch.Tensor]:
    """The same for a plain Context of this model."""
    logits = []
    run = model.run

    def recording(*given):
        hidden = run(*given)
        logits.extend(model.logits(hidden))
        return hidden

    model.run = recording
    return logits
