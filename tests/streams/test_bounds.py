"""Streams without end: restarts of segments, positions turned back, live bounds, the soak."""
import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout

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
from helpers import ROOT, TOY, narrate, record, record_plain, tiny, video
from streams.bounds import LIVE_BOUNDS, live_bounds, most_tokens, rotate_keys, rotation_frequencies
from streams.fast import open_stream
from support.common.errors import BadData
from support.files.video import Video
from test_commands import call
from test_passes import assert_same, lively, small, together
from test_stream import VARIANTS, constant, features

AT, RESTARTS = (0, 9, 10, 22), (4, 7, 8, 10, 13, 21)          # 10 opens a segment anyway
PRUNED = {name: changes for name, changes in VARIANTS.items() if changes.get("prune", True) and name not in (
    "FlowNar-C, k = 10", "one token", "one token, recent")}


def restarted(model, x, forced=None, restarts=(), lookahead=1, context=None):
    """The Decisions, with restarts asked for before these frames."""
    context, found = context or open_stream(model), []
    for step in narrate(model, x, forced=forced, context=context, lookahead=lookahead):
        found.append(step)
        if step.frame + 1 in restarts:
            context.restart()
    return found


def was_restarted(model, step) -> bool:
    return restarted_before(step, model.layout)


def traced(model, steps):
    return ([step.p_skip or 0.0 for step in steps],
            [(step.frame, step.position, step.text_tokens, step.visual_tokens, step.pruned,
              was_restarted(model, step), step.narration and step.narration.tokens) for step in steps])


def memory_alone(model, x, narrations, restarts):
    """The stream in which CLAM alone saw what a restart removes, put together by hand: the logits of
    all its tokens, by the plain steps of Algorithm 2."""
    c = HistoryContext(model) if model.config.narration_memory else stream.Context(model)
    layout = model.layout
    logits = record_plain(model)
    c.update_memory(x[0])
    c.feed(layout.first(), x[0])
    last = 0
    for n, (frame, ids) in enumerate(narrations):
        begin = max([last + 1] + [t for t in restarts if last + 1 < t <= frame])
        for t in range(last + 1, frame + 1):
            if t == begin:
                c.read_memory()
            c.update_memory(x[t])
            if t >= begin:
                c.feed(layout.opening(n) if t == begin else layout.frame(n), x[t])
        stream.generate(c, ids)
        c.read_memory(ids)
        c.discard(n + 1)
        c.segment = n + 1
        last = frame
    del model.run
    return torch.stack(logits)


@pytest.mark.parametrize("name", PRUNED)
def test_restarts(name):
    """A stream with restarts is the stream in which the memory alone saw the frames that were removed:
    the logits of all narrations are the same."""
    model = tiny(**PRUNED[name])
    x, narrations = video(model, 23, AT)
    with torch.no_grad():
        alone = memory_alone(model, x, narrations, RESTARTS)
        without = memory_alone(model, x, narrations, ())
        for _ in ("plain passes", "fast passes"):
            context = open_stream(model)
            logits = record(context)
            steps = restarted(model, x, dict(narrations), RESTARTS, context=context)
            assert [step.frame for step in steps if was_restarted(model, step)] == [4, 7, 8, 13, 21]
            assert steps[-1].position == len(alone)
            words = len(narrations[-1][1])                         # of the last narration
            assert (torch.stack(logits[-words:]) - alone[-words:]).abs().max() < 1e-4
            model.merge() if not model.merged else None
    assert (without[-words:] - alone[-words:]).abs().max() > 1e-3


@pytest.mark.parametrize("fast, changes", [(True, {"last_k": 2}), (False, {"last_k": 2}), (True, {"readout": "cls"}),
                                           (True, {"last_k": 0, "narration_memory": 4}),
                                           (False, {"last_k": 1, "keep_newline": True, "memory": "recent"})])
def test_lookahead_and_bounds(fast, changes):
    """Restarts that are due, restarts that are asked for, positions turned back: the same however many frames a pass
    reads, and beside other streams. No slot is left behind."""
    model, x = lively(**changes)
    if fast:
        model.merge()
    model.config.max_segment, model.config.max_position = 1.5, 150 if "last_k" in changes else None
    once = traced(model, restarted(model, x, None, (17, 30)))
    assert sum(row[5] for row in once[1]) > 2 and sum(bool(row[6]) for row in once[1]) > 3
    context = open_stream(model)
    assert_same(once, traced(model, restarted(model, x, None, (17, 30), 5, context)))
    assert context.cache.used.sum() == context.cache.text + context.cache.visual
    assert bool(context.bounds.rewound) == ("last_k" in changes)
    if fast:
        sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 40, 25)]
        beside = together(model, sources, 3, 4)
        for y, found in zip(sources, beside):
            alone = traced(model, restarted(model, y))
            assert_same((alone[0], [(*row[:5], row[6]) for row in alone[1]]), found, 1e-4)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_trigger_that_never_fires(lookahead):
    """Never more tokens than the formula says, and no more bytes after the first bound; the counter stays."""
    model = tiny(last_k=3, max_segment=5.0, max_new_tokens=6, theta=0.0, theta_low=0.0)
    model.merge()
    x, _ = video(model, 40)
    context, held, used, position = open_stream(model), set(), 0, set()
    for step in narrate(model, (x[t % 40] for t in range(120)), context=context, lookahead=lookahead):
        used = max(used, int(context.cache.used.sum()))
        assert step.frame in (0, 119) or not step.narration
        if step.frame > 10:
            held.add(context.cache.held())
            position.add(step.position)
    N, layout = 10, model.layout
    assert used <= most_tokens(model, 6, lookahead - 1) and len(held) == 1 and len(position) == N + 1   # and the last
    # the formula, written out: P + (k + 1) (L + A + 2) + M + 3 + 11 (N + what is read ahead)
    P = sum(kind == nar.PROMPT for kind in layout.first().kind)
    assert most_tokens(model, 6, 3) == P + 4 * (6 + len(layout.assistant) + 2) + layout.M + 3 + 11 * (N + 3)
    assert context.bounds.restarts == 11


def test_trace_and_last_line_count_restarts(tmp_path, monkeypatch):
    """A checkpoint whose settings have the bounds: "restart" is in the trace where there was one, and only there."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(TOY, tmp_path / "model")
    settings = json.loads((TOY / "narrator.json").read_text())
    (tmp_path / "model" / "narrator.json").write_text(json.dumps(settings | {"max_segment": 2.5, "theta": 0.0}))
    features(tmp_path / "x.safetensors", torch.randn(20, 10, 128, generator=torch.Generator().manual_seed(0)))
    for model, number in ((tmp_path / "model", 3), (TOY, 0)):
        code, errors = call(stream_command, [str(tmp_path / "x.safetensors"), "--model", str(model), "--device", "cpu",
                                     "--theta", "0", "--theta-low", "0", "--trace", str(tmp_path / "t")])
        rows = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
        assert code == 0 and [row["frame"] for row in rows if "restart" in row] == [6, 11, 16][:number]
        assert ("3 restarts" in errors) == bool(number) and ("restart" in errors) == bool(number)


def test_where_a_restart_changes_nothing():
    """Before a frame that opens a segment, before the first one, and where nothing is pruned."""
    for changes, restarts in (({}, (0, 1, 10)), ({"memory": "none", "prune": False}, (4, 13))):
        model = tiny(**changes)
        x, narrations = video(model, 23, AT)
        context = open_stream(model)
        context.restart()
        steps = restarted(model, x, dict(narrations), restarts, context=context)
        assert not any(was_restarted(model, s) for s in steps) and context.bounds.restarts == 0
        assert traced(model, steps) == traced(model, list(narrate(model, x, forced=dict(narrations))))


# ------------------------------------------------------------------ the clock

@pytest.mark.parametrize("lookahead", [1, 3])
def test_clock(lookahead):
    """Frames that a camera dropped: times, the refractory time and the length of a segment follow the clock."""
    model = constant(theta=0.7, theta_low=0.5, max_segment=30.0)
    times = [0.3, 1.0, 2.0, 4.3, 4.4, 9.0, 10.0, 50.0, 50.5, 50.8]
    x, taken = video(model, len(times))[0], []
    source = (taken.append(t) or x[t] for t in range(len(times)))
    steps = list(narrate(model, source, lookahead=lookahead, clock=lambda: times[len(taken) - 1]))
    narrations = [s.narration for s in steps if s.narration]
    assert [y.frame for y in narrations] == [0, 4, 5, 7, 9]        # more than 4 s after the one before; the last
    assert [y.end for y in narrations] == [0.3, 4.4, 9.0, 50.0, 50.8]
    assert [y.start for y in narrations] == [0.0, 0.3, 4.4, 9.0, 50.0]
    assert [s.frame for s in steps if was_restarted(model, s)] == [7]            # the segment began at 10.0


def test_a_clock_that_stands_still_does_not_unbound_a_segment():
    model = constant(theta=0.0, theta_low=0.0, max_segment=2.0)
    steps = list(narrate(model, video(model, 10)[0], clock=lambda: 1.0))
    assert [s.frame for s in steps if was_restarted(model, s)] == [5, 9]


# ------------------------------------------------------------------ positions

ROPES = {"default": {"rope_type": "default", "rope_theta": 1e4},
         "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
         "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256, "rope_theta": 5e5}}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("fast", [True, False])
def test_turned_keys(rope, fast):
    """Grouped queries. Turned keys of layer 0 are those computed at the new positions; there and back changes nothing;
    what follows a common turn of all is the same."""
    model = tiny(llm=small("Llama", rope_parameters=ROPES[rope]), last_k=2)
    if fast:
        model.merge()
    x, narrations = video(model)
    given, runs = dict(narrations), []
    frequencies = rotation_frequencies(model, lambda part: model.decoder([part])[0])
    for back in (0, -100):
        context = open_stream(model)
        logits = record(context)
        for step in narrate(model, x[:16], forced=given, context=context):
            if step.frame == 8 and back:
                slots = np.flatnonzero(context.cache.used)
                before = [y.clone() for y in context.cache.keys]
                for turn in (977, -977):
                    rotate_keys(context.cache, slots, turn, frequencies)
                assert max((y - z)[slots].abs().max() for y, z in zip(context.cache.keys, before)) < 1e-6
                rotate_keys(context.cache, slots, back, frequencies)
                context.position -= back
                assert (context.cache.keys[0] - before[0])[slots].abs().max() > 0.1
        runs.append((torch.stack(logits), context))
    (one, there), (two, here) = runs
    assert (one - two).abs().max() < 5e-4
    slots = np.flatnonzero(there.cache.used)
    assert torch.equal(there.cache.positions[slots] + 100, here.cache.positions[slots])
    rotate_keys(there.cache, slots, -100, frequencies)             # most of `here` was computed 100 positions later
    assert (there.cache.keys[0] - here.cache.keys[0])[slots].abs().max() < 1e-3


@pytest.mark.parametrize("llm, says", [
    (lambda: small("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
    (lambda: small("Cohere"), "default")])                       # dynamic; in pairs of neighbours instead of halves
def test_other_rotations_are_refused(llm, says):
    model = tiny(llm=llm(), last_k=2, max_position=500)
    model.merge()
    with pytest.raises(BadData, match=f"max_position: .*'{says}'"):
        open_stream(model)


def test_a_live_source_does_without_turning_where_it_cannot():
    model = tiny(llm=small("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    assert live_bounds(model).endswith("positions up to inf") and model.config.max_position is None
    open_stream(model)


def test_kept_newlines_leave_no_position_free():
    with pytest.raises(BadData, match="max_position: with --keep-newline"):
        tiny(last_k=1, keep_newline=True, max_position=230)
    assert nar.Config(last_k=3, max_segment=30).max_segment == 30              # a JSON file may say 30 or 30.0


def test_a_limit_that_is_never_reached_changes_no_bit():
    model, x = lively(last_k=2)
    model.merge()
    before = traced(model, restarted(model, x[:20]))
    model.config.max_segment, model.config.max_position = 100.0, 100_000
    assert traced(model, restarted(model, x[:20])) == before


@pytest.mark.parametrize("changes", [{"last_k": 2}, {"last_k": 0}], ids=str)
def test_positions_are_bounded(changes):
    """The counter never passes the limit by more than a segment; kept narrations stand behind the prompt, at their
    distances. A stream that begins with these narrations sees the same."""
    model, limit = tiny(**changes, max_position=230), 230
    x, _ = video(model, 61)
    given = {t: [5, 6, 7] for t in range(0, 61, 6)}
    context, shifts, first = open_stream(model), [], len(model.layout.first())
    highest, segment = 0, len(model.layout.opening(1)) + 5 * 11 + len(model.layout.closing(1)) + 3
    for step in narrate(model, x, forced=given, context=context):
        highest = max(highest, step.position)
        if step.narration and context.bounds.rewound > len(shifts):
            shifts.append(step.frame)
            after = context.cache.positions[context.cache.used].sort().values
            after = after[after >= first]
            assert not len(after) or after[0] == first and (len(after) < 2 or after[-1] < step.position)
    assert len(shifts) > 3 and limit < highest <= limit + segment


def test_turned_back_is_a_young_stream():
    """Layer by layer but for rounding: with one layer of keys, logits after a turn are those of a stream that is k
    narrations old."""
    model = tiny(llm=small("Llama", num_hidden_layers=1), memory="none", last_k=1)
    x, _ = video(model, 30)
    given = {t: [5, 6, 7] for t in range(0, 30, 6)}
    model.config.max_position = 1
    old = list(narrate(model, x, forced=given))
    model.config.max_position = None
    young = list(narrate(model, torch.cat([x[:1], x[13:]]), forced={0: [5, 6, 7]} | {
        t - 12: given[t] for t in given if t > 12}))
    one, two = ([s.p_skip for s in steps if s.p_skip] for steps in (old[13:18], young[1:6]))
    assert len(one) == 5 and max(abs(a - b) for a, b in zip(one, two)) < 1e-6


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
    assert {name: getattr(model.config, name) for name in LIVE_BOUNDS} == LIVE_BOUNDS and not model.layout.keep_newline
    model = tiny(last_k=2, max_segment=5.0)
    live_bounds(model, {"last_k", "max_segment"})
    assert (model.config.last_k, model.config.max_segment, model.config.max_position) == (2, 5.0, 16_384)
    model = tiny()
    assert "memory grows" in live_bounds(model, {"last_k"}) and model.config.max_position is None
    model = tiny(memory="none", prune=False)
    assert "every frame" in live_bounds(model) and model.config.max_segment is None
    with pytest.raises(BadData, match="--keep-newline"):
        live_bounds(tiny(keep_newline=True), {"keep_newline"})


def test_published_weights_are_bounded_live(tmp_path):
    """A published folder, whatever it says of newlines: after k narrations, text never grows again."""
    tiny(memory_target=False, memory_heads=8, keep_newline=True).save(tmp_path)
    model = load_narrator(str(tmp_path))
    live_bounds(model)
    x, _ = video(model, frames=18)
    text = [s.text_tokens for s in narrate(model, x, forced={t: [5, 6] for t in range(18)})]
    assert len(set(text[12:])) == 1


def test_soak():
    told, errors = io.StringIO(), io.StringIO()
    arguments = "soak --hours 0.03 --max-segment 2 --max-position 1500 --every 3 --words 4 --pictures 6 --device cpu"
    with redirect_stdout(told), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*arguments.split(), "--json"])
        with pytest.raises(SystemExit) as end:
            soak.main()
    assert end.value.code == 0
    result = json.loads(told.getvalue().splitlines()[-1])
    last = result["rows"][-1]
    assert (result["frames"], len(result["rows"]), result["outages"]) == (216, 24, 10)
    assert last["restarts"] >= 10 and last["turned"] >= 1 and last["narrations"] >= 60
    assert all(last[name] <= bound for name, bound in result["bounds"].items())
    assert 1500 < last["position"] and "bytes" in told.getvalue() and result["last_to_young"] > 0


def test_darkness_in_the_kitchen():
    """Ten minutes without light after the 21st sentence: none is said, and those after it are as without darkness.

    A still picture of two minutes: nothing is said either.
    """
    narrator = load_narrator(str(TOY)).merge()
    video = torch.stack([torch.from_numpy(picture) for picture in Video(ROOT / "toy" / "kitchen.mp4", 2)])
    encode = narrator.vision_encoder()
    x = torch.cat([encode(part) for part in video.split(64)])
    said = lambda x: [(s.frame, s.narration.text) for s in narrate(narrator, x, lookahead=4) if s.narration]
    live_bounds(narrator)
    without = said(x)
    at = without[20][0] + 1
    for picture, frames in ((torch.zeros_like(video[:1]), 1200), (video[at:at + 1], 240)):
        found = said(torch.cat([x[:at], encode(picture).expand(frames, -1, -1), x[at:]]))
        assert found[:21] == without[:21] and all(not at <= frame < at + frames for frame, _ in found)
        later = [text for frame, text in found if frame >= at + frames]
        assert sum(text == before for text, (_, before) in zip(later, without[21:], strict=True)) >= 20
