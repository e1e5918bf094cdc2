"""The equalities on which the method stands, to be read from top to bottom.

1. §3.3, Eq. 2: CLAM's three forms are one function: token by token, frame by frame, all at once.
2. §3.5, Fig. 4: the mask is the rule that the paper tells in words; both ways of attending by it
   give the same outputs and gradients.
3. §3.4, §3.5: training is streaming. One parallel forward gives the logits of the loop, whose cache
   is pruned, for any narrations at any frames; rule and layout each stand in one place.
4. §3.4: what is kept of the past is bounded, and the position counter goes on as in training.
5. §3.2, Eq. 1: when a sentence is told.

Algorithm 2 as a whole: test_algorithm_2.py. The published code's numbers: test_golden.py.
"""
import pytest
import torch

import narrator as nar
import stream
from beyond.baselines import context_class
from narrator import load
from clam import CLAM
from beyond.commands.drawing import spell
from helpers import grouped, record, tiny, video

# ---------------------------------------------------------------------- 1. CLAM

def make(width=32, tokens=5, heads=2, bias=4.0, **options):
    torch.manual_seed(0)
    clam = CLAM(width, tokens, heads, dropout=0.0, **options)
    torch.nn.init.constant_(clam.w_gate[1].bias, bias)
    return clam


def close(a, b, tolerance=1e-4):
    return (a - b).norm() <= tolerance * b.norm() + 1e-12


def run(form, x, read_at, clam, state=None):
    """Memory tokens, last state and gradients of one form of a memory."""
    clam.zero_grad()
    x = x.clone().requires_grad_()
    memory, last = form(x, read_at, state)
    weight = torch.linspace(-1, 1, memory.numel()).view_as(memory)
    loss = (memory * weight).sum() + last.square().mean()
    loss.backward()
    gradients = {"x": x.grad}
    for name, p in clam.named_parameters():
        if p.grad is not None:
            gradients[name] = p.grad.clone()
    return memory.detach(), last.detach(), gradients


@pytest.mark.parametrize("bias", [-30.0, 0.0, 12.0])        # gates from 1e-13 to 1 - 6e-6
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [10, 30, 20], [1, 300, 7], [0, 3, 0]])
def test_chunked_is_recurrent(bias, lengths):
    assert_chunked_is_recurrent(make(bias=bias, width=16), lengths)


def test_of_no_token_a_read_out_is_that_of_the_first_state():
    clam = make(width=16)
    nothing = torch.zeros(1, 0, 16)
    memory, state = clam.chunked(nothing, torch.tensor([[0]]))
    assert torch.equal(memory[:, 0], clam.read(clam.initial_state()))
    assert not state.any()


def assert_chunked_is_recurrent(clam, lengths):
    """Memory tokens, last state and gradients of both forms, between read-outs of these lengths."""
    read_at = torch.tensor([lengths]).cumsum(1)
    x = torch.randn(1, sum(lengths) + 3, clam.width)
    state = clam.initial_state() + 0.3
    memory, last, gradients = run(clam.chunked, x, read_at, clam, state)
    oracle_memory, oracle_last, oracle_gradients = run(clam.recurrent, x, read_at, clam, state)
    assert close(memory, oracle_memory)
    assert close(last, oracle_last)
    assert gradients.keys() == oracle_gradients.keys()
    # below 1e-6 of the largest, a gradient is rounding
    rounding = 1e-6 * max(gradient.norm() for gradient in oracle_gradients.values())
    for name, gradient in oracle_gradients.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= 1e-4 * gradient.norm() + rounding, name


def test_step_is_chunked():
    """Frame by frame, with reads in between, and in two parts: the same tokens as all at once."""
    J = 10
    memory = make()
    x = torch.randn(1, 120, 32)
    read_at = torch.tensor([[10, 40, 50, 120]])
    parallel, last = memory(x, read_at)
    state = memory.initial_state()
    reads = []
    for begin in range(0, 120, J):
        end = begin + J
        state = memory.step(x[:, begin:end], state)
        if end in read_at:
            reads.append(memory.read(state))
    assert torch.allclose(torch.stack(reads, 1), parallel, atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)
    _, middle = memory(x[:, :50], torch.tensor([[10]]))
    later, _ = memory(x[:, 50:], torch.tensor([[70]]), middle)
    assert torch.allclose(later[:, 0], parallel[:, 3], atol=1e-5)


# ---------------------------------------------------------------------- 2. the mask

@pytest.mark.parametrize("last_k", [None, 0, 1, 2])
def test_visible_is_the_rule(last_k):
    layout = tiny(memory_tokens=2).layout
    tokens = layout.sequence([(0, [5, 6]), (2, [7]), (3, [8, 9]), (6, [5])])
    mask = nar.attention_mask(tokens, last_k)

    def sees(i, j):
        """Whether token i sees token j, in words of the paper."""
        if j > i:
            return False
        same_segment = tokens.segment[j] == tokens.segment[i]
        if tokens.kind[j] == nar.PROMPT or same_segment:
            return True
        if tokens.kind[j] == nar.VISUAL:
            return False
        return last_k is None or tokens.number[j] >= tokens.segment[i] - last_k

    for i in range(len(tokens)):
        for j in range(len(tokens)):
            assert mask[i, j] == sees(i, j), (i, j)
    assert mask.diagonal().all()


def test_without_pruning_causal():
    tokens = tiny().layout.sequence([(0, [5]), (2, [6])])
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    assert torch.equal(nar.attention_mask(tokens, prune=False), causal)


def hidden_and_gradients(model, x, narrations):
    model.zero_grad()
    hidden, _, _ = model(x, narrations)
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * weight).sum().backward()
    gradients = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
    return hidden.detach(), gradients


def assert_both_forms_are_one(model, monkeypatch):
    # segments of one to six frames, some of them alike
    x, narrations = video(model, 30, (0, 3, 9, 15, 16, 22, 24, 26))
    monkeypatch.setattr(nar, "LARGEST_MASK", 10 ** 9)
    expected_hidden, expected_gradients = hidden_and_gradients(model, x, narrations)
    monkeypatch.setattr(nar, "LARGEST_MASK", 0)
    hidden, gradients = hidden_and_gradients(model, x, narrations)
    assert (hidden - expected_hidden).abs().max() < 1e-5
    assert len(gradients) > 20
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        difference = (gradients[name] - expected).abs().max()
        assert difference < 1e-5 * (1 + expected.abs().max()), name


@pytest.mark.parametrize("variant", [
    {}, {"last_k": 0}, {"last_k": 2}, {"memory": "none"}, {"keep_newline": True},
    {"last_k": 0, "narration_memory": 4}, {"memory": "none", "prune": False},
], ids=str)
def test_segments_are_the_mask(variant, monkeypatch):
    """Four heads of queries share two of keys."""
    assert_both_forms_are_one(tiny(llm=grouped(), **variant), monkeypatch)


# ---------------------------------------------------------------------- 3. training is streaming

VARIANTS = {
    "FlowNar": {},
    "FlowNar-C, k = 2": {"last_k": 2},
    "VideoLLM-online": {"memory": "none", "prune": False},
    "recent": {"memory": "recent", "memory_tokens": 20},
    "no narrations": {"last_k": 0},
    "published": {"readout": "cls", "keep_newline": True, "last_k": 1},
    "CLAM on narrations": {"narration_memory": 6, "last_k": 0},
    "on narrations alone": {"memory": "none", "narration_memory": 6, "last_k": 0,
                            "keep_newline": True},
    "one token, published": {"grid": 0, "readout": "cls"},
}


def streamed_logits(model, x, narrations):
    """The logits of all tokens through the plain Context, the Decisions, and the Context."""
    context = context_class(model)(model)
    logits = record(model)
    steps = list(stream.narrate(model, x, given=dict(narrations), context=context))
    del model.run
    return torch.stack(logits), steps, context


def assert_same(model, narrations, streamed, parallel, tolerance=1e-4):
    """Training = streaming; otherwise the first token that differs is named, not a tensor."""
    tokens = model.layout.sequence(narrations)
    assert len(streamed) == len(tokens) - 1         # the last EOT waits for a next frame
    difference = (streamed - parallel[:-1]).abs().amax(1)
    too_large = difference > tolerance
    if too_large.any():
        i = int(too_large.nonzero()[0])
        kind = ("prompt", "visual", "narration")[tokens.kind[i]]
        token = spell(model.layout, tokens)[i]
        pytest.fail(f"training and streaming first differ at position {i} "
                    f"(by {difference[i]:.2g}): {kind} token {token!r} "
                    f"of segment {tokens.segment[i]}")


def both_ways(model, frames=24, seed=0):
    """Random narrations at random frames, teacher-forced through the loop and in parallel.

    Returns the narrations, and the logits of all tokens both ways.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(frames - 1, generator=generator)[:frames // 3]
    at = (drawn + 1).sort().values.tolist()
    x, narrations = video(model, frames, at=(0, *at), seed=seed)
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    streamed, _, _ = streamed_logits(model, x[:at[-1] + 1], narrations)
    return narrations, streamed, parallel


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_streaming(variant, tmp_path):
    """Of a narrator that was written and read again."""
    tiny(**VARIANTS[variant]).save(tmp_path)
    model = load(str(tmp_path))
    assert_same(model, *both_ways(model, frames=18))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_training_is_streaming_with_grouped_queries(dtype, tolerance):
    """Two heads of keys for four of queries; a bf16 base under fp32 LoRA within bf16's rounding."""
    model = tiny(llm=grouped(dtype), last_k=2)
    assert model.trainable()["base_model.model.connector.0.weight"].dtype == torch.float32
    narrations, streamed, parallel = both_ways(model)
    assert_same(model, narrations, streamed, parallel, tolerance)
    assert parallel.std() > 5 * tolerance, "logits that are all alike would prove nothing"


def test_the_rule_is_one_place(monkeypatch):
    """Change the rule, and training and streaming change together."""
    model = tiny(last_k=2)
    _, _, before = both_ways(model, frames=18)
    rule = nar.visible

    def two_segments(tokens, now, *more):
        is_visual = torch.tensor(tokens.kind) == nar.VISUAL
        last_frames = is_visual & (torch.tensor(tokens.segment) == now - 1)
        return rule(tokens, now, *more) | last_frames

    monkeypatch.setattr(nar, "visible", two_segments)
    monkeypatch.setattr(stream, "visible", two_segments)
    narrations, streamed, parallel = both_ways(model, frames=18)
    assert_same(model, narrations, streamed, parallel)
    assert (parallel - before).abs().max() > 1e-2


class MemoryLast(nar.Layout):
    def opening(self, n):
        tokens = nar.Tokens().add([self.eot], nar.NARRATION, segment=n, number=n - 1, learn=True)
        tokens.add(self.newline, nar.NARRATION, segment=n, number=n - 1)
        return tokens.add(self.open + [nar.FRAME] * self.J, nar.VISUAL, segment=n)

    def closing(self, n):
        tokens = nar.Tokens()
        if n > 0:
            tokens.add(self.close, nar.VISUAL, segment=n, learn=True)
            memory = self.open + [nar.MEMORY] * self.M + self.close
            tokens.add(memory, nar.VISUAL, segment=n)
        return tokens.add(self.assistant, nar.NARRATION, segment=n, number=n, learn=True)


def test_the_layout_is_one_place():
    model = tiny(last_k=2)
    _, _, before = both_ways(model, frames=18)
    model.layout = MemoryLast(model.layout.tokenizer, model.config.J, model.config.memory_tokens)
    narrations, streamed, parallel = both_ways(model, frames=18)
    assert_same(model, narrations, streamed, parallel)
    assert (parallel - before).abs().max() > 1e-2


def test_the_mask_matters():
    """The same comparison fails when training sees one narration more: test_training_is_streaming
    can fail."""
    model = tiny(last_k=2)
    x, narrations = video(model, frames=30, at=(0, 4, 8, 12, 16, 20, 24))
    streamed, _, _ = streamed_logits(model, x[:25], narrations)
    model.config.last_k = 3
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    assert (streamed - parallel[:-1]).abs().max() > 1e-3


def test_self_conditioned_is_parallel_too():
    """The loop's own narrations, in parallel, give the probabilities that the loop had."""
    model = tiny(last_k=3, max_new_tokens=6, theta=0.003, theta_low=0.002)
    x, _ = video(model, frames=24)
    steps = list(stream.narrate(model, x))
    narrations = [(step.frame, step.narration.tokens) for step in steps if step.narration]
    assert len(narrations) > 3
    with torch.no_grad():
        hidden, _, tokens = model(x, narrations)
        parallel = model.logits(hidden).softmax(-1)[:, model.layout.skip]
    # the last token of each frame; frame 0 always narrates, and has no probability
    ids = tokens.ids
    last = [i for i in range(len(ids) - 1) if ids[i] == nar.FRAME and ids[i + 1] != nar.FRAME][1:]
    # the last frame is decided twice: the second Decision counts
    streamed = {step.frame: step.p_skip for step in steps if step.p_skip is not None}
    assert len(streamed) == len(last) == 23
    for frame, i in enumerate(last, 1):
        assert abs(streamed[frame] - parallel[i].item()) < 1e-5


# ---------------------------------------------------------------------- 4. bounded memory

def test_cache_is_bounded():
    """C^nar: the prompt and k narrations; C^vid: one segment. Whatever the length of the video."""
    model = tiny(last_k=3)
    layout = model.layout
    at = tuple(range(0, 57, 8))
    x, narrations = video(model, frames=57, at=at)
    _, steps, context = streamed_logits(model, x[:at[-1] + 1], narrations)
    prompt = len(layout.first()) - layout.J - len(layout.open + layout.close)
    longest = max(len(ids) for _, ids in narrations)
    text = prompt + 3 * (longest + len(layout.assistant) + 2)
    visual = layout.M + 8 * (layout.J + 1) + len(2 * layout.open + layout.close)
    assert max(step.text_tokens for step in steps) <= text
    assert max(step.visual_tokens for step in steps) <= visual
    assert context.cache.keys[0].shape[2] <= 2 * (text + visual)
    assert [step.visual_tokens for step in steps if step.narration] == [0] * len(at)
    # the counter continues as in training
    assert context.position == len(layout.sequence(narrations)) - 1


# ---------------------------------------------------------------------- 5. the trigger

def test_thresholds():
    config = nar.Config(theta=0.8, theta_low=0.5, refractory=4.0, fps=2.0)
    assert stream.threshold(0.5, config, static=False) == 0.5
    assert stream.threshold(4.0, config, static=False) == 0.5
    assert stream.threshold(4.5, config, static=False) == 0.8   # strictly more than 8 frames
    assert stream.threshold(0.5, config, static=True) == 0.8


class Constant(nar.Narrator):
    """Gives p([SKIP]) = 0.6 after every frame, and never an end of text."""

    def logits(self, hidden):
        logits = torch.full((*hidden.shape[:-1], len(self.layout.tokenizer)), -30.0)
        logits[..., self.layout.skip] = torch.tensor(0.6).log()
        logits[..., 5] = torch.tensor(0.4).log()
        return logits


def constant(**changes):
    model = tiny(**changes)
    model.__class__ = Constant
    model.config.max_new_tokens = 3
    return model


def test_condition_is_not_above_the_threshold():
    model = constant()
    x, _ = video(model, frames=4)
    p_skip = next(step.p_skip for step in stream.narrate(model, x) if step.frame == 1)
    model.config.theta = model.config.theta_low = p_skip        # p <= theta narrates (Eq. 1)
    assert all(step.narration for step in stream.narrate(model, x))
