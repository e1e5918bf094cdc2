"""Caption scores (§4.1) where little is to be compared, and METEOR. All else of them:
method/test_golden.py, against the published evaluator's values."""
import pytest

import evaluate

java = pytest.mark.skipif(evaluate.java_problem() is not None,
                          reason=f"METEOR {evaluate.java_problem()}")


def test_cider_of_a_single_pair():
    """Every n-gram is in every true sentence, so all weights are 0."""
    assert evaluate.cider([("a b", "a b")]) == [0.0]


def test_rouge_without_a_common_word():
    assert evaluate.rouge_l([("a", "b"), ("a", "")]) == [0, 0]


@java
def test_meteor():
    perfect = ("You open the fridge.", "You open the fridge.")
    scores, corpus = evaluate.meteor([perfect, ("You open  it", ""), ("a", "b")])
    assert scores[0] == pytest.approx(1)
    assert scores[1:] == [0, 0]
    assert 0 < corpus < 1


def test_java_problem_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Java" in evaluate.java_problem()
