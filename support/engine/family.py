"""Which language models can be narrators (not in the paper): those that compute with the masks and
caches of a narrator what they compute by themselves.

Their own logits of a few tokens are compared with ours once, when a narrator is made. So heads that
scale or cap their logits, attention that ignores a mask, layers of other kinds and pasts that are
more than keys and values are found, whatever a family is called.
"""
from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line, say_once
from support.engine import attention

# rotations that do not depend on the length of the context
STATIC = ("default", "linear", "llama3", "yarn")


def check_family(llm: nn.Module) -> None:
    """BadData if a language model of transformers computes something else with the masks and caches
    of a narrator than by itself.
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
        return
    training = llm.training
    llm.eval()                                              # no dropout
    # One layer of each kind is asked, so that it takes no time with large models.
    llm.model.layers = nn.ModuleList({kind_of(layer): layer for layer in layers}.values())
    try:
        same = computes_the_same(llm)
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


@torch.no_grad()
def computes_the_same(llm: nn.Module) -> bool:
    """Whether a model gives three tokens the same logits with its own attention and with ours."""
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
    causal = torch.ones(3, 3, dtype=torch.bool, device=llm.device).tril()[None, None]
    past = {name_of_cache(llm.model): DynamicCache(), "use_cache": True}
    begun = run(1, 2, **past)
    went_on = run(2, 4, attention_mask=causal[..., 1:, :], **past)
    streamed = torch.cat([begun, went_on])

    tolerance = 1e-3 if llm.dtype == torch.float32 else 0.1
    difference = torch.stack([trained, streamed]) - own
    return bool(difference.norm() <= tolerance * own.norm())


def name_of_cache(module: nn.Module) -> str:
    """The name of the argument by which a module of transformers takes its cache."""
    arguments = inspect.signature(type(module).forward).parameters
    # before transformers 5.24 it was `past_key_values`
    return "cache" if "cache" in arguments else "past_key_values"


def rope_type(model: nn.Module) -> str:
    """The kind of rotations that a model of transformers gives its keys."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default")
