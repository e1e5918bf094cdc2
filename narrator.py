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
batches (as in the authors' code, one video at a time, with gradient accumulation).
"""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from clam import CLAM
from support.common.errors import BadData
from support.common.options import LARGEST, setting
from support.engine import attention, checkpoint, family, frozen, lora, pictures
from support.engine.registry import NARRATORS
from support.engine.settings import check_settings, check_together

SYSTEM = ("A multimodal AI assistant is helping users with some activities. "
          "Below is their conversation, interleaved with the list of video frames received by the "
          "assistant.")
INSTRUCTION = "Please concisely narrate the video in real time."

MEMORIES = {"clam": CLAM}       # the visual memories, by name; beyond/baselines/ adds its own

# Above so many tokens `Narrator.parallel` attends segment by segment, which is then faster than
# with a mask of all pairs.
LARGEST_MASK = 640


@dataclass
class Config:
    """All settings of a narrator, as in narrator.json (support/engine/checkpoint.py).

    Each has its help, its values and what it needs beside it (support/common/options.py: setting).
    Commands make options of them: memory_tokens is --memory-tokens, prune is --no-prune.
    """
    # hub ids or folders; relative folders are inside the checkpoint
    llm: str = setting("meta-llama/Llama-3.2-1B-Instruct",
        "frozen language model: hub id or folder", compared=False)
    vision: str = setting("google/siglip-large-patch16-384",
        "frozen vision encoder: hub id or folder", needs="pictures", compared=False)
    # what these are, wherever they lie (frozen.py: FrozenModel.mark); None: not known
    llm_mark: str | None = setting(None, "the mark of the language model")
    vision_mark: str | None = setting(None, "the mark of the vision encoder")
    # frames (§3.1)
    grid: int = setting(3, "pooled tokens per side of a frame, J = 1 CLS + grid^2; 0: CLS alone",
        (0, 100), needs="--data toy, a new narrator")
    width: int = setting(1024, "of the vision encoder's features, D")
    fps: float = setting(2.0, "frames per second", (1e-3, 1e3))
    # the visual memory (§3.3)
    memory: str = setting("clam", "the visual memory", MEMORIES, needs="a new narrator")
    memory_tokens: int = setting(20, "memory tokens, M", needs="a new narrator, a memory")
    memory_heads: int = setting(8, "heads of the memory, h",
        needs="a new narrator, a memory with heads")
    memory_target: bool = setting(True,
        "learn a start of each memory token; the authors' models: no")
    memory_dropout: float = setting(0.1, "dropout in the memory's self-attention", (0, 1),
        needs="a memory with heads", compared=False)
    readout: str = setting("frame",
        "M_t is read after the whole frame, or after its first token (as the authors' code does)",
        ("frame", "cls"), needs="a memory that is read within frames")
    # the context (§3.4)
    prune: bool = setting(True,
        "off, nothing is removed from the context (with --memory none: VideoLLM-online)",
        needs="a new narrator")
    last_k: int | None = setting(None,
        'FlowNar-C keeps the last K narrations (10; 0: none), FlowNar "all"',
        (0, LARGEST), none="all")
    keep_newline: bool = setting(False,
        "keep the newlines of narrations that are removed (authors' code)")
    max_segment: float | None = setting(None,
        "seconds until a segment is begun anew, silently", compared=False)
    max_position: int | None = setting(None,
        "beyond this position, turn back to the prompt", compared=False)
    # the trigger (§3.2)
    theta: float = setting(0.8, "narrate when p([SKIP]) <= theta", (0, 1), compared=False)
    theta_low: float = setting(0.5, "the threshold soon after a narration", (0, 1),
        needs="two thresholds, a refractory time", compared=False)
    refractory: float = setting(4.0, "seconds after a narration with theta-low", (0, LARGEST),
        needs="two thresholds", compared=False)
    max_new_tokens: int = setting(100, "of a narration that does not end by itself",
        compared=False)
    # LoRA on all linear layers (App. B.6)
    lora_rank: int = setting(128, "rank of the LoRA matrices", needs="a new narrator")
    lora_alpha: float = setting(256, "LoRA is scaled by alpha / rank", needs="a new narrator")
    lora_dropout: float = setting(0.05, "dropout on LoRA's input", (0, 1), compared=False)

    MODEL_NAMES = ("llm", "vision")         # no setting: which settings name models

    def __post_init__(self):
        """BadData if a value has the wrong type, is out of range, or contradicts another one."""
        check_settings(self)
        check_together(self, MEMORIES[self.memory])

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

    def __init__(
        self,
        source: str | frozen.FrozenModel,
        grid: int = 3,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        model, mean, std = frozen.load_vision_model(source, dtype)
        # `forward` keeps no gradients, so the model is frozen. (Its weights are not marked as such:
        # with that mark, SigLIP's pooling takes eighty times as long in bf16 on a processor.)
        self.model = model.to(device).eval()
        pictures.check_encoder(model, frame_tokens)
        self.grid = grid
        self.image_size = model.config.image_size
        self.width = model.config.hidden_size
        self.register_buffer("mean", mean.to(device)[:, None, None], persistent=False)
        self.register_buffer("std", std.to(device)[:, None, None], persistent=False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        if frames.dtype != torch.uint8 or frames.shape[3:] != (3,):
            raise BadData(f"pictures are uint8, from 0 to 255, not {frames.dtype}; [T, H, W, 3]")
        device, dtype = self.model.device, self.model.dtype
        frames = frames.to(device).float() / 255
        pixels = pictures.letterbox(frames, self.image_size)                    # [T, 3, S, S]
        pixels = (pixels - self.mean) / self.std
        return frame_tokens(self.model, pixels.to(dtype), self.grid)


def frame_tokens(model: nn.Module, pixels: Tensor, grid: int) -> Tensor:
    """Normalised pixels [T, 3, S, S] -> X [T, J, D] = [CLS; patch tokens averaged to a grid x
    grid]. BadData if the vision model has no token for each patch, or no pooled output.
    """
    output = model(pixel_values=pixels)
    side = model.config.image_size // model.config.patch_size               # patches in a row
    patches = output.last_hidden_state[:, -side * side:]        # drops a leading CLS token, if any
    cls = output.get("pooler_output")
    if patches.shape[1] < side * side:
        raise BadData("it has no token for each patch")
    if cls is None:
        raise BadData("it has no pooled output")
    # SigLIP has no CLS token: as in the authors' code, its pooled output stands for the paper's
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

    def add(
        self,
        ids: list[int],
        kind: int,
        segment: int,
        number: int = -1,
        learn: bool = False,
    ) -> Tokens:
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

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, chosen: list[bool]) -> Tokens:
        """Only the chosen tokens, in their order."""
        lists = (self.ids, self.kind, self.segment, self.number, self.learn)
        return Tokens(*[list(compress(values, chosen)) for values in lists])

    def labels(self) -> Tensor:
        """The labels (§3.5): the successor of each token [L], -100 where nothing is learned."""
        labels = [i if learn else -100 for i, learn in zip(self.ids, self.learn)]
        return torch.tensor(labels[1:] + [-100])


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

    def __init__(
        self,
        tokenizer,
        J: int,
        M: int,
        keep_newline: bool = False,
    ):
        self.tokenizer = tokenizer
        self.J = J
        self.M = M
        self.frame_places = [FRAME] * J
        self.memory_places = [MEMORY] * M
        self.keep_newline = keep_newline    # of removed narrations, as the authors' FlowNar-C does
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prompt = bos + self.encode(SYSTEM + "\n\n")
        self.open = self.encode("[")
        self.close = self.encode("]\n")
        self.user = self.encode("User: " + INSTRUCTION)
        self.newline = self.encode("\n")
        self.assistant = self.encode("Assistant:")
        self.eot = frozen.eot_id(tokenizer)
        skip = self.encode(",")
        if len(skip) != 1:
            raise BadData("this tokenizer splits ','; use a Llama-like model")
        self.skip = skip[0]
        if self.skip == tokenizer.unk_token_id:
            raise BadData("this tokenizer does not know ','; use a Llama-like model")

    def encode(self, text: str) -> list[int]:
        """BadData if the tokenizer cannot encode it."""
        return frozen.token_ids(self.tokenizer, text)

    def encode_narrations(self, narrations: list[tuple[int, str]]) -> Narrations:
        """(frame, text) -> (frame, ids); a blank stands between "Assistant:" and the words."""
        return [(frame, self.encode(" " + text)) for frame, text in narrations]

    def decode(self, ids: list[int]) -> str:
        words = [i for i in ids if i != self.eot]
        text = self.tokenizer.decode(words, clean_up_tokenization_spaces=False)
        if self.tokenizer.clean_up_tokenization_spaces:
            # " 's" -> "'s", as in the authors' code; today's transformers seldom does it itself
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
        # [M_{t_{n-1}}; X_t]
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
        assert narrations and narrations[0][0] == 0, "the first narration belongs to frame 0"
        tokens = self.first()
        last = 0
        for n, (frame, ids) in enumerate(narrations):
            assert n == 0 or frame > last, f"frame {frame} of narration {n} is not after {last}"
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

def visible(
    tokens: Tokens,
    now: int | Tensor,
    last_k: int | None = None,
    prune: bool = True,
) -> Tensor:
    """The one visibility rule: which tokens does a token see that is fed in segment `now`?
    Bool [L], or [N, L] where `now` has N segments [N, 1].

    It sees
        the prompt,
        frames and memory tokens of its own segment,
        the last k narrations before its segment (None: all; with k = 1, segment 2 sees number 1),
        narration tokens fed in its own segment: the end of text that opens it, and its own words.
    Without pruning (VideoLLM-online) it sees everything.

    And only what was fed before it, and itself: `attention_mask` adds that in training; in
    streaming nothing else is there. Training attends by this rule (`Narrator.parallel`), and the
    cache is pruned by it (stream.py: `Context.discard`).
    """
    kind = torch.tensor(tokens.kind)
    segment = torch.tensor(tokens.segment)
    number = torch.tensor(tokens.number)
    in_segment = segment == now
    if last_k is None:
        is_kept = number >= 0                           # true of all narrations
    else:
        is_kept = number >= now - last_k
    # in_segment: only last_k = 0 needs it, where even a token's own narration would be hidden
    narration = (kind == NARRATION) & (is_kept | in_segment)
    visual = (kind == VISUAL) & in_segment
    return (kind == PROMPT) | visual | narration | (not prune)


def attention_mask(tokens: Tokens, last_k: int | None = None, prune: bool = True) -> Tensor:
    """The training mask (§3.5, Fig. 4), bool [L, L].

    A query (row) attends to the visible keys (columns) up to itself.
    """
    now = torch.tensor(tokens.segment)[:, None]             # of each query
    return visible(tokens, now, last_k, prune).tril()


# ------------------------------------------------------ §3.2 the model

class Narrator(nn.Module):
    """LLM + connector + memory.

    `forward` is the parallel form (training); stream.py feeds it piece by piece.
    """

    def __init__(self, llm: nn.Module, tokenizer, config: Config):
        super().__init__()
        self.config = config
        # whether its attention takes segments in place of a mask
        self.by_segments = family.check_family(llm)
        self.cache_name = family.name_of_cache(llm.model)
        self.llm = llm.requires_grad_(False)
        hidden = llm.config.hidden_size             # D_lm
        self.connector = nn.Sequential(             # the MLP of E = MLP(X)
            nn.Linear(config.width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
        )
        self.memory = MEMORIES[config.memory].from_config(config)
        self.layout = Layout(tokenizer, config.J, self.memory.M, config.keep_newline)
        lora.add_lora(llm, config.lora_rank, config.lora_alpha, config.lora_dropout)
        self.is_merged = False
        self.mark = ""            # of its checkpoint's weights; "": it was not loaded

    def embed(
        self,
        ids: list[int],
        x: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [L, D_lm] of L ids.

        The placeholders FRAME and MEMORY are replaced by E = MLP(X), for frame tokens x and memory
        tokens `memory` [.., D], each in the order of the sequence.
        """
        all_ids = torch.as_tensor(ids, device=self.llm.device)
        # Placeholders are negative; they get any row here, which is replaced below.
        e = self.llm.get_input_embeddings()(all_ids.clamp_min(0))
        for placeholder, tokens in ((FRAME, x), (MEMORY, memory)):
            if placeholder in ids:
                places = (all_ids == placeholder)[:, None]
                weight = self.connector[0].weight
                embedded = self.connector(tokens.to(weight))        # of its device and dtype
                e = e.masked_scatter(places, embedded.to(e.dtype))
        return e

    def run(
        self,
        e: Tensor,
        positions: Tensor,
        sees: Tensor | attention.Segments | None = None,
        cache=None,
    ) -> Tensor:
        """One pass of the language model: embeddings [L, D_lm], positions [L] -> last hidden states
        [L, D_lm].

        sees    what each token sees: a mask, bool [L, L]; for long sequences, the same by segments;
                None: all that is in the cache, and all tokens up to itself

        In each layer, attention is softmax(q k^T / sqrt(c)) v over the keys that `sees` says
        (support/engine/attention.py).
        """
        mask, segments = None, None
        old = 0 if cache is None else len(cache.tokens.ids)
        if isinstance(sees, Tensor):
            mask = attention.mask_of_rows(sees, self.llm)
        elif sees is not None:
            segments = sees
        elif old > 0 and len(e) > 1:            # row i sees columns 0 .. old + i
            everything = torch.ones(len(e), old + len(e), dtype=torch.bool, device=e.device)
            mask = attention.mask_of_rows(everything.tril(old), self.llm)
        output = self.llm.model(
            inputs_embeds=e[None],
            position_ids=positions[None].to(e.device),
            attention_mask=mask,
            segments=segments,
            use_cache=cache is not None,
            **{self.cache_name: cache},
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """In fp32: [.., D_lm] -> [.., V]."""
        return self.llm.lm_head(hidden).float()

    # ------------------------------------------------------------------ §3.5 training

    def forward(
        self,
        x: Tensor,
        narrations: Narrations,
        cache=None,
    ) -> tuple[Tensor, Tensor, Tokens]:
        """The parallel form: frame tokens x [T, J, D] and narrations (frame, ids without EOT).

        Returns the hidden states [L, D_lm] of all tokens, the labels [L] on the CPU and the tokens.
        Frames after the last narration are not used. `cache`: an empty one, which gets the keys and
        values.
        """
        tokens = self.layout.sequence(narrations)
        last, _ = narrations[-1]
        x = x[:last + 1]
        memory = self.read_outs(x, narrations)
        positions = torch.arange(len(tokens.ids))   # what the counter l of Algorithm 2 gives
        hidden = self.parallel(tokens, x, memory, positions, cache)
        return hidden, tokens.labels(), tokens

    def read_outs(self, x: Tensor, narrations: Narrations, state=None) -> Tensor:
        """M_t at the end of each segment but the last, which open the next ones [1, n, M, D].

        state       of the memory before the video; None: the initial one
        """
        J = self.layout.J
        # after how many frame tokens it is read: after those of a segment's last frame
        read_at = [(frame + 1) * J for frame, _ in narrations[:-1]]
        if self.config.readout == "cls":        # the authors' models: after that frame's CLS token
            read_at = [frame * J + 1 for frame, _ in narrations[:-1]]
        x = rearrange(x, "t j d -> 1 (t j) d").to(self.connector[0].weight)
        # long: an empty list, of a single narration, would be a float tensor
        memory, _ = self.memory(x, torch.tensor([read_at]).long(), state)
        return memory

    def state_after(self, x: Tensor, narrations: Narrations) -> Tensor:
        """The state of the memory after frames x [T, J, D]. The narrations are not used here; a
        memory of them absorbs them, too (beyond/baselines/).
        """
        x = rearrange(x, "t j d -> 1 (t j) d").to(self.connector[0].weight)
        read_nowhere = torch.zeros(1, 0).long()
        _, state = self.memory(x, read_nowhere)
        return state

    def parallel(
        self,
        tokens: Tokens,
        x: Tensor,
        memory: Tensor,
        positions: Tensor,
        cache=None,
    ) -> Tensor:
        """All tokens of a video in one pass: hidden states [L, D_lm]."""
        assert tokens.ids.count(FRAME) == x.shape[0] * x.shape[1], "a place for each frame token"
        e = self.embed(tokens.ids, x, memory)
        last_k = self.config.last_k
        prune = self.config.prune
        if len(tokens.ids) <= LARGEST_MASK or (prune and not self.by_segments):
            sees = attention_mask(tokens, last_k, prune)                        # Fig. 4
        elif prune:
            # Most videos are longer: the same, segment by segment.
            now = torch.arange(tokens.segment[-1] + 1)[:, None]
            seen = visible(tokens, now, last_k)             # by the tokens of each segment [n, L]
            sees = attention.Segments(tokens.segment, seen, self.llm)
        else:
            sees = None                                     # nothing is pruned: causal attention
        return self.run(e, positions, sees, cache)

    def loss(self, x: Tensor, narrations: Narrations) -> tuple[Tensor, int]:
        """Cross entropy on narration tokens and the trigger (§3.5) -> sum over the learned tokens,
        their number. train.py takes the mean of each video, and then of the batch.
        """
        hidden, labels, _ = self(x, narrations)
        return self.loss_of(hidden, labels)

    def loss_of(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """The same of hidden states [L, D_lm] and labels [L], -100 where nothing is learned."""
        learned = (labels != -100).nonzero()[:, 0]          # the tokens with a label
        labels = labels[learned].to(hidden.device)
        hidden = hidden.index_select(0, learned.to(hidden.device))
        # F.cross_entropy in pieces, because the logits of a video take gigabytes
        return attention.cross_entropy(self.logits, hidden, labels), len(labels)

    def trainable(self) -> dict[str, Tensor]:
        """What is trained (App. B.6), and what a checkpoint holds: LoRA, connector and memory,
        under the names of the authors' adapters.
        """
        weights = {}
        for name, p in self.named_parameters():
            is_frozen = name.startswith("llm.") and "lora_" not in name
            if not is_frozen:
                weights[checkpoint.published_name(name)] = p
        return weights

    # ------------------------------------------------------------------ from and to files

    def merge(self) -> Narrator:
        """Prepare for streaming: merge LoRA into the weights. It can then be neither trained nor
        saved.
        """
        lora.merge_lora(self.llm)
        self.is_merged = True
        return self

    def train(self, mode: bool = True) -> Narrator:
        if mode and self.is_merged:
            raise BadData("a narrator whose LoRA is merged cannot be trained; load it again")
        super().train(mode)
        lora.train_lora_alone(self.llm, mode)
        return self

    def save(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a checkpoint that `load` and PEFT read, in dtype if one is given."""
        checkpoint.save_narrator(self, Path(folder), dtype)

    def vision_encoder(self, dtype: torch.dtype = torch.float32) -> VisionEncoder:
        """The one that the settings name; BadData if its features have another width."""
        config = self.config
        model = frozen.find_model(config.vision, "vision")
        config.vision_mark = model.known_mark("the narrator", config.vision_mark)
        encoder = VisionEncoder(model, config.grid, self.llm.device, dtype)
        if encoder.width != config.width:
            raise BadData(f"the vision model gives features of width {encoder.width}, "
                          f"the narrator needs {config.width}")
        return encoder


NARRATORS[Config] = Narrator


def load(
    source: str | Path,
    llm: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    **changes,
) -> Narrator:
    """A trained narrator from a folder or hub id; `llm` and any setting can be replaced.

    A folder without narrator.json is a checkpoint of the authors: its settings are inferred from
    its tensors where that is possible, and are the authors' defaults otherwise. BadData if anything
    is missing, damaged or unexpected.

    dtype       of the language model; None: what is faster on a processor
    """
    return checkpoint.open_checkpoint(source, llm, **changes).narrator(device, dtype)


if __name__ == "__main__":
    from beyond.commands.drawing import main
    main()
