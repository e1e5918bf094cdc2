"""The narrator (paper §3.1, 3.2, 3.5): frame features, connector, LLM with LoRA, token layout,
mask.

A frozen vision encoder turns each frame into J = 10 tokens. A two-layer MLP, the connector, maps
these and the memory tokens into the embedding space of a language model, which is frozen except for
its LoRA weights. One sequence holds everything: segments of frames, each opened by the memory of
the past and closed by its narration. After each frame the language model gives the probability of
[SKIP]; where a segment ends, it writes what happened.

Glossary (T frames, J tokens a frame, D feature width, M memory tokens, L tokens in a sequence, V
vocabulary):
    x           frame tokens X_t                                          [T, J, D]
    memory      memory tokens M_t                                         [.., M, D]
    e           embeddings of all tokens that are fed; of frames and memory
                tokens, these are E_t = MLP(X_t)                          [..., D_lm]
    segment n   the frames after narration n - 1 up to narration n; in the sequence: all tokens from
                the end of narration n - 1 to the end of narration n
    skip        the token "," between two frames of a segment: the paper's [SKIP]

Training and streaming see the same tokens and attend to the same keys: `Layout` makes the pieces
for both, and `visible` is at once the training mask (Fig. 4) and the rule by which stream.py
prunes.

`python narrator.py` draws the mask of Fig. 4. Does not include: the streaming loop (stream.py);
batches (as in the published code, one video at a time, with gradient accumulation).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from baselines.memories import MEMORIES, new_memory
from support.common.errors import BadData
from support.engine import attention, checkpoint, family, lora
from support.engine.settings import MoreSettings, check_settings
from support.engine.start import start_as_published, start_connector

SYSTEM = ("A multimodal AI assistant is helping users with some activities. "
          "Below is their conversation, interleaved with the list of video frames received by the "
          "assistant.")
INSTRUCTION = "Please concisely narrate the video in real time."

# Above so many tokens `Narrator.forward` attends segment by segment, which is then faster than with
# a mask of all pairs (support/engine/attention.py).
LARGEST_MASK = 640


@dataclass
class Config(MoreSettings):
    """The paper's settings.

    The settings of the published code and of streams without end are in support/engine/settings.py.
    They are fields of the same object, and of the same narrator.json.
    """
    # hub ids or folders; relative folders are inside the checkpoint
    llm: str = "meta-llama/Llama-3.2-1B-Instruct"
    vision: str = "google/siglip-large-patch16-384"
    grid: int = 3                 # J = 1 CLS + grid^2 pooled patch tokens; 0: CLS alone
    width: int = 1024             # D
    fps: float = 2.0              # frames per second
    memory: str = "clam"          # one of MEMORIES
    memory_tokens: int = 20       # M
    prune: bool = True            # dynamic context management; off, without memory: VideoLLM-online
    last_k: int | None = None     # FlowNar-C: narrations kept, 0 for none; None: all
    theta: float = 0.8            # narrate when p([SKIP]) <= theta
    theta_low: float = 0.5        # the threshold soon after a narration
    refractory: float = 4.0       # for how long after it [seconds]
    max_new_tokens: int = 100     # of a narration that does not end by itself
    readout: str = "frame"        # M_t is read after the whole frame; "cls", as the published code
                                  # does: after the frame's first token
    lora_rank: int = 128
    lora_alpha: float = 256

    def __post_init__(self):
        """BadData if a value has the wrong type, is out of range, or contradicts another one."""
        check_settings(self, MEMORIES)

    @property
    def J(self) -> int:
        return 1 + self.grid ** 2


# ------------------------------------------------------ §3.1 visual feature extraction

class VisionEncoder(nn.Module):
    """Frozen vision model: frames uint8 [T, H, W, 3] -> X [T, J, D], the CLS token and grid x grid
    pooled patches.

    source: a folder or hub id of any transformers vision model with square patches (SigLIP, CLIP,
    ...). Frames are scaled to fit its input, padded with black to a square, and normalised as its
    preprocessor_config.json says.
    """

    def __init__(self, source: str, grid: int = 3, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32):
        super().__init__()
        model, processor = checkpoint.load_vision_model(source, dtype)
        # `forward` keeps no gradients, so the model is frozen. (Its weights are not marked as such:
        # with that mark, SigLIP's pooling takes eighty times as long in bf16 on a processor.)
        self.model = model.to(device).eval()
        self.grid = grid
        self.image_size = model.config.image_size
        self.width = model.config.hidden_size
        mean = torch.tensor(processor["image_mean"], device=device)         # of each colour
        std = torch.tensor(processor["image_std"], device=device)
        self.register_buffer("mean", mean[:, None, None], persistent=False)
        self.register_buffer("std", std[:, None, None], persistent=False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        device, dtype = self.model.device, self.model.dtype
        pixels = letterbox(frames.to(device).float() / 255, self.image_size)    # [T, 3, S, S]
        pixels = (pixels - self.mean) / self.std
        return frame_tokens(self.model, pixels.to(dtype), self.grid)


def letterbox(frames: Tensor, size: int) -> Tensor:
    """[T, H, W, 3] in 0..1 -> [T, 3, size, size]: longer side scaled to `size`, the rest black."""
    frames = rearrange(frames, "t h w c -> t c h w")
    height, width = frames.shape[2:]
    if (height, width) == (size, size):
        return frames
    scale = size / max(height, width)
    new_height = max(1, round(height * scale))
    new_width = max(1, round(width * scale))
    frames = F.interpolate(frames, (new_height, new_width), mode="bicubic", antialias=True)
    frames = frames.clamp(0, 1)
    top = (size - new_height) // 2
    left = (size - new_width) // 2
    bottom = size - new_height - top
    right = size - new_width - left
    return F.pad(frames, (left, right, top, bottom))       # [T, 3, size, size]


def frame_tokens(model: nn.Module, pixels: Tensor, grid: int) -> Tensor:
    """Normalised pixels [T, 3, S, S] -> X [T, J, D] = [CLS; patch tokens averaged to a grid x
    grid]. BadData if the vision model has no token for each patch, or no pooled output.
    """
    output = model(pixel_values=pixels)
    side = model.config.image_size // model.config.patch_size               # patches in a row
    patches = output.last_hidden_state[:, -side * side:]        # drops a leading CLS token, if any
    cls = output.get("pooler_output")
    if patches.shape[1] < side * side or cls is None:
        raise BadData("the vision model has no token for each patch, or no pooled output; use "
                      "SigLIP, CLIP, ViT or DINOv2")
    # SigLIP has no CLS token: as published, its pooled output stands for the paper's
    tokens = [cls[:, None]]
    if grid:
        patches = rearrange(patches, "t (h w) d -> t d h w", h=side)
        pooled = F.adaptive_avg_pool2d(patches, grid)
        tokens.append(rearrange(pooled, "t d h w -> t (h w) d"))
    return torch.cat(tokens, dim=1)


# ------------------------------------------------------ §3.2 tokens: one layout for both

# kinds of tokens
PROMPT = 0      # never removed
VISUAL = 1      # frames, memory, and what stands around them: removed with their segment
NARRATION = 2   # "Assistant:", words, end of text, newline: removed where only the last k are kept

# placeholder ids, where the embeddings of frames and of memory tokens go
FRAME = -1
MEMORY = -2


# of a video: (frame, token ids without end of text), the first of frame 0
Narrations = list[tuple[int, list[int]]]


@dataclass
class Tokens:
    """A run of tokens: five lists of one length."""
    ids: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)       # PROMPT, VISUAL, NARRATION
    segment: list[int] = field(default_factory=list)    # in which it is fed
    number: list[int] = field(default_factory=list)     # of its narration: n of y_n; -1: of none
    learn: list[bool] = field(default_factory=list)     # whether the model learns to predict it

    def add(self, ids: list[int], kind: int, segment: int, number: int = -1,
            learn: bool = False) -> Tokens:
        """Append tokens that have all but their ids in common."""
        self.ids += ids
        self.kind += [kind] * len(ids)
        self.segment += [segment] * len(ids)
        self.number += [number] * len(ids)
        self.learn += [learn] * len(ids)
        return self

    def __iadd__(self, other: Tokens) -> Tokens:
        self.ids += other.ids
        self.kind += other.kind
        self.segment += other.segment
        self.number += other.number
        self.learn += other.learn
        return self

    def __add__(self, other: Tokens) -> Tokens:
        both = Tokens()
        both += self
        both += other
        return both

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, chosen: list[bool]) -> Tokens:
        """Only the chosen tokens, in their order."""
        lists = (self.ids, self.kind, self.segment, self.number, self.learn)
        return Tokens(*[list(compress(values, chosen)) for values in lists])

    def for_rule(self, device="cpu") -> Tensor:
        """What `visible` asks of each token: its kind, segment and number [3, L]."""
        return torch.tensor([self.kind, self.segment, self.number], device=device)

    def labels(self) -> Tensor:
        """The labels (§3.5): the successor of each token [L], -100 where nothing is learned."""
        labels = [i if learn else -100 for i, learn in zip(self.ids, self.learn)]
        return torch.tensor(labels[1:] + [-100])

    def positions(self) -> Tensor:
        """What the counter l of Algorithm 2 gives to each token [L]: 0, 1, 2, ..."""
        return torch.arange(len(self))


class Layout:
    r"""Turns a stream into tokens, in the pieces in which it is fed; training concatenates the same
    pieces.

        piece       first                                       closing     narration
        segment 0   SYSTEM  [ x*J ]\n  USER \n                  Assistant:  words
        kind        prompt  visual     prompt                   narration   narration
        learned                                                 yes         yes

        piece       opening                         frame       closing            narration
        segment n   EOT \n  [ m*M ]\n [ x*J         , x*J  ...  ]\n     Assistant:  words
        kind        narration  visual               visual      visual  narration  narration
        number      n - 1                                               n          n
        learned     EOT                             ,           ]\n     yes        yes

    Segment n contains everything fed after the words of narration n - 1, up to and including the
    words of narration n. The end-of-text token and the newline of narration n - 1 are special: they
    *belong to* narration n - 1 (`number`) but are *fed in* segment n (`segment`).

    After each frame the model predicts "," (the paper's [SKIP]: nothing to say yet) or "]\n" (the
    segment ends: narrate now). Each piece of text (SYSTEM, "[", "]\n", ",", ...) is tokenised on
    its own, so that no two ever merge, and no id is written as a number.
    """

    def __init__(self, tokenizer, J: int, M: int, keep_newline: bool = False,
                 vocabulary: int | None = None):
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary        # rows of the language model's table of tokens
        self.J = J
        self.M = M
        self.frame_places = [FRAME] * J
        self.memory_places = [MEMORY] * M
        self.keep_newline = keep_newline    # of removed narrations, as the published FlowNar-C does
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prompt = bos + self.encode(SYSTEM + "\n\n")
        self.open = self.encode("[")
        self.close = self.encode("]\n")
        self.user = self.encode("User: " + INSTRUCTION)
        self.newline = self.encode("\n")
        self.assistant = self.encode("Assistant:")
        self.eot = checkpoint.eot_id(tokenizer, vocabulary)
        skip = self.encode(",")
        if len(skip) != 1:
            raise BadData("this tokenizer splits ','; use a Llama-like model")
        self.skip = skip[0]

    def encode(self, text: str) -> list[int]:
        """BadData if the tokenizer cannot encode it, or the language model lacks such tokens."""
        return checkpoint.token_ids(self.tokenizer, text, self.vocabulary)

    def decode(self, ids: list[int]) -> str:
        words = [i for i in ids if i != self.eot]
        text = self.tokenizer.decode(words, clean_up_tokenization_spaces=False)
        if self.tokenizer.clean_up_tokenization_spaces:
            # " 's" -> "'s", as published; today's transformers does it for few tokenizers itself
            text = self.tokenizer.clean_up_tokenization(text)
        return text.strip()

    def first(self) -> Tokens:
        """The prompt, with frame 0 inside; the first narration always follows."""
        tokens = Tokens().add(self.prompt, PROMPT, segment=0)
        tokens.add(self.open + self.frame_places + self.close, VISUAL, segment=0)
        return tokens.add(self.user + self.newline, PROMPT, segment=0)

    def opening(self, n: int) -> Tokens:
        """The first frame of segment n >= 1, with the memory of all before it (Alg. 2, line 7).

        Before it come end of text and newline of narration n - 1: the model has predicted the end
        of text after the last word, and it was not fed then.
        """
        tokens = Tokens().add([self.eot], NARRATION, segment=n, number=n - 1, learn=True)
        if self.keep_newline:
            tokens.add(self.newline, PROMPT, segment=n)
        else:
            tokens.add(self.newline, NARRATION, segment=n, number=n - 1)
        return tokens + self.memory_and_frame(n)

    def memory_and_frame(self, n: int) -> Tokens:
        """The visual part of `opening`: memory tokens and the first frame, [M_{t_{n-1}}; X_t].

        By itself where a segment is opened anew (streams/bounds.py).
        """
        tokens = Tokens()
        if self.M:
            tokens.add(self.open + self.memory_places + self.close, VISUAL, segment=n)
        return tokens.add(self.open + self.frame_places, VISUAL, segment=n)

    def frame(self, n: int) -> Tokens:
        """A further frame of segment n; the [SKIP] before it says that the last frame was not
        narrated.
        """
        tokens = Tokens().add([self.skip], VISUAL, segment=n, learn=True)
        return tokens.add(self.frame_places, VISUAL, segment=n)

    def closing(self, n: int) -> Tokens:
        """Between the last frame of segment n and its narration.

        "]" is what the last frame predicts instead of [SKIP]: narrate now.
        """
        tokens = Tokens()
        if n > 0:                                       # segment 0 is closed in `first`
            tokens.add(self.close, VISUAL, segment=n, learn=True)
        return tokens.add(self.assistant, NARRATION, segment=n, number=n, learn=True)

    def narration(self, n: int, ids: list[int]) -> Tokens:
        return Tokens().add(ids, NARRATION, segment=n, number=n, learn=True)

    def sequence(self, narrations: Narrations) -> Tokens:
        """All tokens of a video with narrations (frame, ids without EOT), the first at frame 0."""
        if not narrations or narrations[0][0] != 0:
            raise ValueError("the first narration belongs to frame 0")
        tokens = self.first()
        last = 0
        for n, (frame, ids) in enumerate(narrations):
            if n > 0 and frame <= last:
                raise ValueError(f"narration {n} at frame {frame} does not come after frame {last}")
            for t in range(last + 1, frame + 1):
                if t == last + 1:
                    tokens += self.opening(n)
                else:
                    tokens += self.frame(n)
            tokens += self.closing(n)
            tokens += self.narration(n, ids)
            last = frame
        # the last end of text is learned, too, though no frame comes with which it would be fed
        n = len(narrations) - 1
        return tokens.add([self.eot], NARRATION, segment=n + 1, number=n, learn=True)


# ------------------------------------------------------ §3.4, §3.5 what a token sees

def visible(kind, segment, number, now, last_k: int | None = None, prune: bool = True):
    """The one visibility rule: does a token fed in segment `now` see one of this kind, segment and
    number?

    It sees
        the prompt,
        frames and memory tokens of its own segment,
        the last k narrations before its segment (None: all; with k = 1, segment 2 sees number 1),
        narration tokens fed in its own segment: the end of text that opens it, and its own words.
    Without pruning (VideoLLM-online) it sees everything. Tensors or NumPy arrays, which broadcast.

    And only what was fed before it, and itself: `attention_mask` adds that in training; in
    streaming nothing else is there. Training attends by this rule (`Narrator.forward`), and the
    cache is pruned by it (stream.py: `Context.discard`).
    """
    in_segment = segment == now
    if last_k is None:
        is_kept = number >= 0                           # true of all narrations
    else:
        is_kept = number >= now - last_k
    # in_segment: only last_k = 0 needs it, where even a token's own narration would be hidden
    narration = (kind == NARRATION) & (is_kept | in_segment)
    visual = (kind == VISUAL) & in_segment
    return (kind == PROMPT) | visual | narration | (not prune)


def attention_mask(tokens: Tokens, last_k: int | None = None, prune: bool = True,
                   device="cpu") -> Tensor:
    """The training mask (§3.5, Fig. 4), bool [L, L].

    A query (row) attends to the visible keys (columns) up to itself.
    """
    kind, segment, number = tokens.for_rule(device)
    now = segment[:, None]                                  # of each query
    seen = visible(kind, segment, number, now, last_k, prune)
    return seen.tril()


def segment_rows(tokens: Tokens, last_k: int | None = None,
                 device="cpu") -> list[tuple[Tensor, Tensor]]:
    """The same rule without an [L, L] tensor, for long videos: of most pairs of tokens, neither
    sees the other.

    For each segment: the indices of its tokens (queries) [q], and of all tokens that at least one
    of them sees (keys) [k]. A query attends to those of the keys that do not come after it.
    """
    for_rule = tokens.for_rule()                            # kind, segment, number
    segment = for_rule[1]
    _, lengths = segment.unique_consecutive(return_counts=True)
    rows = []
    for queries in torch.arange(len(tokens)).split(lengths.tolist()):
        last = queries[-1]
        seen = visible(*for_rule[:, :last + 1], segment[last], last_k)
        keys = seen.nonzero()[:, 0]
        rows.append((queries.to(device), keys.to(device)))
    return rows


# ------------------------------------------------------ §3.5 the loss

def cross_entropy(logits: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor,
                  rows: int = 256) -> Tensor:
    """Sum of the cross entropy over hidden states [R, D_lm] with labels [R].

    `logits` maps hidden states to logits [.., V]. Those of a video take more memory than all else,
    so only the logits of `rows` hidden states are held at once: the backward pass computes them
    again.
    """
    def loss_of(hidden_rows: Tensor, label_rows: Tensor) -> Tensor:
        return F.cross_entropy(logits(hidden_rows), label_rows, reduction="sum")

    total = 0
    for hidden_rows, label_rows in zip(hidden.split(rows), labels.split(rows)):
        total = total + recomputed(loss_of, hidden_rows, label_rows, use_reentrant=False)
    return total


# ------------------------------------------------------ §3.2 the model

class Narrator(nn.Module):
    """LLM + connector + memory.

    `forward` is the parallel form (training); stream.py feeds it piece by piece.
    """

    def __init__(self, llm: nn.Module, tokenizer, config: Config):
        super().__init__()
        self.config = config
        family.check_family(llm)
        attention.install(llm)                      # its attention takes `segments`, too
        self.llm = llm.requires_grad_(False)
        self.add_connector(llm.config.hidden_size)
        self.add_memory(llm.config.hidden_size)
        self.layout = self.new_layout(tokenizer)
        lora.add_lora(llm, config.lora_rank, config.lora_alpha, config.lora_dropout)
        self.merged = False

    def add_connector(self, hidden: int) -> None:
        """The MLP of E = MLP(X): D -> D_lm."""
        self.connector = nn.Sequential(
            nn.Linear(self.config.width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
        )

    def add_memory(self, hidden: int) -> None:
        """The visual memory (§3.3, clam.py)."""
        self.memory = new_memory(self.config)

    def new_layout(self, tokenizer) -> Layout:
        return Layout(*self.layout_options(tokenizer))

    def layout_options(self, tokenizer) -> tuple:
        vocabulary = len(self.llm.get_input_embeddings().weight)
        return tokenizer, self.config.J, self.memory.M, self.config.keep_newline, vocabulary

    @property
    def device(self) -> torch.device:
        return self.connector[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of connector and frame tokens."""
        return self.connector[0].weight.dtype

    # ------------------------------------------------------------------ embeddings

    def embed(self, ids: Tensor, x: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """Embeddings [L, D_lm] of ids [L].

        The placeholders FRAME and MEMORY are replaced by MLP(X), for frame tokens x and memory
        tokens `memory` [.., D], each in the order of the sequence.
        """
        # Placeholders are negative; they get any row here, which is replaced below.
        e = self.llm.get_input_embeddings()(ids.clamp_min(0))
        for placeholder, tokens in ((FRAME, x), (MEMORY, memory)):
            if tokens is not None:
                places = (ids == placeholder)[:, None]
                e = e.masked_scatter(places, self.embed_visual(tokens).to(e.dtype))
        return e

    def embed_visual(self, x: Tensor) -> Tensor:
        """E = MLP(X): frame or memory tokens [.., D] -> [.., D_lm]."""
        rows = rearrange(x, "... d -> (...) d").to(self.dtype)
        e = self.connector(rows)
        return e.unflatten(0, x.shape[:-1])

    # ------------------------------------------------------------------ one pass

    def run(self, e: Tensor, positions: Tensor, mask: Tensor | None = None, cache=None,
            segments: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Embeddings [L, D_lm], positions [L], mask [L, keys] -> last hidden states [L, D_lm].

        mask        what each token sees
        segments    the same for long sequences: `segment_rows`. With neither of the two, a
                    token sees all tokens up to itself
        """
        # In each layer, transformers hands `attention_mask` and `segments` on to
        # `by_mask_or_segments` (support/engine/attention.py).
        output = self.llm.model(
            inputs_embeds=e[None],
            position_ids=positions[None],
            attention_mask=None if mask is None else mask[None, None],
            segments=segments,
            **family.with_cache(self.llm.model, cache),
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """In fp32: [.., D_lm] -> [.., V]."""
        return self.llm.lm_head(hidden).float()

    # ------------------------------------------------------------------ §3.5 training

    def forward(self, x: Tensor, narrations: Narrations, past=None,
                cache=None) -> tuple[Tensor, Tensor, Tokens]:
        """The parallel form: frame tokens x [T, J, D] and narrations (frame, ids without EOT).

        Returns the hidden states [L, D_lm] of all tokens, the labels [L] on the CPU and the tokens.
        Frames after the last narration are not used.

        past        of a video late in a long stream (streams/late.py: Past); not in the paper
        cache       an empty one, which gets the keys and values
        """
        tokens = self.layout.sequence(narrations)
        x = self.used_frames(x, narrations)
        state = None
        positions = tokens.positions()
        if past is not None:
            state = past.state
            positions = past.positions(tokens)
        # of each segment but the first: what was read at the end of the one before
        memory = self.memory_at_ends(x, narrations, state)
        ids = torch.tensor(tokens.ids, device=self.device)
        e = self.embed(ids, x, memory)
        positions = positions.to(self.device)
        last_k = self.config.last_k
        prune = self.config.prune
        mask = segments = None                  # where nothing is pruned: causal attention
        if len(tokens) <= LARGEST_MASK:
            mask = attention_mask(tokens, last_k, prune, self.device)       # Fig. 4
        elif prune:
            # Most videos are longer: the same, segment by segment.
            segments = segment_rows(tokens, last_k, self.device)
        hidden = self.run(e, positions, mask, cache, segments)
        return hidden, tokens.labels(), tokens

    def used_frames(self, x: Tensor, narrations: Narrations) -> Tensor:
        """The frames up to the last narration, on the model's device.

        ValueError unless x is [T, J, D] and reaches the frame of the last narration.
        """
        last = narrations[-1][0]
        J, D = self.config.J, self.config.width
        has_frames = x.dim() == 3 and x.shape[1:] == (J, D)
        if not has_frames or len(x) <= last:
            raise ValueError(f"expected frame tokens [> {last}, {J}, {D}], got {list(x.shape)}")
        return x[:last + 1].to(self.device, self.dtype)

    def memory_at_ends(self, x: Tensor, narrations: Narrations, state=None) -> Tensor | None:
        """The memory tokens M_t at the end of each segment but the last [1, n, M, D].

        state       of the memory before the video; None: the initial one
        """
        if not self.layout.M:
            return None
        return self.read_outs(x, narrations, state)

    def read_outs(self, x: Tensor, narrations: Narrations, state=None) -> Tensor:
        """M_t at the same ends [1, n, M, D], also where the layout has no place for memory."""
        # how many frame tokens have been absorbed when the memory is read, at the end of a frame
        J = self.config.J
        read_at = [(frame + 1) * J for frame, _ in narrations[:-1]]
        if self.config.readout == "cls":        # published weights: after the frame's CLS token
            read_at = [frame * J + 1 for frame, _ in narrations[:-1]]
        x = rearrange(x, "t j d -> 1 (t j) d")
        read_at = torch.tensor([read_at]).long()
        memory, _ = self.memory(x, read_at, state)
        return memory

    def loss(self, x: Tensor, narrations: Narrations, past=None) -> tuple[Tensor, int]:
        """Cross entropy on narration tokens and the trigger (§3.5) -> sum over the learned tokens,
        their number. train.py takes the mean of each video, and then of the batch.
        """
        hidden, labels, _ = self(x, narrations, past)
        learned = (labels != -100).nonzero()[:, 0]                          # tokens with a label
        labels = labels[learned].to(self.device)
        hidden = hidden.index_select(0, learned.to(self.device))
        return cross_entropy(self.logits, hidden, labels), len(learned)

    def state_after(self, x: Tensor, narrations: Narrations):
        """The state of the memory after frames x [T, J, D] (streams/late.py).

        The narrations are not used here; a memory of them absorbs them, too (baselines).
        """
        x = rearrange(x, "t j d -> 1 (t j) d").to(self.device)
        read_nowhere = torch.zeros(1, 0).long()
        return self.memory(x, read_nowhere)[1]

    # ------------------------------------------------------------------ first weights, checkpoints

    @torch.no_grad()
    def start_published(self):
        """First weights as in the published code: matrices of connector and memory N(0, 0.02),
        biases 0.

        LoRA always starts the same way: A Kaiming-uniform, B zero.
        """
        start_as_published(self.connector)
        self.memory.reset_parameters()

    def initialise(self, x: Tensor):
        """First weights made from features x [T, J, D] of training videos (--start mimetic)."""
        self.memory.initialise(x)
        start_connector(self.connector, x)

    def trainable(self) -> dict[str, Tensor]:
        """What a checkpoint holds, under the names of the published adapters: all but the frozen
        weights.
        """
        weights = {}
        for name, p in self.named_parameters():
            is_frozen = name.startswith("llm.") and "lora_" not in name
            if not is_frozen:
                weights[checkpoint.published_name(name)] = p
        return weights

    def save(self, folder: str | Path, dtype: torch.dtype | None = None,
             **models: str | None) -> None:
        """Write a checkpoint that baselines/variants.py (`load_narrator`) and PEFT read, in dtype
        if one is given; `models` replace those of Config.
        """
        assert not self.merged, "a merged narrator has no LoRA to save"
        checkpoint.save_narrator(self, Path(folder), dtype, **models)

    def merge(self) -> Narrator:
        """Prepare for streaming: merge LoRA into the weights."""
        lora.merge_lora(self.llm)
        self.merged = True
        return self

    def vision_encoder(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The one that the settings name; BadData if its features have another width."""
        config = self.config
        encoder = VisionEncoder(config.vision, config.grid, self.device, dtype)
        if encoder.width != config.width:
            raise BadData(f"the vision model gives features of width {encoder.width}, "
                          f"the narrator needs {config.width}")
        return encoder


if __name__ == "__main__":
    from commands.narrator import main
    main()
