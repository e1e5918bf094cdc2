"""experiments/rates.py: rate and warm-up are chosen on validation videos."""
import pytest

from experiments import paper, rates
from experiments.runs import add_line, train_command
from support.common.disk import read_jsonl
from test_evaluate import command


@pytest.fixture
def few(monkeypatch, tmp_path):
    """One pair of rate and warm-up, one step, three videos; results in a file of the test's own."""
    file = tmp_path / "rates.jsonl"
    monkeypatch.setattr(rates, "FILE", file)
    monkeypatch.setattr(rates, "RATES", (1e-3,))
    monkeypatch.setattr(rates, "WARMUPS", (0.2,))
    for name, value in {"STEPS": 1, "VIDEOS": 3, "VAL_VIDEOS": 2, "DRAWS": 1}.items():
        monkeypatch.setattr(rates, name, value)
    return file


def test_a_result_is_made_once(few):
    table = command("--memories", "recent", "retnet", main=rates.main)
    lines = read_jsonl(few)
    assert [line["memory"] for line in lines] == ["recent", "retnet"]
    for line in lines:
        assert 0.2 < line["val_loss"] < 10
        assert f"| {line['memory']} | **{line['val_loss']:.3f}** |" in table
    command("--memories", "recent", "retnet", main=rates.main)
    assert len(read_jsonl(few)) == 2


def test_the_least_loss_is_chosen(few, monkeypatch):
    monkeypatch.setattr(rates, "RATES", (1e-3, 2e-3))
    for rate, loss in ((1e-3, 0.5), (2e-3, 0.25)):
        assert rates.chosen("clam") is None
        line = rates.identity_of_pair("clam", rate, 0.2) | {"val_loss": loss}
        add_line(rates.FILE, line)
    assert rates.chosen("clam") == (2e-3, 0.2)


def test_narrators_have_the_chosen_rate_and_warm_up():
    """And the memory tokens with which they were chosen."""
    trainings = {row.training for row in paper.TABLES["T5"].rows}
    for training in trainings:
        words = train_command(training, 0, "out")
        memory = words[words.index("--memory") + 1] if "--memory" in words else "clam"
        assert rates.chosen(memory) == (7e-4, float(words[words.index("--warmup") + 1]))
        tokens = words[words.index("--memory-tokens") + 1] if "--memory-tokens" in words else 10
        assert int(tokens) == rates.MEMORIES[memory]
        assert "--lr" not in words
