"""The small world of the ablation: what is asked, the arms, what is kept of trainings."""
from itertools import groupby

import pytest
import torch

from experiments import ablation
from experiments.runs import lines_of
from support.common.disk import read_jsonl
from test_evaluate import command


@pytest.mark.parametrize("name", ablation.TASKS)
def test_the_answer_is_what_was_shown_last(name):
    first, stays, places, _ = ablation.TASKS[name]
    x, last = ablation.draw_videos(name, 100, torch.Generator().manual_seed(0))
    shows = ablation.SHOWS
    shown = (x - ablation.PLACES[:places]) @ shows.T - shows.square().sum(1) / 2
    for timelines, answers in zip(shown.argmax(-1).mT.tolist(), last.tolist()):
        for timeline, answer in zip(timelines, answers):
            runs = [(thing, len([*frames])) for thing, frames in groupby(timeline)]
            *_, (thing, stay), (hidden, gap) = runs
            before = sum(stay for thing, stay in runs if thing not in (0, answer))
            assert (thing, hidden) == (answer, 0)
            for count, (least, most) in zip((before, stay, gap), (first, stays, (8, 16))):
                assert least <= count <= most


def test_each_arm_is_what_its_name_says():
    frames = torch.randn(20, 4, 32)
    is_one = []
    for arm in [*ablation.ARMS][:4]:           # the last one is the delta rule itself
        k, _, log_gate = ablation.new_memory(arm, frames).project(frames)
        norm = k.norm(dim=-1)
        is_one.append([torch.allclose(x, torch.ones_like(x)) for x in (norm, log_gate.exp())])
    # of keys, and of gates
    assert is_one == [[False, False], [True, False], [False, False], [False, True]]


def test_a_training_is_carried_out_once(monkeypatch, tmp_path):
    file = tmp_path / "ablation.jsonl"
    arms = {name: ablation.ARMS[name] for name in ("CLAM", "+ write strength")}
    tasks = {name: (*task[:3], 2) for name, task in ablation.TASKS.items()}
    values = {"FILE": file, "TASKS": tasks, "TEST": 8, "SEEDS": (0, 1), "ARMS": arms,
              "present_commit": lambda: "0123456789"}
    for name, value in values.items():
        monkeypatch.setattr(ablation, name, value)
    table = command(main=ablation.main)
    assert table.count("seeds 2 and 2") == len(ablation.TASKS)
    kept = file.read_text().splitlines()
    assert len(kept) == 4 * len(ablation.TASKS) and len(read_jsonl(file)[0]["videos"]) == 8
    file.write_text("\n".join(kept[1:]) + "\n")
    lines_of.cache_clear()
    assert command(main=ablation.main) == table                         # the same numbers again
    assert sorted(file.read_text().splitlines()) == sorted(kept)
