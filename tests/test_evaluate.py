"""The self-conditioned protocol (§4.1, App. B.5) on cases worked out by hand."""
import json

import numpy as np
import pytest

import data
import evaluate
from helpers import GOLDEN
from stream import Narration


def test_segments_are_chained_and_turned():
    assert evaluate.segments([2, 5, 4], start=1.0).tolist() == [[1, 2], [2, 5], [4, 5]]
    assert evaluate.segments([]).shape == (0, 2)


def test_overlaps_by_hand():
    iou, giou = evaluate.overlaps(np.array([[0, 4], [4, 6.0]]), np.array([[0, 2], [2, 6.0], [8, 10]]))
    assert iou == pytest.approx(np.array([[0.5, 2 / 6, 0], [0, 0.5, 0]]))
    assert giou[0, 2] == pytest.approx(0 - 4 / 10) and giou[1, 0] == pytest.approx(0 - 2 / 6)


def test_alignment_by_hand():
    precision, recall, f1 = evaluate.alignment(np.array([[0.5, 0.2, 0.1], [0.49, 0.6, 0]]))
    assert (precision, recall, f1) == pytest.approx((2 / 3, 1, 0.8))
    assert evaluate.alignment(np.zeros((3, 0))) == (0, 0, 0)


@pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")
def test_overlaps_are_the_published():
    golden = json.loads((GOLDEN / "eval" / "matching_small.json").read_text())
    cases = golden if isinstance(golden, list) else [golden]
    for case in cases:
        keys = {key.lower(): key for key in case}
        truth, predicted = (np.array(case[keys[k]], dtype=float) for k in ("gt_segments", "pred_segments"))
        iou, giou = evaluate.overlaps(truth, predicted)
        assert iou == pytest.approx(np.array(case[keys["iou"]]), abs=1e-6)
        assert giou == pytest.approx(np.array(case[keys["giou"]]), abs=1e-6)


def narration(n, end, text):
    return Narration(n, 0, 0.0, end, text, None, [])


def test_compare_by_hand():
    """One true sentence is matched, one memory word of two is right, one sentence without memory is wrong."""
    told = [(0, "You look.", ()), (3, "You tap the fridge hiding the red cup.", ("red", "cup")), (7, "You wash the pan.", ())]
    sample = data.make_sample("a", told, 2.0, 8, lambda: iter(()))
    predicted = [narration(0, 0.5, "You look."), narration(1, 2.0, "You tap the fridge hiding the red pan."),
                 narration(2, 4.0, "You wash the cup.")]
    result = evaluate.compare([sample], [predicted])
    assert result["f1"] == 1 and result["narrations"] == 3 and result["exact"] == pytest.approx(1 / 3)
    assert result["exact_without_memory"] == 0.5 and result["memory_words"] == 0.5


def test_compare_without_predictions():
    sample = data.make_sample("a", [(0, "You look.", ())], 2.0, 1, lambda: iter(()))
    result = evaluate.compare([sample], [[]])
    assert result["f1"] == 0 and result["exact"] == 0 and result["memory_words"] is None
