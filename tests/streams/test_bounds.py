"""Streams without end: restarts of segments, positions turned back, live bounds, the soak."""
import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from unittest import mock

import numpy as np
import pytest
import torch

import narrator as nar
import stream
from baselines.narration_memory import HistoryContext
from baselines.variants import load_narrator
from commands import stream as stream_command
from commands.stream import restarted as restarted_before
from experiments import soak
from helpers import ROOT, TOY, grouped, narrate, record, record_plain, tiny, video
from streams.bounds import (
    LIVE_BOUNDS, decoder_pass, live_bounds, most_tokens, rotate_keys, rotation_frequencies,
)
from streams.bounds import open_stream
from support.common.errors import BadData
from support.files.video import Video
from test_commands import call
from test_passes import assert_same, lively, small, together
from test_equalities import VARIANTS, constant
from test_stream import features

FRAMES = 15
AT = (0, 7, 8, 14)                          # frames with narrations
# restarts are asked for before these frames; frame 8 opens a segment anyway
ASKED = (3, 5, 6, 8, 11, 13)
RESTARTS = [3, 5, 6, 11, 13]                # frames before which there is one
SKIPPED = ("FlowNar-C, k = 10", "one token", "one token, recent")
PRUNED = {
    name: changes for name, changes in VARIANTS.items()
    if changes.get("prune", True) and name not in SKIPPED
}


def restarted(model, x, forced=None, restarts=(), lookahead=1, context=None):
    """The Decisions, with restarts asked for before these frames."""
    if context is None:
        context = open_stream(model)
    steps = []
    for step in narrate(model, x, given=forced, context=context, lookahead=lookahead):
        steps.append(step)
        if step.frame + 1 in restarts:
            context.restart()
    return steps


def was_restarted(model, step) -> bool:
    return restarted_before(step, model.layout)


def traced(model, steps):
    """p([SKIP]) of each frame, and what must be equal to the last bit: (frame, position, text
    tokens, visual tokens, pruned tokens, restarted, ids of the narration)."""
    probabilities = []
    rows = []
    for step in steps:
        probabilities.append(step.p_skip or 0.0)
        ids = step.narration.tokens if step.narration else None
        rows.append((step.frame, step.position, step.text_tokens, step.visual_tokens, step.pruned,
                     was_restarted(model, step), ids))
    return probabilities, rows


def memory_alone(model, x, narrations, restarts):
    """The stream in which CLAM alone saw what a restart removes, put together by hand: the logits
    of all its tokens, by the plain steps of Algorithm 2."""
    if hasattr(model, "narration_memory"):
        context = HistoryContext(model)
    else:
        context = stream.Context(model)
    layout = model.layout
    logits = record_plain(model)
    context.update_memory(x[0])
    context.feed(layout.first(), x[0])
    last = 0                                    # frame of the narration before
    for n, (frame, ids) in enumerate(narrations):
        restarts_of_segment = [t for t in restarts if last + 1 < t <= frame]
        begin = max([last + 1, *restarts_of_segment])
        for t in range(last + 1, frame + 1):
            if t == begin:
                context.read_memory()
            context.update_memory(x[t])
            if t == begin:
                context.feed(layout.opening(n), x[t])
            elif t > begin:
                context.feed(layout.frame(n), x[t])
        stream.generate(context, ids)
        context.read_memory(ids)
        context.discard(n + 1)
        context.segment = n + 1
        last = frame
    del model.run
    return torch.stack(logits)


@pytest.mark.parametrize("name", PRUNED)
def test_restarts(name):
    """A stream with restarts is the stream in which the memory alone saw the frames that were
    removed: the logits of the last narration are the same."""
    model = tiny(llm=grouped(), **PRUNED[name])
    x, narrations = video(model, FRAMES, AT)
    words = len(narrations[-1][1])                          # of the last narration
    with torch.no_grad():
        alone = memory_alone(model, x, narrations, ASKED)
        without_restarts = memory_alone(model, x, narrations, ())
        assert (without_restarts[-words:] - alone[-words:]).abs().max() > 1e-3
        for fast in (False, True):
            if fast:
                model.merge()
            context = open_stream(model)
            logits = record(context)
            steps = restarted(model, x, dict(narrations), ASKED, context=context)
            assert [step.frame for step in steps if was_restarted(model, step)] == RESTARTS
            assert steps[-1].position == len(alone)
            assert (torch.stack(logits[-words:]) - alone[-words:]).abs().max() < 1e-4


@pytest.mark.parametrize("fast, changes", [
    (True, {"last_k": 2}),
    (False, {"last_k": 2}),
    (True, {"readout": "cls"}),
    (True, {"last_k": 0, "narration_memory": 4}),
    (False, {"last_k": 1, "keep_newline": True, "memory": "recent"}),
])
def test_lookahead_and_bounds(fast, changes):
    """Restarts that are due, restarts that are asked for, positions turned back: the same however
    many frames a pass reads, and beside other streams. No slot is left behind."""
    model, x = lively(grouped(), **changes)
    if fast:
        model.merge()
    model.config.max_segment = 1.5
    if "last_k" in changes:
        model.config.max_position = 150
    frame_by_frame = traced(model, restarted(model, x, None, (17, 26)))
    *_, restarts, ids = zip(*frame_by_frame[1])
    assert sum(restarts) > 2
    assert sum(bool(narration) for narration in ids) > 3
    context = open_stream(model)
    assert_same(frame_by_frame, traced(model, restarted(model, x, None, (17, 26), 5, context)))
    assert context.cache.used.sum() == context.cache.text + context.cache.visual
    assert bool(context.bounds.rewound) == ("last_k" in changes)
    if fast:
        sources = [video(model, frames=frames, seed=frames)[0] for frames in (8, 20, 14)]
        beside = together(model, sources, 3, 4)
        for source, shared in zip(sources, beside):
            probabilities, rows = traced(model, restarted(model, source))
            # `together` does not tell restarts
            rows = [(*sizes, ids) for *sizes, _, ids in rows]
            assert_same((probabilities, rows), shared, 1e-4)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_trigger_that_never_fires(lookahead):
    """The cache never holds more tokens than the formula says. After the first restart the buffers
    do not grow, and the counter stays in its range."""
    model = tiny(llm=grouped(), last_k=3, max_segment=5.0, max_new_tokens=6,
                 theta=0.0, theta_low=0.0)
    model.merge()
    x, _ = video(model, 40)
    frames = torch.cat([x, x, x])
    context = open_stream(model)
    used = 0                                                # tokens
    sizes = set()                                           # bytes
    positions = set()
    for step in narrate(model, frames, context=context, lookahead=lookahead):
        used = max(used, int(context.cache.used.sum()))
        assert step.frame in (0, 119) or not step.narration
        if step.frame > 10:
            sizes.add(context.cache.held())
            positions.add(step.position)
    N, layout = 10, model.layout
    assert used <= most_tokens(model, 6, lookahead - 1)
    assert len(sizes) == 1
    assert len(positions) == N + 1                          # and after the last frame's narration
    # the formula, written out: P + (k + 1) (L + A + 2) + M + 3 + 11 (N + what is read ahead)
    P = sum(kind == nar.PROMPT for kind in layout.first().kind)
    text = P + 4 * (6 + len(layout.assistant) + 2)
    assert most_tokens(model, 6, 3) == text + layout.M + 3 + 11 * (N + 3)
    assert context.bounds.restarts == 11


def test_trace_and_last_line_count_restarts(tmp_path, monkeypatch):
    """A checkpoint whose settings have the bounds: "restart" is in the trace where there was one,
    and only there."""
    monkeypatch.chdir(ROOT)
    bounded = tmp_path / "model"
    shutil.copytree(TOY, bounded)
    settings = json.loads((TOY / "narrator.json").read_text())
    settings |= {"max_segment": 2.5, "theta": 0.0}
    (bounded / "narrator.json").write_text(json.dumps(settings))
    source, trace = tmp_path / "x.safetensors", tmp_path / "t"
    features(source, torch.randn(20, 10, 128, generator=torch.Generator().manual_seed(0)))
    for model, restarts in ((bounded, [6, 11, 16]), (TOY, [])):
        code, errors = call(stream_command, [
            str(source), "--model", str(model), "--device", "cpu", "--theta", "0",
            "--theta-low", "0", "--trace", str(trace)])
        assert code == 0
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [row["frame"] for row in rows if "restart" in row] == restarts
        if restarts:
            assert "3 restarts" in errors
        else:
            assert "restart" not in errors


def test_where_a_restart_changes_nothing():
    """Before a frame that opens a segment, before the first one, and where nothing is pruned."""
    for changes, asked in [({}, (0, 1, 8)), ({"memory": "none", "prune": False}, (3, 11))]:
        model = tiny(llm=grouped(), **changes)
        x, narrations = video(model, FRAMES, AT)
        context = open_stream(model)
        context.restart()
        steps = restarted(model, x, dict(narrations), asked, context=context)
        assert not any(was_restarted(model, step) for step in steps)
        assert context.bounds.restarts == 0
        without = narrate(model, x, given=dict(narrations))
        assert traced(model, steps) == traced(model, without)


# ------------------------------------------------------------------ the clock

@pytest.mark.parametrize("lookahead", [1, 3])
def test_clock(lookahead):
    """Frames that a camera dropped: times, the refractory time and the length of a segment follow
    the clock."""
    model = constant(theta=0.7, theta_low=0.5, max_segment=30.0)
    times = [0.3, 1.0, 2.0, 4.3, 4.4, 9.0, 10.0, 50.0, 50.5, 50.8]
    x, _ = video(model, len(times))
    now = None

    def source():
        nonlocal now
        for now, frame in zip(times, x):
            yield frame

    steps = list(narrate(model, source(), lookahead=lookahead, clock=lambda: now))
    narrations = [step.narration for step in steps if step.narration]
    # more than 4 s after the narration before, and the last frame
    assert [narration.frame for narration in narrations] == [0, 4, 5, 7, 9]
    assert [narration.end for narration in narrations] == [0.3, 4.4, 9.0, 50.0, 50.8]
    assert [narration.start for narration in narrations] == [0.0, 0.3, 4.4, 9.0, 50.0]
    # the segment began at 10.0
    assert [step.frame for step in steps if was_restarted(model, step)] == [7]


def test_a_clock_that_stands_still_does_not_unbound_a_segment():
    model = constant(theta=0.0, theta_low=0.0, max_segment=2.0)
    steps = list(narrate(model, video(model, 10)[0], clock=lambda: 1.0))
    assert [step.frame for step in steps if was_restarted(model, step)] == [5, 9]


# ------------------------------------------------------------------ positions

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("fast", [True, False])
def test_turned_keys(rope, fast):
    """With grouped queries: rotated keys of layer 0 are those computed at the new positions. There
    and back changes nothing. What follows a common rotation of all keys is the same."""
    model = tiny(llm=small("Llama", rope_parameters=ROPES[rope]), last_k=2)
    if fast:
        model.merge()
    x, narrations = video(model)
    given = dict(narrations)
    runs = []
    frequencies = rotation_frequencies(model, decoder_pass(model))
    for back in (0, -100):
        context = open_stream(model)
        logits = record(context)
        for step in narrate(model, x[:16], given=given, context=context):
            if step.frame == 8 and back:
                slots = np.flatnonzero(context.cache.used)
                before = [keys.clone() for keys in context.cache.keys]
                rotate_keys(context.cache, slots, 977, frequencies)
                rotate_keys(context.cache, slots, -977, frequencies)
                for keys, keys_before in zip(context.cache.keys, before):
                    assert (keys - keys_before)[slots].abs().max() < 1e-6
                rotate_keys(context.cache, slots, back, frequencies)
                context.position -= back
                assert (context.cache.keys[0] - before[0])[slots].abs().max() > 0.1
        runs.append((torch.stack(logits), context))
    (logits, plain), (moved_logits, moved) = runs
    assert (logits - moved_logits).abs().max() < 5e-4
    slots = np.flatnonzero(plain.cache.used)
    assert torch.equal(plain.cache.positions[slots] + 100, moved.cache.positions[slots])
    # most keys of `moved` were computed 100 positions later
    rotate_keys(plain.cache, slots, -100, frequencies)
    assert (plain.cache.keys[0] - moved.cache.keys[0])[slots].abs().max() < 1e-3


@pytest.mark.parametrize("family, changes, says", [
    ("Llama", {"rope_parameters": DYNAMIC}, "dynamic"),
    ("Cohere", {}, "default"),                  # in pairs of neighbours instead of halves
])
def test_other_rotations_are_refused(family, changes, says):
    model = tiny(llm=small(family, **changes), last_k=2, max_position=500)
    model.merge()
    with pytest.raises(BadData, match=f"max_position: .*'{says}'"):
        open_stream(model)


def test_a_live_source_does_without_turning_where_it_cannot():
    model = tiny(llm=small("Llama", rope_parameters=DYNAMIC))
    assert live_bounds(model).endswith("positions up to inf")
    assert model.config.max_position is None
    open_stream(model)


def test_kept_newlines_leave_no_position_free():
    with pytest.raises(BadData, match="max_position: with --keep-newline"):
        tiny(last_k=1, keep_newline=True, max_position=230)
    # a JSON file may say 30 or 30.0
    assert nar.Config(last_k=3, max_segment=30).max_segment == 30


def test_a_limit_that_is_never_reached_changes_no_bit():
    model = tiny(llm=grouped(), last_k=2)
    model.merge()
    x, narrations = video(model)
    without_limits = traced(model, restarted(model, x, dict(narrations)))
    model.config.max_segment = 100.0
    model.config.max_position = 100_000
    assert traced(model, restarted(model, x, dict(narrations))) == without_limits


@pytest.mark.parametrize("changes", [{"last_k": 2}, {"last_k": 0}], ids=str)
def test_positions_are_bounded(changes):
    """The counter never passes the limit by more than a segment; kept narrations stand right behind
    the prompt."""
    limit = 230
    model = tiny(llm=grouped(), **changes, max_position=limit)
    layout = model.layout
    x, _ = video(model, 61)
    given = {t: [5, 6, 7] for t in range(0, 61, 6)}
    first = len(layout.first())
    segment = len(layout.opening(1)) + 5 * 11 + len(layout.closing(1)) + 3
    context = open_stream(model)
    shifts = []                                             # frames
    highest = 0
    for step in narrate(model, x, given=given, context=context):
        highest = max(highest, step.position)
        if step.narration and context.bounds.rewound > len(shifts):
            shifts.append(step.frame)
            positions = context.cache.positions[context.cache.used].sort().values
            kept = positions[positions >= first]
            if len(kept) > 0:
                assert kept[0] == first
            if len(kept) > 1:
                assert kept[-1] < step.position
    assert len(shifts) > 3 and limit < highest <= limit + segment


def test_turned_back_is_a_young_stream():
    """With one layer of keys, logits after positions are turned back are those of a stream that is
    k narrations old, up to rounding."""
    model = tiny(llm=small("Llama", num_hidden_layers=1), memory="none", last_k=1)
    x, _ = video(model, 30)
    given = {t: [5, 6, 7] for t in range(0, 30, 6)}
    model.config.max_position = 1
    old = list(narrate(model, x, given=given))
    model.config.max_position = None
    later = {t - 12: given[t] for t in given if t > 12}
    young = list(narrate(model, torch.cat([x[:1], x[13:]]), given={0: [5, 6, 7]} | later))
    for old_step, young_step in zip(old[13:18], young[1:6], strict=True):
        assert abs(old_step.p_skip - young_step.p_skip) < 1e-6


def test_settings_that_contradict_each_other():
    with pytest.raises(BadData, match="max_segment"):
        nar.Config(prune=False, memory="none", max_segment=30.0)
    with pytest.raises(BadData, match="max_position"):
        nar.Config(max_position=1000)
    for wrong in ({"max_segment": 0.0}, {"max_position": 0, "last_k": 1}):
        with pytest.raises(BadData, match="max_"):
            nar.Config(**wrong)


# ------------------------------------------------------------------ live sources

def test_live_bounds():
    model = tiny(keep_newline=True)
    assert "last 10 narrations" in live_bounds(model)
    assert {name: getattr(model.config, name) for name in LIVE_BOUNDS} == LIVE_BOUNDS
    assert not model.layout.keep_newline
    model = tiny(last_k=2, max_segment=5.0)
    live_bounds(model, {"last_k", "max_segment"})
    config = model.config
    assert (config.last_k, config.max_segment, config.max_position) == (2, 5.0, 16_384)
    model = tiny()
    assert "memory grows" in live_bounds(model, {"last_k"}) and model.config.max_position is None
    model = tiny(memory="none", prune=False)
    assert "every frame" in live_bounds(model) and model.config.max_segment is None
    with pytest.raises(BadData, match="--keep-newline"):
        live_bounds(tiny(keep_newline=True), {"keep_newline"})


def test_published_weights_are_bounded_live(tmp_path):
    """A published folder, whatever it says of newlines: after k narrations, text never grows
    again."""
    tiny(memory_target=False, memory_heads=8, keep_newline=True).save(tmp_path)
    model = load_narrator(str(tmp_path))
    live_bounds(model)
    x, _ = video(model, frames=18)
    steps = list(narrate(model, x, given={t: [5, 6] for t in range(18)}))
    assert len({step.text_tokens for step in steps[12:]}) == 1


def test_soak():
    output = io.StringIO()
    arguments = ("soak --hours 0.02 --max-segment 2 --max-position 1000 --every 3 --words 4 "
                 "--pictures 6 --device cpu --json")
    with (mock.patch("sys.argv", arguments.split()), redirect_stdout(output),
          redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as end):
        soak.main()
    assert end.value.code == 0
    result = json.loads(output.getvalue().splitlines()[-1])
    last = result["rows"][-1]
    assert (result["frames"], len(result["rows"]), result["outages"]) == (144, 24, 10)
    assert last["restarts"] >= 10 and last["turned"] >= 1 and last["narrations"] >= 40
    assert all(last[name] <= bound for name, bound in result["bounds"].items())
    assert last["position"] > 1000
    assert "bytes" in output.getvalue()
    assert result["last_to_young"] > 0


def test_darkness_in_the_kitchen():
    """Five minutes without light after the 21st sentence: none is said, and those after it are as
    without darkness. A still picture of two minutes: nothing is said either.
    """
    narrator = load_narrator(str(TOY)).merge()
    live_bounds(narrator)
    encode = narrator.vision_encoder()
    frames = islice(Video(ROOT / "toy" / "kitchen.mp4", 2), 220)
    pictures = torch.stack([torch.from_numpy(picture) for picture in frames])
    x = torch.cat([encode(batch) for batch in pictures.split(64)])

    def sentences(x):
        steps = narrate(narrator, x, lookahead=4)
        return [(step.frame, step.narration.text) for step in steps if step.narration]

    light = sentences(x)
    begin = light[20][0] + 1
    dark = torch.zeros_like(pictures[:1])
    for picture, length in ((dark, 600), (pictures[begin:begin + 1], 240)):
        end = begin + length
        stretch = encode(picture).expand(length, -1, -1)
        narrations = sentences(torch.cat([x[:begin], stretch, x[begin:]]))
        assert narrations[:21] == light[:21]
        later = narrations[21:]
        assert later[0][0] >= end
        same = [text == text_in_light
                for (_, text), (_, text_in_light) in zip(later, light[21:], strict=True)]
        assert len(same) > 8
        assert sum(same) >= len(same) - 2
