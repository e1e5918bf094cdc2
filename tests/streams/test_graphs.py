"""Passes of fixed shapes (beyond/streams/graphs.py), on a processor: the narrations of the plain form."""
import random
from functools import partial

import pytest
import torch

import narrator as nar
import stream
from helpers import TOY, assert_same_stream, grouped, tiny
from beyond.streams import graphs
from beyond.streams.bounds import open_stream
from beyond.streams.graphs import use_graphs
from beyond.streams.suspend import pack, unpack
from support.files.features import encode_pictures
from toy import world

import beyond.baselines  # noqa: F401  its memories are in the table, too


def setting(seed):
    """A narrator, a video and how it is streamed, drawn from a seed."""
    chance = random.Random(seed)
    memory = chance.choice(["clam", "clam", *sorted(nar.MEMORIES)])
    given = {"memory": memory, "grid": chance.choice([0, 1, 3]),
             "last_k": chance.choice([None, 0, 2]), "refractory": chance.choice([0.0, 1.0]),
             "theta": chance.choice([0.5, 0.99]), "max_new_tokens": chance.choice([1, 3, 12]),
             "max_segment": chance.choice([None, 3.0]), "max_position": chance.choice([None, 150])}
    if memory == "none" and chance.random() < 0.5:
        given |= {"prune": False, "last_k": None, "max_segment": None}
    if memory != "none":
        given["memory_tokens"] = chance.choice([1, 3, 10])
    if given["last_k"] is None:
        given["max_position"] = None
    llm = grouped() if chance.random() < 0.4 else None
    model = tiny(seed, llm=llm, **given)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(chance.randint(2, 20), model.config.J, model.config.width, generator=generator)
    options = {"lookahead": chance.randint(1, 8), "guesses": chance.randint(0, 4)}
    return model, x, options


def with_graphs(model, encoder=None, **options):
    context = open_stream(model, **options)
    use_graphs(context, encoder)
    return context


SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 3 else ()) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_narrations_are_those_of_the_plain_form(seed, monkeypatch):
    """With a capacity that has to double; half-way through, suspended and resumed."""
    monkeypatch.setattr(graphs, "CAPACITY", 16)
    model, x, options = setting(seed)
    plain = list(stream.narrate(model, x, context=open_stream(model, lookahead=1, guesses=0)))
    whole = with_graphs(model, **options)
    assert_same_stream(list(stream.narrate(model, x, context=whole)), plain)

    middle = len(x) // 2
    first = with_graphs(model, lookahead=1)
    begun = []
    for decision in stream.narrate(model, x, context=first):
        begun.append(decision)
        if decision.frame + 1 == middle:
            break
    first.take_back()
    second = with_graphs(model, **options)
    unpack(second, *pack(first))
    assert_same_stream(begun + list(stream.narrate(model, x[middle:], context=second)), plain)


def test_other_passes_stay_as_they_are():
    """Those of VideoLLM-MoD have shapes that depend on the frame."""
    model = tiny(memory="none", prune=False, mod_keep=0.2, max_new_tokens=3)
    x = torch.randn(6, model.config.J, model.config.width)
    plain = list(stream.narrate(model, x, context=open_stream(model, lookahead=1)))
    context = with_graphs(model, lookahead=1)
    assert_same_stream(list(stream.narrate(model, x, context=context)), plain)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.cuda
@gpu
@pytest.mark.parametrize("memory", nar.MEMORIES)
def test_graphs_give_the_narrations_of_the_plain_form(memory):
    model = tiny(memory=memory, last_k=2, theta=0.99, max_segment=3.0, max_new_tokens=8).to("cuda")
    x = torch.randn(30, model.config.J, model.config.width)
    plain = list(stream.narrate(model, x, context=open_stream(model, lookahead=1, guesses=0)))
    for options in ({"lookahead": 1, "guesses": 0}, {"lookahead": 4}):
        context = with_graphs(model, **options)
        assert_same_stream(list(stream.narrate(model, x, context=context)), plain)


@pytest.mark.cuda
@gpu
def test_the_bundled_narrator_from_pictures_by_graphs():
    """And, with a second stream, by the graphs that the first one has recorded."""
    model = nar.load(str(TOY), device="cuda").merge()
    encoder = model.vision_encoder()
    kitchen, = world.kitchens("test", 1)
    pictures = [kitchen.render(frame) for frame in range(len(kitchen))]

    def steps(open_context, lookahead):
        context = open_context(model, lookahead=lookahead)
        frames = encode_pictures(pictures, encoder, lookahead)
        return list(stream.narrate(model, frames, context=context))

    plain = steps(open_stream, 1)
    assert len([step for step in plain if step.narration]) > 5
    by_graphs = partial(with_graphs, encoder=encoder)
    for lookahead in (4, 1):                # a GPU rounds batches of 4 pictures otherwise
        assert_same_stream(steps(by_graphs, lookahead), plain, tolerance=1e-4)
