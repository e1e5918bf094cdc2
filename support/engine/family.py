"""Which language models can be narrators (not in the paper): those that compute with the masks and
caches of a narrator what they compute by themselves.

Their own logits of a few tokens are compared with ours once, when a narrator is made. So heads that
scale or cap their logits, attention that ignores a mask, layers of other kinds and pasts that are
more than keys and values are found, whatever a family is called.
"""
from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line, say_once
from support.engine import attention

# rotations that do not depend on the length of the context
STATIC = ("default", "linear", "llama3", "yarn")


def adapt(llm: nn.Module, prune: bool) -> None:
    """Let a language model of transformers attend as narrators need it. BadData if it cannot.

    prune       whether anything is ever removed from the context: some models can be narrators
                only where it is not (VideoLLM-online)
    """
    family = type(llm).__name__
    advice = "use a Llama-like language model"
    layers = getattr(getattr(llm, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(llm, "lm_head"):
        raise BadData(f"{family} is built differently (without model.layers or lm_head); {advice}")
    rotations = rope_type(llm.model)
    if rotations not in STATIC:
        say_once(f"warning: the rotations of {family} ({rotations}) depend on the length of the "
                 f"context: on long videos, streaming differs from training")
    if llm.device.type == "meta":                       # without numbers there is nothing to try
        attention.install(llm)
        return
    training = llm.training
    llm.eval()                                              # no dropout
    # One layer of each kind is asked, so that it takes no time with large models.
    llm.model.layers = nn.ModuleList({kind_of(layer): layer for layer in layers}.values())
    try:
        own = own_logits(llm, prune)
        attention.install(llm)
        same = computes_the_same(llm, own, prune)
    except Exception as error:  # models that were written for other caches and masks raise anything
        raise BadData(f"{family} does not run with the caches and masks of a narrator "
                      f"({first_line(error)[:120]}); {advice}") from error
    finally:
        llm.model.layers = layers
        llm.train(training)
    if not same:
        raise BadData(f"{family} computes something else with the caches and masks of a narrator "
                      f"than by itself; {advice}")


def kind_of(layer: nn.Module) -> tuple[type, ...]:
    return tuple(type(module) for module in layer.modules())


def words_to_try(llm: nn.Module) -> Tensor:
    """Ids of four tokens; any words."""
    return torch.arange(4, device=llm.device) + len(llm.get_input_embeddings().weight) // 2


@torch.no_grad()
def own_logits(llm: nn.Module, prune: bool) -> Tensor:
    """The model's logits with its own attention; of the last three tokens if `prune`."""
    first = 1 if prune else 0
    positions = torch.arange(4, device=llm.device)
    llm.set_attn_implementation("eager")
    output = llm(input_ids=words_to_try(llm)[None, first:], position_ids=positions[None, first:],
                 use_cache=False)
    return output.logits[0].float()


@torch.no_grad()
def computes_the_same(llm: nn.Module, own: Tensor, prune: bool) -> bool:
    """Compare our logits with its `own`, after a token that is removed from the context if `prune`.
    """
    from transformers import DynamicCache
    first = 1 if prune else 0
    positions = torch.arange(4, device=llm.device)
    ids = words_to_try(llm)

    def run(begin: int, end: int, **options) -> Tensor:
        """The logits of some of the tokens, computed as in a narrator."""
        e = llm.get_input_embeddings()(ids[begin:end])
        places = positions[None, begin:end]
        output = llm.model(inputs_embeds=e[None], position_ids=places, **options)
        return llm.lm_head(output.last_hidden_state[0]).float()

    # training: with a mask, and segment by segment
    mask = torch.ones(4, 4, dtype=torch.bool, device=llm.device).tril()
    mask[first:, :first] = False
    by_mask = run(0, 4, attention_mask=mask[None, None], use_cache=False)
    segments = [(piece, piece) for piece in positions.split([first, 4 - first]) if len(piece)]
    by_segments = run(0, 4, segments=segments, use_cache=False)
    # streaming: one token, and the others, with a cache from which the first one was removed
    past = with_cache(llm.model, DynamicCache())
    begun = run(first, first + 1, **past,
                attention_mask=mask[None, None, first:first + 1, first:first + 1])
    went_on = run(first + 1, 4, **past, attention_mask=mask[None, None, first + 1:, first:])

    tolerance = 1e-3 if llm.dtype == torch.float32 else 0.1
    for ours in (by_mask[first:], by_segments[first:], torch.cat([begun, went_on])):
        if (ours - own).norm() > tolerance * own.norm():
            return False
    return True


def with_cache(module: nn.Module, cache) -> dict:
    """The arguments that give a module of transformers its cache; None: it has none."""
    return {cache_name(type(module)): cache, "use_cache": cache is not None}


@functools.cache
def cache_name(kind: type[nn.Module]) -> str:
    """`cache` since transformers 5.24, before that `past_key_values`."""
    arguments = inspect.signature(kind.forward).parameters
    return "cache" if "cache" in arguments else "past_key_values"


def rope_type(model: nn.Module) -> str:
    """The kind of rotations that a model of transformers gives its keys."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default")
