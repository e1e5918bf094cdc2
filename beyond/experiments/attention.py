"""What true narrations attend to (Fig. 10).

    python -m beyond.experiments.attention --data toy --model toy/checkpoint
"""
import argparse
import json

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

import narrator as nar
from beyond.commands.evaluate_command import narrator_and_samples
from evaluate import true_narrations
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import (
    DEFAULT_MODEL, Parser, data_options, json_option, model_options,
)
from support.common.progress import progress

GROUPS = ("past narrations", "current frames", "past frames", "memory tokens")


@torch.no_grad()
def attention(narrator: nar.Narrator, x: Tensor,
              narrations: nar.Narrations) -> np.ndarray:
    """Attention of the last layer, mean over heads, from the tokens that predict a narration to
    four groups of tokens.

    x [T, J, D]; narrations: (frame, ids)
    Returns the means over all narrations but the first, [4], in the order of GROUPS. The rest goes
    to the prompt and to the narration itself.
    """
    config = narrator.config
    tokens = narrator.layout.sequence(narrations)
    mask = nar.attention_mask(tokens, config.last_k, config.prune)
    weights, labels = last_attention(narrator, x, narrations, mask)            # [L, L], [L]
    segment = torch.tensor(tokens.segment)
    number = torch.tensor(tokens.number)
    ids = torch.tensor(tokens.ids)
    is_frame = ids == nar.FRAME
    shares = []
    for n in range(1, len(narrations)):
        rows = weights[(labels != -100) & (segment == n) & (number == n)]
        groups = [
            (number >= 0) & (number < n),
            is_frame & (segment == n),
            is_frame & (segment < n),
            (ids <= nar.MEMORY) & (segment == n),
        ]
        shares.append([rows[:, group].sum(1).mean().item() for group in groups])
    return np.mean(shares, axis=0)


def last_attention(narrator: nar.Narrator, x: Tensor, narrations: nar.Narrations,
                   mask: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer's attention in the parallel form, mean over heads [L, L], and the labels [L].

    transformers' layers call the function that is registered here, in place of their own attention.
    """
    seen = mask.to(narrator.llm.device).log()                  # log 1 = 0, log 0 = -inf
    latest = {}

    def watched(module, query: Tensor, key: Tensor, value: Tensor, *_, scaling: float, **options):
        attended, weights = eager_attention_forward(module, query, key, value, seen, scaling)
        latest["weights"] = weights[0].float().mean(0).cpu()   # [1, h, L, L]; the last layer's stay
        return attended, None

    AttentionInterface.register("watched", watched)
    before = narrator.llm.config._attn_implementation
    narrator.llm.set_attn_implementation("watched")
    try:
        _, labels, _ = narrator(x, narrations)
    finally:
        narrator.llm.set_attn_implementation(before)
    return latest["weights"], labels


def run_attention(args: argparse.Namespace) -> None:
    narrator, vision, samples = narrator_and_samples(args)
    if getattr(narrator, "routing", None):
        raise BadData(f"{args.model}: in a layer with a router, few tokens attend; its attention "
                      "cannot be compared")
    shares = []
    for sample in progress(samples, args.model, unit="video", leave=False):
        x = torch.stack(list(sample.tokens(vision)))                           # [T, J, D]
        narrations = true_narrations(narrator, sample)
        if len(narrations) > 1:
            shares.append(attention(narrator, x, narrations))
    if not shares:
        raise BadData(f"{args.model}: no video has a narration after the first frame's")
    means = dict(zip(GROUPS, np.mean(shares, axis=0).tolist()))
    if args.json:
        print(json.dumps(means))
        return
    print("attention of the last layer while it predicts true narrations")
    print_table([("share", means)])


def main() -> None:
    parser = Parser(prog="python -m beyond.experiments.attention",
                    description="What true narrations attend to.")
    data_options(parser)
    model_options(parser, nar.Config, default=DEFAULT_MODEL)
    json_option(parser)
    args = parser.parse_args()
    command_line(lambda: run_attention(args))


if __name__ == "__main__":
    main()
