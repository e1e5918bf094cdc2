"""Which language models can be narrators (not in the paper): those that compute with the masks and
caches of a narrator what they compute by themselves.

A few tokens cannot show everything, so a model is asked in three ways, once, when a narrator is made:

settings    layers that do not see all tokens before them, and limits of positions
attention   what its layers ask of attention beside softmax(q k^T / sqrt(c)) v: caps, sinks, windows
logits      its own logits of a few tokens are compared with ours: attention that ignores a mask,
            layers of other kinds, pasts that are more than keys and values, heads that scale or cap

What could make a difference and is not on the lists below is refused by name, whatever the family is
called. What makes one on long videos alone is told.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line, say_once
from support.engine import attention

# rotations that do not depend on the length of the context
STATIC = ("default", "linear", "llama3", "yarn", "proportional")
# kinds of layers that are as in Llama
LAYERS = ("full_attention", "attention")
# what layers hand to attention, and this repository does, or need not do
OPTIONS = {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position",
           "layer_idx", "attention_mask", "segments", "dropout", "scaling"}
# A shorter window hides tokens in most videos. Beyond a longer one, only long videos have some.
LONG = 1024
ADVICE = "use a Llama-like language model"


def check_family(llm: nn.Module) -> None:
    """BadData if a language model of transformers computes something else with the masks and caches
    of a narrator than by itself.
    """
    family = type(llm).__name__
    layers = getattr(getattr(llm, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(llm, "lm_head"):
        raise BadData(f"{family} is built differently (without model.layers or lm_head); {ADVICE}")
    check_layers(llm)
    rotations = rope_type(llm.model)
    if rotations not in STATIC:
        say_once(f"warning: the rotations of {family} ({rotations}) depend on the length of the "
                 f"context: on long videos, streaming differs from training")
    if llm.device.type == "meta":                       # without numbers there is nothing to try
        return
    training = llm.training
    llm.eval()                                              # no dropout
    # One layer of each kind is asked, so that it takes no time with large models.
    llm.model.layers = nn.ModuleList({kind_of(layer): layer for layer in layers}.values())
    try:
        difference = difference_of(llm)
    except Exception as error:  # models that were written for other caches and masks raise anything
        raise BadData(f"{family} does not run with the caches and masks of a narrator "
                      f"({first_line(error)[:120]}); {ADVICE}") from error
    finally:
        llm.model.layers = layers
        llm.train(training)
    if difference:
        raise BadData(f"{family} {difference}")


# ---------------------------------------------------------------------- what the settings say

def check_layers(llm: nn.Module) -> None:
    """BadData if the settings have layers that do not see all tokens before them; a warning, if that
    makes a difference on long videos alone.
    """
    config = llm.config.get_text_config()
    family = type(llm).__name__
    kinds = getattr(config, "layer_types", None) or []
    limits = {name: limit for name, limit in limits_of(config) if limit < LIMITLESS}
    # A limit that no layer has does nothing.
    limited = [kind for kind in kinds if kind not in LAYERS]
    if kinds and not limited and not limits_of_modules(llm):
        return
    for kind in limited:
        if not any(word in kind for word in ("sliding", "chunked", "local")):
            raise BadData(f"{family} has layers of another kind ({kind}); {ADVICE}")
    if limited and not limits:
        raise BadData(f"{family} has layers that do not see all tokens ({limited[0]}); {ADVICE}")
    if limits:
        name, limit = min(limits.items(), key=lambda item: item[1])
        text = (f"{family} has layers that look back at most {limit} tokens, a window ({name} = "
                f"{limit}); here they see all")
        if limit < LONG:
            raise BadData(f"{text}, which computes something else; {ADVICE}")
        say_once(f"warning: {text}: on videos of more tokens it computes something else than by "
                 f"itself")


LIMITLESS = 10 ** 7
# names of settings and of modules' attributes that limit how far a layer looks back
WINDOWS = ("sliding_window", "attention_window", "window_size", "attention_chunk_size",
           "local_attention", "local_window_size", "attention_window_size", "sliding_window_size",
           "window")


def limits_of(config) -> Iterator[tuple[str, int]]:
    """Settings by which layers look back at a limited number of tokens."""
    if getattr(config, "use_sliding_window", True) is False:
        return
    for name in WINDOWS:
        yield from ((name, limit) for limit in positive(getattr(config, name, None)))


def limits_of_modules(llm: nn.Module) -> bool:
    """Whether a layer itself has a limit, whatever the settings say."""
    values = [getattr(module, name, None) for module in llm.model.layers.modules()
              for name in WINDOWS]
    return any(limit < LIMITLESS for value in values for limit in positive(value))


def positive(value) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [number for number in values
            if isinstance(number, int) and not isinstance(number, bool) and number > 0]


def most_positions(llm: nn.Module) -> int | None:
    """How many positions a language model was made for; None if it does not say."""
    config = llm.config.get_text_config()
    most = positive(getattr(config, "max_position_embeddings", None))
    for rope in ropes(config):
        factor = rope.get("factor")
        before = positive(rope.get("original_max_position_embeddings")) or most
        if isinstance(factor, int | float) and before and rope.get("rope_type") != "default":
            most = most + [int(before[0] * factor)]
    return max(most, default=None)


TOLD = WeakSet()                                # language models of which it has been said


def warn_of_positions(llm: nn.Module, positions: int, what: str) -> None:
    """One warning, when something needs more positions than a language model was made for.

    what        what needs them, or when
    """
    most = most_positions(llm)
    if most is None or positions <= most or llm in TOLD:
        return
    TOLD.add(llm)
    say_once(f"warning: {what} needs more than the {most} positions for which the language model "
             f"was made (max_position_embeddings): beyond these it may compute worse")


def ropes(config) -> list[dict]:
    """The settings of a model's rotations: one, or one for each kind of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in given.values() if isinstance(rope, dict)]
    return nested or [given]


def rope_type(model: nn.Module) -> str:
    """How a model of transformers rotates its keys: of several ways, one that depends on the
    context's length.
    """
    kinds = sorted({rope.get("rope_type", "default") for rope in ropes(model.config)})
    return next((kind for kind in kinds if kind not in STATIC), kinds[0])


# ---------------------------------------------------------------------- what the model does

def kind_of(layer: nn.Module) -> tuple:
    """What two layers must have in common, to be asked once: modules, and their plain settings."""
    kinds = []
    for module in layer.modules():
        plain = {name: value for name, value in vars(module).items()
                 if isinstance(value, bool | int | float | str) and name not in OF_ONE_LAYER}
        kinds.append((type(module), tuple(sorted(plain.items()))))
    return tuple(kinds)


OF_ONE_LAYER = ("layer_idx", "layer_id", "idx", "layer_number")


@torch.no_grad()
def difference_of(llm: nn.Module) -> str | None:
    """What a model does that a narrator does not, with four tokens; None: nothing."""
    from transformers import AttentionInterface, DynamicCache
    positions = torch.arange(4, device=llm.device)
    ids = positions + len(llm.get_input_embeddings().weight) // 2           # any words

    # by itself: the last three of four tokens alone
    llm.set_attn_implementation("eager")
    of_head = []

    def enlarge(head, inputs, logits: Tensor) -> Tensor:
        of_head.append(30 * logits)                         # a cap shows on large numbers alone
        return of_head[-1]

    hook = llm.lm_head.register_forward_hook(enlarge)
    try:
        own = llm(input_ids=ids[None, 1:], position_ids=positions[None, 1:], use_cache=False)
    finally:
        hook.remove()
    own = own.logits[0].float() / 30
    if not own.isfinite().all():
        return not_finite(llm)
    if not torch.allclose(own, of_head[-1][0].float() / 30, rtol=1e-2, atol=1e-3):
        return f"computes something else: it scales or caps its logits, a narrator does not; {ADVICE}"

    asked = {}

    def attend(*args, **options):
        asked.update({name: value for name, value in options.items() if value is not None})
        return attention.by_mask_or_segments(*args, **options)

    AttentionInterface.register("asked", attend)
    llm.set_attn_implementation("asked")

    def run(begin: int, end: int, **options) -> Tensor:
        """The logits of some of the tokens, computed as in a narrator."""
        e = llm.get_input_embeddings()(ids[begin:end])
        output = llm.model(inputs_embeds=e[None], position_ids=positions[None, begin:end],
                           **options)
        return llm.lm_head(output.last_hidden_state[0]).float()

    # training: all four, and the last three do not see the first
    seen = torch.tensor([[True, False, False, False], [False, True, True, True]])
    segments = attention.Segments([0, 1, 1, 1], seen, llm)
    trained = run(0, 4, segments=segments, use_cache=False)[1:]
    # streaming: one token, then the two others, with a cache
    causal = torch.ones(3, 3, dtype=torch.bool, device=llm.device).tril()[None, None]
    past = {name_of_cache(llm.model): DynamicCache(), "use_cache": True}
    begun = run(1, 2, **past)
    went_on = run(2, 4, attention_mask=causal[..., 1:, :], **past)
    streamed = torch.cat([begun, went_on])

    attention.install(llm)
    if "sliding_window" in asked and dict(limits_of(llm.config.get_text_config())):
        del asked["sliding_window"]                         # `check_layers` has told of it
    unknown = sorted(asked.keys() - OPTIONS)
    if unknown:
        return (f"computes something else: it asks attention for {', '.join(unknown)}, which a "
                f"narrator has not; {ADVICE}")
    both = torch.stack([trained, streamed])
    if not both.isfinite().all():
        return not_finite(llm)
    tolerance = 1e-3 if llm.dtype == torch.float32 else 0.1
    if (both - own).norm() > tolerance * own.norm():
        return (f"computes something else with the caches and masks of a narrator than by itself; "
                f"{ADVICE}")
    return None


def not_finite(llm: nn.Module) -> str:
    """Of numbers that are not finite: why, and what helps."""
    if llm.dtype == torch.float16:
        return ("has logits that are not finite: its numbers overflow in float16; give --dtype "
                "bfloat16 or float32")
    return "has logits that are not finite; are its weights damaged? Get them again"


def name_of_cache(module: nn.Module) -> str:
    """The name of the argument by which a module of transformers takes its cache."""
    arguments = inspect.signature(type(module).forward).parameters
    # before transformers 5.24 it was `past_key_values`
    return "cache" if "cache" in arguments else "past_key_values"
