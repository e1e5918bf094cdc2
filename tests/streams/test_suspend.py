"""streams/suspend.py: a stream that is killed goes on as if it had not been; what cannot go on is refused by name."""
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

from commands import data as data_command, stream as stream_command
from commands.stream import trace_row
from helpers import ROOT, grouped, narrate, tiny, video
from streams import camera, suspend
from streams.fast import open_stream
from streams.subtitles import Writers
from streams.suspend import pack, model_answers, read_state, unpack, write_state
from streams.together import DirectPasses
from support.common.errors import BadData
from support.files.features import encode_pictures
from test_camera import Eyes, arguments, lavfi
from test_commands import call


def talking(llm=None, **changes):
    """A tiny narrator that narrates every few frames, and frames."""
    model = tiny(0, llm, max_new_tokens=4, **changes)
    x, _ = video(model, 40)
    p = sorted(step.p_skip for step in islice(narrate(model, x, forced={0: [5]}), 1, 16))
    model.config.theta, model.config.theta_low = (p[4] + p[5]) / 2, (p[2] + p[3]) / 2
    return model, x


# ------------------------------------------------------------------ what is saved

def suspended(model, context):
    """Another Context, with what a file of this one holds."""
    numbers, tensors = pack(context)
    other = open_stream(model)
    model_answers(model, other, None)
    unpack(other, json.loads(json.dumps(numbers)), load(save({name: y.clone() for name, y in tensors.items()})))
    return other


def told(step, layout):
    narration = step.narration and vars(step.narration)
    return trace_row(step, layout), narration, step.fed.ids, step.pruned


def killed(model, x, lookahead, restarts=(), share=0.0, seed=0):
    """All Decisions of a stream that is suspended at a share of the moments at which it can be; its new Contexts."""
    numbers, context, steps, at = random.Random(seed), open_stream(model), [], []
    while True:
        for step in narrate(model, x[context.frame:], context=context, lookahead=lookahead):
            steps.append(told(step, model.layout))
            if step.frame + 1 in restarts:
                context.restart()
            if not context.ahead and numbers.random() < share:
                break
        else:
            return steps, at
        context = suspended(model, context)
        at.append(context)


MOD = {"memory": "none", "prune": False, "mod_keep": 0.4}


@pytest.mark.parametrize("fast, lookahead, changes", [
    (True, 1, {}), (True, 4, {"last_k": 2}), (False, 4, {"readout": "cls", "keep_newline": True, "last_k": 1}),
    (True, 4, {"memory": "recent", "memory_tokens": 20}), (True, 4, {"last_k": 0, "narration_memory": 4}),
    (True, 4, {"memory": "none", "prune": False}), (True, 4, MOD), (False, 1, MOD)], ids=str)
def test_bit_by_bit(fast, lookahead, changes):
    """d3: every p([SKIP]), every token, every length of the cache is that of the stream without interruption."""
    model, x = talking(grouped() if changes is MOD else None, **changes)
    if fast:
        model.merge()
    whole, _ = killed(model, x[:24], lookahead)
    pieces, at = killed(model, x[:24], lookahead, (), 0.7)
    assert pieces == whole and len(at) >= 4 and sum(bool(row[1]) for row in whole) > 3
    assert any(context.waiting for context in at) and any(context.opening is None for context in at)


@pytest.mark.parametrize("lookahead, changes", [(1, {"last_k": 2}), (2, {"readout": "cls", "last_k": 1})])
def test_with_bounds(lookahead, changes):
    """d5: after positions were turned back, and in the middle of a restarted segment."""
    model, x = talking(**changes, max_segment=1.5, max_position=150)
    model.merge()
    whole, _ = killed(model, x, lookahead, (17, 30))
    pieces, at = killed(model, x, lookahead, (17, 30), 1.0)
    assert pieces == whole
    assert any(context.bounds.rewound for context in at)
    again = {row["frame"] + lookahead for row, *_ in whole if "restart" in row}
    assert any(context.frame in again and context.cache.visual for context in at)


def test_into_a_cache_of_another_capacity():
    """Slots were added: a state has more of them than a new cache."""
    model, x = talking()
    assert model.config.last_k is None
    model.config.theta = model.config.theta_low = -1.0                                    # a segment without end
    whole, _ = killed(model, x[:28], 4)
    pieces, at = killed(model, x[:28], 4, (), 0.5)
    assert pieces == whole and len(at[-1].cache.used) > 256


def test_size_is_constant():
    """d4: the state of a bounded stream does not grow."""
    model, x = talking(last_k=2, max_segment=2.0, max_position=200)
    model.merge()
    sizes, context = [], open_stream(model)
    for step in narrate(model, torch.cat([x] * 3), context=context):
        numbers, tensors = pack(context)
        text = json.dumps(numbers | {"narrated": []})
        sizes.append(sum(y.nbytes for y in tensors.values()) + len(text))
    assert len(sizes) >= 120 and max(sizes[60:]) <= max(sizes[20:60]) * 1.02 and context.bounds.rewound > 3


def test_state_of_another_version(tmp_path):
    context = open_stream(tiny())
    write_state(tmp_path / "s", context, {}, {})
    assert read_state(tmp_path / "s")[0]["stream"]["frame"] == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BadData, match="has format 2, not 3"):
        patch.setattr(suspend, "FORMAT", 3)
        read_state(tmp_path / "s")


def as_format_1(path):
    """Rewrite a state file as the first version wrote it: the same tensors, other numbers."""
    about, tensors = read_state(path)
    new = about["stream"]
    bounds = new["bounds"]
    old_bounds = {"began": bounds["start_frame"], "since": bounds["start_time"],
                  "asked": bounds["restart_asked"], "mark": bounds["segment_start"],
                  "count": bounds["restarts"], "turned": bounds["rewound"]}
    old = {"position": new["position"], "segment": new["segment"], "frame": new["frame"],
           "cache": new["cache"], "bounds": old_bounds, "said": new["narrated"],
           "new": new["opens"] and new["frame"] > 0,           # frame 0 was no new segment
           "last_narrated": 0,                                 # the frame; not used any more
           "told": new["last_narration_time"],
           "decided": [new["p_skip"], new["theta"], new["now"]]}
    save_file(tensors, path, {"state": json.dumps(about | {"format": 1, "stream": old})})


def test_a_state_of_the_first_format(tmp_path):
    """The stream goes on as if the present version had written it, whatever was going on."""
    model, x = talking(last_k=2, max_segment=1.5, max_position=150)
    model.merge()

    def streamed(frames, context):
        for step in narrate(model, frames, context=context):
            yield told(step, model.layout)

    whole = list(streamed(x, open_stream(model)))
    opens, contexts = set(), []
    for cut in (0, 1, 3, 14, 29):
        context, other = open_stream(model), open_stream(model)
        model_answers(model, context, None)
        assert list(islice(streamed(x, context), cut)) == whole[:cut]
        write_state(tmp_path / "s", context, {}, {})
        as_format_1(tmp_path / "s")
        about, tensors = read_state(tmp_path / "s")
        model_answers(model, other, None)
        unpack(other, about["stream"], tensors)
        assert pack(other)[0] == pack(context)[0]
        opens.add(other.opening is not None)
        contexts.append(other)
        assert list(streamed(x[cut:], other)) == whole[cut:]
    assert opens == {True, False}
    assert contexts[-1].bounds.restarts and contexts[-1].bounds.rewound


def test_a_damaged_state_of_the_first_format(tmp_path):
    about = {"format": 1, "stream": {"decided": [0.5]}}
    save_file({}, tmp_path / "s", {"state": json.dumps(about)})
    with pytest.raises(BadData, match="is damaged"):
        read_state(tmp_path / "s")


def test_a_command_goes_on_with_the_first_format(half, tmp_path):
    as_format_1(tmp_path / "s")
    code, errors = call(stream_command, half.line)
    assert code == 0 and "goes on after" in errors
    often = contents(tmp_path)
    (tmp_path / "s").unlink()
    assert call(stream_command, half.line)[0] == 0 and contents(tmp_path) == often


# ------------------------------------------------------------------ frames that are left out

@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_skipped_pictures(batch):
    """What comes after them has the same numbers as without, whatever else was encoded with it; little is encoded."""
    a, b, c, d = (np.full((4, 6, 3), k, np.uint8) for k in (1, 2, 3, 4))
    encoded = []

    def vision(frames):                                                  # that depends on what shares its pass
        encoded.extend(frames[:, 0, 0, 0].tolist())
        return frames[:, :1, :2].float() + 0.01 * frames[:, :1, :2].float().sum()

    for pictures in ([a, b, c, d, a, b, c, d, b], [a, a, b, b, c, c, c, c, d, d], [a, b, b, b, b, b, b, c], [a] * 9):
        whole = list(encode_pictures(pictures, vision, batch))
        for skip in range(len(pictures) + 2):
            encoded.clear()
            found = list(encode_pictures(iter(pictures), vision, batch, skip))
            assert [x.tolist() for x in found] == [x.tolist() for x in whole[skip:]]
            assert len(encoded) <= len(pictures[skip:]) + 2 * batch - 1


# ------------------------------------------------------------------ python stream.py --state

OUTPUTS = "jsonl", "srt", "vtt", "trace"


def words(folder, source, *more):
    return [str(source), *more, "--device", "cpu", *(f"--{name}={folder / name}" for name in OUTPUTS)]


def contents(folder, names=OUTPUTS):
    return {name: (folder / name).read_bytes() for name in names}


def everything(folder):
    """What any file holds, and when it was written."""
    return {file: (file.stat().st_mtime_ns, file.is_file() and file.read_bytes()) for file in folder.rglob("*")}


def test_killed_at_any_moment(tmp_path):
    """d1: kill -9, again and again; the files are those of a run that was left alone, byte for byte."""
    numbers, path = random.Random(0), tmp_path / "state"
    data_command.write_toy(1, 0.4, tmp_path / "a.mp4")
    once, often = tmp_path / "once", tmp_path / "often"
    once.mkdir(), often.mkdir()
    assert call(stream_command, words(once, tmp_path / "a.mp4", "--last-k=3"))[0] == 0

    def saved():
        with suppress(FileNotFoundError):
            return path.stat().st_mtime_ns

    line, lives, code = words(often, tmp_path / "a.mp4", "--last-k=3", f"--state={path}"), 0, -signal.SIGKILL
    always = ("from commands import stream; from streams import suspend; suspend.EVERY = 0.0; "
              "stream.main()")
    while code == -signal.SIGKILL:
        was, lives = saved(), lives + 1
        child = subprocess.Popen([sys.executable, "-c", always, *line], cwd=ROOT, stdout=subprocess.DEVNULL)
        while child.poll() is None and saved() == was:
            time.sleep(0.001)
        if lives < 4:
            time.sleep(numbers.uniform(0, 0.05))
            child.kill()
        code = child.wait(60)
    assert code == 0 and lives > 2 and contents(often) == contents(once)
    before = everything(tmp_path)
    assert call(stream_command, line) == (
        0, f"{path}: {tmp_path / 'a.mp4'} is narrated to its end; delete it to begin anew\n")
    assert before == everything(tmp_path)


def stopped(line, after, monkeypatch):
    """The command until so many rows of the trace are there."""
    rows = []

    def trace(self, row, original=Writers.trace):
        if len(rows) == after:
            raise KeyboardInterrupt
        rows.append(row)
        original(self, row)
    with monkeypatch.context() as patch:
        patch.setattr(Writers, "trace", trace)
        patch.setattr(suspend, "EVERY", 0.0)
        return call(stream_command, line)


class Half:
    """A stream of features, interrupted: the command, and the narrator that it loads."""

    def __init__(self, model, folder):
        self.model, self.line = model, words(folder, folder / "x.safetensors", "--model=m", f"--state={folder / 's'}")

    def load(self, *_, **changes):
        vars(self.model.config).update(changes)
        self.model.slow_because, self.model.merge = None, lambda: self.model
        return self.model


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder, (model, x) = tmp_path_factory.mktemp("half"), talking(last_k=2)
    save_file({"x": x}, folder / "x.safetensors")
    save_file({"x": x + 0.1}, folder / "y.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        half = Half(copy.deepcopy(model), folder)
        patch.setattr(stream_command, "load_narrator", half.load)
        assert stopped(half.line, 19, patch)[0] == 130 and (folder / "s").exists()
    return model, folder


@pytest.fixture
def half(template, tmp_path, monkeypatch):
    shutil.copytree(template[1], tmp_path, dirs_exist_ok=True)
    half = Half(copy.deepcopy(template[0]), tmp_path)
    monkeypatch.setattr(stream_command, "load_narrator", half.load)
    return half


def test_interrupted_and_resumed(half, tmp_path, monkeypatch):
    """Ctrl-C: what was saved last stands, and the rest is narrated again. Thresholds, which may differ, do not here."""
    assert len((tmp_path / "trace").read_text().splitlines()) == 19
    assert stopped(half.line, 9, monkeypatch)[0] == 130
    code, errors = call(stream_command, half.line)
    assert code == 0 and "goes on with" not in errors
    often = contents(tmp_path)
    (tmp_path / "s").unlink()
    assert call(stream_command, half.line)[0] == 0 and contents(tmp_path) == often
    assert len(often["trace"].splitlines()) == 40 and len(often["jsonl"].splitlines()) > 5


def signalled(line, after, monkeypatch, how=signal.SIGINT):
    """The command, which gets a signal when so many rows of the trace are there."""
    rows = []

    def trace(self, row, original=Writers.trace):
        if len(rows) == after:
            signal.raise_signal(how)
        rows.append(row)
        original(self, row)
    with monkeypatch.context() as patch:
        patch.setattr(Writers, "trace", trace)
        return call(stream_command, line)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_a_recording(half, tmp_path, monkeypatch, how):
    """At the next frame at which it can, and it says where it goes on; then nothing has been lost or doubled."""
    (tmp_path / "s").unlink()
    before = signal.getsignal(signal.SIGINT)
    code, errors = signalled(half.line, 9, monkeypatch, how)
    frame = read_state(tmp_path / "s")[0]["stream"]["frame"]
    assert code == 130 and 10 <= frame <= 13
    assert f"s: saved; the same command goes on after {frame} frames, at 00:00:0{frame / 2}\n" in errors
    assert errors.endswith("interrupted\n") and signal.getsignal(signal.SIGINT) is before
    code, errors = call(stream_command, half.line)
    assert code == 0 and f"goes on after {frame} frames" in errors
    often = contents(tmp_path)
    (tmp_path / "s").unlink()
    assert call(stream_command, half.line)[0] == 0 and contents(tmp_path) == often
    without = [word for word in half.line if "--state" not in word]
    code, errors = signalled(without, 9, monkeypatch)
    assert code == 130 and errors.endswith("interrupted\n") and "saved" not in errors


def test_ctrl_c_saves_several_recordings(half, tmp_path, monkeypatch):
    """All that have begun are saved; one whose turn had not come begins the next time."""
    def line(folder, *more):
        inputs = [str(tmp_path / f"{name}.safetensors") for name in "xyz"]
        return [*inputs, "--model=m", "--device=cpu", "--batch=2", f"--jsonl={folder}", *more]
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "z.safetensors")
    again = line(tmp_path / "often", f"--state={tmp_path / 'states'}")
    assert call(stream_command, line(tmp_path / "once"))[0] == 0
    code, errors = signalled(again, 9, monkeypatch)
    assert code == 130 and errors.count(": saved; the same command goes on") == 2, errors
    assert {file.name for file in (tmp_path / "states").iterdir()} == {"x.state", "y.state"}
    assert call(stream_command, again)[0] == 0

    def sentences(folder):
        rows = [json.loads(row) for name in "xyz" for row in open(tmp_path / folder / f"{name}.jsonl")]
        return [(row["n"], row["frame"], row["text"]) for row in rows]
    assert sentences("often") == sentences("once")


def test_a_state_is_of_one_process(half, tmp_path, monkeypatch):
    """Who comes second is refused in one line, and changes nothing; a lock ends with its process, even by kill -9."""
    code = ("import sys, time\nfrom pathlib import Path\nfrom streams.suspend import take_lock\n"
            "lock = take_lock(Path(sys.argv[1]))\nprint('locked', flush=True)\ntime.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True)
    assert other.stdout.readline() == "locked\n"
    before = everything(tmp_path)
    code, errors = call(stream_command, half.line)
    assert (code, errors) == (1, f"error: {tmp_path / 's'}: is in use by another stream.py; end that one first, or "
                                 f"give another --state\n")
    assert before == everything(tmp_path)
    other.kill()
    other.communicate()
    assert call(stream_command, half.line)[0] == 0
    assert not list(tmp_path.glob(".s.*"))


def changed(model, part):
    if part == "tokenizer":
        other = copy.copy(model)
        other.layout = copy.copy(model.layout)
        other.layout.tokenizer = copy.deepcopy(model.layout.tokenizer)
        other.layout.tokenizer.add_tokens(["zzz"])
        return other
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(part).mul_(1.2)
    return other


REFUSED = {
    "video": ("another source", lambda half, folder: half.line.__setitem__(0, str(folder / "y.safetensors"))),
    "last_k": (r"another last_k \(2; here 3\)", lambda half, folder: half.line.append("--last-k=3")),
    "fps": (r"another fps", lambda half, folder: half.line.append("--fps=3")),
    **{part: (says, lambda half, _, part=part: setattr(half, "model", changed(half.model, part))) for part, says in [
        ("memory.z", "another weights of its memory"), ("connector.2.bias", "another weights of its connector"),
        ("tokenizer", "another tokenizer"), ("llm.lm_head.lora_B.weight", "language model, or with another LoRA"),
        ("llm.model.layers.1.mlp.down_proj.lora_B.weight", "language model, or with another LoRA"),
        ("llm.model.layers.0.mlp.up_proj.base_layer.weight", "language model")]},
    "truncated": ("is damaged", lambda half, folder: os.truncate(folder / "s", (folder / "s").stat().st_size - 100)),
    "random bytes": ("is damaged", lambda half, folder: (folder / "s").write_bytes(os.urandom(1000))),
    "features": ("is damaged",
                 lambda half, folder: shutil.copy(folder / "y.safetensors", folder / "s")),
    "other tensors": ("is damaged", lambda half, folder: save_file(
        {"cache.slots": torch.zeros(3).long()}, folder / "s", {"state": json.dumps(read_state(folder / "s")[0])})),
    "empty": ("is damaged", lambda half, folder: (folder / "s").write_bytes(b"")),
    "folder": ("is a directory", lambda half, folder: ((folder / "s").unlink(), (folder / "s").mkdir())),
    "no trace": ("srt: is missing", lambda half, folder: (folder / "srt").unlink()),
    "short": ("jsonl: is shorter than it was", lambda half, folder: os.truncate(folder / "jsonl", 30)),
    "fewer outputs": ("was saved with --jsonl --srt --vtt --trace;", lambda half, folder: half.line.pop(-2)),
    "twice": ("is given twice", lambda half, folder: half.line.append(f"--state={folder / 'srt'}")),
    "nowhere": ("srt/s: cannot be",
                lambda half, folder: half.line.append(f"--state={folder / 'srt/s'}")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind, half, tmp_path):
    """d2: one line that says what it is, and nothing is changed."""
    says, change = REFUSED[kind]
    change(half, tmp_path)
    before = everything(tmp_path)
    code, errors = call(stream_command, half.line)
    assert code == 1 and len(errors.strip().splitlines()) == 1 and re.search(says, errors), errors
    assert before == everything(tmp_path)


def test_what_may_differ(half, tmp_path):
    """Thresholds and bounds, which are said; names of models; the place of the file."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "x.safetensors").rename(tmp_path / "moved" / "z.safetensors")
    half.line[0] = str(tmp_path / "moved" / "z.safetensors")
    half.model.config.llm = "another/name"
    changes = "--theta=0.5", "--refractory=1", "--static", "--lookahead=2", "--max-segment=9"
    theta = half.model.config.theta
    code, errors = call(stream_command, [*half.line, *changes])
    assert code == 0 and "goes on after" in errors
    said, = [line for line in errors.splitlines() if "goes on with" in line]
    assert said == (f"{tmp_path / 's'}: goes on with theta = 0.5 (was {theta}), refractory = 1.0 (was 4.0), "
                    f"max_segment = 9.0 (was None), static = True (was False)")
    assert [json.loads(row)["frame"] for row in (tmp_path / "trace").read_text().splitlines()] == list(range(40))


def test_another_vision_model(tmp_path):
    """It proves itself on a picture; so does one whose answer is that of another format."""
    model, proofs = at_every_frame(), []
    for scale in (1, 1.01, 2):
        eyes = Eyes()
        eyes.encode_batches = lambda videos, scale=scale: [y * torch.arange(32) * scale for y in Eyes().encode_batches(videos)]
        proofs.append(model_answers(model, open_stream(model), lambda pictures: eyes.encode_batches([pictures])[0]))
    suspend.check_model_answers("s", proofs[1], proofs[0], 5e-2)
    with pytest.raises(BadData, match="another vision model"):
        suspend.check_model_answers("s", proofs[2], proofs[0], 5e-2)


def test_another_format(tmp_path):
    """d3: a state of fp32 goes on in bf16; nearly the same p([SKIP])."""
    model, x = talking(last_k=2)
    steps = narrate(model, x, context=(context := open_stream(model)))
    list(islice(steps, 12))
    write_state(tmp_path / "s", context, {}, model_answers(model, open_stream(model), None))
    half_precision = copy.deepcopy(model)
    half_precision.llm.to(torch.bfloat16)
    other = open_stream(half_precision)
    proof, (about, tensors) = model_answers(half_precision, other, None), read_state(tmp_path / "s")
    suspend.check_model_answers("s", tensors, proof, 5e-2)
    with pytest.raises(BadData):
        suspend.check_model_answers("s", tensors, proof, 1e-6)
    unpack(other, about["stream"], tensors)
    assert other.cache.keys[0].dtype == torch.bfloat16
    one, two = next(steps), next(narrate(half_precision, x[12:], context=other))
    assert one.frame == two.frame == 12 and 0.8 < one.p_skip / two.p_skip < 1.25


def test_several_inputs(half, tmp_path, monkeypatch):
    """Each has a state of its own in a folder; one that is finished stays as it is."""
    def line(folder):
        inputs = [str(tmp_path / f"{name}.safetensors") for name in "xy"]
        return [*inputs, "--model=m", "--device=cpu", "--batch=1", f"--jsonl={folder}", f"--trace={folder}"]
    assert call(stream_command, line(tmp_path / "once"))[0] == 0
    state = f"--state={tmp_path / 'states'}"
    assert stopped([*line(tmp_path / "often"), state], 65, monkeypatch)[0] == 130
    assert {file.name for file in (tmp_path / "states").iterdir()} == {"x.state", "y.state"}
    code, errors = call(stream_command, [*line(tmp_path / "often"), state])
    assert code == 0 and "x.safetensors is narrated to its end" in errors and "y.state: goes on after" in errors
    names = "x.jsonl", "x.trace.jsonl", "y.jsonl", "y.trace.jsonl"
    assert contents(tmp_path / "once", names) == contents(tmp_path / "often", names)


# ------------------------------------------------------------------ live

def at_every_frame(**changes):
    return tiny(last_k=2, fps=10.0, theta=1.0, theta_low=1.0, max_new_tokens=2, **changes)


def live(folder, model, ask=DirectPasses(), names=("jsonl", "trace", "state")):
    files = {name: folder / name.replace("state", "s") for name in names}
    run = stream_command.Input(lavfi(25), "", files, True)
    return run, run.decisions(model, Eyes(), arguments(), ask)


def test_a_camera_goes_on(tmp_path):
    """After each narration it is saved; numbers go on, and so does time, by the wall clock."""
    run, steps = live(tmp_path, at_every_frame())
    before = list(islice(steps, 6))
    steps.close()
    time.sleep(1.2)
    since = time.time() - run.video.arrived
    again, steps = live(tmp_path, at_every_frame())
    after = list(islice(steps, 3))
    steps.close()
    rows = [json.loads(row) for row in (tmp_path / "jsonl").read_text().splitlines()]
    assert [row["n"] for row in rows] == list(range(9)) == [step.frame for step, _ in before + after]
    assert after[0][1]["start"] == before[-1][1]["end"] and after[0][1]["end"] - before[-1][1]["end"] > 1.2
    passed = (again.video.arrived - run.video.arrived)                               # both by the monotonic clock
    assert abs(after[-1][1]["end"] - before[-1][1]["end"] - passed) < 0.1 and since
    assert [json.loads(row)["frame"] for row in (tmp_path / "trace").read_text().splitlines()] == list(range(9))


def rows_of(path):
    return [json.loads(row) for row in path.read_text().splitlines()]


@pytest.fixture
def no_repeats(monkeypatch):
    """Each sentence is a subtitle, too, though it is that of the frame before."""
    monkeypatch.setattr(camera, "REPEAT", -1.0)


def test_a_killed_camera_loses_no_line(tmp_path, no_repeats):
    """What was written after the last saving stays, but half a line; numbers go on after it."""
    names = "jsonl", "srt", "vtt", "trace", "state"
    run, steps = live(tmp_path, at_every_frame(), names=names)
    list(islice(steps, 3))
    saved = (tmp_path / "s").read_bytes()
    list(islice(steps, 3))
    assert len(rows_of(tmp_path / "trace")) == 6                     # none waits for the next one
    steps.close()
    torn = {"jsonl": '{"n": 6, "fra', "srt": "7\n00:00:00,6", "vtt": "00:00:00.600 --> 00:00:00.700\nYou l",
            "trace": '{"frame": 6'}
    before = {}
    for name, half_a_line in torn.items():
        before[name] = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before[name] + half_a_line)
    (tmp_path / "s").write_bytes(saved)                              # as if it had been killed before the next saving
    for _ in range(2):
        run, steps = live(tmp_path, at_every_frame(), names=names)
        list(islice(steps, 2))
        steps.close()
    for name, text in before.items():
        assert (tmp_path / name).read_text().startswith(text)
    assert [row["n"] for row in rows_of(tmp_path / "jsonl")] == list(range(10))
    assert [row["frame"] for row in rows_of(tmp_path / "jsonl")] == list(range(10))
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(10))
    cues = (tmp_path / "srt").read_text().split("\n\n")[:-1]
    assert [int(cue.split("\n")[0]) for cue in cues if "-->" in cue] == list(range(1, 11))
    assert (tmp_path / "vtt").read_text().count(" --> ") == 10


@pytest.mark.parametrize("names", [("jsonl", "trace"), ("jsonl", "srt", "vtt"), ("srt", "state"), ("vtt", "state")])
def test_a_camera_appends(tmp_path, no_repeats, names):
    """Without --state, too, and after a damaged state was deleted, as its message says."""
    for start in range(3):
        run, steps = live(tmp_path, at_every_frame(), names=names)
        list(islice(steps, 2))
        steps.close()
        (tmp_path / "s").unlink(missing_ok=True)
    if "jsonl" in names:
        assert [row["n"] for row in rows_of(tmp_path / "jsonl")] == list(range(6))
    if "trace" in names:
        assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(6))
    if "srt" in names:
        assert re.findall(r"^(\d+)\n\d", (tmp_path / "srt").read_text(), re.M) == list("123456")
    if "vtt" in names:
        text = (tmp_path / "vtt").read_text()
        assert text.count("WEBVTT") == 1 and text.count(" --> ") == 6


def test_a_live_trace_has_one_row_for_a_frame(tmp_path):
    """Of a frame that is decided twice, when a live source ends, the second row."""
    for start in (0, 2):
        with ExitStack() as stack:
            writers = Writers({"trace": tmp_path / "trace"}, stack, live=True)
            for frame, narrate in ((0, True), (1, False), (1, True)):
                writers.trace({"frame": frame, "narrate": narrate})
        assert rows_of(tmp_path / "trace")[start:] == [{"frame": start, "narrate": True},
                                                       {"frame": start + 1, "narrate": True}]


@pytest.mark.parametrize("content", ["a diary\n", '{"n": 3, "frame": 7\n'])
def test_a_camera_leaves_other_files_alone(tmp_path, content):
    (tmp_path / "jsonl").write_text(content)
    with pytest.raises(BadData, match="jsonl: (is not what --jsonl writes|its last line is damaged)"):
        next(live(tmp_path, at_every_frame(), names=["jsonl"])[1])
    assert (tmp_path / "jsonl").read_text() == content


class Interrupted(DirectPasses):
    """Ctrl-C while the stream waits for frame number `at`."""
    def __init__(self, at):
        self.left = at

    def wait(self, ready):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().wait(ready)


def test_a_camera_is_interrupted(tmp_path):
    """Ctrl-C between two frames: all of them are saved. The segment is restarted, for the view is another one."""
    model = at_every_frame(max_segment=30.0)
    model.config.theta = model.config.theta_low = -1.0
    run, steps = live(tmp_path, model, Interrupted(5))
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    assert read_state(tmp_path / "s")[0]["stream"]["frame"] == 5 == len((tmp_path / "trace").read_text().splitlines())
    for frames in (0, 0, 3):                                                 # 0: interrupted before a picture comes
        run, steps = live(tmp_path, model, Interrupted(frames))
        with pytest.raises(KeyboardInterrupt):
            list(steps)
    rows = [json.loads(row) for row in (tmp_path / "trace").read_text().splitlines()]
    assert [row["frame"] for row in rows] == list(range(8))
    assert [row["frame"] for row in rows if "restart" in row] == [5]
    model.config.theta = model.config.theta_low = 1.0
    step, row = next(live(tmp_path, model)[1])
    assert (step.frame, row["n"], row["start"]) == (8, 1, 0.1)
