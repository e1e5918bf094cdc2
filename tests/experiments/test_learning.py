"""The figure of what the paper's loss alone teaches: its points are those of the results."""
import pytest

from experiments import figures, learning, tables
from support.common.errors import BadData


def draw(monkeypatch, png):
    monkeypatch.setattr(figures, "command_line", lambda run: run())
    monkeypatch.setattr("sys.argv", ["figures", "learning", "--png", str(png)])
    figures.main()


def test_a_point_for_each_training(monkeypatch, tmp_path):
    """200 updates an epoch, 800 videos four at a time; 800 an epoch of four times the videos."""
    def made_up(experiment):
        words = {"one-loss": 0.2, "one-loss-8": 0.5, "scalar-8": 0.6, "flownar-short": 0.9,
                 "one-loss-more": 0.7}
        if experiment.evaluation != "stream" or experiment.training not in words:
            return None
        if experiment.seed > 0 and experiment.training != "one-loss-8":
            return None
        measures = {"memory_words": words[experiment.training] + experiment.seed}
        return {"seed": experiment.seed, "losses": {"narrator": 0.1}, "measures": measures}

    monkeypatch.setattr(tables, "result", made_up)
    assert learning.words_by_updates() == {
        "CLAM": [(600, [0.2]), (1600, [0.5, 1.5, 2.5])],
        "CLAM on 3,200 videos": [(3200, [0.7])],
        "one gate per head": [(1600, [0.6])],
        "CLAM, with `recall`": [(600, [0.9])],
    }
    draw(monkeypatch, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_without_results(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "result", lambda experiment: None)
    with pytest.raises(BadData, match="no results yet: python -m experiments.tables one-loss"):
        draw(monkeypatch, tmp_path / "a.png")
