"""A killed stream continues as if it had never been stopped; other states are refused."""
import copy
import json
import os
import random
import shutil
import signal
import time
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from beyond.commands import data_command, stream_command
from forks import Forked
from helpers import ROOT, TOY, grouped, lively, narrate, row_of
from narrator import Config
from beyond.streams import suspend
from beyond.streams.bounds import open_stream
from beyond.streams.inputs import Input
from beyond.streams.suspend import digest_of_state, read_state, unpack, write_state
from support.common.disk import read_jsonl as rows_of
from support.common.errors import BadData
from support.files.features import open_frames
from support.files.sources import source_of
from test_commands import call
from test_live import arguments, at_every_frame, narrate_live

def narrate_in_parts(model, x, path, share, lookahead, restarts=()):
    """Narrate frames; save the stream at a random share of the moments when it can be saved, and go
    on from the file -> what must be equal of the Decisions, and the Context of each part.

    restarts        frames before which a restart of the segment is asked for
    """
    numbers = random.Random(0)
    context = open_stream(model, lookahead=lookahead)
    rows = []
    parts = [context]
    while True:
        for step in narrate(model, x[context.frame:], context=context):
            rows.append((step.p_skip, step.theta, step.narration, row_of(step)))
            if step.frame + 1 in restarts:
                context.restart()
            if not context.guessed and numbers.random() < share:
                write_state(path, context, {})
                header, tensors = read_state(path)
                context = open_stream(model, lookahead=lookahead)
                unpack(context, header["stream"], tensors)
                parts.append(context)
                break
        else:
            return rows, parts


@pytest.mark.parametrize("lookahead, changes", [
    (4, {"readout": "cls", "keep_newline": True, "last_k": 1}),
    (4, {"last_k": 0, "narration_memory": 4}),
    (3, {"memory": "none", "prune": False, "mod_keep": 0.4}),
    # saved after positions were turned back, and in the middle of a restarted segment
    (2, {"max_segment": 1.5, "max_position": 150, "last_k": 2}),
], ids=str)
def test_bit_by_bit(tmp_path, lookahead, changes):
    is_bounded = "max_segment" in changes
    model, x = lively(grouped(), frames=36 if is_bounded else 16, **changes)
    restarts = (17, 30) if is_bounded else ()
    uninterrupted, _ = narrate_in_parts(model, x, tmp_path / "s", 0.0, lookahead, restarts)
    rows, parts = narrate_in_parts(model, x, tmp_path / "s", 0.7, lookahead, restarts)
    assert rows == uninterrupted
    assert len(parts) > 4
    assert sum(narration is not None for _, _, narration, _ in rows) > 2
    assert (parts[-1].restarts > 2 and parts[-1].rewound > 0) == is_bounded


class Pictures(list):
    """In the place of a video."""
    frames = 9


def test_skipped_pictures():
    """Those after them get the numbers as without a skip, whatever else was encoded with them; and few
    of the skipped ones are encoded."""
    pictures = [np.full((4, 6, 3), k, np.uint8) for k in (1, 2, 3, 3, 4, 1, 2, 2, 2)]
    encoded = []

    def vision(frames):                         # tokens depend on all pictures that share the pass
        encoded.extend(frames)
        tokens = frames[:, :1, :2].float()
        return tokens + 0.01 * tokens.sum()

    def tokens(batch, skip):
        frames, total, _ = open_frames(source_of("a.mp4"), Config(), vision, batch, skip=skip,
                                       open_video=lambda *_: Pictures(pictures))
        assert total == 9
        return [x.tolist() for x in frames]

    for batch in (1, 3):
        every = tokens(batch, 0)
        for skip in range(11):
            encoded.clear()
            assert tokens(batch, skip) == every[skip:]
            assert len(encoded) <= max(0, 9 - skip) + batch - 1


OUTPUTS = "jsonl", "srt", "vtt", "trace"


def contents(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUTS}


def snapshot(folder):
    return {file: (file.stat().st_mtime_ns, file.read_bytes())
            for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"}


KILLED = """
import os, signal, sys
from beyond.commands import stream_command
from beyond.streams import suspend

suspend.EVERY = 0.0                     # saved whenever this is possible, not once a minute
replace = os.replace
saves = []

def replace_or_die(*paths):
    saves.append(paths)
    if len(saves) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
del sys.argv[1]                         # this program
stream_command.main()
"""


def test_killed(tmp_path):
    """After kill -9 in the third save, the same command ends with the same files, byte for byte."""
    source = tmp_path / "a.mp4"
    data_command.write_toy(1, 0.2, source)

    def line(folder):
        outputs = [f"--{name}={tmp_path / folder / name}" for name in (*OUTPUTS, "state")]
        return [str(source), f"--model={TOY}", "--last-k=3", "--device=cpu", *outputs]

    assert call(stream_command, line("once"))[0] == 0
    code, _ = Forked(["-c", KILLED, *line("often")], ROOT, os.environ).end()
    assert code == -signal.SIGKILL
    assert contents(tmp_path / "often") != contents(tmp_path / "once")

    code, errors = call(stream_command, line("often"))
    assert code == 0 and "goes on after" in errors
    assert contents(tmp_path / "often") == contents(tmp_path / "once")
    before = snapshot(tmp_path)
    code, errors = call(stream_command, line("often"))
    assert code == 0 and f"{source} is narrated to its end; delete it to begin anew\n" in errors
    assert snapshot(tmp_path) == before


class Half:
    """A stream of features in a folder, x.safetensors, and its narrator."""

    def __init__(self, model, folder):
        self.model = model
        self.folder = folder
        self.state = folder / "s"
        self.source = folder / "x.safetensors"
        self.files = {name: str(folder / name) for name in OUTPUTS} | {"state": str(self.state)}
        self.args = arguments()
        self.args.lookahead = 4

    def decisions(self):
        stream = stream_command.NarratedInput(Input(source_of(str(self.source)), "", self.files))
        return stream.decisions(self.model, None, self.args)

    def stop_after(self, count):
        steps = self.decisions()
        assert len(list(islice(steps, count))) == count
        steps.close()

    def assert_refused(self, message):
        """With one line, and no file is changed."""
        before = snapshot(self.folder)
        with pytest.raises(BadData, match=message) as error:
            next(self.decisions())
        assert "\n" not in str(error.value)
        assert snapshot(self.folder) == before


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    model, x = lively(grouped(), frames=40, last_k=2, max_new_tokens=4)
    model.merge()
    save_file({"x": x}, folder / "x.safetensors")
    save_file({"x": x + 0.1}, folder / "y.safetensors")
    half = Half(model, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suspend, "EVERY", 0.0)                # saved whenever this is possible
        half.stop_after(19)
    assert half.state.exists()
    return half


@pytest.fixture
def half(template, tmp_path, monkeypatch):
    monkeypatch.setattr(suspend, "EVERY", 0.0)
    shutil.copytree(template.folder, tmp_path, dirs_exist_ok=True)
    return Half(copy.deepcopy(template.model), tmp_path)


def test_what_may_differ(half, capsys):
    moved = half.folder / "moved" / "z.safetensors"
    moved.parent.mkdir()
    half.source.rename(moved)
    half.source = moved
    config = half.model.config
    config.llm = "another/name"
    config.theta, config.refractory, config.max_segment = 0.5, 1.0, 9.0
    half.args.static = True
    half.args.source_option = [("framerate", "25")]         # of a raw film, it is another one
    half.args.lookahead = 2
    half.model.llm.to(torch.bfloat16)
    list(half.decisions())
    told = capsys.readouterr().err
    assert "static = False, here True" in told and "--source-option = None, here" in told
    frames = [row["frame"] for row in rows_of(half.folder / "trace")]
    assert sorted(set(frames)) == list(range(40))
    (half.folder / "srt").unlink()              # the end does not stand for a file that is gone
    half.assert_refused("srt: is missing, or not")


def another(name, value):
    return lambda half: setattr(half.model.config, name, value)


def cut_off(name, size):
    return lambda half: os.truncate(half.folder / name, size)


OF_ANOTHER_STREAM = {
    "last_k = 2, here 3": another("last_k", 3),
    "source = ": lambda half: setattr(half, "source", half.folder / "y.safetensors"),
    "llm_mark = None, here 0a": another("llm_mark", "0a"),
    "narrator = , here 0a": lambda half: setattr(half.model, "mark", "0a"),
    "was saved with --jsonl --srt --vtt --trace;": lambda half: half.files.pop("vtt"),
    "srt: is missing, or not": lambda half: (half.folder / "srt").unlink(),
    "jsonl: is missing, or not": cut_off("jsonl", 30),
    # it would be cut off where the state goes on
    "vtt: is missing, or not": lambda half: (half.folder / "vtt").write_text("1\n" * 9999),
}


@pytest.mark.parametrize("message", OF_ANOTHER_STREAM)
def test_a_state_of_another_stream_is_refused(half, message):
    OF_ANOTHER_STREAM[message](half)
    half.assert_refused(message)


def test_addresses_are_told_apart_and_not_shown():
    """Two cameras of one recorder; a password may be changed."""
    one, other, same = (
        suspend.source_signature(source_of(f"rtsp://me:{address}?key=hidden"))
        for address in ("secret@nvr/ch1", "secret@nvr/ch2", "new@nvr/ch1"))
    assert one == same != other
    assert one.startswith("rtsp://nvr/... ")
    assert not any(word in one for word in ("secret", "hidden", "ch1"))


def rewritten(change):
    """A function that changes the header of a state, with a right digest."""
    def rewrite(path):
        header, tensors = read_state(path)
        change(header)
        text = json.dumps(header)
        save_file(tensors, path, {"state": text, "digest": digest_of_state(text, tensors)})
    return rewrite


def without_digest(path):
    header, tensors = read_state(path)
    save_file(tensors, path, {"state": json.dumps(header)})


@pytest.mark.parametrize("damage, message", [
    (lambda state: os.truncate(state, state.stat().st_size - 100), "is damaged"),
    (without_digest, "is damaged"),
    (rewritten(lambda header: header.update(format=3)), "no state of this version .*format 3, not 8"),
    (rewritten(lambda header: header["stream"].pop("words")), "expected a state of this program"),
    (rewritten(lambda header: header["stream"].update(tokens=5)), "expected a state"),
], ids=["truncated", "no digest", "an earlier format", "no words", "no tokens"])
def test_a_file_that_is_no_state_is_refused(half, damage, message):
    damage(half.state)
    half.assert_refused(message)


def test_a_damaged_byte_is_refused(half):
    intact = half.state.read_bytes()
    numbers = random.Random(0)
    for place in [*range(8), *numbers.sample(range(len(intact)), 100)]:
        damaged = bytearray(intact)
        damaged[place] ^= 1 << numbers.randrange(8)
        half.state.write_bytes(damaged)
        with pytest.raises(BadData):
            read_state(half.state)
    half.assert_refused("is damaged")


def test_an_output_may_be_added_to_those_of_a_camera(tmp_path):
    model = at_every_frame()
    narrate_live(tmp_path, model, ("jsonl", "state"), 3)
    narrate_live(tmp_path, model, ("jsonl", "vtt", "state"), 2)
    assert (tmp_path / "vtt").read_text().count(" --> ") == 2
    assert len(rows_of(tmp_path / "jsonl")) == 5


def test_time_never_goes_back(tmp_path, monkeypatch):
    """The wall clock is set back by an hour between two runs of a camera."""
    model = at_every_frame()
    narrate_live(tmp_path, model, ("jsonl", "trace", "state"), 3)
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() - 3600)
    narrate_live(tmp_path, model, ("jsonl", "trace", "state"), 3)
    for name, field in (("jsonl", "end"), ("trace", "time")):
        times = [row[field] for row in rows_of(tmp_path / name)]
        assert len(times) == 6 and times == sorted(set(times)), name
