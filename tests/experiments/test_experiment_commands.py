"""The commands of experiments/, with nonsense for every option and with what cannot work."""
from pathlib import Path

import pytest

from test_commands import check_nonsense, check_refused_early, no_model, world    # noqa: F401

COMMANDS = [
    "-m experiments.cost stream --frames 4 --variants FlowNar --device cpu",
    "-m experiments.figures attention --data toy --root toys --limit 1 --device cpu",
    "-m experiments.figures timeline toys/a.mp4 --png new.png --device cpu",
    "-m experiments.summary --pred p.json --gt g.json",
    "-m experiments.objects --pred p.json --data toy --limit 1",
]
CANNOT_WORK = [
    "-m experiments.figures timeline nowhere.mp4 --png new.png",
    "-m experiments.figures timeline toys/a.mp4 --png p.json/new",
    "-m experiments.figures timeline toys/a.mp4 --png new.png --vision owner/nowhere",
    "-m experiments.knowledge --save p.json/new",
    "-m experiments.summary --pred p.json --llm owner/nowhere --answers p.json/new",
]


@pytest.fixture
def quick(world, monkeypatch):                                                    # noqa: F811
    """The folder `world`, where pictures are not drawn."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, path, **settings: Path(path).write_bytes(b"PNG"))
    return world


@pytest.mark.parametrize("line", COMMANDS)
def test_nonsense_is_refused_in_one_line(line, quick):
    check_nonsense(line)


@pytest.mark.parametrize("line", CANNOT_WORK)
def test_what_cannot_work_is_refused_before_anything_is_loaded(line, quick, no_model):    # noqa: F811
    check_refused_early(line, quick)
