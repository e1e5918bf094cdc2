"""The commands of experiments/, with nonsense for every option."""
import pytest

from test_commands import check_nonsense, world    # noqa: F401

COMMANDS = [
    "-m experiments.cost stream --frames 4 --variants FlowNar --device cpu",
    "-m experiments.attention --data toy --root toys --limit 1 --device cpu",
    "-m experiments.asked summaries --pred p.json --gt g.json --llm toys",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_nonsense_is_refused_in_one_line(line, world):
    check_nonsense(line)
