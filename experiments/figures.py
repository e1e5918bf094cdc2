"""Figures of a stream: where a narration looks (paper App. C.2), and one video as a timeline.

What is drawn is computed here or comes from stream.py's trace; evaluate.py has the commands.
"""
import numpy as np
import torch
from torch import Tensor

from support import captions as metrics
import narrator as nar
from support.common import pyplot, save_figure
from support.captions import Told

# ---------------------------------------------------------------------- attention (App. C.2)

GROUPS = ("past narrations", "current frames", "past frames", "memory tokens")


@torch.no_grad()
def attention(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]]) -> np.ndarray:
    """Attention of the last layer, mean over heads, from the tokens that predict a narration to four groups of tokens.

    Mean over all narrations but the first -> [4], as in GROUPS; what is left goes to the prompt and the narration itself.
    """
    seen, layer = {}, narrator.llm.model.layers[-1].self_attn
    hook = layer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    try:
        _, labels, tokens = narrator(x, narrations)
    finally:
        hook.remove()
    weights = weights_of(layer, seen["hidden_states"], seen["position_embeddings"], seen["attention_mask"])      # [L, L]
    segment, number, ids = (torch.tensor(y, device=weights.device) for y in (tokens.segment, tokens.number, tokens.ids))
    rows = []
    for n in range(1, len(narrations)):
        asking = (segment == n) & (labels != -100) & (number == n)
        past = (number >= 0) & (number < n)
        memory, frames = (ids == nar.MEMORY) & (segment == n), ids == nar.FRAME
        groups = past, frames & (segment == n), frames & (segment < n), memory
        rows.append([weights[asking][:, group].sum(1).mean().item() for group in groups])
    return np.mean(rows, axis=0)


def weights_of(attn, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """softmax(Q K^T) of a Llama attention layer, mean over heads: hidden [1, L, D_lm] -> [L, L]."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv
    split = lambda y: y.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
    q, k = apply_rotary_pos_emb(split(attn.q_proj(hidden)), split(attn.k_proj(hidden)), *rotation)
    scores = (q @ repeat_kv(k, attn.num_key_value_groups).transpose(2, 3)).float() * attn.scaling
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)[0].mean(0)


def plot_attention(results: dict[str, dict[str, float]], png: str):
    """Bars of {model: {group: share}}."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3))
    for i, (model, row) in enumerate(results.items()):
        axes.bar(np.arange(4) + i * 0.8 / len(results), list(row.values()), 0.8 / len(results), label=model)
    axes.set_xticks(np.arange(4) + 0.4 - 0.4 / len(results), GROUPS)
    axes.set(ylabel="attention", title="Where a narration looks (last layer)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, png)


# ---------------------------------------------------------------------- timeline

def plot_timeline(trace: list[dict], said: list[Told], true: list[Told], fps: float, png: str):
    """True and predicted segments, p([SKIP]) with its thresholds, the cache; `trace` as stream.py writes it."""
    plt = pyplot()
    heights = [3.2] * bool(true) + [3.2, 1.2, 1.0]                                    # inches
    width = min(60, max(10, 0.28 * max(len(said), len(true))))
    figure, axes = plt.subplots(len(heights), 1, figsize=(width, sum(heights)), sharex=True,
                                gridspec_kw={"height_ratios": heights, "hspace": 0.08})
    for axis, title, narrations, colour in zip(axes, ["truth"] * bool(true) + ["narrated"], [true] * bool(true) + [said],
                                               ["#4c9be8"] * bool(true) + ["#e8a04c"]):
        for i, (low, high) in enumerate(metrics.segments([y.time for y in narrations])):
            axis.axvspan(low, high, color=colour, alpha=0.25 + 0.25 * (i % 2), linewidth=0)
            if high - low >= 2 / fps:                                                 # there is room for a line
                axis.text((low + high) / 2, 0.03, narrations[i].text, rotation=90, ha="center", va="bottom", fontsize=7,
                          transform=axis.get_xaxis_transform(), clip_on=True)
        axis.set(ylabel=title, yticks=[])
    skip, cache = axes[-2:]
    decided = [row for row in trace if row["p_skip"] is not None]
    at = [(row["frame"] + 1) / fps for row in decided]
    skip.step(at, [row["theta"] for row in decided], where="mid", color="#b0b0b0", label="threshold")
    skip.plot(at, [row["p_skip"] for row in decided], color="#2060a0", label="p([SKIP])")
    skip.plot([a for a, row in zip(at, decided) if row["narrate"]], [row["p_skip"] for row in decided if row["narrate"]], "o",
              color="#c03020", markersize=3, label="narrate")
    skip.set(ylabel="trigger", ylim=(-0.05, 1.05))
    every = [(row["frame"] + 1) / fps for row in trace]
    cache.stackplot(every, [row["text_tokens"] for row in trace], [row["visual_tokens"] for row in trace],
                    labels=["text", "current segment"], colors=["#e8c08c", "#9cc8f0"], step="pre")
    for axis in (skip, cache):
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    cache.set(ylabel="cache, tokens", xlabel="seconds", xlim=(0, every[-1]))
    save_figure(figure, png)
