"""Figures: attention (Fig. 10), the timeline, how memories forget."""
import shutil
from functools import partial

import numpy as np
import pytest
import torch

import narrator as nar
from experiments import figures, forgetting, timeline
from experiments.knowledge import AGES
from helpers import ROOT, TOY, small, tiny, video
from support.files.narrations import Sentence
from test_evaluate import command, write

run_figures = partial(command, main=figures.main)


@pytest.mark.parametrize("changes, past_frames, memory", [
    ({}, False, True),
    ({"memory": "none", "prune": False}, True, False),
    ({"memory": "none", "last_k": 0, "narration_memory": 4}, False, True),
])
def test_attention_is_where_it_may_be(changes, past_frames, memory):
    """Shares of the whole; none on past frames that are pruned, some on memory where there is one.
    """
    model = tiny(**changes)
    shares = figures.attention(model, *video(model))
    assert shares.shape == (4,)
    assert (shares >= 0).all() and shares.sum() <= 1
    assert (shares[2] > 0) == past_frames
    assert (shares[3] > 0) == memory


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3"])
def test_attention_is_that_of_the_models_own_weights(family):
    """As transformers returns it for the mask of Fig. 4, with norms of queries and keys (Qwen3),
    one matrix for queries, keys and values (Phi3)."""
    llm = small(family, pad_token_id=0)
    for p in llm.parameters():
        p.data *= 4                            # attention far from uniform
    model = tiny(llm=llm, last_k=2)
    x, narrations = video(model)
    inputs = {}

    def keep_inputs(module, arguments, options):
        inputs.update(options)

    hook = llm.model.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    tokens = model.layout.sequence(narrations)
    mask = nar.attention_mask(tokens, 2)
    with torch.no_grad():
        found, _ = figures.last_attention(model, x, narrations, mask)
    hook.remove()

    llm.set_attn_implementation("eager")
    with torch.no_grad():
        output = llm.model(
            inputs_embeds=inputs["inputs_embeds"],
            position_ids=inputs["position_ids"],
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None],
            use_cache=False,
            output_attentions=True,
        )
    assert torch.allclose(found, output.attentions[-1][0].mean(0), atol=1e-4)


def test_attention_command():
    table = run_figures("attention", "--data", "toy", "--limit", 1, "--model", TOY, TOY)
    lines = table.splitlines()[2:]                         # below the title and the models
    assert [line[:20].strip() for line in lines] == list(figures.GROUPS)
    shares = [[float(number) for number in line[20:].split()] for line in lines]
    assert all(one == other for one, other in shares)
    assert shares[2][0] == 0 and shares[3][0] > 0          # past frames, memory tokens


def test_wrong_sentences():
    """Of the true segment that fits best; without sentences on one side nothing is wrong."""
    true = [Sentence(2.0, "a"), Sentence(4.0, "b"), Sentence(9.0, "c")]
    predicted = [Sentence(2.5, "a"), Sentence(8.5, "b"), Sentence(9.0, "c")]
    assert timeline.wrong_sentences(predicted, true) == [False, True, False]
    assert timeline.wrong_sentences(predicted, []) == [False] * 3
    assert timeline.wrong_sentences([Sentence(1.0, "")], true) == [False]


def test_the_timeline_of_a_video(tmp_path):
    """It does not replace the truth, which stands beside the video."""
    for name in ("kitchen.mp4", "kitchen.json"):
        shutil.copy(ROOT / "toy" / name, tmp_path)
    film = tmp_path / "kitchen.mp4"
    error = run_figures("timeline", film, "--png", tmp_path / "kitchen.json", ok=False)
    assert "kitchen.json: is given twice" in error
    run_figures("timeline", film, "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    write(tmp_path / "kitchen.json", {"a": [], "b": []})
    error = run_figures("timeline", film, "--png", tmp_path / "a.png", ok=False)
    assert "no narrations of kitchen" in error


def test_how_memories_forget(tmp_path):
    """The means are those of the page's tables."""
    read_out, written, by_length = forgetting.forgetting().values()
    means = np.round([np.mean(numbers) for numbers in read_out["CLAM"]], 3)
    assert len(means) == len(AGES) and means[:3].tolist() == [0.890, 0.831, 0.632]
    baseline = "VideoLLM-online (keeps all frames)"
    assert baseline in written and baseline not in read_out
    assert [len(numbers) for numbers in by_length["CLAM"]] == [3, 3, 3, 3]
    run_figures("forgetting", "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
