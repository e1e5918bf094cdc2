"""Which language models can be narrators (not in the paper): those that compute with the masks and
caches of a narrator what they compute by themselves.

A model is asked once, when a narrator is made of it: what its settings say of its layers and of the
rotations of its keys; and whether the logits of a few tokens, computed as in training and as in a
stream, are its own. (What its layers ask of attention beside softmax(q k^T / sqrt(c)) v, such as
windows, caps and sinks, is an error there.) What could make a difference is refused, whatever the
family is called.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line, say_once
from support.engine import attention

# kinds of layers that see all tokens before them
LAYERS = ("full_attention", "attention")
# rotations that do not depend on the length of the context
ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")


def check_family(llm: nn.Module) -> None:
    """BadData if a language model of transformers computes something else with the masks and caches
    of a narrator than by itself.
    """
    reason = of_settings(llm)
    if reason is None:
        try:
            reason = difference_of(llm.eval())              # no dropout
        except Exception as error:      # models for other caches and masks raise anything
            reason = f"does not run as a narrator ({first_line(error)[:120]})"
    if reason:
        raise BadData(f"{type(llm).__name__} {reason}; use a Llama-like language model")


def of_settings(llm: nn.Module) -> str | None:
    """What the settings of a model have that a narrator has not."""
    layers = getattr(getattr(llm, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(llm, "lm_head"):
        return "is built differently (without model.layers or lm_head)"
    config = llm.config.get_text_config()
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in LAYERS:
            return f"has layers that do not see all tokens ({kind})"
    given = getattr(config, "rope_parameters", None) or {}
    # the settings of all layers, or of each kind of layers
    rotations = [part for part in given.values() if isinstance(part, dict)] or [given]
    for rotation in rotations:
        kind = rotation.get("rope_type", "default")
        if kind not in ROTATIONS:
            return f"has rotations that depend on the length of the context ({kind})"
    return None


@torch.no_grad()
def difference_of(llm: nn.Module) -> str | None:
    """What a model does that a narrator does not, with four tokens; None: nothing."""
    from transformers import DynamicCache
    positions = torch.arange(4, device=llm.device)
    ids = positions + len(llm.get_input_embeddings().weight) // 2           # any words

    # by itself: the last three of four tokens alone
    llm.set_attn_implementation("eager")
    own = llm(input_ids=ids[None, 1:], position_ids=positions[None, 1:], use_cache=False)
    own = own.logits[0].float()
    attention.install(llm)

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
    past = {name_of_cache(llm.model): DynamicCache(), "use_cache": True}
    begun = run(1, 2, **past)
    seen = torch.tensor([[True, True, False], [True, True, True]])
    went_on = run(2, 4, attention_mask=attention.mask_of_rows(seen, llm), **past)
    streamed = torch.cat([begun, went_on])

    both = torch.stack([trained, streamed])
    if not both.isfinite().all() or not own.isfinite().all():
        return f"has logits that are not finite in {llm.dtype} (give --dtype bfloat16 or float32)"
    tolerance = 1e-3 if llm.dtype == torch.float32 else 0.1
    if (both - own).norm() > tolerance * own.norm():
        return "computes something else with the caches and masks of a narrator than by itself"
    return None


def name_of_cache(module: nn.Module) -> str:
    """The name of the argument by which a module of transformers takes its cache."""
    arguments = inspect.signature(type(module).forward).parameters
    # before transformers 5.24 it was `past_key_values`
    return "cache" if "cache" in arguments else "past_key_values"


# ---------------------------------------------------------------------- positions

def most_positions(llm: nn.Module) -> float:
    """How many positions a language model was made for; infinity, if it does not say."""
    most = getattr(llm.config.get_text_config(), "max_position_embeddings", None)
    return most or float("inf")


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
        say_once(f"warning: {what} needs more than the {most} positions for which the language "
                 f"model was made (max_position_embeddings): beyond these it may compute worse")
