"""Figures: attention (Fig. 10), the timeline, frequent words (Fig. 8), frequency of narrations
(Fig. 9), curves of the results."""
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import transformers

import narrator as nar
from experiments import curves, figures, timeline
from helpers import ROOT, TOY, tiny, video
from support.files.narrations import Sentence
from test_evaluate import command, write
from test_train import epic

run_figures = partial(command, main=figures.main)


# ---------------------------------------------------------------------- attention

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


FAMILIES = {"Llama": {}, "Qwen3": {}, "Phi3": {},
            "SmolLM3": {"num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1}}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_models_own_weights(family):
    """As transformers returns it for the mask of Fig. 4, with norms of queries and keys (Qwen3), a
    layer without rotation (SmolLM3), one matrix for queries, keys and values (Phi3)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = getattr(transformers, family + "Config")(**sizes | FAMILIES[family])
    llm = getattr(transformers, family + "ForCausalLM")(config)
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


def test_attention_command(tmp_path):
    """Of the model's own narrations, or of the true ones; a picture of both models."""
    common = ["attention", "--data", "toy", "--limit", 1, "--json"]
    own = run_figures(*common)
    true = run_figures(*common, "--teacher", "--model", TOY, "--png", tmp_path / "a.png")
    assert own["narrations"] != true["narrations"]
    (shares,) = true["models"].values()
    assert list(shares) == list(figures.GROUPS)
    assert shares["past frames"] == 0 and shares["memory tokens"] > 0
    assert (tmp_path / "a.png").stat().st_size > 5000


# ---------------------------------------------------------------------- timeline

def test_wrong_sentences():
    """Of the true segment that fits best; without sentences on one side nothing is wrong."""
    true = [Sentence(2.0, "a"), Sentence(4.0, "b"), Sentence(9.0, "c")]
    predicted = [Sentence(2.5, "a"), Sentence(8.5, "b"), Sentence(9.0, "c")]
    assert timeline.wrong_sentences(predicted, true) == [False, True, False]
    assert timeline.wrong_sentences(predicted, []) == [False] * 3
    assert timeline.wrong_sentences([Sentence(1.0, "")], true) == [False]


def test_sentences_in_their_cells():
    """In lines where the longest word fits, else upright; nothing in the narrowest."""
    text = "You wipe the cupboard after the green bottle."
    assert timeline.in_lines(text, 9) == (text, 0)
    wrapped, rotation = timeline.in_lines(text, 0.7)
    assert rotation == 0 and wrapped.count("\n") >= 3 and wrapped.split() == text.split()
    assert timeline.in_lines(text, 0.3) == (text, 90)
    assert timeline.in_lines(text, 0.01) == ("", 0)


def test_the_timeline_of_a_video(tmp_path):
    """It replaces no file unasked: not its own picture, nor the truth."""
    for name in ("kitchen.mp4", "kitchen.json"):
        shutil.copy(ROOT / "toy" / name, tmp_path)
    (tmp_path / "kitchen.png").touch()
    film = tmp_path / "kitchen.mp4"
    assert "kitchen.png: is there already; say by --png" in run_figures("timeline", film, ok=False)
    error = run_figures("timeline", film, "--png", tmp_path / "kitchen.json", ok=False)
    assert "kitchen.json: is given twice" in error
    other = write(tmp_path / "two.json", {"a": [], "b": []})
    error = run_figures("timeline", film, "--gt", other, "--png", tmp_path / "a.png", ok=False)
    assert "no narrations of kitchen" in error
    run_figures("timeline", film, "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000


# ---------------------------------------------------------------------- words

def test_words_by_hand():
    texts = [
        "You wash the red cup, and wash it.",
        "C’s son re-heats a Red Cup with the 3 pans",
        "The.",
        "你 wash",
    ]
    assert figures.count_words(texts) == {
        "wash": 3, "red": 2, "cup": 2, "c’s": 1, "son": 1, "re-heats": 1, "pans": 1, "你": 1,
    }


def test_words_need_no_features(tmp_path):
    root = tmp_path / "root"
    epic(root, videos=3)
    for path in root.glob("features*"):
        path.unlink()
    options = ["words", "--data", "ek100", "--root", root, "--json"]
    result = run_figures(*options, "--top", 3)
    assert result["narrations"] == 2 + 3 + 4
    assert result["frequent"] == {"wash": 9, "red": 3, "cup": 3}
    assert result["words"] == 3 * 9 - 1
    first_video = run_figures(*options, "--split", "train", "--limit", 1)
    assert first_video["narrations"] == 2


def test_words_of_the_toy(tmp_path):
    options = ["words", "--data", "toy", "--limit", 2]
    plain = run_figures(*options, "--json", "--png", tmp_path / "w.png")
    second = run_figures(*options, "--json", "--world", "second")
    assert plain["frequent"].keys() != second["frequent"].keys()
    assert plain["frequent"]["kitchen"] == 2
    assert (tmp_path / "w.png").stat().st_size > 5000


@pytest.mark.parametrize("options, says", [
    ("--data ego4d --root .", "ego4d is not in"),
    ("--data nonsense", "unknown data set"),
    ("--data ek100 --world idle", "for the toy"),
])
def test_refusals_of_words(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    assert says in run_figures("words", *options.split(), ok=False)


def test_a_split_without_narrations_gets_one_line(tmp_path):
    (tmp_path / "annotations").mkdir()
    write(tmp_path / "annotations" / "refined_val_narrations.json", {"v": []})
    message = run_figures("words", "--data", "ek100", "--root", tmp_path, ok=False)
    assert "has no narrations" in message


# ---------------------------------------------------------------------- frequency

PACE = {"narrations_per_minute": 20.0, "segment_s": 3.0,
        "true_narrations_per_minute": 15, "true_segment_s": 4.0}


def test_frequency_of_several_settings(tmp_path):
    true = [{"time": 30.0, "text": "You look."}, {"time": 60, "text": "You wash."}]
    predicted = [{"time": time, "text": "You look."} for time in (10, 20, 30, 60)]
    gt = write(tmp_path / "t.json", {"v": true})
    pred = write(tmp_path / "p.json", {"v": predicted})
    printed = command("score", "--pred", pred, "--gt", gt, "--json")           # its last line
    result = tmp_path / "result.json"
    result.write_text("videos  1\n" + json.dumps(printed) + "\n")
    silent = write(tmp_path / "silent.json",
                   printed | {"narrations_per_minute": 0.0, "segment_s": None})
    table = run_figures("frequency", f"dynamic={result}", silent, "--png", tmp_path / "f.png")
    assert [line.split() for line in table.splitlines()[:5]] == [
        ["dynamic", "silent"],
        ["narrations", "per", "minute", "4.000", "0.000"],
        ["segment", "s", "15.000", "-"],
        ["true", "narrations", "per", "minute", "2.000", "2.000"],
        ["true", "segment", "s", "30.000", "30.000"],
    ]
    assert (tmp_path / "f.png").stat().st_size > 5000


@pytest.mark.parametrize("text", [
    "", "nonsense", "[]", "3", '{"segment_s": 3}', json.dumps(PACE | {"segment_s": "x"}),
    json.dumps(PACE) + "\nmore",
])
def test_what_is_no_result_gets_one_line(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    assert "last line must be" in run_figures("frequency", tmp_path / "r.json", ok=False)


def test_an_overwritten_result_gets_one_line(tmp_path):
    good = write(tmp_path / "r.json", PACE)
    assert "is given twice" in run_figures("frequency", good, "--png", good, ok=False)


# ---------------------------------------------------------------------- curves of the results

def test_a_point_for_each_number_of_updates(tmp_path):
    """200 updates an epoch: 800 videos, four at a time. The means are those of the page's table."""
    found = curves.words_by_updates()
    assert [x for x, _ in found["CLAM"]] == [600, 1600, 3200]
    assert [len(numbers) for _, numbers in found["CLAM"]] == [1, 2, 1]
    assert [x for x, _ in found["CLAM on 3,200 videos"]] == [3200]
    _, means = curves.means(found["CLAM"])
    assert np.round(means, 3).tolist() == [0.158, 0.270, 0.465]
    run_figures("learning", "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_how_memories_forget(tmp_path):
    panels = curves.forgetting()
    ages, numbers = zip(*panels["read out"]["CLAM"])
    assert ages == curves.AGES
    assert np.round(np.mean(numbers, 1), 3).tolist()[:3] == [0.890, 0.831, 0.632]
    baseline = "VideoLLM-online (keeps all frames)"
    assert baseline in panels["written"] and baseline not in panels["read out"]
    assert [x for x, _ in panels["by length"]["CLAM"]] == [1, 3, 6, 11]
    run_figures("forgetting", "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
