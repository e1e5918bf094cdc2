"""The narrator (paper §3.1, 3.2, 3.5): frame features, connector, LLM with LoRA, token layout, mask.

Frames become J = 10 tokens each by a frozen vision encoder; a two-layer MLP, the connector, maps them and the memory
tokens into the embedding space of a frozen language model that only its LoRA weights adapt. One sequence holds
everything: segments of frames, each opened by the memory of the past and closed by its narration. The language model
says after each frame how likely [SKIP] is, and after each closed segment what happened.

Glossary (T frames, J tokens per frame, D feature width, M memory tokens, L tokens in a sequence, V vocabulary):
    x           frame tokens X_t                                          [T, J, D]
    memory      memory tokens M_t                                         [N, M, D]
    e           their embeddings E_t = MLP(X_t)                           [..., D_lm]
    segment n   the frames up to narration n, and in the sequence all that is fed between narration n-1 and n
    SEP         the token "," between two frames of a segment: the paper's [SKIP]

What is trained is what is streamed, to the token and to the attended key: `Layout` makes the very same pieces for both,
and `visible` is at once the training mask (Fig. 4) and what stream.py prunes.

`python narrator.py` draws the mask of Fig. 4. Does not include: the streaming loop (stream.py), batches (as published,
one video at a time, with gradient accumulation).
"""
import argparse
import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from safetensors import SafetensorError
from torch import Tensor, nn

from baselines.memories import RecentFrames
from clam import CLAM, NoMemory
from support import checkpoint
from support.common import BadData, command_line, first_line, pyplot, quiet, save_figure

SYSTEM = ("A multimodal AI assistant is helping users with some activities. Below is their conversation, interleaved "
          "with the list of video frames received by the assistant.")
INSTRUCTION = "Please concisely narrate the video in real time."
LORA_TARGETS = "model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)|lm_head$"  # all linear layers

MEMORIES = {"clam": CLAM, "recent": RecentFrames, "none": NoMemory}


@dataclass
class Config:
    """What a checkpoint has to say beyond its weights (narrator.json); the defaults are the paper's."""
    llm: str = "meta-llama/Llama-3.2-1B-Instruct"         # hub id or folder, relative ones inside the checkpoint
    vision: str = "google/siglip-large-patch16-384"       # likewise
    memory: str = "clam"                                  # clam | recent | none
    memory_tokens: int = 20                               # M
    memory_heads: int = 8                                 # h
    memory_target: bool = True                            # a learned starting point for each memory token
    memory_dropout: float = 0.1                           # of CLAM's self-attention, in training
    readout: str = "frame"                                # M_t after the whole frame, or after its "cls" token only
    prune: bool = True                                    # dynamic context management; off: VideoLLM-online
    last_k: int | None = None                             # FlowNar-C: narrations kept; None: all of them
    keep_newline: bool = False                            # published FlowNar-C never drops the newline after a narration
    grid: int = 3                                         # J = 1 CLS + grid^2 pooled patch tokens
    width: int = 1024                                     # D
    fps: float = 2.0                                      # frames per second
    theta: float = 0.8                                    # narrate when p(SKIP) <= theta,
    theta_low: float = 0.5                                # <= theta_low so soon after a narration:
    refractory: float = 4.0                               # seconds
    max_new_tokens: int = 100                             # of a narration, end of text included
    lora_rank: int = 128
    lora_alpha: int = 256
    lora_dropout: float = 0.05

    def __post_init__(self):
        for f in fields(self):
            if not isinstance(getattr(self, f.name), f.type | int if f.type is float else f.type):
                raise BadData(f"{f.name} of a narrator cannot be {getattr(self, f.name)!r}")
        if self.memory not in MEMORIES or self.readout not in ("frame", "cls"):
            raise BadData(f"memory is one of {', '.join(MEMORIES)} and readout frame or cls, not {self.memory}, {self.readout}")

    @classmethod
    def infer(cls, weights: dict[str, Tensor], folder: Path) -> "Config":
        """Of a published checkpoint, from what its tensors tell."""
        name = "base_model.model.clustering.query_embed.weight"
        connector = weights.get("base_model.model.connector.0.weight")
        if connector is None:
            raise BadData(f"{folder}: neither narrator.json nor connector weights: not a FlowNar checkpoint")
        if name not in weights:
            return cls(memory="none", prune=False, width=connector.shape[1])
        return cls(memory_tokens=len(weights[name]), memory_target=name.replace("query", "tgt") in weights,
                   readout="cls", keep_newline=True, width=connector.shape[1])

    @property
    def J(self) -> int:
        return 1 + self.grid ** 2


# ---------------------------------------------------------------------- §3.1 visual feature extraction

class VisionEncoder(nn.Module):
    """Frozen vision model: frames uint8 [T, H, W, 3] -> X [T, J, D], the CLS token and grid x grid pooled patches.

    source: a folder or hub id of any transformers vision model with square patches (SigLIP, CLIP, ...). Frames are
    scaled to fit its input, padded with black to a square, and normalised as its preprocessor_config.json says.
    """

    def __init__(self, source: str, grid: int = 3, device: str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        from transformers import AutoConfig, AutoModel
        quiet()
        try:
            if hasattr(AutoConfig.from_pretrained(source), "vision_config"):  # image and text: the image half will do
                model = AutoModel.from_pretrained(source, dtype=dtype).vision_model
            else:
                model = AutoModel.from_pretrained(source, dtype=dtype)
            file = Path(source) / "preprocessor_config.json"
            if not file.exists():
                from huggingface_hub import hf_hub_download
                file = Path(hf_hub_download(source, "preprocessor_config.json"))
            processor = json.loads(file.read_text())
        except (OSError, ValueError, SafetensorError) as error:
            raise BadData(f"vision model '{source}' cannot be loaded: {first_line(error)}") from error
        self.model, self.grid = model.to(device).eval().requires_grad_(False), grid
        self.image_size, self.patches = model.config.image_size, (model.config.image_size // model.config.patch_size) ** 2
        self.mean, self.std = processor["image_mean"], processor["image_std"]
        self.width = model.config.hidden_size

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        p = next(self.model.parameters())
        pixels = letterbox(frames.to(p.device).float() / 255, self.image_size)            # [T, 3, S, S]
        mean, std = (torch.tensor(value, device=p.device)[:, None, None] for value in (self.mean, self.std))
        return frame_tokens(self.model, ((pixels - mean) / std).to(p.dtype), self.grid)


def frame_tokens(model: nn.Module, pixels: Tensor, grid: int) -> Tensor:
    """Normalised pixels [T, 3, S, S] -> X [T, J, D] = [CLS; patch tokens averaged to a grid x grid]."""
    output = model(pixel_values=pixels)
    side = model.config.image_size // model.config.patch_size
    patches = output.last_hidden_state[:, -side * side:]                                  # without a CLS in front
    patches = rearrange(patches, "t (h w) d -> t d h w", h=side)
    patches = rearrange(F.adaptive_avg_pool2d(patches, grid), "t d h w -> t (h w) d")
    return torch.cat([output.pooler_output[:, None], patches], dim=1)


def letterbox(frames: Tensor, size: int) -> Tensor:
    """[T, H, W, 3] in 0..1 -> [T, 3, size, size]: the longer side scaled to `size`, the rest black."""
    frames = rearrange(frames, "t h w c -> t c h w")
    height, width = frames.shape[2:]
    if (height, width) == (size, size):
        return frames
    scale = size / max(height, width)
    new = max(1, round(height * scale)), max(1, round(width * scale))
    frames = F.interpolate(frames, new, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    return F.pad(frames, (left, size - new[1] - left, top, size - new[0] - top))


# ---------------------------------------------------------------------- §3.2 tokens: one layout for training and streaming

PROMPT, VISUAL, NARRATION = 0, 1, 2        # what a token is: kept for ever, of the current segment, of a narration
FRAME, MEMORY = -1, -2                     # ids of the places that frame and memory embeddings take


@dataclass
class Tokens:
    """A run of tokens: five lists of one length."""
    ids: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)       # PROMPT, VISUAL, NARRATION
    segment: list[int] = field(default_factory=list)    # in which it is fed
    number: list[int] = field(default_factory=list)     # of the narration that it belongs to, -1 without
    learn: list[bool] = field(default_factory=list)     # whether the model learns to predict it

    def add(self, ids: list[int], kind: int, segment: int, number: int = -1, learn: bool = False) -> "Tokens":
        n = len(ids)
        for name, values in (("ids", ids), ("kind", [kind] * n), ("segment", [segment] * n),
                             ("number", [number] * n), ("learn", [learn] * n)):
            getattr(self, name).extend(values)
        return self

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __len__(self) -> int:
        return len(self.ids)


class Layout:
    """Turns a stream into tokens, in the pieces in which it is fed; training concatenates the same pieces.

    segment 0   PROMPT OPEN x*J CLOSE USER NEWLINE | ASSISTANT narration_0
    segment n   EOT NEWLINE [OPEN m*M CLOSE] OPEN x*J | SEP x*J | ... | CLOSE ASSISTANT narration_n

    Each atom is tokenised on its own, so that no two ever merge, and no id is written as a number.
    """

    def __init__(self, tokenizer, frame_tokens: int, memory_tokens: int, keep_newline: bool = False):
        self.tokenizer, self.J, self.M, self.keep_newline = tokenizer, frame_tokens, memory_tokens, keep_newline
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prompt = bos + self.encode(SYSTEM + "\n\n")
        self.open, self.close, self.sep = self.encode("["), self.encode("]\n"), self.encode(",")
        self.user, self.newline = self.encode("User: " + INSTRUCTION), self.encode("\n")
        self.assistant = self.encode("Assistant:")
        eot = tokenizer.convert_tokens_to_ids("<|eot_id|>") if "<|eot_id|>" in tokenizer.get_vocab() else None
        self.eot = tokenizer.eos_token_id if eot is None else eot
        if self.eot is None or len(self.sep) != 1:
            raise BadData("this tokenizer has no end-of-text token or splits ','; use a Llama-like model")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.eot]).strip()

    def first(self) -> Tokens:
        """Frame 0 inside the prompt; the first narration is always given."""
        tokens = Tokens().add(self.prompt, PROMPT, 0)
        tokens.add(self.open + [FRAME] * self.J + self.close, VISUAL, 0)
        return tokens.add(self.user + self.newline, PROMPT, 0)

    def end(self, n: int) -> Tokens:
        """EOT of narration n: predicted at its end, fed with the frame that follows."""
        return Tokens().add([self.eot], NARRATION, n + 1, n, learn=True)

    def opening(self, n: int) -> Tokens:
        """The first frame of segment n >= 1, with the memory of all before it (Alg. 2, line 7)."""
        memory = self.open + [MEMORY] * self.M + self.close if self.M else []
        newline = (PROMPT, n) if self.keep_newline else (NARRATION, n, n - 1)
        tokens = self.end(n - 1).add(self.newline, *newline)
        return tokens.add(memory + self.open + [FRAME] * self.J, VISUAL, n)

    def frame(self, n: int) -> Tokens:
        """A further frame of segment n; its SEP says that the frame before was skipped."""
        return Tokens().add(self.sep, VISUAL, n, learn=True).add([FRAME] * self.J, VISUAL, n)

    def closing(self, n: int) -> Tokens:
        """From the last frame of segment n to its narration."""
        close = [] if n == 0 else self.close
        return Tokens().add(close, VISUAL, n, learn=True).add(self.assistant, NARRATION, n, n, learn=True)

    def narration(self, n: int, ids: list[int]) -> Tokens:
        return Tokens().add(ids, NARRATION, n, n, learn=True)

    def sequence(self, narrations: list[tuple[int, list[int]]]) -> Tokens:
        """All tokens of a video with narrations (frame, ids without EOT), the first at frame 0."""
        if not narrations or narrations[0][0] != 0:
            raise ValueError("the first narration belongs to frame 0")
        tokens, last = self.first(), 0
        for n, (frame, ids) in enumerate(narrations):
            if n and frame <= last:
                raise ValueError(f"narration {n} at frame {frame} does not come after frame {last}")
            if n:
                tokens = tokens + self.opening(n)
            for _ in range(last + 1, frame):
                tokens = tokens + self.frame(n)
            tokens, last = tokens + self.closing(n) + self.narration(n, ids), frame
        return tokens + self.end(len(narrations) - 1)


def visible(tokens: Tokens, last_k: int | None = None, prune: bool = True, device="cpu") -> Tensor:
    """The one visibility rule (§3.5, Fig. 4), bool [L, L]: may the query (row) attend to the key (column)?

    A key is visible if it is not in the future and is prompt, or visual of the query's own segment, or of one of the
    last k narrations before the query's segment (or the one being written). Without pruning: causal.
    """
    L = len(tokens)
    causal = torch.ones(L, L, dtype=torch.bool, device=device).tril()
    if not prune:
        return causal
    kind, segment, number = (torch.tensor(y, device=device) for y in (tokens.kind, tokens.segment, tokens.number))
    kept = (kind == PROMPT) | ((kind == VISUAL) & (segment == segment[:, None]))
    narrated = (kind == NARRATION) & (number >= (segment[:, None] - last_k if last_k else 0))
    return causal & (kept | narrated)


# ---------------------------------------------------------------------- §3.2 the model

class LoRALinear(nn.Module):
    """y = W x + alpha / r * B A x with W frozen (Hu et al., 2022); names as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base_layer, self.scale, self.dropout = base.requires_grad_(False), alpha / rank, nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5 ** 0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        update = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype))))
        return self.base_layer(x) + self.scale * update.to(x.dtype)


def add_lora(llm: nn.Module, rank: int, alpha: float, dropout: float):
    """Wrap every linear layer whose name matches LORA_TARGETS."""
    for name, module in list(llm.named_modules()):
        if isinstance(module, nn.Linear) and re.fullmatch(LORA_TARGETS, name):
            parent, _, child = name.rpartition(".")
            setattr(llm.get_submodule(parent), child, LoRALinear(module, rank, alpha, dropout))


class Narrator(nn.Module):
    """LLM + connector + memory. `forward` is the parallel form (training); stream.py calls `embed`, `run`, `logits`."""

    def __init__(self, llm: nn.Module, tokenizer, config: Config):
        super().__init__()
        self.config = config
        self.llm = llm.requires_grad_(False)
        hidden = llm.config.hidden_size
        self.connector = nn.Sequential(nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        options = {} if config.memory != "clam" else {
            "heads": config.memory_heads, "target": config.memory_target, "dropout": config.memory_dropout}
        tokens = 0 if config.memory == "none" else config.memory_tokens
        self.memory = MEMORIES[config.memory](config.width, tokens, **options)
        self.layout = Layout(tokenizer, config.J, tokens, config.keep_newline)
        add_lora(llm, config.lora_rank, config.lora_alpha, config.lora_dropout)

    @classmethod
    def load(cls, source: str, llm: str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32,
             **changes) -> "Narrator":
        """A trained narrator from a folder or hub id; `llm` and any field of Config can be replaced.

        A folder without narrator.json is a published checkpoint: what can be inferred is, the rest is the published
        default. Raises BadData if anything is missing, damaged or left over.
        """
        folder, adapter, own, weights = checkpoint.read_checkpoint(source)
        if own is None:
            config = Config.infer(weights, folder)
        elif unknown := own.keys() - {f.name for f in fields(Config)}:
            raise BadData(f"{folder / checkpoint.OWN}: unknown entries {sorted(unknown)}")
        else:
            config = Config(**own)
        named = {"llm": "base_model_name_or_path", "lora_rank": "r", "lora_alpha": "lora_alpha",
                 "lora_dropout": "lora_dropout"}
        found = {name: adapter[key] for name, key in named.items() if adapter.get(key) is not None}
        config = replace(config, **found | changes)
        for name in ("llm", "vision"):
            if (folder / getattr(config, name)).is_dir():
                setattr(config, name, str(folder / getattr(config, name)))
        config.llm = llm or config.llm
        narrator = cls(*checkpoint.load_llm(config.llm, dtype), config)
        checkpoint.fill(narrator.trainable(), weights, folder / checkpoint.WEIGHTS)
        return narrator.to(device).eval()

    def save(self, folder: str | Path, llm: str | None = None, vision: str | None = None,
             dtype: torch.dtype | None = None) -> None:
        """Write a checkpoint that `load` and PEFT read, in dtype if one is given."""
        config = self.config
        modules = ["connector"] + (["clustering"] if config.memory == "clam" else [])
        adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": llm or config.llm,
                   "r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout,
                   "target_modules": LORA_TARGETS, "modules_to_save": modules, "bias": "none", "fan_in_fan_out": False,
                   "inference_mode": True, "init_lora_weights": True}
        own = {name: value for name, value in asdict(config).items() if not name.startswith("lora") and name != "llm"}
        own["vision"] = vision or config.vision
        weights = {name: p.to(dtype or p.dtype) for name, p in self.trainable().items()}
        checkpoint.write_checkpoint(Path(folder), adapter, own, weights)

    @property
    def device(self) -> torch.device:
        return self.connector[0].weight.device

    def embed(self, tokens: Tokens, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Token embeddings [L, D_lm]; frame tokens x [.., J, D] and memory [.., M, D] fill their places in order."""
        ids = torch.tensor(tokens.ids, device=self.device)
        e = self.llm.get_input_embeddings()(ids.clamp_min(0)).clone()
        for place, visual in ((FRAME, x), (MEMORY, memory)):
            if (ids == place).any():
                projected = self.connector(visual.reshape(-1, self.config.width).to(self.connector[0].weight.dtype))
                e[ids == place] = projected.to(e.dtype)                        # E = MLP(X), Alg. 2, line 9
        return e

    def run(self, e: Tensor, positions: Tensor, mask: Tensor, cache=None) -> Tensor:
        """Embeddings [L, D_lm] at positions [L] with mask [L, keys] -> last hidden states [L, D_lm]."""
        return self.llm.model(inputs_embeds=e[None], position_ids=positions[None], attention_mask=mask[None, None],
                              past_key_values=cache, use_cache=cache is not None).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """In fp32: [.., D_lm] -> [.., V]."""
        return self.llm.lm_head(hidden).float()

    @torch.no_grad()
    def start_published(self):
        """Start connector and CLAM (`CLAM.reset_parameters`) as the published training: weights N(0, 0.02), biases 0.

        LoRA always starts alike: A Kaiming-uniform, B zero.
        """
        for layer in (self.connector[0], self.connector[2]):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        if hasattr(self.memory, "reset_parameters"):
            self.memory.reset_parameters()

    @torch.no_grad()
    def initialise(self, x: Tensor, where: float = 5.0):
        """Start connector and CLAM from the statistics of training features x [T, J, D] (no labels are used).

        The connector's input is standardised, and the directions in which the J token slots differ are enlarged by
        `where`: the language model has to find a place before it can say what is there.
        """
        if self.config.memory == "clam":
            self.memory.initialise(x)
        x = x.float()
        mean, std = x[:, 1:].mean((0, 1)), x[:, 1:].std((0, 1)) + 1e-6              # the patches; CLS is an outlier
        slots = (x[:, 1:].mean(0) - mean) / std                                     # [J - 1, D]
        span = torch.linalg.svd(slots, full_matrices=False).Vh[:len(slots) - 1]     # [J - 2, D], orthonormal
        enlarge = torch.eye(len(mean)) + (where - 1) * span.T @ span
        first = self.connector[0]
        first.weight.copy_(nn.init.orthogonal_(torch.empty_like(first.weight)) @ enlarge / std)
        first.bias.copy_(-first.weight @ mean)

    def read_at(self, frame: int) -> int:
        """How many frame tokens CLAM has seen when the memory at the end of `frame` is read."""
        return (frame + 1) * self.config.J if self.config.readout == "frame" else frame * self.config.J + 1

    def forward(self, x: Tensor, narrations: list[tuple[int, list[int]]],
                state: Tensor | None = None, before: int = 0) -> tuple[Tensor, Tensor, Tokens]:
        """The parallel form: frame tokens x [T, J, D] and narrations (frame, ids without EOT). For the middle of a long
        stream: `state` is the memory's before the first frame, `before` the number of tokens since pruned.

        Returns the hidden states [L, D_lm] of every token, the labels [L] (the id that each token should predict, -100
        where nothing is learned) and the tokens. Frames after the last narration are not used.
        """
        T, last = len(x), narrations[-1][0]
        if x.dim() != 3 or x.shape[1:] != (self.config.J, self.config.width) or T <= last:
            raise ValueError(f"expected frame tokens [> {last}, {self.config.J}, {self.config.width}], got {list(x.shape)}")
        x = x[:last + 1].to(self.device, self.connector[0].weight.dtype)
        tokens = self.layout.sequence(narrations)
        memory = None
        if self.layout.M:
            read_at = torch.tensor([[self.read_at(frame) for frame, _ in narrations[:-1]]], device=self.device).long()
            memory, _ = self.memory(rearrange(x, "t j d -> 1 (t j) d"), read_at, state)
        e = self.embed(tokens, x, memory)
        after_prompt = torch.tensor([n > 0 or kind == NARRATION for kind, n in zip(tokens.kind, tokens.segment)])
        positions = torch.arange(len(tokens)) + before * after_prompt
        mask = visible(tokens, self.config.last_k, self.config.prune, self.device)
        labels = torch.tensor([i if learn else -100 for i, learn in zip(tokens.ids[1:], tokens.learn[1:])] + [-100])
        return self.run(e, positions.to(self.device), mask), labels.to(self.device), tokens

    def loss(self, x: Tensor, narrations: list[tuple[int, list[int]]], state: Tensor | None = None,
             before: int = 0) -> tuple[Tensor, int]:
        """Cross entropy on narration tokens and the trigger (§3.5), summed over the learned tokens; their number."""
        hidden, labels, _ = self(x, narrations, state, before)
        learned = labels != -100
        return F.cross_entropy(self.logits(hidden[learned]), labels[learned], reduction="sum"), int(learned.sum())

    def trainable(self) -> dict[str, Tensor]:
        """What a checkpoint holds: LoRA, connector, CLAM, under their names in the published adapters."""
        return {published_name(name): p for name, p in self.named_parameters()
                if "lora_" in name or name.startswith(("connector.", "memory."))}


def published_name(name: str) -> str:
    """Our parameter name -> the one in adapter_model.safetensors (PEFT's layout)."""
    if name.startswith("memory."):
        name = name.removeprefix("memory.")
        ours = next(key for key in CLAM.PUBLISHED if name.startswith(key) and (key.endswith(".") or name == key))
        name = "clustering." + CLAM.PUBLISHED[ours] + name.removeprefix(ours)
    return "base_model.model." + name.removeprefix("llm.")


# ---------------------------------------------------------------------- python narrator.py: Fig. 4

class Letters:
    """A tokenizer for drawing: every atom of the layout is one token."""
    bos_token_id, eos_token_id = None, 1

    def __init__(self):
        self.names = {}

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict:
        return {"input_ids": [self.names.setdefault(text, len(self.names) + 2)]}

    def get_vocab(self) -> dict:
        return self.names


def draw(last_k: int | None, png: str | None):
    """The mask of three segments with J = 1 and M = 1: rows are queries, columns keys."""
    layout = Layout(Letters(), frame_tokens=1, memory_tokens=1)
    tokens = layout.sequence([(0, layout.encode("y0")), (2, layout.encode("y1")), (4, layout.encode("y2"))])
    mask = visible(tokens, last_k)
    short = {"[": "[", "]\n": "]", ",": ",", "\n": "\\n", "Assistant:": "A:", "y0": "y0", "y1": "y1", "y2": "y2"}
    names = {i: short.get(text, "p" if text.startswith(SYSTEM[:9]) else "u") for text, i in layout.tokenizer.names.items()}
    names |= {FRAME: "x", MEMORY: "m", layout.eot: "$"}
    labels = [names[i] for i in tokens.ids]
    print(f"Training mask (Fig. 4), last-k = {last_k}: rows attend to columns; x frame, m memory, y narration, "
          f"$ end of text, p prompt, u instruction")
    print(" " * 8 + " ".join(f"{label:>2}" for label in labels))
    for row, label, segment in zip(mask, labels, tokens.segment):
        print(f"  {segment}  {label:>2} " + " ".join(" ■" if seen else " ·" for seen in row.tolist()))
    if png:
        plt = pyplot()
        kinds = torch.tensor(tokens.kind) + 1
        image = torch.where(mask, repeat(kinds, "k -> q k", q=len(tokens)), 0)
        figure, axes = plt.subplots(figsize=(8, 8))
        axes.imshow(image, cmap=plt.matplotlib.colors.ListedColormap(["white", "#b0b0b0", "#4c9be8", "#e8a04c"]), vmin=0, vmax=3)
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set(title="Training mask: prompt (grey), visual (blue), narrations (orange)", xlabel="keys", ylabel="queries")
        save_figure(figure, png)


def main():
    parser = argparse.ArgumentParser(description="Draw the training mask (Fig. 4) of a short sequence.")
    parser.add_argument("--last-k", type=int, help="keep only the last k narrations (FlowNar-C)")
    parser.add_argument("--png", help="also as a picture")
    args = parser.parse_args()
    command_line(lambda: draw(args.last_k, args.png))


if __name__ == "__main__":
    main()
