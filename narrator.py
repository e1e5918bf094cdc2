"""The narrator (paper §3.1, 3.2, 3.5): frame features, connector, LLM with LoRA, token layout, mask.

A frozen vision encoder turns each frame into J = 10 tokens; a two-layer MLP, the connector, maps these and the memory
tokens into the embedding space of a language model, which is frozen except for its LoRA weights. One sequence holds
everything: segments of frames, each opened by the memory of the past and closed by its narration. After each frame the
language model gives the probability of [SKIP]; where a segment ends, it writes what happened.

Glossary (T frames, J tokens per frame, D feature width, M memory tokens, L tokens in a sequence, V vocabulary):
    x           frame tokens X_t                                          [T, J, D]
    memory      memory tokens M_t                                         [.., M, D]
    history     tokens of the narration memory (Table 15)                 [.., N, D_lm]
    e           their embeddings E_t = MLP(X_t)                           [..., D_lm]
    segment n   the frames after narration n - 1 up to narration n; in the sequence, all that is fed between the two
    skip        the token "," between two frames of a segment: the paper's [SKIP]

Training and streaming see the same tokens and attend to the same keys: `Layout` makes the pieces for both, and
`visible` is at once the training mask (Fig. 4) and the rule by which stream.py prunes.

`python narrator.py` draws the mask of Fig. 4. Does not include: the streaming loop (stream.py); batches (as in the
published code, one video at a time, with gradient accumulation).
"""
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from baselines.lionfs import Aggregation, TwoEncoders
from baselines.memories import KMeans, MovieChat, RecentFrames, RetNet, ScalarGate, TokenMLP
from baselines.mod import LAYERS, Routing
from clam import CLAM, NoMemory
from support import attention, checkpoint, decode, family, lora
from support.bounds import PART, check_bounds, count_positions
from support.common import BadData, command_line, whole
from support.drawing import Letters, plot_matrix, print_matrix
from support.features import letterbox
from support.linear import speed_up
from support.options import Parser
from support.start import start_connector
from support.training import cross_entropy

SYSTEM = ("A multimodal AI assistant is helping users with some activities. Below is their conversation, interleaved "
          "with the list of video frames received by the assistant.")
INSTRUCTION = "Please concisely narrate the video in real time."

MEMORIES = {"clam": CLAM, "scalar": ScalarGate, "retnet": RetNet, "tokenmlp": TokenMLP, "moviechat": MovieChat,
            "kmeans": KMeans, "recent": RecentFrames, "none": NoMemory}
READOUTS = ("frame", "cls")
RANGES = {(1, 1e9): "memory_tokens memory_heads width max_new_tokens lora_rank lora_alpha max_position",  # of Config
          (0, 1): "theta theta_low memory_dropout lora_dropout", (1e-6, 1e6): "fps max_segment", (1e-6, 1): "mod_keep",
          (0, 1e9): "refractory last_k narration_memory width_second", (0, 100): "grid"}


@dataclass
class Config:
    """A checkpoint's settings (narrator.json). Defaults: the paper's; "published": the authors' code's; "ours"."""
    llm: str = "meta-llama/Llama-3.2-1B-Instruct"         # hub id or folder, relative ones inside the checkpoint
    vision: str = "google/siglip-large-patch16-384"       # likewise
    memory: str = "clam"                                  # one of MEMORIES
    memory_tokens: int = 20                               # M
    memory_heads: int = 8                                 # h (published, not in the paper)
    memory_target: bool = True                            # learned start of each memory token (ours; published: none)
    memory_dropout: float = 0.1                           # of its self-attention (published, not in the paper)
    readout: str = "frame"                                # when M_t is read; published weights: after the "cls" token
    prune: bool = True                                    # dynamic context management; off: VideoLLM-online
    last_k: int | None = None                             # FlowNar-C: narrations kept, 0 for none; None: all of them
    narration_memory: int = 0                             # N: tokens of a CLAM on narrations in their place (Table 15)
    mod_keep: float | int | None = None                   # VideoLLM-MoD: share of a frame's tokens that a router keeps
    mod_layers: str = "interleaved"                       # which layers have routers: one of baselines/mod.py's LAYERS
    width_second: int = 0                                 # LION-FS: the last so many of D are a second encoder's,
    vision_second: str | None = None                      # this one's (hub id or folder; None: features on disk only)
    keep_newline: bool = False                            # keep every newline, as the published FlowNar-C does
    grid: int = 3                                         # J = 1 CLS + grid^2 pooled patch tokens; 0: CLS alone
    width: int = 1024                                     # D
    fps: float = 2.0                                      # frames per second
    theta: float = 0.8                                    # narrate when p([SKIP]) <= theta,
    theta_low: float = 0.5                                # <= theta_low soon after a narration, that is within
    refractory: float = 4.0                               # seconds
    max_new_tokens: int = 100                             # of a narration without its end (published, not in the paper)
    max_segment: float | None = None                      # seconds after which it is restarted (ours; None: never)
    max_position: int | None = None                       # beyond it, narrations are turned back (ours; None: never)
    lora_rank: int = 128
    lora_alpha: int = 256
    lora_dropout: float = 0.05                            # (published, not in the paper)

    def __post_init__(self):
        """BadData if a value has the wrong type or is out of range."""
        checkpoint.check_settings(self, {"memory": MEMORIES, "readout": READOUTS, "mod_layers": LAYERS}, RANGES)
        clam = issubclass(MEMORIES[self.memory], CLAM)
        if clam and self.width % (2 * self.memory_heads):
            raise BadData(f"memory_heads: width {self.width} is not a multiple of twice {self.memory_heads} heads")
        if self.readout == "cls" and not clam:
            raise BadData(f"readout: memory {self.memory!r} is read after whole frames, not after the cls token")
        if self.last_k is not None and not self.prune:
            raise BadData(f"last_k = {self.last_k}: where nothing is pruned (VideoLLM-online), all narrations are kept")
        if self.narration_memory and self.last_k != 0:
            raise BadData(f"last_k = {self.last_k}: narration_memory stands for past narrations, so it must be 0")
        if self.mod_keep is not None and (self.prune or self.memory != "none"):
            raise BadData("mod_keep: VideoLLM-MoD has no memory and prunes nothing (--memory none --no-prune)")
        check_bounds(self)
        if self.width_second >= self.width:
            raise BadData(f"width_second: {self.width_second} of {self.width} features leave none to the first encoder")

    @property
    def J(self) -> int:
        return 1 + self.grid ** 2


# ---------------------------------------------------------------------- §3.1 visual feature extraction

class VisionEncoder(nn.Module):
    """Frozen vision model: frames uint8 [T, H, W, 3] -> X [T, J, D], the CLS token and grid x grid pooled patches.

    source: a folder or hub id of any transformers vision model with square patches (SigLIP, CLIP, ...). Frames are
    scaled to fit its input, padded with black to a square, and normalised as its preprocessor_config.json says.
    """

    def __init__(self, source: str, grid: int = 3, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32):
        super().__init__()
        model, processor = checkpoint.load_vision_model(source, dtype)
        self.model, self.grid = model.to(device).eval().requires_grad_(False), grid
        speed_up(self)
        self.image_size = model.config.image_size
        self.mean, self.std = processor["image_mean"], processor["image_std"]
        self.width = model.config.hidden_size

    def forward(self, frames: Tensor) -> Tensor:
        return self.several([frames])[0]

    @torch.no_grad()
    def several(self, videos: list[Tensor]) -> list[Tensor]:
        """Frames of several videos, whose sizes can differ, in one pass."""
        p = next(self.model.parameters())
        pixels = torch.cat([letterbox(frames.to(p.device).float() / 255, self.image_size) for frames in videos])
        mean, std = (torch.tensor(value, device=p.device)[:, None, None] for value in (self.mean, self.std))
        x = frame_tokens(self.model, ((pixels - mean) / std).to(p.dtype), self.grid)       # pixels [T, 3, S, S]
        return list(x.split([len(frames) for frames in videos]))


def load_encoders(vision: str, second: str | None, grid: int, **where) -> VisionEncoder | TwoEncoders:
    """The vision encoder; with a second one (LION-FS), both as one."""
    encoders = [VisionEncoder(source, grid, **where) for source in (vision, second) if source]
    return TwoEncoders(*encoders) if second else encoders[0]


def frame_tokens(model: nn.Module, pixels: Tensor, grid: int) -> Tensor:
    """Normalised pixels [T, 3, S, S] -> X [T, J, D] = [CLS; patch tokens averaged to a grid x grid]."""
    output = model(pixel_values=pixels)
    side = model.config.image_size // model.config.patch_size
    patches = output.last_hidden_state[:, -side * side:]                    # drops a leading CLS token, if any
    patches = rearrange(patches, "t (h w) d -> t d h w", h=side)
    pooled = F.adaptive_avg_pool2d(patches, grid) if grid else patches[..., :0]
    return torch.cat([output.pooler_output[:, None], rearrange(pooled, "t d h w -> t (h w) d")], dim=1)


# ---------------------------------------------------------------------- §3.2 tokens: one layout for both

PROMPT, VISUAL, NARRATION = 0, 1, 2        # kinds of tokens: never removed; part of a segment; of a narration
FRAME, MEMORY, HISTORY = -1, -2, -3        # placeholder ids, where embeddings of frames and of both memories go


@dataclass
class Tokens:
    """A run of tokens: five lists of one length."""
    ids: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)       # PROMPT, VISUAL, NARRATION
    segment: list[int] = field(default_factory=list)    # in which it is fed
    number: list[int] = field(default_factory=list)     # of the narration that it belongs to, -1: none
    learn: list[bool] = field(default_factory=list)     # whether the model learns to predict it

    def add(self, ids: list[int], kind: int, segment: int, number: int = -1, learn: bool = False) -> "Tokens":
        self += Tokens(ids, *([value] * len(ids) for value in (kind, segment, number, learn)))
        return self

    def __iadd__(self, other: "Tokens") -> "Tokens":
        for mine, more in zip(vars(self).values(), vars(other).values()):
            mine += more
        return self

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(*(one + more for one, more in zip(vars(self).values(), vars(other).values())))

    def about(self, device="cpu") -> Tensor:
        """What `visible` asks of each token, its kind, segment and number [3, L]."""
        return torch.tensor([self.kind, self.segment, self.number], device=device)

    def __len__(self) -> int:
        return len(self.ids)


class Layout:
    """Turns a stream into tokens, in the pieces in which it is fed; training concatenates the same pieces.

        piece       first                                       closing     narration
        segment 0   PROMPT  [ x*J ]\n  USER \n                  Assistant:  words
        kind        prompt  visual     prompt                   narration   narration

        piece       opening                         frame       closing            narration
        segment n   EOT \n  [ m*M ]\n [ x*J         , x*J  ...  ]\n     Assistant:  words
        kind        narration  visual               visual      visual  narration  narration
        number      n - 1                                               n          n

    A *segment* n is thus all that is fed after the words of narration n - 1 up to the words of narration n: EOT and
    newline of a narration belong to it (`number`), but are fed with the first frame of the next segment (`segment`).
    It can be *restarted* (support/bounds.py): it opens once more, without EOT and newline, as n + PART, n + 2 PART, ...
    With a narration memory (Table 15) its tokens, [ n*N ]\n, stand before [ m*M ]\n, and are visual like these.
    "," between two frames of a segment is the paper's [SKIP]. The atoms (PROMPT, "[", "]\n", ",", ...) are each
    tokenised on their own, so that no two ever merge, and no id is written as a number.
    """

    def __init__(self, tokenizer, J: int, M: int, keep_newline: bool = False, N: int = 0):
        self.tokenizer, self.J, self.M, self.keep_newline, self.N = tokenizer, J, M, keep_newline, N
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prompt = bos + self.encode(SYSTEM + "\n\n")
        self.open, self.close, skip = self.encode("["), self.encode("]\n"), self.encode(",")
        self.user, self.newline = self.encode("User: " + INSTRUCTION), self.encode("\n")
        self.assistant = self.encode("Assistant:")
        eot = tokenizer.convert_tokens_to_ids("<|eot_id|>") if "<|eot_id|>" in tokenizer.get_vocab() else None
        self.eot = tokenizer.eos_token_id if eot is None else eot
        if self.eot is None or len(skip) != 1:
            raise BadData("this tokenizer has no end-of-text token or splits ','; use a Llama-like model")
        self.skip = skip[0]

    def encode(self, text: str) -> list[int]:
        return checkpoint.token_ids(self.tokenizer, text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.eot]).strip()

    def spell(self, tokens: Tokens, prompt: str = "") -> list[str]:
        """A short name for each token: x frame, m and n memory, $ end of text, [SKIP], `prompt` for its, else text."""
        names = {FRAME: "x", MEMORY: "m", HISTORY: "n", self.eot: "$", self.skip: "[SKIP]"}
        return [kind == PROMPT and prompt or names.get(i) or self.tokenizer.decode([i]).replace("\n", "\\n")
                for i, kind in zip(tokens.ids, tokens.kind)]

    def first(self) -> Tokens:
        """The prompt, with frame 0 inside; the first narration always follows."""
        tokens = Tokens().add(self.prompt, PROMPT, segment=0)
        tokens.add(self.open + [FRAME] * self.J + self.close, VISUAL, segment=0)
        return tokens.add(self.user + self.newline, PROMPT, segment=0)

    def end(self, n: int) -> Tokens:
        """EOT of narration n: predicted at its end, fed with the frame that follows."""
        return Tokens().add([self.eot], NARRATION, segment=n + 1, number=n, learn=True)

    def opening(self, n: int) -> Tokens:
        """The first frame of segment n >= 1, with the memory of all before it (Alg. 2, line 7)."""
        tokens = self.end(n - 1)
        if self.keep_newline:
            tokens.add(self.newline, PROMPT, segment=n)
        else:
            tokens.add(self.newline, NARRATION, segment=n, number=n - 1)
        return tokens + self.reopening(n)

    def reopening(self, n: int) -> Tokens:
        """The first frame after a restart, in segment n: the memory once more."""
        memory = self.open + [MEMORY] * self.M + self.close if self.M else []
        tokens = Tokens().add(self.open + [HISTORY] * self.N + self.close if self.N else [], VISUAL, segment=n)
        return tokens.add(memory + self.open + [FRAME] * self.J, VISUAL, segment=n)

    def frame(self, n: int) -> Tokens:
        """A further frame of segment n; the [SKIP] before it says that the last frame was not narrated."""
        tokens = Tokens().add([self.skip], VISUAL, segment=n, learn=True)
        return tokens.add([FRAME] * self.J, VISUAL, segment=n)

    def closing(self, n: int) -> Tokens:
        """Between the last frame of segment n and its narration."""
        tokens = Tokens().add(self.close if n else [], VISUAL, segment=n, learn=True)
        return tokens.add(self.assistant, NARRATION, segment=n, number=n % PART, learn=True)

    def narration(self, n: int, ids: list[int]) -> Tokens:
        return Tokens().add(ids, NARRATION, segment=n, number=n % PART, learn=True)

    def sequence(self, narrations: list[tuple[int, list[int]]], restarts: range | tuple = ()) -> Tokens:
        """All tokens of a video with narrations (frame, ids without EOT), the first at frame 0. Segments are restarted
        before the frames in `restarts`; one that opens a segment anyway changes nothing."""
        if not narrations or narrations[0][0] != 0:
            raise ValueError("the first narration belongs to frame 0")
        tokens, last = self.first(), 0
        for n, (frame, ids) in enumerate(narrations):
            if n and frame <= last:
                raise ValueError(f"narration {n} at frame {frame} does not come after frame {last}")
            part = n
            for t in range(last + 1, frame + 1):
                first, again = t == last + 1, t in restarts
                part += PART * (again and not first)
                tokens += self.opening(n) if first else self.reopening(part) if again else self.frame(part)
            tokens += self.closing(part) + self.narration(part, ids)
            last = frame
        return tokens + self.end(len(narrations) - 1)


def visible(kind: Tensor, segment: Tensor, number: Tensor, now: Tensor | int, last_k: int | None = None,
            prune: bool = True) -> Tensor:
    """The one visibility rule (§3.4, §3.5): does a token fed in segment `now` see one of this kind, segment and number?

    It sees the prompt, always; visual tokens, frames and memory alike, of its own segment only (§3.4 discards memory
    tokens with their segment), after a restart only those since then; the last k narrations before the segment, its
    own, and all that is fed in it. Without pruning it sees everything. Tensors or NumPy arrays, which broadcast.
    Training attends by this rule (`segment_rows`, shown by `attention_mask`), and the cache is pruned by it (stream.py:
    `Context.discard`).
    """
    visual = (kind == VISUAL) & (segment == now)
    oldest = 0 if last_k is None else now % PART - last_k
    narrated = (kind == NARRATION) & ((number >= oldest) | (segment % PART == now % PART))
    return (kind == PROMPT) | visual | narrated | (not prune)


def attention_mask(tokens: Tokens, last_k: int | None = None, prune: bool = True, device="cpu") -> Tensor:
    """The training mask (§3.5, Fig. 4), bool [L, L]: a query (row) attends to visible keys (columns) up to itself."""
    about = tokens.about(device)
    return visible(*about, about[1, :, None], last_k, prune).tril()


def segment_rows(tokens: Tokens, last_k: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """The same without an [L, L]: each segment's queries [q] and the keys [k] that some of them see (up to itself)."""
    about, every = tokens.about(), torch.arange(len(tokens))
    keys = lambda last: visible(*about[:, :last + 1], about[1, last], last_k).nonzero()[:, 0]
    lengths = about[1].unique_consecutive(return_counts=True)[1].tolist()
    return [(queries, keys(queries[-1])) for queries in every.split(lengths)]


# ---------------------------------------------------------------------- §3.2 the model

class Narrator(nn.Module):
    """LLM + connector + memory. `forward` is the parallel form (training); streams go through `decoder`."""

    def __init__(self, llm: nn.Module, tokenizer, config: Config):
        super().__init__()
        self.config = config
        self.llm = llm.requires_grad_(False)
        family.adapt(llm, config.prune)
        hidden = llm.config.hidden_size
        second = config.width_second
        self.connector = nn.Sequential(nn.Linear(config.width - second, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.aggregation = Aggregation(second, hidden, config.J) if second else None             # baselines/lionfs.py
        kind, tokens = MEMORIES[config.memory], 0 if config.memory == "none" else config.memory_tokens
        options = {"heads": config.memory_heads, "target": config.memory_target, "dropout": config.memory_dropout}
        self.memory = kind(config.width, tokens, **options if issubclass(kind, CLAM) else {"J": config.J})
        if (N := config.narration_memory) and hidden % (2 * config.memory_heads):
            raise BadData(f"narration_memory: width {hidden} is not a multiple of twice {config.memory_heads} heads")
        self.narration_memory = CLAM(hidden, N, **options) if N else NoMemory(hidden)
        self.layout = Layout(tokenizer, config.J, tokens, config.keep_newline, N)
        lora.add_lora(llm, config.lora_rank, config.lora_alpha, config.lora_dropout)
        self.routing = Routing(llm, config.J, config.mod_keep, config.mod_layers)
        speed_up(self)
        self.decoder, self.plain, self.merged = decode.Plain(self), "its LoRA is not merged", False

    @classmethod
    def load(cls, source: str, llm: str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32,
             **changes) -> "Narrator":
        """A trained narrator from a folder or hub id; `llm` and any field of Config can be replaced.

        A folder without narrator.json is a published checkpoint: its settings are inferred from its tensors where that
        is possible, and are the published defaults otherwise. BadData if anything is missing, damaged or unexpected.
        """
        folder, adapter, own, weights = checkpoint.read_checkpoint(source)
        if own is None:
            config = Config(**checkpoint.inferred_settings(weights, folder))
        elif unknown := own.keys() - {f.name for f in fields(Config)}:
            raise BadData(f"{folder / checkpoint.OWN}: unknown entries {sorted(unknown)}")
        else:
            config = Config(**own)
        named = {"llm": "base_model_name_or_path", "lora_rank": "r", "lora_alpha": "lora_alpha",
                 "lora_dropout": "lora_dropout"}
        found = {name: adapter[key] for name, key in named.items() if adapter.get(key) is not None}
        config = replace(config, **found | changes)
        for name in ("llm", "vision", "vision_second"):
            if (there := getattr(config, name)) and (folder / there).is_dir():
                setattr(config, name, str(folder / there))
        config.llm = llm or config.llm
        llm, tokenizer = checkpoint.load_llm(config.llm, dtype)
        with torch.device("meta"):                     # shapes alone take no memory, however large
            shapes = cls(checkpoint.without_weights(llm), tokenizer, config).trainable()
        checkpoint.compare(shapes, weights, folder / checkpoint.WEIGHTS)
        narrator = cls(llm, tokenizer, config)
        checkpoint.fill(narrator.trainable(), weights, folder / checkpoint.WEIGHTS)
        return narrator.to(device).eval()

    def merge(self) -> "Narrator":
        """For streaming: LoRA becomes part of the weights, and passes take the fast path (`plain` says why not)."""
        lora.merge_lora(self.llm)
        self.merged, (self.decoder, self.plain) = True, decode.fastest(self)
        return self

    def save(self, folder: str | Path, dtype: torch.dtype | None = None, **models: str | None) -> None:
        """Write a checkpoint that `load` and PEFT read, in dtype if one is given; `models` replace those of Config."""
        config = replace(self.config, **models)
        if self.merged:
            raise ValueError("a merged narrator has no LoRA to save")
        modules = ["connector"] + ["clustering"] * any(True for _ in self.memory.parameters())
        modules += ["narration_memory"] * bool(self.layout.N) + ["aggregation"] * bool(config.width_second)
        adapter = {"base_model_name_or_path": config.llm, "r": config.lora_rank, "lora_alpha": config.lora_alpha,
                   "lora_dropout": config.lora_dropout, "target_modules": lora.TARGETS, "modules_to_save": modules}
        own = {name: value for name, value in asdict(config).items() if not name.startswith("lora") and name != "llm"}
        weights = {name: p.to(dtype or p.dtype) for name, p in self.trainable().items()}
        checkpoint.write_checkpoint(Path(folder), adapter, own, weights)

    def vision_encoder(self, source: str | None = None,
                       dtype: torch.dtype = torch.float32) -> VisionEncoder | TwoEncoders:
        """The one that the checkpoint names, or another one; BadData if its features have another width."""
        config = self.config
        encoder = load_encoders(source or config.vision, config.vision_second, config.grid, device=self.device,
                                dtype=dtype)
        if encoder.width != config.width:
            raise BadData(f"the vision model gives features of width {encoder.width}, the narrator needs {config.width}"
                          + "; give it features of both its encoders" * (config.width_second > 0))
        return encoder

    @property
    def device(self) -> torch.device:
        return self.connector[0].weight.device

    def embed(self, ids: Tensor, x: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """Embeddings [L, D_lm] of ids [L]; x [.., J, D] and what `embed_memory` gives fill their places in order."""
        self.routing.begin(ids == FRAME, 0 if x is None else x.numel() // (self.config.J * self.config.width))
        e = self.llm.get_input_embeddings()(ids.clamp_min(0))
        for place, visual in ((ids == FRAME, x if x is None else self.embed_frames(x)), (ids <= MEMORY, memory)):
            if visual is not None:
                e = e.masked_scatter(place[:, None], visual.to(e.dtype))
        return e

    def embed_visual(self, x: Tensor) -> Tensor:
        """E = MLP(X): frame or memory tokens [.., D] -> [.., D_lm]; of two encoders' features, the first one's."""
        rows = rearrange(x[..., :self.connector[0].in_features], "... d -> (...) d").to(self.connector[0].weight.dtype)
        return self.connector(rows).unflatten(0, x.shape[:-1])

    def embed_frames(self, x: Tensor) -> Tensor:
        """Likewise whole frames [.., D]; of two encoders' features, a mixture of both (baselines/lionfs.py)."""
        e = self.embed_visual(x)
        return e if self.aggregation is None else self.aggregation(e, x)

    def embed_memory(self, memory: Tensor | None, history: Tensor | None) -> Tensor | None:
        """What opens segments: history [.., N, D_lm], then memory [.., M, D] -> [.., N + M, D_lm]. Each can be None."""
        parts = [y for y in (history, memory if memory is None else self.embed_visual(memory)) if y is not None]
        return torch.cat(parts, dim=-2) if parts else None

    def spoken(self, narrations: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
        """What the narration memory absorbs: embeddings [1, L, D_lm] of Assistant:, words and EOT of the narrations
        (frame, ids), and where each of them ends [1, n]."""
        ids = [self.layout.assistant + words + [self.layout.eot] for _, words in narrations]
        e = self.llm.get_input_embeddings()(torch.tensor([sum(ids, [])], dtype=torch.long, device=self.device))
        return e.to(self.connector[0].weight.dtype), torch.tensor([list(map(len, ids))]).long().cumsum(1)

    def run(self, e: Tensor, positions: Tensor, mask: Tensor, cache=None) -> Tensor:
        """Embeddings [L, D_lm] at positions [L] with mask [L, keys] -> last hidden states [L, D_lm]."""
        return self.llm.model(inputs_embeds=e[None], position_ids=positions[None], attention_mask=mask[None, None],
                              past_key_values=cache, use_cache=cache is not None).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """In fp32: [.., D_lm] -> [.., V]."""
        return self.llm.lm_head(hidden).float()

    @torch.no_grad()
    def start_published(self):
        """Start connector and memory (`CLAM.reset_parameters`) as published: weights N(0, 0.02), biases 0.

        LoRA always starts the same way: A Kaiming-uniform, B zero; the narration memory from statistics of words.
        """
        for name, layer in self.named_modules():
            if name.startswith(("connector.", "aggregation.")) and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.memory.reset_parameters()
        self.narration_memory.initialise(self.llm.get_input_embeddings().weight[:4096, None])

    def initialise(self, x: Tensor):
        """Start connector and memory from the statistics of training features x [T, J, D] (support/start.py)."""
        self.memory.initialise(x)
        self.narration_memory.initialise(self.llm.get_input_embeddings().weight[:4096, None])
        own = self.connector[0].in_features
        start_connector(self.connector, x[..., :own])
        if self.aggregation:
            start_connector(self.aggregation.connector, x[..., own:])

    def read_at(self, frame: int) -> int:
        """How many frame tokens the memory has seen when it is read at the end of `frame`."""
        return (frame + 1) * self.config.J if self.config.readout == "frame" else frame * self.config.J + 1

    def forward(self, x: Tensor, narrations: list[tuple[int, list[int]]], state: Tensor | None = None, before: int = 0,
                history_state: Tensor | None = None, restarts: range | tuple = ()) -> tuple[Tensor, Tensor, Tokens]:
        """The parallel form: frame tokens x [T, J, D] and narrations (frame, ids without EOT); `restarts`: see Layout.
        In the middle of a long stream: the memories' `state` and `history_state`, and the tokens pruned `before`.

        Returns the hidden states [L, D_lm] of every token, the labels [L] on the CPU (the id that each token should
        predict, -100 where nothing is learned) and the tokens. Frames after the last narration are not used.
        """
        T, last = len(x), narrations[-1][0]
        if x.dim() != 3 or x.shape[1:] != (self.config.J, self.config.width) or T <= last:
            raise ValueError(f"expected frame tokens [> {last}, {self.config.J}, {self.config.width}], "
                             f"got {list(x.shape)}")
        x = x[:last + 1].to(self.device, self.connector[0].weight.dtype)
        tokens, said = self.layout.sequence(narrations, restarts), [frame for frame, _ in narrations]
        ends = sorted({*said[:-1], *(t for t in range(last) if t + 1 in restarts)})     # when the memory is read
        memory = history = None
        if self.layout.M:
            read_at = torch.tensor([[self.read_at(frame) for frame in ends]]).long()
            memory, _ = self.memory(rearrange(x, "t j d -> 1 (t j) d"), read_at, state)
        if self.layout.N:
            history, _ = self.narration_memory(*self.spoken(narrations[:-1]), history_state)
            history = history[:, [sum(frame <= end for frame in said) - 1 for end in ends]]
        e = self.embed(torch.tensor(tokens.ids, device=self.device), x, self.embed_memory(memory, history))
        after_prompt = torch.tensor([n > 0 or kind == NARRATION for kind, n in zip(tokens.kind, tokens.segment)])
        positions = count_positions([kind == VISUAL for kind in tokens.kind], tokens.segment) + before * after_prompt
        rows = self.config.prune and segment_rows(tokens, self.config.last_k)             # not pruned: causal
        labels = torch.tensor([i if learn else -100 for i, learn in zip(tokens.ids[1:], tokens.learn[1:])] + [-100])
        y = self.llm.model(inputs_embeds=e[None], position_ids=positions[None].to(self.device), use_cache=False,
                           rectangles=attention.rectangles(rows, len(tokens), self.device) if rows else None)
        return y.last_hidden_state[0], labels, tokens

    def loss(self, x: Tensor, narrations: list[tuple[int, list[int]]], state: Tensor | None = None, before: int = 0,
             history_state: Tensor | None = None, restarts: range | tuple = ()) -> tuple[Tensor, int]:
        """Cross entropy on narration tokens and the trigger (§3.5) -> sum over the learned tokens, their number."""
        hidden, labels, _ = self(x, narrations, state, before, history_state, restarts)
        rows = (labels != -100).nonzero()[:, 0]
        hidden, labels = (y.to(hidden.device).index_select(0, rows.to(hidden.device)) for y in (hidden, labels))
        return cross_entropy(self.logits, hidden, labels), len(rows)

    def trainable(self) -> dict[str, Tensor]:
        """What a checkpoint holds: LoRA, connectors, memories, routers, under their names in the published adapters."""
        own = "connector.", "memory.", "narration_memory.", "aggregation."
        return {self.published_name(name): p for name, p in self.named_parameters() if "lora_" in name
                or ".router." in name or name.startswith(own)}

    def published_name(self, name: str) -> str:
        """Our parameter name -> the one in adapter_model.safetensors (PEFT's layout)."""
        if name.startswith("memory."):
            own = name.removeprefix("memory.")
            ours = next((key for key in self.memory.PUBLISHED if own.startswith(key)), "")
            name = "clustering." + self.memory.PUBLISHED.get(ours, "") + own.removeprefix(ours)
        return "base_model.model." + name.removeprefix("llm.").replace(".inner.", ".")     # baselines/mod.py: MoDLayer


# ---------------------------------------------------------------------- python narrator.py: Fig. 4

def three_segments() -> tuple[Layout, Tokens]:
    """Three segments of 1, 2 and 2 frames with J = 1 and M = 1, each narrated by one word."""
    short = {SYSTEM + "\n\n": "p", "User: " + INSTRUCTION: "u", "]\n": "]", "Assistant:": "A:"}
    layout = Layout(Letters(short), J=1, M=1)
    return layout, layout.sequence([(n * 2, layout.encode(f"y{n}")) for n in range(3)])


LEGEND = "p prompt, u instruction, x frame, m memory, A: Assistant:, y narration, $ end of text"


def draw_mask(last_k: int | None, png: str | None):
    """The mask of a short sequence: rows are queries, columns keys."""
    layout, tokens = three_segments()
    labels = [name.replace("[SKIP]", ",") for name in layout.spell(tokens)]
    mask = attention_mask(tokens, last_k)
    kept = "all narrations" if last_k is None else f"the last {last_k} narrations"
    print(f"Training mask (Fig. 4), {kept} in context: rows attend to columns.\n{LEGEND}; \",\" is [SKIP]\n")
    print_matrix(mask, labels, tokens.segment)
    if png:
        plot_matrix(mask, labels, tokens.kind, png)


def list_tokens(last_k: int | None):
    """The same sequence token by token; its positions before and after the pruning that ends segment 2 (Fig. 7)."""
    layout, tokens = three_segments()
    kind, segment, number = about = tokens.about()
    stays = visible(*about, 3, last_k).tolist()
    print(f"{LEGEND}\n\nposition  token   segment  kind       narration  learned  position after pruning")
    for i, name in enumerate(layout.spell(tokens)):
        after = "removed" if not stays[i] else f"{i} (renumbered, it would be {sum(stays[:i])})"
        named = "-" if number[i] < 0 else int(number[i])
        print(f"{i:>8}  {name:6}  {segment[i]:>7}  {('prompt', 'visual', 'narration')[kind[i]]:9}  {named:>9}  "
              f"{'yes' if tokens.learn[i] else 'no':>7}  {after}")


def main():
    parser = Parser(description="Draw the training mask (Fig. 4) of a short sequence.")
    parser.add_argument("--last-k", type=whole, help="keep only the last k narrations (FlowNar-C)")
    parser.add_argument("--png", help="also write the mask as a picture")
    parser.add_argument("--tokens", action="store_true", help="list the tokens of the sequence instead")
    args = parser.parse_args()
    command_line(lambda: list_tokens(args.last_k) if args.tokens else draw_mask(args.last_k, args.png))


if __name__ == "__main__":
    main()
