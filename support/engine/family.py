"""Which language models can be narrators (not in the paper): where training is streaming.

Training hides removed tokens by `segments` (support/engine/attention.py); streaming removes them from
the cache. Both are tried once with three tokens: some families do not hand `segments` on to their
attention, some carry the past in other ways than by keys and values, some are built differently.
"""
from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor, nn

from support.common.errors import BadData, first_line
from support.engine import attention

# rotations that do not depend on the length of the context
STATIC = ("default", "linear", "llama3", "yarn")


def adapt(llm: nn.Module, pruned: bool) -> None:
    """Let a language model attend as narrators need it. BadData if its family cannot be used.

    pruned: whether anything is ever removed from the context. A model that knows only a causal mask
    can be trained without pruning (VideoLLM-online), but not with it. It is not streamed with
    pruning either: nobody could have trained such a narrator.
    """
    family = type(llm).__name__
    advice = "use a Llama-like language model"
    layers = getattr(getattr(llm, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(llm, "lm_head"):
        raise BadData(f"{family} is built differently (without model.layers or lm_head); {advice}")
    try:
        attention.install(llm)
        if llm.device.type != "meta":
            problem = difference(llm, pruned)
        else:
            problem = None                                          # nothing can be computed
    except BadData:
        raise
    except Exception as error:  # models that were written for other caches and masks raise anything
        raise BadData(f"{family} does not run with the caches and masks of a narrator "
                      f"({first_line(error)[:120]}); {advice}") from error
    if problem:
        raise BadData(f"{family} {problem}; {advice}")
    warn_of_rotations(llm)


def difference(llm: nn.Module, pruned: bool) -> str | None:
    """In what training and streaming of three tokens differ, in words; None: in nothing.

    One layer of each kind is asked, so that it takes no time with large models.
    """
    layers, training = llm.model.layers, llm.training
    first = {}
    for layer in layers:
        kind = tuple(type(module) for module in layer.modules())
        first.setdefault(kind, layer)
    llm.model.layers = nn.ModuleList(first.values())
    llm.eval()                                                      # no dropout
    try:
        return difference_of_few_layers(llm, pruned)
    finally:
        llm.model.layers = layers
        llm.train(training)


def difference_of_few_layers(llm: nn.Module, pruned: bool) -> str | None:
    """See `difference`. If `pruned`, token 0 is hidden from the others; streaming is without it."""
    generator = torch.Generator().manual_seed(0)
    e, direction = (torch.randn(3, llm.config.hidden_size, generator=generator) for _ in range(2))
    # Beside weights in int8, the embeddings are in bf16, whatever the layers are in.
    dtype = next(llm.model.layers.parameters()).dtype
    e = (0.02 * e).to(llm.device, dtype).requires_grad_()
    places = torch.arange(3)
    parts = None
    if pruned:
        rows = [(places[:1], places[:1]), (places[1:], places[1:])]
        parts = [(queries.to(llm.device), keys.to(llm.device)) for queries, keys in rows]
    with torch.enable_grad():
        trained = llm.model(inputs_embeds=e[None], position_ids=places[None].to(llm.device),
                            use_cache=False, segments=parts).last_hidden_state[0]
        if pruned:
            later = (trained[1:].float() * direction[1:].to(llm.device)).sum()
            gradient, = torch.autograd.grad(later, e)
            # A hidden token has no influence at all: whatever the dtype, its gradient is exactly 0
            # (or NaN, if weights are damaged; streams notice that).
            if gradient[0].nan_to_num(0, 0, 0).any():
                return "does not hide from its attention what is removed from the context"
    streamed = token_by_token(llm, e.detach(), places, 1 if pruned else 0)
    distance = (trained[2] - streamed).detach().float().norm()
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    if distance > tolerance * streamed.float().norm():
        return "computes one token after the other differently from all at once"
    if isinstance(llm.lm_head, nn.Linear):      # it may share the embeddings' weight
        streamed = streamed.to(llm.lm_head.weight.dtype)
    words = llm.lm_head(streamed[None]).shape[-1]
    if words != llm.config.vocab_size:
        return f"has {words} numbers as its answer, and {llm.config.vocab_size} words"
    return None


@torch.no_grad()
def token_by_token(llm: nn.Module, e: Tensor, places: Tensor, begin: int) -> Tensor:
    """The last hidden state [D_lm] of the last token, streamed in two passes from `begin` on."""
    from transformers import DynamicCache
    cache = DynamicCache()
    for new in (places[begin:begin + 1], places[begin + 1:]):
        positions = new.to(llm.device)
        mask = places[begin:int(new[-1]) + 1] <= new[:, None]
        hidden = llm.model(inputs_embeds=e[None, positions], position_ids=positions[None],
                           attention_mask=mask[None, None].to(llm.device), use_cache=True,
                           cache=cache).last_hidden_state
    return hidden[0, -1]


# ---------------------------------------------------------------------- rotations

def rope_type(model: nn.Module) -> str:
    """The kind of rotations that a model of transformers gives its keys."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default")


def warn_of_rotations(llm: nn.Module) -> None:
    """One line on stderr, once, if rotations depend on the length of the context.

    Such a model is not refused: up to the position that is named, its training is its streaming.
    """
    config, kind = llm.config, rope_type(llm.model)
    if kind in STATIC:
        return
    limit = config.max_position_embeddings
    if kind == "longrope":
        trained = config.rope_parameters.get("original_max_position_embeddings")
        limit = trained or getattr(config, "original_max_position_embeddings", limit)
    warn(f"warning: the rotations of {type(llm).__name__} ({kind}) depend on the length of the "
         f"context: beyond position {limit}, streaming differs from training")


@cache
def warn(text: str) -> None:
    print(text, file=sys.stderr)
