"""The caption scores of §4.1 by hand (test_golden.py: against the published evaluator's values)."""
import json

import numpy as np
import pytest

from support import captions
from helpers import GOLDEN

java = pytest.mark.skipif(captions.java_problem() is not None, reason=f"METEOR {captions.java_problem()}")
NAMES = {"Bleu_1": "bleu_1", "Bleu_2": "bleu_2", "Bleu_3": "bleu_3", "Bleu_4": "bleu_4", "ROUGE_L": "rouge_l",
         "CIDEr": "cider", "METEOR": "meteor", "t_precision": "precision", "t_recall": "recall", "t_f1": "f1"}


def published_case(name):
    return json.loads((GOLDEN / "eval" / name).read_text())


def test_cider_by_hand():
    """Two pairs, unigrams and bigrams in one document each; the first is perfect, the second shares nothing."""
    assert captions.cider([("a b c d", "a b c d"), ("e f g h", "i j k l")]) == pytest.approx([10, 0])
    penalty = np.exp(-2 ** 2 / (2 * 6 ** 2))                                        # two bigrams more
    cosines = [(4 / (4 * 6) ** 0.5), 3 / (3 * 5) ** 0.5, 2 / (2 * 4) ** 0.5, 1 / (1 * 3) ** 0.5]
    assert captions.cider([("a b c d", "a b c d x y"), ("e", "z")])[0] == pytest.approx(10 * np.mean(cosines) * penalty)
    assert captions.cider([("a b", "a b")]) == [0.0]                                 # a single pair has no idf


def test_rouge_by_hand():
    assert captions.rouge_l([("a b c d", "a x c"), ("a", "b"), ("a", ""), ("", "")])[1:3] == [0, 0]
    p, r = 2 / 3, 2 / 4
    assert captions.rouge_l([("a b c d", "a x c")])[0] == pytest.approx(2.44 * p * r / (r + 1.44 * p))


def test_bleu_by_hand():
    each, corpus = captions.bleu([("a b c d", "a b c d"), ("a b c d", "a b")])
    assert each[0] == pytest.approx(np.ones(4), abs=1e-6)
    assert each[1][0] == pytest.approx(np.exp(1 - 4 / 2), abs=1e-6)                 # brevity
    assert corpus[0] == pytest.approx(np.exp(1 - 8 / 6), abs=1e-6)


@java
def test_meteor_and_ptb():
    perfect = ("You open the fridge.", "You open the fridge.")
    scores, corpus = captions.meteor([perfect, ("You open  it", ""), ("a", "b")])
    assert scores[0] == pytest.approx(1) and scores[1:] == [0, 0] and 0 < corpus < 1
    assert captions.ptb([("You open the Fridge.", "Stop!")]) == [("you open the fridge", "stop")]


def test_java_problem_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Java" in captions.java_problem()


