"""The caption scores of §4.1 by hand (method/test_golden.py: against the published evaluator's values)."""
import numpy as np
import pytest

import evaluate

java = pytest.mark.skipif(evaluate.java_problem() is not None,
                          reason=f"METEOR {evaluate.java_problem()}")


def test_cider_of_a_perfect_pair_and_of_one_that_shares_nothing():
    scores = evaluate.cider([("a b c d", "a b c d"), ("e f g h", "i j k l")])
    assert scores == pytest.approx([10, 0])


def test_cider_of_a_longer_sentence():
    """It has six words, five bigrams, four trigrams and three 4-grams, all with the same weight."""
    cosines = [4 / (4 * 6) ** 0.5, 3 / (3 * 5) ** 0.5, 2 / (2 * 4) ** 0.5, 1 / (1 * 3) ** 0.5]
    penalty = np.exp(-2 ** 2 / (2 * 6 ** 2))               # two bigrams more
    score, _ = evaluate.cider([("a b c d", "a b c d x y"), ("e", "z")])
    assert score == pytest.approx(10 * np.mean(cosines) * penalty)


def test_cider_of_a_single_pair():
    """Every n-gram is in every true sentence, so all weights are 0."""
    assert evaluate.cider([("a b", "a b")]) == [0.0]


def test_rouge_by_hand():
    precision = 2 / 3
    recall = 2 / 4
    score, = evaluate.rouge_l([("a b c d", "a x c")])
    assert score == pytest.approx(2.44 * precision * recall / (recall + 1.44 * precision))
    assert evaluate.rouge_l([("a", "b"), ("a", "")]) == [0, 0]


def test_bleu_by_hand():
    """The second sentence is perfect, but too short."""
    per_pair, corpus = evaluate.bleu([("a b c d", "a b c d"), ("a b c d", "a b")])
    assert per_pair[0] == pytest.approx(np.ones(4), abs=1e-6)
    assert per_pair[1][0] == pytest.approx(np.exp(1 - 4 / 2), abs=1e-6)
    assert corpus[0] == pytest.approx(np.exp(1 - 8 / 6), abs=1e-6)


@java
def test_meteor_and_ptb():
    perfect = ("You open the fridge.", "You open the fridge.")
    scores, corpus = evaluate.meteor([perfect, ("You open  it", ""), ("a", "b")])
    assert scores[0] == pytest.approx(1)
    assert scores[1:] == [0, 0]
    assert 0 < corpus < 1
    assert evaluate.ptb([("You open the Fridge.", "Stop!")]) == [("you open the fridge", "stop")]


def test_java_problem_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Java" in evaluate.java_problem()
