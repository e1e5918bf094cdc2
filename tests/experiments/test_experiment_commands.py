"""The commands of experiments/, with nonsense for every option and with what cannot work."""
import pytest

from test_commands import check_nonsense, check_refused_early, no_model, world    # noqa: F401

COMMANDS = [
    "-m experiments.cost stream --frames 4 --variants FlowNar --device cpu",
    "-m experiments.attention --data toy --root toys --limit 1 --device cpu",
    "-m experiments.summary --pred p.json --gt g.json --llm toys",
]
CANNOT_WORK = [
    "-m experiments.knowledge --save p.json/new",
    "-m experiments.summary --pred p.json --llm owner/nowhere --answers p.json/new",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_nonsense_is_refused_in_one_line(line, world):
    check_nonsense(line)


@pytest.mark.parametrize("line", CANNOT_WORK)
def test_what_cannot_work_is_refused_before_anything_is_loaded(line, world, no_model):    # noqa: F811
    check_refused_early(line, world)
