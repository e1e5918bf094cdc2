"""Algorithm 2 (App. B.3), written a second time from the paper alone: the loop of stream.py gives the
same probabilities, thresholds, positions, contexts and narrations.

The tests of this folder prove the method; about two hours. Read them in this order: this file;
test_equalities.py, from top to bottom; test_learning.py (§3.5); test_teacher_forcing.py (§4.1);
test_what_is_read_runs.py; test_golden.py (the authors' code's numbers).

Nothing here is taken from stream.py or from the rule `visible`. There is no cache: at every step all
tokens go through the language model again, each seeing what was in C^vid and C^nar when it came.
"""
from types import SimpleNamespace

import pytest
import torch

import stream
from narrator import load
from helpers import TOY, kitchen_tokens, tiny, video
from narrator import INSTRUCTION, SYSTEM


@torch.no_grad()
def algorithm_2(narrator, frames):
    """Frame tokens X_t [J, D] -> for each decision: t, p([SKIP]), theta, l, |C^nar|, |C^vid|, y_n.

    y_n is None where nothing is narrated. As published, frame 0 stands in the prompt and always
    narrates, and so does the last frame. t, n and l begin at 0.
    """
    llm, memory, layout, config = narrator.llm, narrator.memory, narrator.layout, narrator.config
    skip, eot = layout.skip, layout.eot
    # Of all tokens that ever came: their embedding, their position, and which of them each sees.
    tokens = SimpleNamespace(e=[], positions=[], sees=[])
    l = 0

    def text(string):
        return embed(layout.encode(string))

    def embed(ids):
        return llm.get_input_embeddings()(torch.tensor(ids, dtype=torch.long))

    def MLP(x):
        return narrator.connector(x)

    def LLM(*pieces):
        """New tokens after C^vid and C^nar -> the probabilities of the token that comes next.

        A piece is (e [L, D_lm], where): "prompt", "vid", or the number of a narration.
        """
        nonlocal l
        for e, where in pieces:
            for row in e:
                i = len(tokens.e)
                if where == "vid":
                    C_vid.append(i)
                else:
                    C_nar.append((i, where))
                tokens.e.append(row)
                tokens.positions.append(l)
                tokens.sees.append(torch.tensor(C_vid + [j for j, _ in C_nar]))
                l += 1
        mask = torch.zeros(len(tokens.e), len(tokens.e), dtype=torch.bool)
        for i, seen in enumerate(tokens.sees):
            mask[i, seen] = True
        hidden = llm.model(inputs_embeds=torch.stack(tokens.e)[None],
                           position_ids=torch.tensor(tokens.positions)[None],
                           attention_mask=mask[None, None], use_cache=False).last_hidden_state
        return llm.lm_head(hidden[0, -1:])[0].softmax(-1)

    def generate():
        """y_n: greedily, until the end of text, which is fed with the next frame."""
        if n > 0:                                       # frame 0 is closed in the prompt
            LLM((text("]\n"), "vid"))
        p = LLM((text("Assistant:"), n))
        words = []
        while len(words) < config.max_new_tokens and p.argmax() != eot:
            words.append(int(p.argmax()))
            p = LLM((embed(words[-1:]), n))
        return words

    def last_k():
        """FlowNar-C: of C^nar, the prompt and the last k narrations before the present segment."""
        if config.last_k is None:
            return C_nar
        return [(i, where) for i, where in C_nar if where == "prompt" or where >= n - config.last_k]

    def row(y):
        return t, p_skip, theta, l, len(C_nar), len(C_vid), y

    rows = []
    C_vid, C_nar = [], []                                                       # line 1
    n, b_new = 0, False                                                         # line 2
    S = torch.zeros(memory.heads, memory.width // 2 // memory.heads,
                    memory.width // memory.heads)                               # line 3
    p_skip = theta = t_n = M_t_n = None
    for t, X in enumerate(frames):                                              # line 4
        for k, v, log_gate in zip(*memory.project(X)):                          # line 5, Eq. 2
            S = log_gate.exp()[:, :, None] * S + k[:, :, None] * v[:, None, :]
        M_t = memory.read(S)
        if t == 0:
            bos = [layout.tokenizer.bos_token_id]
            pieces = [(embed(bos), "prompt"), (text(SYSTEM + "\n\n"), "prompt"),
                      (text("["), "vid"), (MLP(X), "vid"), (text("]\n"), "vid"),
                      (text("User: " + INSTRUCTION), "prompt"), (text("\n"), "prompt")]
        elif b_new:                                                             # lines 6-8
            pieces = [(embed([eot]), n - 1), (text("\n"), n - 1),
                      (text("["), "vid"), (MLP(M_t_n), "vid"), (text("]\n"), "vid"),
                      (text("["), "vid"), (MLP(X), "vid")]
            b_new = False
        else:
            pieces = [(embed([skip]), "vid"), (MLP(X), "vid")]
        p = LLM(*pieces)                                                        # lines 9-12
        if t > 0:
            p_skip = float(p[skip])                                             # Eq. 1
            soon = (t - t_n) / config.fps <= config.refractory
            theta = config.theta_low if soon else config.theta
        y = None
        if t == 0 or p_skip <= theta:                                           # line 13
            t_n = t                                                             # line 14
            y = generate()                                                      # line 15
            M_t_n = M_t                                                         # line 17
            C_vid = []                                                          # line 18
            n, b_new = n + 1, True                                              # line 19
            C_nar = last_k()
        rows.append(row(y))                                                     # line 16
    if not b_new:
        y = generate()
        C_vid = []
        n = n + 1
        C_nar = last_k()
        rows.append(row(y))
    return rows


def assert_is_algorithm_2(narrator, frames, narrations):
    expected = algorithm_2(narrator, frames)
    steps = list(stream.narrate(narrator, frames))
    assert len(steps) == len(expected)
    for step, (t, p_skip, theta, position, text, visual, y) in zip(steps, expected):
        ids = step.narration.tokens if step.narration else None
        assert (step.frame, ids) == (t, y)
        assert step.p_skip == pytest.approx(p_skip, abs=1e-5)
        assert step.theta == theta
        assert step.position == position
        assert (step.text_tokens, step.visual_tokens) == (text, visual)
    assert sum(step.narration is not None for step in steps) >= narrations


@pytest.mark.parametrize("last_k", [None, 0, 2])            # 0: none is kept, never all
def test_of_a_random_narrator(last_k):
    model = tiny(last_k=last_k, grid=1, memory_tokens=3, max_new_tokens=3, theta=0.003,
                 theta_low=0.002, refractory=1.0)
    x, _ = video(model, frames=8)
    assert_is_algorithm_2(model, x, narrations=4)


def test_of_the_bundled_narrator_in_its_kitchen():
    narrator = load(str(TOY)).eval()
    assert_is_algorithm_2(narrator, kitchen_tokens(14), narrations=3)
