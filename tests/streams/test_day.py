"""A stream without end is bounded in memory and positions: hours of it in minutes."""
import pytest
import torch

import narrator as nar
import stream
from narrator import load
from helpers import TOY
from beyond.streams.bounds import live_bounds, open_stream
from beyond.streams.suspend import read_state, unpack, write_state

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
        """(context, decision) of each frame."""
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
