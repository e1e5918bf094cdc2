"""A world in which places show one thing after another: what is asked, what can be reached, what is
kept of trainings."""
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baselines.memories import RetNet
from clam import CLAM
from experiments import overwriting
from experiments.overwriting import (
    ARMS, BASE, LONG, SEEDS, SHORT, SIZE, SWEPT, THINGS, WIDTH, WORLDS, Arm, MemoryTraining,
    PlacesWorld,
)
from experiments.runs import lines_of
from support.common.disk import read_jsonl
from support.engine.gates import effect_of_gate, gate_at_mean, has_gate
from support.engine.start import start_memory
from test_evaluate import command

TINY = PlacesWorld(stay=3, gap=(2, 4), places=3)


def drawn(world, videos, seed=0):
    """Timelines, the things of each place, tokens."""
    generator = torch.Generator().manual_seed(seed)
    shown, things = overwriting.timelines(world, videos, generator)
    return shown, things, overwriting.tokens_shown(world, shown, generator)


# ------------------------------------------------------------------ the world

@pytest.mark.parametrize("world", [BASE, TINY, PlacesWorld(things=1, idle=8),
                                   PlacesWorld(things=5, gap=(3, 3))], ids=str)
def test_the_answer_is_what_was_shown_last(world):
    shown, things, _ = drawn(world, 40)
    assert shown.shape == (40, world.frames, world.places)
    for video in range(40):
        for place in range(world.places):
            timeline = shown[video, :, place].tolist()
            hidden = [frame for frame, thing in enumerate(timeline) if thing == 0]
            visible = [thing for thing in timeline if thing]
            runs = [thing for i, thing in enumerate(visible) if i == 0 or thing != visible[i - 1]]
            assert runs == things[video, :, place].tolist()
            assert len(visible) <= world.things * world.stay
            gap = world.frames - max(frame for frame, thing in enumerate(timeline) if thing) - 1
            assert world.gap[0] <= gap - world.idle <= world.gap[1]
            assert set(range(world.frames - gap, world.frames)) <= set(hidden)

            last = overwriting.last_shown(shown)[video, :, place].tolist()
            seen = 0
            for thing, kept in zip(timeline, last):
                seen = thing or seen
                assert kept == seen
    assert (things[:, 1:] != things[:, :-1]).all()


def test_one_in_eight_can_be_guessed():
    """All things come last equally often, whatever the thing before and the times are."""
    _, things, _ = drawn(BASE, 4000)
    last = things[:, -1].flatten()
    share = torch.bincount(last, minlength=THINGS + 1)[1:] / len(last)
    assert torch.allclose(share, torch.full((THINGS,), 1 / THINGS), atol=0.01)


def test_tokens_say_what_is_shown():
    shown, _, x = drawn(BASE, 4)
    places, _, contents = overwriting.directions(BASE)
    assert ((x - places) @ contents.T - contents.square().sum(1) / 2).argmax(-1).equal(shown)
    assert (x @ places.T).argmax(-1).equal(torch.arange(BASE.places).expand(shown.shape))
    assert x.square().mean().sqrt().item() == pytest.approx(1, abs=0.2)


# ------------------------------------------------------------------ memories and gates

def answers_of_state(memory, world, x):
    """The thing that weighs most in the state, in the first channel of each place, of all heads."""
    state = memory.step(x.flatten(1, 2), memory.initial_state(len(x)))
    values = state[:, :, :world.places].transpose(1, 2).flatten(2)      # [B, P, D]
    _, visible, contents = overwriting.directions(world)
    return (values @ memory.w_v.weight @ (contents[1:] - visible).T).argmax(-1) + 1


@torch.no_grad()
def test_a_gate_set_by_hand_needs_no_training():
    """It reaches the ceiling; without its dependence on the input, it is far below."""
    world = PlacesWorld(places=4, stay=6, noise=0.01)
    _, things, x = drawn(world, 50)
    torch.manual_seed(0)
    memory = overwriting.new_arm(ARMS["clam, by hand"], world, torch.Generator().manual_seed(1))
    right = answers_of_state(memory, world, x) == things[:, -1]
    assert right.float().mean() > 0.99
    with gate_at_mean(memory, x.flatten(1, 2)):
        of_mean = answers_of_state(memory, world, x) == things[:, -1]
    assert of_mean.float().mean() < 0.7


@torch.no_grad()
def test_keys_by_place_belong_to_one_token_of_the_average_frame():
    _, _, x = drawn(BASE, 20)
    x = x.flatten(0, 1)
    memory = CLAM(WIDTH, BASE.places, heads=4)
    start_memory(memory, x)
    overwriting.keys_by_place(memory, x)
    keys = memory.w_k(x.mean(0))                                        # [P, D/2]
    own = torch.arange(WIDTH // 2) % BASE.places
    belongs = torch.nn.functional.one_hot(own, BASE.places).T.bool()
    assert keys[belongs].abs().min() > 10 * keys[~belongs].abs().max()
    assert torch.equal(memory.w_q.weight, memory.w_k.weight)


@torch.no_grad()
def test_a_gate_without_input_has_no_effect():
    torch.manual_seed(0)
    _, _, x = drawn(TINY, 5)
    x = x.flatten(1, 2)
    read_at = torch.tensor([[9, 30]]).expand(5, -1)
    memory = CLAM(WIDTH, 3, heads=4)
    assert has_gate(memory) and not has_gate(RetNet(WIDTH, 3, heads=4))
    memory.w_gate[1].bias.fill_(2)
    memory.w_gate[1].weight.zero_()
    assert effect_of_gate(memory, x, read_at) == pytest.approx(0, abs=1e-5)
    torch.nn.init.normal_(memory.w_gate[1].weight, std=10)
    assert effect_of_gate(memory, x, read_at) > 0.1
    _, _, before = memory.project(x)
    with gate_at_mean(memory, x):
        _, _, fixed = memory.project(x)
        assert torch.allclose(fixed, before.mean((0, 1)).expand_as(before), atol=1e-5)
        assert memory.project(x[0, :3])[2].shape == (3, 4, WIDTH // 8)
    assert torch.equal(memory.project(x)[2], before)


# ------------------------------------------------------------------ theory

def test_the_best_decay_against_a_simulation():
    """A state for each place that fades by q a frame, and what it says of drawn tokens."""
    world = PlacesWorld(gap=(4, 8))
    shown, things, x = drawn(world, 400, seed=3)
    places, visible, contents = overwriting.directions(world)
    parts = (x - places) @ (contents[1:] - visible).T / SIZE ** 2       # [B, T, P, THINGS]

    def simulated(q):
        state = torch.zeros_like(parts[:, 0])
        for frame in parts.unbind(1):
            state = q * state + frame
        return (state.argmax(-1) + 1 == things[:, -1]).float().mean().item()

    share, best = overwriting.best_fixed_decay(world)
    assert simulated(best) == pytest.approx(share, abs=0.02)
    for q in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        assert simulated(q) < share + 0.02
    easy = overwriting.best_fixed_decay(world._replace(things=1))
    assert easy[0] > 0.99 > share


# ------------------------------------------------------------------ trainings and their results

@pytest.fixture
def few(monkeypatch, tmp_path):
    """Few and short trainings of two arms; results in a file of the test's own."""
    file = tmp_path / "overwriting.jsonl"
    arms = {"delta, place": Arm("delta", "place"), "clam, mimetic": Arm("clam", "mimetic")}
    for name, value in {"FILE": file, "ARMS": arms, "SWEPT": ["delta, place"], "BASE": TINY,
                        "COMPARED": [], "NOT_YET_FLAT": [], "WORLDS": {"tiny": TINY}, "RATES": (0.003,), "TRIAL": 3,
                        "LONG": 2, "SHORT": 1, "SEEDS": (0,)}.items():
        monkeypatch.setattr(overwriting, name, value)
    return file


def test_a_training_is_carried_out_once(few, monkeypatch):
    with monkeypatch.context() as patch:                                # no processes: it is faster
        patch.setattr(overwriting, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
        table = command(main=overwriting.main)
    lines = read_jsonl(few)
    assert [line["steps"] for line in lines] == [3, 3, 2, 2, 1]
    for line in lines:
        assert sum(line["videos"]) == round(line["right"] * 256 * TINY.places)
        assert line["commit"]
    assert f"| {lines[2]['right']:.3f} |" in table
    del lines[3]
    few.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    lines_of.cache_clear()
    assert command("--show", main=overwriting.main) != table            # and trains nothing
    assert len(read_jsonl(few)) == 4
    assert command(main=overwriting.main) == table                      # the same, in a process
    assert len(read_jsonl(few)) == 5


def test_the_rate_is_that_which_learned_first(few, monkeypatch):
    monkeypatch.setattr(overwriting, "RATES", (1, 2, 3, 4))
    for rate, steps, loss in ((1, 3, 0.5), (2, 2, 0.009), (3, 3, 0.1), (4, 2, 0.008)):
        assert overwriting.chosen_rate("delta, place") is None
        run = MemoryTraining("delta, place", TINY, overwriting.TRIAL_SEED, rate, 3)
        overwriting.add_line(few, run.settings | {"loss": loss, "curve": [[steps, 1, loss]]})
    assert overwriting.chosen_rate("delta, place") == 4


def test_the_delta_rule_learns_at_once():
    run = MemoryTraining("gateddelta, place", TINY, 0, 0.01, 150)
    result = overwriting.train_memory(run)
    assert result["right"] > 0.95
    assert result["curve"][0][1] < result["right"] or result["curve"][-1][0] < 150


# ------------------------------------------------------------------ the committed results

def test_results_are_complete_and_shown():
    table = command("--show", main=overwriting.main)
    for arm in ARMS:
        results = overwriting.results_of_arm(arm, BASE, LONG)
        assert [result["seed"] for result in results] == list(SEEDS), arm
        assert overwriting.cell([result["right"] for result in results]) in table
    for name, world in WORLDS.items():
        for arm in SWEPT:
            results = overwriting.results_of_arm(arm, world, SHORT)
            assert [result["seed"] for result in results] == list(SEEDS), (arm, name)


def test_the_picture_is_drawn(tmp_path):
    picture = tmp_path / "overwriting.png"
    command("--picture", str(picture), main=overwriting.main)
    assert picture.read_bytes().startswith(b"\x89PNG")
