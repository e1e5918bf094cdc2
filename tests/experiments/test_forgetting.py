"""The figure of how memories forget: its points are those of the results."""
import pytest

from experiments import forgetting, tables
from experiments.paper import AGES, TABLES
from support.common.errors import BadData


def test_points_of_each_seed(monkeypatch, tmp_path):
    """A point for each age and length that has a result, with the numbers of its seeds."""
    def made_up(experiment):
        if experiment.training == "flownar" and experiment.evaluation == "knowledge":
            right = 0.9 - 0.1 * experiment.seed
            measures = {f"idle/by_age/<= {age} s/right_once": right for age in AGES[:2]}
            return {"seed": experiment.seed, "losses": {"narrator": 0.1}, "measures": measures}
        if experiment.training == "retnet" and experiment.evaluation == "ages":
            measures = {"by_age/<= 20 s/right": 0.7}
            return {"seed": experiment.seed, "losses": {"narrator": 0.1}, "measures": measures}
        if experiment.training == "online" and experiment.evaluation == "long":
            measures = {"by_duration/>= 8 min/memory_words": 0.5}
            return {"seed": experiment.seed, "losses": {"narrator": 0.1}, "measures": measures}
        return None

    monkeypatch.setattr(tables, "result", made_up)
    panels = forgetting.curves()
    three_seeds = pytest.approx([0.9, 0.8, 0.7])
    assert panels["read_out"]["CLAM"] == [(5, three_seeds), (10, three_seeds)]
    assert panels["read_out"]["recent"] == []
    assert panels["written"]["Refac. RetNet"] == [(20, [0.7] * 3)]
    baseline = "VideoLLM-online (keeps all frames)"
    assert panels["by_length"][baseline] == [(11, [0.5] * 3)]
    assert baseline not in panels["read_out"]
    assert len(panels["by_length"]) == len(TABLES["ages"].rows) == len(forgetting.COLOURS)

    png = tmp_path / "forgetting.png"
    monkeypatch.setattr(forgetting, "command_line", lambda run: run())
    monkeypatch.setattr("sys.argv", ["forgetting", "--png", str(png)])
    forgetting.main()
    assert png.stat().st_size > 10_000


def test_without_results(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "result", lambda experiment: None)
    monkeypatch.setattr(forgetting, "command_line", lambda run: run())
    monkeypatch.setattr("sys.argv", ["forgetting", "--png", str(tmp_path / "a.png")])
    with pytest.raises(BadData, match="no results yet: python -m experiments.tables knowledge"):
        forgetting.main()
