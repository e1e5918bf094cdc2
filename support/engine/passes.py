"""The language model in streaming (not in the paper): the function of transformers' modules, with less work around it.

    Plain       passes through transformers' own modules: for any model, and the oracle of Decoder
    Decoder     the same for Llama-like models (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...), with routers or without:
                matrices that share their input are one, grouped queries read their keys without copies, several
                streams share a pass. On CUDA the pass of one stream is captured as a graph, one for each shape.

A pass is one function of tensors with fixed shapes: no sizes that depend on data, nothing that waits for the device.
Glossary (N new tokens, n of them in layers with routers, S slots, H query heads, G key and value heads of c channels):
    plan        ids, positions and slots of the new tokens                  [3, N]
    routed      positions and slots of those in layers with routers         [2, n]
    span        slots that are looked at: all that are in use lie before it
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common.errors import BadData
from support.engine.int8 import Int8Linear, Int8Weight, join_int8
from support.engine.linear import Linear, linear
from support.engine.slots import Slots


STATIC = "default", "linear", "llama3", "yarn"                        # rotations that do not depend on the length
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
         "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
         "post_attention_layernorm")                                    # all that may have weights in a layer
LLAMA = {"use_rope": True, "residual_multiplier": 1, "embedding_multiplier": 1, "clip_qkv": None,
         "llama_4_scaling_beta": 0}    # what changes a layer, and Llama's value of it


@dataclass
class PassInput:
    """What one stream gives to a pass: see `embed` of narrator.py for x and memory; `rows`, whose logits it wants."""
    plan: Tensor                # [3, N]
    x: Tensor | None
    memory: Tensor | None
    slots: Slots
    rows: slice
    routed: Tensor | None = None        # [2, n], given by `Routing.assign_routed_slots` (baselines/mod.py)


class Plain:
    """Passes through the modules of transformers, one stream after the other."""

    def __init__(self, narrator):
        self.narrator = narrator

    @torch.no_grad()
    def __call__(self, parts: list[PassInput]) -> list[Tensor]:
        """The logits [rows, V] of each part's tokens, whose keys and values go into its slots."""
        return [self.run(part) for part in parts]

    def run(self, part: PassInput) -> Tensor:
        ids, positions, slots = part.plan
        mask = part.slots.begin(positions, slots)
        e = self.narrator.embed(ids, part.x, part.memory)
        hidden = self.narrator.run(e, positions, mask, part.slots)
        return self.narrator.logits(hidden[part.rows])

    def compile(self) -> None:
        raise BadData("--compile: this language model takes the plain path, which is not compiled")


class UnsupportedModel(Exception):
    """Why a model takes the plain path."""


def rope_type(model: nn.Module) -> str:
    """How a model of transformers makes the rotations of its keys."""
    return (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")


def fuse(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers of one input as one. The layers' own become views of it: none is held twice."""
    if all(isinstance(layer, Int8Linear) for layer in layers):
        return join_int8(layers)
    if any(type(layer) not in (nn.Linear, Linear) or (layer.bias is None) != (layers[0].bias is None)
           for layer in layers):
        raise UnsupportedModel("has linear layers of its own")
    fused = {"bias": None}
    for name, _ in layers[0].named_parameters():
        fused[name] = torch.cat([getattr(layer, name).data for layer in layers])
        for layer, piece in zip(layers, fused[name].split([layer.out_features for layer in layers])):
            setattr(layer, name, nn.Parameter(piece, False))
    return fused["weight"], fused["bias"]


class Layer:
    """One layer of a Llama-like model, its keys and values being at `place` among those of a stream's slots.

    Raises Different if it has weights that this file does not know.
    """

    def __init__(self, layer: nn.Module, place: int):
        if strange := [name for name, _ in layer.named_parameters() if name.rpartition(".")[0] not in LAYER]:
            raise UnsupportedModel(f"has {strange[0]} in its layers")
        attention, mlp, self.place = layer.self_attn, layer.mlp, place
        self.channels = attention.head_dim
        self.heads, self.groups = (y.out_features // self.channels for y in (attention.q_proj, attention.k_proj))
        self.qkv = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.up, self.act = fuse(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.o, self.down, self.scale = fuse(attention.o_proj), fuse(mlp.down_proj), attention.scaling
        self.norm_a, self.norm_m = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        self.norm_q, self.norm_k = (norm_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))

    def in_fp32(self) -> "Layer":
        """A copy that computes in fp32 and is alone: at place 0."""
        other = copy(self)
        other.place = 0
        for name, value in vars(self).items():
            if isinstance(value, tuple):                          # a weight and its bias or epsilon
                pair = [y.float() if isinstance(y, Tensor) else y for y in value]
                setattr(other, name, tuple(pair))
        return other

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, streams: list[tuple[Slots, Tensor, Tensor]]) -> Tensor:
        """h [N, D_lm] of all streams -> [N, D_lm]; `streams` as from `Decoder.enter`."""
        lengths, seen = [len(into) for _, into, _ in streams], []
        new = zip(*(y.split(lengths) for y in self.project(h, cos, sin)))
        for (stream, into, mask), (q, k, v) in zip(streams, new):
            keys = stream.keys[self.place].index_copy_(0, into, k)[:stream.span]
            values = stream.values[self.place].index_copy_(0, into, v)[:stream.span]
            seen.append(self.attend(q, keys, values, mask))
        h = h + linear(torch.cat(seen), *self.o)
        return h + self.feed_forward(h)

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, D_lm] -> rotated queries [N, H, c], rotated keys and values [N, G, c]."""
        H, G, c = self.heads, self.groups, self.channels
        qkv = linear(norm(h, *self.norm_a), *self.qkv).view(-1, H + 2 * G, c)
        qk, v = qkv[:, :H + G], qkv[:, H + G:]
        if self.norm_q:
            qk = torch.cat([norm(qk[:, :H], *self.norm_q), norm(qk[:, H:], *self.norm_k)], dim=1)
        qk = torch.addcmul(qk * cos, qk.roll(c // 2, -1), sin)
        return qk[:, :H], qk[:, H:], v

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries [N, H, c] on keys and values [S, G, c] with mask [1, 1, N H/G, S] -> [N, H c].

        The queries that share a key head are rows of one query, so no key is copied.
        """
        q = q.unflatten(1, (self.groups, -1)).transpose(0, 1)                                 # [G, N, H/G, c]
        o = F.scaled_dot_product_attention(q.flatten(1, 2)[None], keys.transpose(0, 1)[None],
                                           values.transpose(0, 1)[None], attn_mask=mask, scale=self.scale)
        return o.view_as(q).transpose(0, 1).flatten(1)

    def feed_forward(self, h: Tensor) -> Tensor:
        gate, up = linear(norm(h, *self.norm_m), *self.up).chunk(2, -1)
        return linear(self.act(gate) * up, *self.down)


def norm_of(module: nn.Module | None) -> tuple[Tensor, float] | None:
    return module and (module.weight, module.variance_epsilon)


def norm(h: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], weight, epsilon)


def join(pieces: list[Tensor], dim: int = 0) -> Tensor | None:
    """torch.cat, but None for no piece, and no copy of a single one."""
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0] if pieces else None


class Decoder:
    """Passes of a Llama-like model, whose LoRA has been merged, with its matrices fused."""

    def __init__(self, narrator):
        model = narrator.llm.model
        if (rope := rope_type(model)) not in STATIC:
            raise UnsupportedModel(f"rotates its keys by rules of its own ({rope})")
        if strange := unlike_llama(model):
            raise UnsupportedModel(f"computes something that Llama does not ({strange})")
        self.routing = getattr(narrator, "routing", None)                   # baselines/mod.py
        routers = [self.routing is not None and i in self.routing.layers for i in range(len(model.layers))]
        self.routes = [layer.route if there else None for layer, there in zip(model.layers, routers)]
        try:
            self.layers = [Layer(layer.inner if there else layer, routers[:i].count(there))
                           for i, (layer, there) in enumerate(zip(model.layers, routers))]
            self.norm, rotary = norm_of(model.norm), model.rotary_emb
            self.inverse, self.rope_scale = rotary.inv_freq, rotary.attention_scaling
        except AttributeError as error:
            raise UnsupportedModel(f"is not built like Llama ({error})") from None
        self.narrator, self.run = narrator, self.forward

    @torch.no_grad()
    def __call__(self, parts: list[PassInput]) -> list[Tensor]:
        """As Plain; all parts share the pass."""
        first = self.layers[0]
        like, unrouted = first.norm_a[0].new_empty(first.groups, first.channels), self.routes.count(None)
        for part in parts:
            part.slots.allocate(unrouted, like)
            if self.routing is not None:
                if part.routed is None:                                     # not there already, in a second run
                    ids, positions, slots = part.plan.cpu().numpy()
                    routed = self.routing.assign_routed_slots(part.slots, ids < 0, positions, slots)
                    part.routed = torch.from_numpy(routed).to(part.plan.device)
                part.slots.routed.allocate(len(self.layers) - unrouted, like)
        if len(parts) == 1:
            return [self.captured(*parts) if parts[0].plan.is_cuda else self.run(parts)]
        return list(self.forward(parts).split([len(range(part.plan.shape[1])[part.rows]) for part in parts]))

    def forward(self, parts: list[PassInput]) -> Tensor:
        """Logits [all rows, V] of the tokens of all parts, which follow each other."""
        ids, positions, _ = join([part.plan for part in parts], 1)
        x, memory = (join([y for y in ys if y is not None]) for ys in zip(*((part.x, part.memory) for part in parts)))
        h = self.narrator.embed(ids, x, memory)
        cos, sin = self.rotations(positions, h.dtype)
        streams = [self.enter(part.slots, part.plan) for part in parts]
        fewer = [self.enter(part.slots.routed, part.routed) for part in parts if part.routed is not None]
        for layer, route in zip(self.layers, self.routes):
            if route is None:
                h = layer(h, cos, sin, streams)
            else:                                                           # of the tokens that the router keeps
                h = route(lambda *some: layer(*some, fewer), h, cos, sin)
        h = join([own[part.rows] for own, part in zip(h.split([part.plan.shape[1] for part in parts]), parts)])
        return self.narrator.logits(norm(h, *self.norm))

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [N, 1, c] at positions [N], as `Layer.project` takes them."""
        angles = positions[:, None].float() * self.inverse
        cos = (angles.cos() * self.rope_scale).to(dtype).repeat(1, 2)[:, None]
        sin = (angles.sin() * self.rope_scale).to(dtype)
        return cos, torch.cat([-sin, sin], 1)[:, None]

    def enter(self, stream: Slots, plan: Tensor) -> tuple[Slots, Tensor, Tensor]:
        """The new tokens take their slots in a stream -> the stream, these slots, the queries' mask [1, 1, N H/G, S].
        """
        (*_, positions, into), first = plan, self.layers[0]
        stream.positions.index_copy_(0, into, positions)
        mask = stream.positions[:stream.span] <= positions[:, None]
        return stream, into, mask.repeat_interleave(first.heads // first.groups, 0)[None, None]

    def compile(self) -> None:
        """Compile the pass of one stream; shapes may change."""
        self.run = torch.compile(self.forward, fullgraph=True, dynamic=True)

    def captured(self, part: PassInput) -> Tensor:
        """The pass of one stream as a CUDA graph, captured when its shape is first met with these buffers."""
        given, graphs = [part.plan, part.x, part.memory, part.routed], part.slots.graphs
        key = *(y is not None and y.shape for y in given), part.rows.indices(part.plan.shape[1])
        if key not in graphs:
            buffers = plan, x, memory, routed = [y if y is None else y.clone() for y in given]
            run = partial(self.run, [PassInput(plan, x, memory, part.slots, part.rows, routed)])
            with torch.cuda.device(plan.device):                             # graphs are captured on the current GPU
                aside = torch.cuda.Stream()                                  # a first run, as capture demands
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):
                    run()
                torch.cuda.current_stream().wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    logits = run()
            graphs[key] = graph, buffers, logits
        graph, buffers, logits = graphs[key]
        for buffer, new in zip(buffers, given):
            if new is not None:
                buffer.copy_(new)
        with torch.cuda.device(part.plan.device):
            graph.replay()
        return logits.clone()


def compile_memory(memory: nn.Module) -> None:
    """Compile what CLAM (clam.py) computes for each frame and each narration; other memories stay as they are."""
    if hasattr(memory, "absorb"):
        memory.absorb = torch.compile(memory.absorb, dynamic=True)
        memory.read = torch.compile(memory.read, dynamic=True)


# ---------------------------------------------------------------------- which path


def fastest(narrator) -> tuple[Callable, str | None]:
    """Decoder, if it is proved to compute what the model computes; else Plain, and why."""
    plain = Plain(narrator)
    try:
        decoder = Decoder(narrator)
    except UnsupportedModel as reason:
        return plain, str(reason)
    if differs(decoder):
        return plain, "computes something that Llama does not"
    return decoder, None


def unlike_llama(model: nn.Module) -> str | None:
    """The name of an attribute or setting by which a model's layers differ from Llama's."""
    owners = [model, model.config]
    for layer in model.layers:
        layer = getattr(layer, "inner", layer)                                    # without a router
        owners += [layer, getattr(layer, "self_attn", layer)]
    values = [vars(owner) for owner in owners]
    values.append(getattr(model.config, "rope_parameters", None) or {})
    for name, plain in LLAMA.items():
        if any(settings.get(name) not in (plain, None) for settings in values):
            return name
    return None


def far_positions(config) -> Tensor:
    """Where the two paths are compared: at the beginning, from 100,000 on, and beyond what the
    model was trained for."""
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    starts = torch.tensor(sorted([0, 100_000, 2 * trained]))
    return (starts[:, None] + 5 * torch.arange(9)).flatten().unique()


@torch.no_grad()
def differs(decoder: Decoder) -> bool:
    """Does a layer compute something else than the model's own, or the model something else than
    its layers in turn?

    Queries, keys, values and outputs of all layers for random tokens, in fp32 whatever the dtype of
    the model: bf16's rounding is larger than many differences. A layer is fp32 only while it
    computes, so no second model is held. Products of int8 round their inputs: there, a difference
    of the last bit can become one of 1 %.
    """
    same = partial(close, limit=1e-4)
    if isinstance(decoder.layers[0].qkv[0], Int8Weight):
        same = partial(close, limit=3e-2)
    narrator = decoder.narrator
    model, device = narrator.llm.model, narrator.llm.device
    positions = far_positions(model.config).to(device)
    count = len(positions)
    generator = torch.Generator().manual_seed(0)      # the caller's random numbers stay as they are
    words = len(narrator.llm.get_input_embeddings().weight)
    ids = torch.randint(words, (count,), generator=generator).to(device)
    e = narrator.embed(ids).float()
    mask = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    inputs, outputs, attended = [], [], []            # of each layer in turn; then of the last norm
    layers = [getattr(layer, "inner", layer) for layer in model.layers]
    with ExitStack() as stack:
        for module in (*layers, model.norm):
            stack.enter_context(in_fp32(module, inputs, outputs))
        model(inputs_embeds=e[None], position_ids=positions[None], attention_mask=mask[None, None],
              use_cache=False, watch=lambda *given: attended.append(given))
    if len(attended) != len(layers) or len(outputs) != len(layers) + 1:
        return True
    rotations, h = decoder.rotations(positions, torch.float32), e
    for layer, before, after, (*heads, scale) in zip(decoder.layers, inputs, outputs, attended):
        if not same(h, before):
            return True
        layer, slots = layer.in_fp32(), Slots(device, 64)
        q, k, v = layer.project(before, *rotations)
        their_q, their_k, their_v = (y[0].transpose(0, 1) for y in heads)            # [N, heads, c]
        same_q = same(q * layer.scale, their_q * scale)
        if not same_q or not same(k, their_k) or not same(v, their_v):
            return True
        slots.allocate(1, k)
        into = torch.from_numpy(slots.take(count)).to(device)
        stream = decoder.enter(slots, torch.stack([ids, positions, into]))
        if not same(layer(before, *rotations, [stream]), after):
            return True
        h = after
    weight, epsilon = decoder.norm
    return not same(h, inputs[-1]) or not same(norm(h, weight.float(), epsilon), outputs[-1])


def close(one: Tensor, other: Tensor, limit: float) -> bool:
    """Do two tensors [N, ..] agree to this share of each token's length?"""
    if one.shape != other.shape:
        return False
    one, other = one.flatten(1), other.flatten(1)
    return bool(((one - other).norm(dim=1) <= limit * other.norm(dim=1)).all())


@contextmanager
def in_fp32(module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """While the module computes, its weights are fp32; what goes in [1, N, D] and comes out is
    noted as [N, D]."""
    kept = {}

    def begin(module, args, kwargs):
        kept.update({p: p.data for p in module.parameters()})
        for p, weight in kept.items():
            p.data = weight.float()
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    def end(module, args, out):
        for p, weight in kept.items():                  # the same tensors: fused weights stay views
            p.data = weight
        kept.clear()
        if out is not None:                                 # None: it failed
            outputs.append((out[0] if isinstance(out, tuple) else out)[0])

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True),
             module.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
