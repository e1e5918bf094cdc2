"""The measures of §4.1 and App. B.5: by hand, against the published evaluator's values, and at their edges."""
import json

import numpy as np
import pytest

from support import captions as metrics
from helpers import GOLDEN
from support.captions import Told, Truth

golden = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")
java = pytest.mark.skipif(metrics.java_problem() is not None, reason=f"METEOR {metrics.java_problem()}")
NAMES = {"Bleu_1": "bleu_1", "Bleu_2": "bleu_2", "Bleu_3": "bleu_3", "Bleu_4": "bleu_4", "ROUGE_L": "rouge_l", "CIDEr": "cider",
         "METEOR": "meteor", "t_precision": "precision", "t_recall": "recall", "t_f1": "f1"}


def read(name):
    return json.loads((GOLDEN / "eval" / name).read_text())


def test_segments_are_chained_and_turned():
    assert metrics.segments([2, 5, 4], start=1.0).tolist() == [[1, 2], [2, 5], [4, 5]]
    assert metrics.segments([]).shape == (0, 2)


def test_overlaps_by_hand():
    iou, giou = metrics.overlaps(np.array([[0, 4], [4, 6.0]]), np.array([[0, 2], [2, 6.0], [8, 10]]))
    assert iou == pytest.approx(np.array([[0.5, 2 / 6, 0], [0, 0.5, 0]]))
    assert giou[0, 2] == pytest.approx(0 - 4 / 10) and giou[1, 0] == pytest.approx(0 - 2 / 6)


def test_alignment_by_hand():
    assert metrics.alignment(np.array([[0.5, 0.2, 0.1], [0.49, 0.6, 0]])) == pytest.approx(
        {"precision": 2 / 3, "recall": 1, "f1": 0.8})
    assert metrics.alignment(np.zeros((3, 0))) == {"precision": 0, "recall": 0, "f1": 0}


@golden
def test_overlaps_are_the_published():
    case = read("matching_small.json")
    iou, giou = metrics.overlaps(np.array(case["gt_segments"]), np.array(case["pred_segments"]))
    assert iou == pytest.approx(np.array(case["iou"]), abs=1e-6) and giou == pytest.approx(np.array(case["giou"]), abs=1e-6)
    assert [[i, int(best)] for i, best in enumerate(giou.argmax(1))] == case["indices"]
    assert list(metrics.alignment(iou).values()) == pytest.approx(case["t"], abs=1e-6)


@golden
def test_scores_are_the_published():
    case = read("scorers_pairs.json")
    corpus, each = metrics.captions([(pair["gt"], pair["pred"]) for pair in case["pairs"]], metrics.java_problem() is None)
    for theirs, ours in NAMES.items():
        if ours in corpus:
            assert corpus[ours] == pytest.approx(case["corpus"][theirs], abs=1e-6), ours
            assert each[ours] == pytest.approx([case["per_pair"][str(i)][theirs] for i in range(len(each[ours]))], abs=1e-6)


@golden
def test_a_whole_evaluation_is_the_published():
    case = read("ek100.json")
    told = lambda rows: [Told(row["time"], row["text"]) for row in rows]
    result, rows = metrics.evaluate({name: Truth([told(y)]) for name, y in case["gts"].items()},
                                    {name: told(y) for name, y in case["predictions"].items()})
    for theirs, ours in NAMES.items():
        if result[ours] is not None:
            assert result[ours] == pytest.approx(case["corpus_metrics"][theirs], abs=1e-6), ours
        for name, row in rows.items():
            if ours in row:
                assert row[ours] == pytest.approx(case["per_video_metrics"][name][theirs], abs=1e-6), (name, ours)
    matches = [pair for name, y in case["gts"].items()
               for pair in metrics.match(Truth([told(y)]), told(case["predictions"][name]))[1]]
    assert [(true.text, said) for true, said in matches] == [(p["gt"], p["pred"]) for p in case["matched_pairs"].values()]


def test_cider_by_hand():
    """Two pairs, unigrams and bigrams in one document each; the first is perfect, the second shares nothing."""
    assert metrics.cider([("a b c d", "a b c d"), ("e f g h", "i j k l")]) == pytest.approx([10, 0])
    penalty = np.exp(-2 ** 2 / (2 * 6 ** 2))                                        # two bigrams more
    cosines = [(4 / (4 * 6) ** 0.5), 3 / (3 * 5) ** 0.5, 2 / (2 * 4) ** 0.5, 1 / (1 * 3) ** 0.5]
    assert metrics.cider([("a b c d", "a b c d x y"), ("e", "z")])[0] == pytest.approx(10 * np.mean(cosines) * penalty)
    assert metrics.cider([("a b", "a b")]) == [0.0]                                 # a single pair has no idf


def test_rouge_by_hand():
    assert metrics.rouge_l([("a b c d", "a x c"), ("a", "b"), ("a", ""), ("", "")])[1:3] == [0, 0]
    p, r = 2 / 3, 2 / 4
    assert metrics.rouge_l([("a b c d", "a x c")])[0] == pytest.approx(2.44 * p * r / (r + 1.44 * p))


def test_bleu_by_hand():
    each, corpus = metrics.bleu([("a b c d", "a b c d"), ("a b c d", "a b")])
    assert each[0] == pytest.approx(np.ones(4), abs=1e-6)
    assert each[1][0] == pytest.approx(np.exp(1 - 4 / 2), abs=1e-6)                 # brevity
    assert corpus[0] == pytest.approx(np.exp(1 - 8 / 6), abs=1e-6)


@java
def test_meteor_and_ptb():
    scores, corpus = metrics.meteor([("You open the fridge.", "You open the fridge."), ("You open  it", ""), ("a", "b")])
    assert scores[0] == pytest.approx(1) and scores[1:] == [0, 0] and 0 < corpus < 1
    assert metrics.ptb([("You open the Fridge.", "Stop!")]) == [("you open the fridge", "stop")]


def test_several_annotators_are_chained_apart():
    truth = Truth([[Told(2, "a"), Told(4, "b")], [Told(3, "c")]], start=1.0)
    row, matched = metrics.match(truth, [Told(2, "p"), Told(4, "q")])
    assert [(true.text, said) for true, said in matched] == [("a", "p"), ("b", "q"), ("c", "p")]
    assert row["recall"] == 1 and row["precision"] == 1


@pytest.mark.parametrize("predicted", [[], [Told(2, "a")], [Told(2, "a"), Told(2, "b")], [Told(99, "late")],
                                       [Told(5, "a"), Told(1, "b")], [Told(2, "")]])
@pytest.mark.parametrize("true", [[Told(2, "a")], [Told(2, ""), Told(2, "b")], [Told(3, "a b c"), Told(1, "d")]])
def test_edges_give_finite_numbers(true, predicted, monkeypatch):
    monkeypatch.setattr(metrics, "java_problem", lambda: "takes too long here")
    result, rows = metrics.evaluate({"v": Truth([true])}, {"v": predicted})
    assert all(np.isfinite(value) for value in result.values() if value is not None)
    assert 0 <= result["f1"] <= 1 and result["narrations"] == len(true)
    if not predicted and all(told.text for told in true):
        assert result["f1"] == result["cider"] == result["rouge_l"] == 0


def test_java_problem_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Java" in metrics.java_problem()


def test_the_toys_own_measures_by_hand(monkeypatch):
    """One true sentence is matched, one memory word of two is right, one sentence without memory is wrong."""
    monkeypatch.setattr(metrics, "java_problem", lambda: "takes too long here")
    true = [Told(0.5, "You look."), Told(2, "You tap the fridge hiding the red cup.", ("red", "cup")), Told(4, "You wash the pan.")]
    said = [Told(0.5, "You look."), Told(2, "You tap the fridge hiding the red pan."), Told(4, "You wash the cup.")]
    result, each = metrics.evaluate({"v": Truth([true]), "w": Truth([true[:1]])}, {"v": said, "w": said[:1]})
    assert result["f1"] == 1 and result["exact"] == 0.5
    assert result["exact_without_memory"] == pytest.approx(2 / 3) and result["memory_words"] == 0.5
    assert each["v"]["exact"] == pytest.approx(1 / 3) and each["w"]["exact"] == 1 and each["w"]["memory_words"] is None
