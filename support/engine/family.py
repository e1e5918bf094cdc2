"""Which language models can be narrators (not in the paper): those that compute with the masks and
caches of a narrator what they compute by themselves.

A model is asked once, when a narrator is made of it, before anything of it is replaced: what its
settings say of its layers and of the rotations of its keys; and whether what it computes of a few
tokens, in training and in a stream, is its own. (What its layers ask of attention beside
softmax(q k^T / sqrt(c)) v, such as windows, caps and sinks, is an error there.) What could make a
difference is refused, whatever the family is called. docs/training.md has a table of families.
"""
import inspect
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line
from support.common.progress import say_as_one
from support.engine import attention
from support.engine.norms import fuse_norms

# kinds of layers that see all tokens before them
LAYERS = ("full_attention", "attention")
# rotations that do not depend on the length of the context
ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")


def check_family(llm: nn.Module) -> bool:
    """Let a language model of transformers attend as a narrator's does, with norms by one operator
    each. BadData if it then computes something else than by itself.

    Returns whether its layers attend by segments (attention.py), or by one mask of all tokens alone.
    """
    try:
        check_settings_of(llm)
        by_segments = try_out(llm.eval())               # no dropout
    except Exception as error:          # models for other caches and masks raise anything
        raise BadData(f"{type(llm).__name__} cannot be a narrator: {first_line(error)}; use a "
                      f"Llama-like language model") from error
    if not by_segments:
        say_as_one(f"the layers of {type(llm).__name__} attend by one mask of all tokens: in "
                   f"training, long videos take more memory")
    return by_segments


def check_settings_of(llm: nn.Module) -> None:
    """BadData if the settings of a model have what a narrator has not."""
    layers = getattr(getattr(llm, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(llm, "lm_head"):
        raise BadData("it is built differently (without model.layers or lm_head)")
    config = llm.config.get_text_config()
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in LAYERS:
            raise BadData(f"its layers do not see all tokens ({kind})")
    for rotation in rotations(config):
        kind = rotation.get("rope_type", "default")
        if kind not in ROTATIONS:
            raise BadData(f"its rotations depend on the length of the context ({kind})")


def rotations(config) -> list[dict]:
    """The settings of the rotations of all layers, or of each kind of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    return [part for part in given.values() if isinstance(part, dict)] or [given]


@torch.no_grad()
def try_out(llm: nn.Module) -> bool:
    """The same as `check_family`, with four tokens."""
    words = llm.get_input_embeddings()
    ids = torch.arange(4, device=llm.device) + len(words.weight) // 2           # any words
    e = words(ids)[None]
    # its head, and what comes after it
    layers = llm.model.layers
    llm.model.layers = one_of_each_kind(layers)
    llm.set_attn_implementation("eager")
    hidden = llm.model(inputs_embeds=e, use_cache=False).last_hidden_state
    logits = llm(inputs_embeds=e, use_cache=False).logits
    if not logits.isfinite().all():
        raise BadData(f"its logits are not finite in {llm.dtype} (give --dtype bfloat16 or float32)")
    if (llm.lm_head(hidden) - logits).norm() > 1e-3 * logits.norm():
        raise BadData("it scales its logits, or caps them")
    # its layers, in float32: differences may be as small as rounding
    small = deepcopy(llm.model, {id(words): nn.Identity()}).float()
    llm.model.layers = layers
    by_segments = attends_by_segments(small, e.float())
    fuse_norms(llm.model)
    attention.install(llm.model)
    return by_segments


def one_of_each_kind(layers: nn.ModuleList) -> nn.ModuleList:
    """The first layer of each kind. Layers of one kind differ in their numbers alone."""
    kinds = {}
    for layer in layers:
        kind = [(name, weight.shape) for name, weight in layer.named_parameters()]
        for module in layer.modules():
            kind += [(name, value) for name, value in vars(module).items()
                     if isinstance(value, int | float | str) and name != "layer_idx"]
        kinds.setdefault(str(kind), layer)
    return nn.ModuleList(kinds.values())


def attends_by_segments(model: nn.Module, e: Tensor) -> bool:
    """The same of a model without head, and embeddings of four tokens [1, 4, D_lm]."""
    def run(begin: int, end: int, **options) -> Tensor:
        """The last hidden states of some of the tokens."""
        positions = torch.arange(begin, end, device=e.device)[None]
        return model(inputs_embeds=e[:, begin:end], position_ids=positions,
                     **options).last_hidden_state[0]

    def is_own(hidden: Tensor) -> bool:
        return bool((hidden - own).norm() <= 1e-3 * own.norm())

    # by itself: the last three of four tokens alone
    model.set_attn_implementation("eager")
    own = run(1, 4, use_cache=False)
    fuse_norms(model)
    attention.install(model)
    # streaming: one token, then the two others, with a cache
    past = {name_of_cache(model): attention.KeysAndValues(), "use_cache": True}
    begun = run(1, 2, **past)
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    went_on = run(2, 4, attention_mask=attention.mask_of_rows(seen[1:3, :3], model), **past)
    # training: all four, and the last three do not see the first
    seen[1:, 0] = False
    segments = attention.Segments([0, 1, 1, 1], seen[[0, 3]], model)
    by_segments = is_own(run(0, 4, segments=segments, use_cache=False)[1:])
    mask = attention.mask_of_rows(seen, model)
    by_mask = by_segments or is_own(run(0, 4, attention_mask=mask, use_cache=False)[1:])
    if not by_mask or not is_own(torch.cat([begun, went_on])):
        raise BadData("it computes something else with the caches and masks of a narrator than by "
                      "itself")
    return by_segments


def name_of_cache(module: nn.Module) -> str:
    """The name of the argument by which a module of transformers takes its cache."""
    arguments = inspect.signature(type(module).forward).parameters
    # before transformers 5.24 it was `past_key_values`
    return "cache" if "cache" in arguments else "past_key_values"


# ---------------------------------------------------------------------- positions

def most_positions(llm: nn.Module) -> float:
    """How many positions a language model was made for; infinity, if it does not say."""
    config = llm.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or float("inf")
    for rotation in rotations(config):
        if rotation.get("rope_type") == "yarn":         # a card may add it, and leave the other number
            most = max(most, int(rotation["factor"] * rotation["original_max_position_embeddings"]))
    return most


def warn_of_longest(narrator: nn.Module, samples: Sequence) -> None:
    """A warning, if the longest of a training's videos needs more positions than its model has."""
    longest = max(samples, key=lambda sample: sample.narrations[-1][0])
    narrations = narrator.layout.encode_narrations(longest.narrations)
    tokens = narrator.layout.sequence(narrations)
    warn_of_positions(narrator.llm, len(tokens), f"the video {longest.name}")


def warn_of_positions(llm: nn.Module, positions: int, what: str) -> None:
    """A warning, if something needs more positions than a language model was made for.

    what        what needs them
    """
    most = most_positions(llm)
    if positions > most:
        say_as_one(f"warning: {what} needs more than the {most} positions for which the language "
                   f"model was made (max_position_embeddings): beyond these it may compute worse")
