"""Streams without end: restarts of segments, the clock, positions turned back, live sources."""
import pytest
import torch
from safetensors.torch import save_file

import narrator as nar
import stream
from beyond.baselines import context_class
from narrator import load
from beyond.commands import stream_command
from beyond.commands.explain import restarted
from helpers import (
    TOY, assert_same_stream, grouped, kitchen_tokens, lively, narrate, record, small,
    tiny, video,
)
from beyond.streams.bounds import LIVE_BOUNDS, live_bounds, open_stream, tell_of_positions
from beyond.streams.suspend import read_state, unpack, write_state
from support.common.disk import read_jsonl
from support.common.errors import BadData
from test_commands import call
from test_equalities import constant

FRAMES = 15
AT = (0, 7, 8, 14)                          # frames with narrations
# restarts are asked for before these frames; frame 8 opens a segment anyway
ASKED = (3, 5, 6, 8, 11, 13)
RESTARTS = [3, 5, 6, 11, 13]                # frames before which there is one


def restarts_of(model, steps) -> list[int]:
    return [step.frame for step in steps if restarted(step, model.layout)]


def narrate_with_restarts(model, x, asked, context, given=None):
    steps = []
    for step in narrate(model, x, given=given, context=context):
        steps.append(step)
        if step.frame + 1 in asked:
            context.restart()
    return steps


def memory_alone(model, x, narrations, restarts):
    """The logits of a stream whose memory alone saw what a restart removes, made by hand."""
    context = context_class(model)(model)
    layout = model.layout
    logits = record(model)
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
        context.read_memory()
        context.discard(n + 1)
        context.segment = n + 1
        last = frame
    del model.run
    return torch.stack(logits)


@pytest.mark.parametrize("changes", [
    {"last_k": 2},
    {"memory": "recent", "memory_tokens": 20},
    {"readout": "cls", "keep_newline": True, "last_k": 1},
    {"narration_memory": 6, "last_k": 0},
], ids=str)
def test_restarts(changes):
    """As if the memory alone had seen the removed frames: the last narration's logits."""
    model = tiny(llm=grouped(), **changes)
    x, narrations = video(model, FRAMES, AT)
    words = len(narrations[-1][1])                          # of the last narration
    with torch.no_grad():
        alone = memory_alone(model, x, narrations, ASKED)
        without_restarts = memory_alone(model, x, narrations, ())
    assert (without_restarts[-words:] - alone[-words:]).abs().max() > 1e-3

    logits = record(model)
    context = open_stream(model, guesses=0)
    context.restart()                                       # before the first frame, too
    steps = narrate_with_restarts(model, x, ASKED, context, dict(narrations))
    assert restarts_of(model, steps) == RESTARTS
    assert steps[-1].position == len(alone)
    assert (torch.stack(logits[-words:]) - alone[-words:]).abs().max() < 1e-4


@pytest.mark.parametrize("changes", [
    {"last_k": 2},
    {"last_k": 0, "narration_memory": 4},
    {"readout": "cls", "keep_newline": True},
], ids=str)
def test_lookahead_and_bounds(changes):
    model, x = lively(grouped(), **changes)
    model.config.max_segment = 1.5
    if "last_k" in changes:
        model.config.max_position = 150
    plain = open_stream(model, guesses=0)
    steps = narrate_with_restarts(model, x, (17, 26), plain)
    assert plain.restarts > 2
    assert sum(step.narration is not None for step in steps) > 3
    assert bool(plain.rewound) == bool(model.config.max_position)
    ahead = open_stream(model, lookahead=5)
    assert_same_stream(narrate_with_restarts(model, x, (17, 26), ahead), steps)
    assert (ahead.restarts, ahead.rewound) == (plain.restarts, plain.rewound)
    assert {keys.shape[2] for keys in ahead.cache.keys.values()} == {len(ahead.cache.tokens)}


def test_trace_and_last_line_count_restarts(tmp_path):
    source, trace = tmp_path / "x.safetensors", tmp_path / "t"
    x = torch.randn(13, 10, 128, generator=torch.Generator().manual_seed(0))
    save_file({"x": x}, source)
    line = f"{source} --device cpu --theta 0 --theta-low 0 --trace {trace}"
    for bound, restarts in ((" --max-segment 2.5", [6, 11]), ("", [])):
        code, errors = call(stream_command, (line + bound).split())
        assert code == 0 and ("2 restarts" in errors) == bool(restarts)
        assert [row["frame"] for row in read_jsonl(trace) if "restart" in row] == restarts


def test_where_nothing_is_pruned_there_is_no_restart():
    model = tiny(memory="none", prune=False)
    x, narrations = video(model, FRAMES, AT)
    context = open_stream(model)
    narrate_with_restarts(model, x, ASKED, context, dict(narrations))
    assert context.restarts == 0


def test_clock():
    """Frames that a camera dropped: times, refractory time and restarts follow the clock."""
    model = constant(theta=0.7, theta_low=0.5, max_segment=30.0)
    times = [0.3, 1.0, 2.0, 4.3, 4.4, 9.0, 10.0, 50.0, 50.5, 50.8]
    x, _ = video(model, len(times))
    now = None

    def source():
        nonlocal now
        for now, frame in zip(times, x):
            yield frame

    steps = list(narrate(model, source(), clock=lambda: now))
    narrations = [step.narration for step in steps if step.narration]
    # more than 4 s after the narration before, and the last frame
    assert [narration.frame for narration in narrations] == [0, 4, 5, 7, 9]
    assert [narration.end for narration in narrations] == [0.3, 4.4, 9.0, 50.0, 50.8]
    assert [narration.start for narration in narrations] == [0.0, 0.3, 4.4, 9.0, 50.0]
    assert restarts_of(model, steps) == [7]                 # the segment began at 10.0


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256},
}


def test_where_positions_cannot_be_turned_back():
    llm = small("Cohere", logit_scale=1.0)
    with pytest.raises(BadData, match="max_position: .*cannot be turned back"):
        open_stream(tiny(llm=llm, last_k=2, max_position=500))
    model = tiny(llm=small("Cohere", logit_scale=1.0))
    assert live_bounds(model).endswith("positions up to inf")
    open_stream(model)


@pytest.mark.parametrize("last_k", [2, 0])
def test_positions_are_bounded(last_k):
    """Turned back, the oldest kept narration, or else the last segment, follows the prompt."""
    limit = 230
    model = tiny(llm=grouped(), last_k=last_k, max_position=limit)
    layout = model.layout
    x, _ = video(model, 61)
    given = {t: [5, 6, 7] for t in range(0, 61, 6)}
    segment = len(layout.opening(1)) + 5 * 11 + len(layout.closing(1)) + 3
    turned_back = len(layout.first()) + segment
    if last_k == 2:
        turned_back += len(layout.assistant) + 3    # and the narration before that segment
    else:
        turned_back -= 2                            # end of text and newline of the one before
    context = open_stream(model)
    highest = 0
    rewound = 0
    for step in narrate(model, x, given=given, context=context):
        highest = max(highest, step.position)
        if context.rewound > rewound:
            assert step.position == turned_back
        rewound = context.rewound
    assert rewound > 3 and limit < highest <= limit + segment


@pytest.mark.parametrize("rope", ROPES)
def test_turned_back_is_a_young_stream(rope):
    """With one layer of keys, logits are those of a stream that is k narrations old."""
    model = tiny(llm=small("Llama", num_hidden_layers=1, rope_parameters=ROPES[rope]), memory="none", last_k=1)
    for name in ("q_proj", "k_proj"):           # attention far from uniform: places matter
        getattr(model.llm.model.layers[0].self_attn, name).base_layer.weight.data *= 30
    x, _ = video(model, 30)
    given = {t: [5, 6, 7] for t in range(0, 30, 6)}
    model.config.max_position = 1
    old = list(narrate(model, x, given=given))
    model.config.max_position = None
    later = {t - 12: given[t] for t in given if t > 12}
    young = list(narrate(model, torch.cat([x[:1], x[13:]]), given={0: [5, 6, 7]} | later))
    for old_step, young_step in zip(old[13:18], young[1:6], strict=True):
        assert abs(old_step.p_skip - young_step.p_skip) < 1e-6


def test_live_bounds():
    model = tiny(keep_newline=True)
    assert "last 10 narrations" in live_bounds(model)
    assert {name: getattr(model.config, name) for name in LIVE_BOUNDS} == LIVE_BOUNDS
    assert not model.layout.keep_newline
    model = tiny(last_k=2, max_segment=5.0)
    live_bounds(model, {"last_k", "max_segment"})
    config = model.config
    assert (config.last_k, config.max_segment, config.max_position) == (2, 5.0, 16_384)
    model = tiny(llm=grouped())                     # of 2,048 positions
    assert live_bounds(model).endswith("positions up to 2048")
    model = tiny()
    assert "memory grows" in live_bounds(model, {"last_k"}) and model.config.max_position is None
    model = tiny(memory="none", prune=False)
    assert "every frame" in live_bounds(model) and model.config.max_segment is None


def test_positions_that_the_model_was_not_made_for(capsys):
    model = tiny(llm=small("Llama", max_position_embeddings=64))
    tell_of_positions(model, "a.mp4", 5)
    assert capsys.readouterr().err == ""
    tell_of_positions(model, "a.mp4", 6)
    assert "a.mp4 needs more than the 64 positions" in capsys.readouterr().err
    assert live_bounds(model).endswith("positions up to 64")
    tell_of_positions(model, "a.mp4", 6)                # which are turned back now
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_darkness_in_the_kitchen():
    narrator = load(str(TOY)).merge()
    live_bounds(narrator)
    encode = narrator.vision_encoder()
    x = kitchen_tokens(220)

    def sentences(x):
        steps = narrate(narrator, x, lookahead=4)
        return [(step.frame, step.narration.text) for step in steps if step.narration]

    light = sentences(x)
    begin = light[20][0] + 1
    dark = encode(torch.zeros(1, 96, 96, 3, dtype=torch.uint8))
    still = [picture.expand(120, -1, -1) for picture in (dark, x[begin:begin + 1])]
    narrations = sentences(torch.cat([x[:begin], *still, x[begin:]]))
    assert narrations[:21] == light[:21]
    later = narrations[21:]
    assert later[0][0] >= begin + 240
    same = [text == text_in_light
            for (_, text), (_, text_in_light) in zip(later, light[21:], strict=True)]
    assert len(same) > 8 and sum(same) >= len(same) - 2


WORDS = 12


def most_tokens(narrator, words, ahead=0):
    """The formula of beyond/streams/bounds.py: how many tokens the cache can hold at most.

    words       tokens of a narration
    ahead       frames that are read ahead
    """
    config = narrator.config
    layout = narrator.layout
    brackets = len(layout.open + layout.close)
    prompt = len(layout.first()) - layout.J - brackets
    narration = words + len(layout.assistant + layout.newline) + 1
    text = prompt + (config.last_k + 1) * narration
    frames = round(config.max_segment * config.fps) + ahead
    # with its brackets
    memory = layout.opening(1).kind.count(nar.VISUAL) - layout.J - len(layout.open)
    return text + memory + brackets - 1 + (layout.J + 1) * frames


@pytest.mark.parametrize("hours", [0.03, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_without_end_is_bounded(hours, tmp_path):
    """It is dark in the second of four parts: no sentence, and the segment grows as far as it may.
    Ten times the camera is away, and the segment is restarted. In the third part the stream is
    saved, thrown away, and goes on from its file."""
    narrator = load(str(TOY)).merge()
    live_bounds(narrator)
    config = narrator.config
    config.max_segment = 10.0
    config.last_k = 4
    config.max_position = 900          # four narrations and what was between them have 600
    count = round(hours * 3600 * config.fps)
    torch.manual_seed(0)
    pool = torch.randn(50, config.J, config.width)
    ids = (narrator.layout.newline * WORDS)[:WORDS]
    in_the_dark = range(count // 4, count // 2)
    given = {t: ids for t in range(0, count, 9) if t not in in_the_dark}
    outages = {count * n // 10 for n in range(1, 10)}
    save_at = count * 5 // 8

    def frames(first):
        for t in range(first, count):
            yield torch.zeros_like(pool[0]) if t in in_the_dark else pool[t % len(pool)]

    def streamed():
        context = open_stream(narrator, lookahead=4, guesses=0)
        decisions = stream.narrate(narrator, frames(0), given=given, context=context)
        for decision in decisions:
            yield context, decision
            if decision.frame >= save_at and not context.waiting:
                break
        write_state(tmp_path / "state", context, {})
        header, tensors = read_state(tmp_path / "state")
        context = open_stream(narrator, lookahead=4, guesses=0)
        unpack(context, header["stream"], tensors)
        rest = frames(decision.frame + 1)
        for decision in stream.narrate(narrator, rest, given=given, context=context):
            yield context, decision

    bound = most_tokens(narrator, WORDS, ahead=3)
    segment = most_tokens(narrator, WORDS) - len(narrator.layout.prompt)      # its tokens, at most
    bytes_at = {}
    decided = 0
    for context, decision in streamed():
        decided += 1
        if decision.frame + 1 in outages:
            context.restart()
        assert decision.text_tokens + decision.visual_tokens + decision.pruned <= bound
        assert decision.position <= config.max_position + segment
        bytes_at[decision.frame] = sum(buffer.nbytes for buffer in context.cache.keys.values())
    assert decided == count
    assert context.restarts > len(outages)         # in the dark, after every ten seconds, too
    assert context.rewound > 0
    most_in_the_dark = max(bytes_at[t] for t in in_the_dark)
    assert max(bytes_at[t] for t in range(count // 2, count)) <= most_in_the_dark
