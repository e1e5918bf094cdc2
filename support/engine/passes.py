"""The language model in streaming (not in the paper): the function of transformers' modules, with
less work around it.

    Plain       passes through transformers' own modules: for any model, and the oracle of Decoder
    Decoder     the same for Llama-like models (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...), with
                routers or without: matrices that share their input are one, grouped queries read
                their keys without copies, several streams share a pass. On CUDA a pass is captured
                as a graph, one for each shape (several streams: support/engine/shared.py).

A pass is one function of tensors with fixed shapes: no sizes that depend on data, nothing that
waits for the device.

Glossary (N new tokens, n of them in layers with routers, S slots, H query heads, G key and value
heads of c channels):
    plan        ids, positions and slots of the new tokens                  [3, N]
    routed      positions and slots of those in layers with routers         [2, n]
    span        slots that a query looks at: all slots in use lie before it
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
from support.engine.int8 import Int8Linear, Int8Weight
from support.engine.linear import (
    Linear, PackedLinear, join_layers, linear, pack_weights, unpack_weights,
)
from support.engine.shared import SharedRows
from support.engine.slots import Slots

# rotations that do not depend on the length of the context
STATIC = ("default", "linear", "llama3", "yarn")
# all modules of a layer that may have weights
LAYER_MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "self_attn.q_norm", "self_attn.k_norm",
                 "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "input_layernorm", "post_attention_layernorm")
# settings that change what a layer computes, with Llama's value
LLAMA = {"use_rope": True, "residual_multiplier": 1, "embedding_multiplier": 1, "clip_qkv": None,
         "llama_4_scaling_beta": 0}


@dataclass
class PassInput:
    """What one stream gives to a pass: its new tokens, and the rows whose logits it wants.

    x and memory are as in `Narrator.embed`.
    """
    plan: Tensor                        # [3, N]
    x: Tensor | None
    memory: Tensor | None
    slots: Slots
    rows: slice
    routed: Tensor | None = None        # [2, n], from baselines/mod.py: `assign_routed_slots`


class Plain:
    """Passes through the modules of transformers, one stream after the other."""

    def __init__(self, narrator):
        self.narrator = narrator

    @torch.no_grad()
    def __call__(self, inputs: list[PassInput]) -> list[Tensor]:
        """The logits [rows, V] of each input. Keys and values go into its slots."""
        return [self.run(given) for given in inputs]

    def run(self, given: PassInput) -> Tensor:
        ids, positions, slots = given.plan
        mask = given.slots.place_and_mask(positions, slots)
        e = self.narrator.embed(ids, given.x, given.memory)
        hidden = self.narrator.run(e, positions, mask, given.slots)
        return self.narrator.logits(hidden[given.rows])

    def pack(self) -> None:
        pack_weights(self.narrator.llm)

    def compile(self) -> None:
        raise BadData("--compile: this language model takes the plain path, which is not compiled")


class UnsupportedModel(Exception):
    """Why a model takes the plain path."""


def rope_type(model: nn.Module) -> str:
    """The kind of rotations that a model of transformers gives its keys."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default")


def fuse(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several linear layers with one input, as one layer.

    The layers' own weights become views of the fused one, so memory does not double.
    """
    kinds = {type(layer) for layer in layers}
    if kinds in ({Int8Linear}, {PackedLinear}):
        return join_layers(layers)
    has_bias = layers[0].bias is not None
    for layer in layers:
        if type(layer) not in (nn.Linear, Linear) or (layer.bias is not None) != has_bias:
            raise UnsupportedModel("has linear layers of its own")
    fused = {"bias": None}
    sizes = [layer.out_features for layer in layers]
    for name, _ in layers[0].named_parameters():
        fused[name] = torch.cat([getattr(layer, name).data for layer in layers])
        for layer, view in zip(layers, fused[name].split(sizes)):
            setattr(layer, name, nn.Parameter(view, requires_grad=False))
    return fused["weight"], fused["bias"]


class Layer:
    """One layer of a Llama-like model. Its keys and values are at `place` in the lists of Slots.

    Raises UnsupportedModel if it has weights that this file does not know.
    """

    def __init__(self, layer: nn.Module, place: int):
        for name, _ in layer.named_parameters():
            module, _, _ = name.rpartition(".")
            if module not in LAYER_MODULES:
                raise UnsupportedModel(f"has {name} in its layers")
        attention = layer.self_attn
        self.place = place
        self.channels = attention.head_dim
        self.heads = attention.q_proj.out_features // self.channels
        self.groups = attention.k_proj.out_features // self.channels
        self.scale = attention.scaling
        self.act = layer.mlp.act_fn
        self.take_weights(layer)
        # pairs of weight and epsilon
        self.norm_a = norm_of(layer.input_layernorm)
        self.norm_m = norm_of(layer.post_attention_layernorm)
        self.norm_q = norm_of(getattr(attention, "q_norm", None))
        self.norm_k = norm_of(getattr(attention, "k_norm", None))

    def take_weights(self, layer: nn.Module) -> None:
        """Pairs of weight and bias."""
        attention = layer.self_attn
        mlp = layer.mlp
        self.qkv = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.up = fuse(mlp.gate_proj, mlp.up_proj)
        self.o = fuse(attention.o_proj)
        self.down = fuse(mlp.down_proj)

    def in_fp32(self) -> "Layer":
        """A copy that computes in fp32, with its keys and values at place 0."""
        other = copy(self)
        other.place = 0
        for name, value in vars(self).items():
            if isinstance(value, tuple):                        # a weight, and its bias or epsilon
                weight, second = value
                if isinstance(second, Tensor):
                    second = second.float()
                if isinstance(weight, Tensor):                  # not in int8
                    weight = weight.float()
                setattr(other, name, (weight, second))
        return other

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        """h [N, D_lm] of all streams -> [N, D_lm].

        attend      attend(layer, q, k, v) -> [N, H c] of rotated queries [N, H, c], rotated keys and
                    values [N, G, c]; it also keeps keys and values
        """
        h = h + linear(attend(self, *self.project(h, cos, sin)), *self.o)
        return h + self.feed_forward(h)

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, D_lm] -> rotated queries [N, H, c], rotated keys and values [N, G, c]."""
        H, G, c = self.heads, self.groups, self.channels
        qkv = linear(norm(h, *self.norm_a), *self.qkv).view(-1, H + 2 * G, c)
        qk = qkv[:, :H + G]
        v = qkv[:, H + G:]
        if self.norm_q:
            qk = torch.cat([norm(qk[:, :H], *self.norm_q), norm(qk[:, H:], *self.norm_k)], dim=1)
        # RoPE: the second half of the channels goes first; `sin` has a minus there
        qk = torch.addcmul(qk * cos, qk.roll(c // 2, -1), sin)
        return qk[:, :H], qk[:, H:], v

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries [N, H, c] on keys and values [S, G, c] with mask [1, 1, N H/G, S] -> [N, H c].

        The queries that share a key head are rows of one query, so no key is copied.
        """
        q = q.unflatten(1, (self.groups, -1)).transpose(0, 1)               # [G, N, H/G, c]
        rows = q.flatten(1, 2)[None]                                        # [1, G, N H/G, c]
        keys = keys.transpose(0, 1)[None]                                   # [1, G, S, c]
        values = values.transpose(0, 1)[None]
        o = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=self.scale)
        return o.view_as(q).transpose(0, 1).flatten(1)

    def feed_forward(self, h: Tensor) -> Tensor:
        gate, up = linear(norm(h, *self.norm_m), *self.up).chunk(2, -1)
        return linear(self.act(gate) * up, *self.down)


def attend_apart(streams: list[tuple[Slots, Tensor, Tensor]], layer: Layer, q: Tensor, k: Tensor,
                 v: Tensor) -> Tensor:
    """What a layer calls to attend: one stream after the other, each in its own slots. `streams` as
    from `Decoder.place_tokens`."""
    lengths = [len(into) for _, into, _ in streams]
    q, k, v = (tensor.split(lengths) for tensor in (q, k, v))
    attended = []
    for i, (slots, into, mask) in enumerate(streams):
        keys = slots.keys[layer.place].index_copy_(0, into, k[i])[:slots.span]      # [S, G, c]
        values = slots.values[layer.place].index_copy_(0, into, v[i])[:slots.span]
        attended.append(layer.attend(q[i], keys, values, mask))
    return torch.cat(attended)


def norm_of(module: nn.Module | None) -> tuple[Tensor, float] | None:
    """Weight and epsilon of an RMSNorm, as `norm` takes them."""
    if module is None:
        return None
    return module.weight, module.variance_epsilon


def norm(h: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], weight, epsilon)


def join(tensors: list[Tensor], dim: int = 0) -> Tensor | None:
    """torch.cat, but None for no tensor, and no copy of a single one."""
    if not tensors:
        return None
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim)


class Decoder:
    """Passes of a Llama-like model with fused matrices. Its LoRA must have been merged."""

    def __init__(self, narrator):
        model = narrator.llm.model
        rope = rope_type(model)
        if rope not in STATIC:
            raise UnsupportedModel(f"rotates its keys by rules of its own ({rope})")
        strange = unlike_llama(model)
        if strange:
            raise UnsupportedModel(f"computes something that Llama does not ({strange})")
        self.narrator = narrator
        self.routing = getattr(narrator, "routing", None)                   # baselines/mod.py
        self.layers: list[Layer] = []
        self.routes: list[Callable | None] = []         # of each layer: how its router calls it
        routed = 0                                      # layers with routers so far
        try:
            for i, layer in enumerate(model.layers):
                # layers with routers keep fewer tokens, in slots of their own: they count apart
                if self.routing is not None and i in self.routing.layers:
                    self.layers.append(Layer(layer.inner, routed))
                    self.routes.append(layer.route)
                    routed += 1
                else:
                    self.layers.append(Layer(layer, i - routed))
                    self.routes.append(None)
            self.norm = norm_of(model.norm)
            self.inverse = model.rotary_emb.inv_freq
            self.rope_scale = model.rotary_emb.attention_scaling
        except AttributeError as error:
            raise UnsupportedModel(f"is not built like Llama ({error})") from None
        self.run = self.forward                                             # or its compiled form
        self.graph_pool = None                                              # of captured passes
        self.shared = None                              # passes of several streams; None: apart
        if narrator.device.type == "cuda" and self.routing is None:
            self.shared = SharedRows(self, capture=True)

    @torch.no_grad()
    def __call__(self, inputs: list[PassInput]) -> list[Tensor]:
        """As Plain, but all inputs share the pass."""
        self.prepare(inputs)
        if len(inputs) > 1 and self.shared is not None:
            return self.shared(inputs)
        if len(inputs) > 1:
            rows = [len(range(given.plan.shape[1])[given.rows]) for given in inputs]
            return list(self.forward(inputs).split(rows))
        if inputs[0].plan.is_cuda:
            return [self.captured(inputs[0])]
        return [self.run(inputs)]

    def prepare(self, inputs: list[PassInput]) -> None:
        """Before the pass, all that depends on data: buffers, and slots in layers with routers."""
        first = self.layers[0]
        like = first.norm_a[0].new_empty(first.groups, first.channels)
        unrouted = self.routes.count(None)
        for given in inputs:
            given.slots.allocate(unrouted, like)
            if self.routing is None:
                continue
            if given.routed is None:                    # a second run of this input has it already
                ids, positions, slots = given.plan.cpu().numpy()
                routed = self.routing.assign_routed_slots(given.slots, ids < 0, positions, slots)
                given.routed = torch.from_numpy(routed).to(given.plan.device)
            given.slots.routed.allocate(len(self.layers) - unrouted, like)

    def forward(self, inputs: list[PassInput]) -> Tensor:
        """Logits [all rows, V] of the tokens of all inputs, which follow each other."""
        ids, positions, _ = join([given.plan for given in inputs], dim=1)
        x = join([given.x for given in inputs if given.x is not None])
        memory = join([given.memory for given in inputs if given.memory is not None])
        h = self.narrator.embed(ids, x, memory)                             # [N, D_lm]
        cos, sin = self.rotations(positions, h.dtype)
        streams = [self.place_tokens(given.slots, given.plan) for given in inputs]
        routed_streams = [self.place_tokens(given.slots.routed, given.routed)
                          for given in inputs if given.routed is not None]
        attend = partial(attend_apart, streams)
        attend_routed = partial(attend_apart, routed_streams)

        for layer, route in zip(self.layers, self.routes):
            if route is None:
                h = layer(h, cos, sin, attend)
            else:
                def of_kept(h, cos, sin):               # of the tokens that the router keeps
                    return layer(h, cos, sin, attend_routed)
                h = route(of_kept, h, cos, sin)

        lengths = [given.plan.shape[1] for given in inputs]
        wanted = [tokens[given.rows] for tokens, given in zip(h.split(lengths), inputs)]
        return self.narrator.logits(self.last_norm(join(wanted)))

    def last_norm(self, h: Tensor) -> Tensor:
        return norm(h, *self.norm)

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [N, 1, c] at positions [N], as `Layer.project` takes them."""
        angles = positions[:, None].float() * self.inverse                  # [N, c/2]
        cos = (angles.cos() * self.rope_scale).to(dtype)
        sin = (angles.sin() * self.rope_scale).to(dtype)
        return cos.repeat(1, 2)[:, None], torch.cat([-sin, sin], 1)[:, None]

    def place_tokens(self, slots: Slots, plan: Tensor) -> tuple[Slots, Tensor, Tensor]:
        """Enter the positions of a stream's new tokens in its slots.

        plan: its last two rows are positions and slots.
        Returns the stream's slots, those of the new tokens [N], and their mask [1, 1, N H/G, S].
        """
        positions = plan[-2]
        into = plan[-1]
        slots.positions.index_copy_(0, into, positions)
        mask = slots.positions[:slots.span] <= positions[:, None]           # [N, S]
        first = self.layers[0]
        return slots, into, mask.repeat_interleave(first.heads // first.groups, 0)[None, None]

    def pack(self) -> None:
        """Put bf16 weights into the order in which they are multiplied fastest."""
        self.change_weights(pack_weights)

    def change_weights(self, change: Callable[[nn.Module], bool]) -> None:
        """Change the model's weights, layer by layer; `change` says whether it found any."""
        for ours, theirs in zip(self.layers, self.narrator.llm.model.layers):
            theirs = getattr(theirs, "inner", theirs)           # without a router
            if change(theirs):
                ours.take_weights(theirs)
        change(self.narrator.llm)                               # the head

    def compile(self) -> None:
        """Compile the pass of one stream; shapes may change."""
        self.change_weights(unpack_weights)                     # torch.compile reads no packed ones
        self.run = torch.compile(self.forward, fullgraph=True, dynamic=True)

    def captured(self, given: PassInput) -> Tensor:
        """The pass of one stream as a CUDA graph, captured when its shape is first met."""
        tensors = [given.plan, given.x, given.memory, given.routed]
        shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        key = (*shapes, given.rows.indices(given.plan.shape[1]))
        graphs = given.slots.graphs
        if key not in graphs:
            graphs[key] = self.capture(given)
        graph, buffers, logits = graphs[key]
        # a graph reads always the same memory, so the new tensors go there
        for buffer, tensor in zip(buffers, tensors):
            if tensor is not None:
                buffer.copy_(tensor)
        with torch.cuda.device(given.plan.device):
            graph.replay()
        return logits.clone()

    def capture(self, given: PassInput) -> tuple[torch.cuda.CUDAGraph, list[Tensor | None], Tensor]:
        """Returns a graph of the pass, the buffers that it reads (plan, x, memory, routed) and the
        logits that it writes."""
        buffers = []
        for tensor in (given.plan, given.x, given.memory, given.routed):
            buffers.append(None if tensor is None else tensor.clone())
        plan, x, memory, routed = buffers
        buffered = [PassInput(plan, x, memory, given.slots, given.rows, routed)]
        with torch.cuda.device(plan.device):            # graphs are captured on the current GPU
            graph, logits = self.capture_graph(lambda: self.run(buffered))
        return graph, buffers, logits

    def capture_graph(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of run(), on the current GPU, and the tensor that it writes."""
        # a capture demands a first run, on a stream of CUDA of its own
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            run()
        torch.cuda.current_stream().wait_stream(side_stream)
        # All graphs share their memory: no two run at once, and what they write is copied at once.
        if self.graph_pool is None:
            self.graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            result = run()
        return graph, result


def compile_memory(memory: nn.Module) -> None:
    """Compile what CLAM (clam.py) computes for each frame and each narration.

    Other memories stay the same.
    """
    if hasattr(memory, "absorb"):
        memory.absorb = torch.compile(memory.absorb, dynamic=True)
        memory.read = torch.compile(memory.read, dynamic=True)


# ---------------------------------------------------------------------- which path


def fastest(narrator) -> tuple[Callable, str | None]:
    """Decoder and None, if it is proved to compute what the model computes; else Plain, and why.
    Then its weights are packed (support/engine/linear.py)."""
    path, why_plain = proved_path(narrator)
    path.pack()
    return path, why_plain


def proved_path(narrator) -> tuple[Callable, str | None]:
    """See `fastest`."""
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
        layer = getattr(layer, "inner", layer)                              # without a router
        owners += [layer, getattr(layer, "self_attn", layer)]
    values = [vars(owner) for owner in owners]
    values.append(getattr(model.config, "rope_parameters", None) or {})
    for name, plain in LLAMA.items():
        if any(settings.get(name) not in (plain, None) for settings in values):
            return name
    return None


def far_positions(config) -> Tensor:
    """Positions at which the two paths are compared: from 0, from 100,000 and from beyond the
    positions that the model was trained with."""
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    starts = torch.tensor(sorted([0, 100_000, 2 * trained]))
    return (starts[:, None] + 5 * torch.arange(9)).flatten().unique()


@torch.no_grad()
def differs(decoder: Decoder) -> bool:
    """Whether a layer computes something else than the model's own layer, or the model something
    else than its layers in turn.

    Compares queries, keys, values and outputs of all layers for random tokens, in fp32 whatever the
    dtype of the model: bf16's rounding is larger than many differences. A layer is fp32 only while
    it computes, so no second model is held.
    """
    limit = 1e-4
    if isinstance(decoder.layers[0].qkv[0], Int8Weight):
        limit = 3e-2            # inputs are rounded: the last bit can become a difference of 1 %
    same = partial(close, limit=limit)
    narrator = decoder.narrator
    model = narrator.llm.model
    device = narrator.llm.device
    positions = far_positions(model.config).to(device)
    count = len(positions)
    generator = torch.Generator().manual_seed(0)        # takes no random numbers from the caller
    words = len(narrator.llm.get_input_embeddings().weight)
    ids = torch.randint(words, (count,), generator=generator).to(device)
    e = narrator.embed(ids).float()
    mask = torch.ones(count, count, dtype=torch.bool, device=device).tril()

    # run transformers' modules, and note what each computes
    inputs, outputs, attended = [], [], []              # of each layer in turn, then the last norm

    def watch(query, key, value, scale):
        attended.append((query, key, value, scale))

    layers = [getattr(layer, "inner", layer) for layer in model.layers]
    with ExitStack() as stack:
        for module in (*layers, model.norm):
            stack.enter_context(in_fp32(module, inputs, outputs))
        model(inputs_embeds=e[None], position_ids=positions[None], attention_mask=mask[None, None],
              use_cache=False, watch=watch)
    if len(attended) != len(layers) or len(outputs) != len(layers) + 1:
        return True

    # give each layer here the same input
    rotations = decoder.rotations(positions, torch.float32)
    h = e
    for i, layer in enumerate(decoder.layers):
        if not same(h, inputs[i]):
            return True
        layer = layer.in_fp32()
        q, k, v = layer.project(inputs[i], *rotations)
        *heads, their_scale = attended[i]
        their_q, their_k, their_v = (tensor[0].transpose(0, 1) for tensor in heads)  # [N, heads, c]
        same_q = same(q * layer.scale, their_q * their_scale)
        if not same_q or not same(k, their_k) or not same(v, their_v):
            return True
        slots = Slots(device, 64)
        slots.allocate(1, k)
        into = torch.from_numpy(slots.reserve(count)).to(device)
        stream = decoder.place_tokens(slots, torch.stack([ids, positions, into]))
        attend = partial(attend_apart, [stream])
        if not same(layer(inputs[i], *rotations, attend), outputs[i]):
            return True
        h = outputs[i]
    weight, epsilon = decoder.norm
    return not same(h, inputs[-1]) or not same(norm(h, weight.float(), epsilon), outputs[-1])


def close(ours: Tensor, theirs: Tensor, limit: float) -> bool:
    """Whether two tensors [N, ..] agree to this share of each token's length."""
    if ours.shape != theirs.shape:
        return False
    ours = ours.flatten(1)
    theirs = theirs.flatten(1)
    distances = (ours - theirs).norm(dim=1)
    return bool((distances <= limit * theirs.norm(dim=1)).all())


@contextmanager
def in_fp32(module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """While the module computes, its weights are fp32. Its input and output [1, N, D] are added to
    the lists as [N, D]."""
    weights = {}                                            # parameter -> its own weight

    def begin(module, args, kwargs):
        weights.update({p: p.data for p in module.parameters()})
        for p, weight in weights.items():
            p.data = weight.float()
        hidden = args[0] if args else kwargs["hidden_states"]
        inputs.append(hidden[0])

    def end(module, args, output):
        for p, weight in weights.items():                   # the same tensors, so views stay views
            p.data = weight
        weights.clear()
        if output is None:                                  # the module failed
            return
        if isinstance(output, tuple):
            output = output[0]
        outputs.append(output[0])

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True),
             module.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
