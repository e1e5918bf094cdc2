"""Caption scores (§4.1) where little is to be compared, and METEOR. All else of them:
method/test_golden.py, against the published evaluator's values."""
import sys

import pytest

import evaluate
from support.common.java import java_problem

java = pytest.mark.skipif(java_problem() is not None, reason=f"METEOR {java_problem()}")


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


@pytest.mark.parametrize("java, reason", [
    (None, "No such file"),
    ("echo 'no memory' >&2; exit 1", "no memory"),
    ("while read line; do echo 0,5; done", "could not convert"),
])
def test_what_java_lacks_is_said(monkeypatch, tmp_path, capsys, java, reason):
    """Java is not there, ends at once, or writes other numbers: all other scores stand."""
    package = tmp_path / "pycocoevalcap" / "meteor"
    package.mkdir(parents=True)
    (package / "meteor.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("pycocoevalcap")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PATH", str(tmp_path))
    if java:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{java}\n")
        (tmp_path / "java").chmod(0o755)
    corpus, _ = evaluate.caption_scores([("You open it.", "You open it.")], with_meteor=True)
    said = capsys.readouterr().err
    assert "METEOR is not computed: " in said and reason in said
    assert corpus["rouge_l"] == 1 and "meteor" not in corpus
