"""beyond/streams/ahead.py: frames and words that are read ahead change nothing but the number of passes."""
import pytest
import torch

import stream
from beyond.baselines import context_class
from helpers import assert_same_stream, grouped, lively, narrate, small, tiny, video
from beyond.streams.bounds import open_stream
from support.engine.compiled import compile_narrator

VARIANTS = {
    "FlowNar-C": {"last_k": 2},
    "published": {"readout": "cls", "keep_newline": True, "last_k": 1},
    "VideoLLM-MoD": {"memory": "none", "prune": False, "mod_keep": 0.4},
    "Table 15": {"last_k": 0, "narration_memory": 4},
}


def plain(model, x):
    return list(stream.narrate(model, x, context=context_class(model)(model)))


def count_passes(model):
    lengths = []
    run = model.run

    def counting(e, *arguments, **options):
        lengths.append(len(e))
        return run(e, *arguments, **options)

    model.run = counting
    return lengths


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_stream_in_fewer_passes(variant):
    """With grouped queries; ids, counters, lengths of stream.py alone, p([SKIP]) up to 1e-5."""
    model, x = lively(grouped(), frames=16, **VARIANTS[variant])
    passes = count_passes(model)
    steps = plain(model, x)
    plain_passes = list(passes)
    assert sum(step.narration is not None for step in steps) > 4
    for lookahead, guesses in ((1, 3), (8, 2)):
        passes.clear()
        ahead = narrate(model, x, lookahead=lookahead, guesses=guesses)
        assert_same_stream(list(ahead), steps)
        assert len(passes) < len(plain_passes)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_families(family):
    """Biases (Qwen2), norms of queries and keys (Qwen3); LoRA merged."""
    model, x = lively(small(family), frames=14, last_k=2)
    steps = plain(model, x)
    model.merge()
    assert_same_stream(list(narrate(model, x, lookahead=4)), steps, tolerance=1e-4)


def test_frames_are_taken_ahead_only_as_asked():
    model = tiny(max_new_tokens=2)
    x, _ = video(model, 8)
    for context, lookahead in (
        (stream.Context(model), 1),
        (open_stream(model, guesses=0), 1),
        (open_stream(model, lookahead=4, guesses=0), 4),
    ):
        taken = []

        def source():
            for t, frame in enumerate(x):
                taken.append(t)
                yield frame

        for step in narrate(model, source(), given={0: [5], 4: [6]}, context=context):
            assert step.frame <= taken[-1] < step.frame + lookahead


def test_a_stream_without_frames():
    assert list(narrate(tiny(), iter([]), lookahead=4)) == []


@pytest.mark.slow
def test_compiled():
    model, x = lively(small("Llama", num_hidden_layers=1), frames=10, last_k=2)
    steps = plain(model, x)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compile_narrator(model)
    assert_same_stream(list(narrate(model, x, lookahead=4)), steps)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
