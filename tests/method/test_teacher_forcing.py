"""Teacher-forced evaluation (§4.1) is that of whole forwards, one for each frame and segment."""
import pytest
import torch

import evaluate
import narrator as nar
from beyond.baselines import context_class
from helpers import tiny, video


class Leaning(nar.Narrator):
    """One token is always the likeliest."""
    token: int

    def logits(self, hidden):
        logits = super().logits(hidden)
        logits[..., self.token] += 18.0
        return logits


@torch.no_grad()
def test_words_are_predicted_from_all_that_comes_before():
    """PPL and LM-Correctness of a segment, word by word: "Assistant:", the narration and the end of
    text, each from the token before it. The narrations after it do not change them.
    """
    model = tiny()
    model.__class__ = Leaning                               # or no first word is ever right
    model.token = model.layout.assistant[0]
    x, narrations = video(model, frames=24, at=(0, 3, 9, 15, 16))
    for n, score in enumerate(evaluate.score_segments(model, x, narrations)):
        hidden, _, tokens = model(x, narrations[:n + 1])
        _, ids = narrations[n]
        words = [*model.layout.assistant, *ids, model.layout.eot]
        if n > 0:
            words = model.layout.close[1:] + words          # "]" itself is a frame's decision
        assert tokens.ids[-len(words):] == words
        logits = model.logits(hidden[-len(words) - 1:-1])
        mean = sum(-logits[i].log_softmax(-1)[word] for i, word in enumerate(words)) / len(words)
        assert score.ppl == pytest.approx(float(mean.exp()), rel=1e-4)
        right = 0
        while right < len(words) and logits[right].argmax() == words[right]:
            right += 1
        assert right > 0 or words[0] != model.layout.assistant[0]
        assert score.correctness == right / len(words)


def after_frame(model, x, narrations, n, frame):
    """The hidden state after a frame if segment n goes on until then, by a forward of its own."""
    *earlier, (_, ids) = narrations[:n + 1]
    hidden, _, tokens = model(x, [*earlier, (frame, ids)])
    return hidden[max(i for i, token in enumerate(tokens.ids) if token == nar.FRAME)]


def assert_segments_go_on(model, x, narrations):
    cache = context_class(model)(model).cache
    _, _, tokens = model(x, narrations, cache=cache)
    cache.tokens += tokens
    for n in (1, 2, 3, 4):
        frame, _ = narrations[n]
        last_token = max(i for i, token in enumerate(tokens.ids)
                         if token == nar.FRAME and tokens.segment[i] == n)
        later = evaluate.later_frames(model, cache, last_token + 1, n, x[frame + 1:frame + 4])
        assert len(later) == 3
        for i, hidden in enumerate(later, 1):
            expected = after_frame(model, x, narrations, n, frame + i)
            assert (hidden - expected).abs().max() < 1e-4


@pytest.mark.parametrize("variant", [
    {},
    {"memory": "none", "prune": False},
    {"readout": "cls", "keep_newline": True, "last_k": 1},
    {"last_k": 0, "narration_memory": 4},
], ids=str)
@torch.no_grad()
def test_segments_go_on_from_the_keys_and_values(variant):
    model = tiny(**variant)
    assert_segments_go_on(model, *video(model, frames=24, at=(0, 3, 9, 15, 16)))


@torch.no_grad()
def test_how_early_or_late_a_segment_ends():
    """Where p([SKIP]) is below the threshold for the first time, by a whole forward for each frame;
    or never, at the latest that is asked."""
    model = tiny()
    model.__class__ = Leaning
    model.token = model.layout.skip
    x, narrations = video(model, frames=20, at=(0, 4, 9, 12, 17, 19))
    segments = []                              # (begin, end, latest, p([SKIP]) after each frame)
    for n in range(1, len(narrations)):
        begin, _ = narrations[n - 1]
        end, _ = narrations[n]
        following, _ = narrations[min(n + 1, len(narrations) - 1)]
        latest = min(following, end + (end - begin) - 1)
        hidden = torch.stack([after_frame(model, x, narrations, n, frame)
                              for frame in range(begin + 1, latest + 1)])
        p_skip = model.logits(hidden).softmax(-1)[:, model.layout.skip]
        segments.append((begin, end, latest, p_skip))

    all_p_skip = torch.cat([p_skip for *_, p_skip in segments]).sort().values
    found = set()
    for theta in [0.0, *(all_p_skip[1:16:2] + all_p_skip[:15:2]).div(2).tolist()]:
        _, *scores = evaluate.score_segments(model, x, narrations, theta)
        for score, (begin, end, latest, p_skip), (_, ids) in zip(scores, segments, narrations[1:]):
            below = (p_skip < theta).nonzero().flatten().tolist()
            ending = begin + 1 + below[0] if below else latest
            assert score.difference == end - ending
            if ending > end:
                words = len(model.layout.assistant) + len(ids) + 1             # and the end of text
                assert score.fluency == pytest.approx((end - begin - 1) / (end - begin + words))
            found.add((ending > end) - (ending < end) if below else "never")
    assert found == {-1, 0, 1, "never"}


def test_summary_by_hand():
    """Means over the segments; the first has no frames to decide on."""
    scores = [evaluate.SegmentScores(1.0, 0.5), evaluate.SegmentScores(2.0, 1.0, 2, 0.5),
              evaluate.SegmentScores(3.0, 0.0, -1, 1.0)]
    assert evaluate.summary(scores, fps=2.0) == {
        "ppl": 2.0, "time_diff": 0.75, "fluency": 0.75, "lm_correctness": 0.5}
    assert evaluate.summary(scores[:1], fps=2.0) == {
        "ppl": 1.0, "time_diff": 0.0, "fluency": 1.0, "lm_correctness": 0.5}


@pytest.mark.parametrize("difference, right", [(0, 5), (1, 4), (2, 3), (-1, 4), (-3, 4)])
def test_frames_decided_rightly(difference, right):
    assert evaluate.frames_decided_rightly(5, difference) == right
