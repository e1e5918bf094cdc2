"""streams/suspend.py: a killed stream continues as if it had never been stopped. A state that does
not belong to the stream is refused."""
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
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

import narrator as nar
from commands import data as data_command, stream as stream_command
from commands.stream import trace_row
from helpers import ROOT, grouped, narrate, tiny, video
from streams import camera, suspend
from streams.bounds import open_stream
from streams.subtitles import Writers
from streams.suspend import pack, model_answers, read_state, unpack, write_state
from streams.together import DirectPasses
from support.common.errors import BadData
from support.files.features import encode_pictures
from test_live import Eyes, arguments, lavfi
from test_commands import call


def talking(**changes):
    """A tiny narrator that narrates every few frames, and 40 frames for it."""
    model = tiny(llm=grouped(), max_new_tokens=4, **changes)
    x, _ = video(model, 40)
    steps = narrate(model, x, given={0: [5]})
    p_skip = sorted(step.p_skip for step in islice(steps, 1, 16))
    model.config.theta = (p_skip[4] + p_skip[5]) / 2
    model.config.theta_low = (p_skip[2] + p_skip[3]) / 2
    return model, x


# ------------------------------------------------------------------ what is saved

def suspended(model, context):
    """A new Context with the contents of this one's state, after JSON and safetensors."""
    numbers, tensors = pack(context)
    # safetensors refuses tensors that share memory
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    new_context = open_stream(model)
    model_answers(model, new_context, None)
    unpack(new_context, json.loads(json.dumps(numbers)), load(save(copies)))
    return new_context


def exact(step, layout):
    """Everything of a Decision that must be equal to the last bit."""
    narration = step.narration and vars(step.narration)
    return trace_row(step, layout), narration, step.fed.ids, step.pruned


def narrate_in_parts(model, x, lookahead, share, restarts=()):
    """Narrate frames; suspend the stream at a random share of the moments when it can be saved.

    restarts        frames before which a restart of the segment is asked for

    Returns the exact Decisions, and the Context of each resumed part.
    """
    numbers = random.Random(0)
    context = open_stream(model)
    decisions = []
    resumed = []
    finished = False
    while not finished:
        finished = True
        rest = x[context.frame:]
        for step in narrate(model, rest, context=context, lookahead=lookahead):
            decisions.append(exact(step, model.layout))
            if step.frame + 1 in restarts:
                context.restart()
            if not context.ahead and numbers.random() < share:
                context = suspended(model, context)
                resumed.append(context)
                finished = False
                break
    return decisions, resumed


MOD = {"memory": "none", "prune": False, "mod_keep": 0.4}


@pytest.mark.parametrize("fast, lookahead, changes", [
    (True, 4, {"last_k": 2}),
    (False, 4, {"readout": "cls", "keep_newline": True, "last_k": 1}),
    (True, 4, {"memory": "recent", "memory_tokens": 20}),
    (True, 4, {"last_k": 0, "narration_memory": 4}),
    (True, 4, {"memory": "none", "prune": False}),
    (True, 4, MOD),
    (False, 1, MOD),
], ids=str)
def test_bit_by_bit(fast, lookahead, changes):
    """Every p([SKIP]), every token and every length of the cache is that of the stream without
    interruption."""
    model, x = talking(**changes)
    if fast:
        model.merge()
    uninterrupted, _ = narrate_in_parts(model, x[:24], lookahead, share=0.0)
    decisions, resumed = narrate_in_parts(model, x[:24], lookahead, share=0.7)
    assert decisions == uninterrupted
    assert len(resumed) >= 4
    narrations = [narration for _, narration, _, _ in uninterrupted if narration]
    assert len(narrations) > 3
    assert any(context.unabsorbed for context in resumed)
    assert any(context.opening is None for context in resumed)


@pytest.mark.parametrize("lookahead, changes", [
    (1, {"last_k": 2}),
    (2, {"readout": "cls", "last_k": 1}),
])
def test_with_bounds(lookahead, changes):
    """Suspended after positions were turned back, and in the middle of a restarted segment."""
    model, x = talking(**changes, max_segment=1.5, max_position=150)
    model.merge()
    restarts = (17, 30)
    uninterrupted, _ = narrate_in_parts(model, x, lookahead, 0.0, restarts)
    decisions, resumed = narrate_in_parts(model, x, lookahead, 1.0, restarts)
    assert decisions == uninterrupted
    assert any(context.bounds.rewound for context in resumed)
    rows = [row for row, *_ in uninterrupted]
    after_restart = {row["frame"] + lookahead for row in rows if "restart" in row}
    assert any(context.frame in after_restart and context.cache.visual for context in resumed)


def test_into_a_cache_of_another_capacity():
    """A state can have more slots than a new cache, because slots were added."""
    model, x = talking()
    assert model.config.last_k is None
    model.config.theta = model.config.theta_low = -1.0      # one segment without end
    uninterrupted, _ = narrate_in_parts(model, x[:28], 4, share=0.0)
    decisions, resumed = narrate_in_parts(model, x[:28], 4, share=0.5)
    assert decisions == uninterrupted
    assert len(resumed[-1].cache.used) > 256


def test_into_a_cache_that_has_grown():
    """On CUDA, `try_passes` adds slots to the new cache before the state comes."""
    model, x = talking()
    context = open_stream(model)
    list(narrate(model, x[:6], context=context))
    numbers, tensors = pack(context)
    larger = open_stream(model)
    model_answers(model, larger, None)                  # its buffers
    larger.cache.grow(128)
    unpack(larger, numbers, tensors)
    assert larger.cache.used.sum() == context.cache.used.sum()
    assert len(larger.cache.free) == len(larger.cache.used) - larger.cache.used.sum()
    assert len(larger.cache.used) == len(context.cache.used) + 128


def test_size_is_constant():
    """The state of a bounded stream does not grow."""
    model, x = talking(last_k=2, max_segment=2.0, max_position=200)
    model.merge()
    context = open_stream(model)
    sizes = []
    for step in narrate(model, torch.cat([x] * 3), context=context):
        numbers, tensors = pack(context)
        text = json.dumps(numbers | {"narrated": []})
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()) + len(text))
    assert len(sizes) >= 120
    assert max(sizes[60:]) <= max(sizes[20:60]) * 1.02
    assert context.bounds.rewound > 3


def as_format_1(path):
    """Rewrite a state file as the first version wrote it: the same tensors, other numbers."""
    header, tensors = read_state(path)
    new = header["stream"]
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
    save_file(tensors, path, {"state": json.dumps(header | {"format": 1, "stream": old})})


def test_a_state_of_the_first_format(tmp_path):
    """The stream goes on as if the present version had written the state."""
    model, x = talking(last_k=2, max_segment=1.5, max_position=150)
    model.merge()
    state = tmp_path / "s"

    def decisions(frames, context):
        for step in narrate(model, frames, context=context):
            yield exact(step, model.layout)

    uninterrupted = list(decisions(x, open_stream(model)))
    opens = set()
    for cut in (0, 1, 3, 14, 29):
        context = open_stream(model)
        model_answers(model, context, None)
        assert list(islice(decisions(x, context), cut)) == uninterrupted[:cut]
        write_state(state, context, {}, {})
        as_format_1(state)

        header, tensors = read_state(state)
        resumed = open_stream(model)
        model_answers(model, resumed, None)
        unpack(resumed, header["stream"], tensors)
        assert pack(resumed)[0] == pack(context)[0]
        opens.add(resumed.opening is not None)
        assert list(decisions(x[cut:], resumed)) == uninterrupted[cut:]
    assert opens == {True, False}
    assert resumed.bounds.restarts and resumed.bounds.rewound


def test_a_command_goes_on_with_the_first_format(half, tmp_path):
    as_format_1(tmp_path / "s")
    code, errors = call(stream_command, half.line)
    assert code == 0 and "goes on after" in errors
    assert contents(tmp_path) == contents_at_once(half, tmp_path)


# ------------------------------------------------------------------ frames that are left out

@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("letters", ["abcdabcdb", "aabbccccdd", "abbbbbbc", "aaaaaaaaa"])
def test_skipped_pictures(batch, letters):
    """Pictures after the skipped ones get the same numbers as without a skip, whatever else was
    encoded with them; and few pictures are encoded."""
    # a letter is one array: a repeated picture
    arrays = {letter: np.full((4, 6, 3), k, np.uint8) for k, letter in enumerate("abcd", 1)}
    pictures = [arrays[letter] for letter in letters]
    encoded = []

    def vision(frames):
        """Tokens that depend on all pictures that share the pass."""
        encoded.extend(frames[:, 0, 0, 0].tolist())
        tokens = frames[:, :1, :2].float()
        return tokens + 0.01 * tokens.sum()

    every = [x.tolist() for x in encode_pictures(pictures, vision, batch)]
    for skip in range(len(pictures) + 2):
        encoded.clear()
        rest = [x.tolist() for x in encode_pictures(iter(pictures), vision, batch, skip)]
        assert rest == every[skip:]
        assert len(encoded) <= len(pictures[skip:]) + 2 * batch - 1


# ------------------------------------------------------------------ python stream.py --state

OUTPUTS = "jsonl", "srt", "vtt", "trace"


def command_words(folder, source, *options):
    outputs = [f"--{name}={folder / name}" for name in OUTPUTS]
    return [str(source), *options, "--device", "cpu", *outputs]


def contents(folder, names=OUTPUTS):
    return {name: (folder / name).read_bytes() for name in names}


def contents_at_once(half, folder):
    """The outputs of the same command without an interruption."""
    (folder / "s").unlink()
    assert call(stream_command, half.line)[0] == 0
    return contents(folder)


def rows_of(path):
    return [json.loads(row) for row in path.read_text().splitlines()]


def snapshot(folder):
    """The contents of every file, and when it was written."""
    files = {}
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else None
        files[file] = (file.stat().st_mtime_ns, content)
    return files


@contextmanager
def killed_after_a_save(line, state):
    """A process that runs the command, when it has saved for the first time; in the end it is
    killed."""
    # saved whenever this is possible, not once a minute
    code = ("from commands import stream; from streams import suspend; suspend.EVERY = 0.0; "
            "stream.main()")
    process = subprocess.Popen([sys.executable, "-c", code, *line], cwd=ROOT,
                               stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not state.exists():
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait(60)
    assert process.returncode == -signal.SIGKILL, "the process had ended by itself"


def call_until_row(line, count, interrupt, monkeypatch):
    """Run the command; call `interrupt` when the trace has `count` rows."""
    rows = []
    write_row = Writers.trace

    def trace(self, row):
        if len(rows) == count:
            interrupt()
        rows.append(row)
        write_row(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Writers, "trace", trace)
        return call(stream_command, line)


def stop_at_row(line, count, monkeypatch):
    """End the command at once, without a last save. Before, it saves whenever it can."""
    def stop():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suspend, "EVERY", 0.0)
        return call_until_row(line, count, stop, monkeypatch)


def signal_at_row(line, count, monkeypatch, number=signal.SIGINT):
    """Send a signal to the command, as Ctrl-C does."""
    return call_until_row(line, count, lambda: signal.raise_signal(number), monkeypatch)


def test_killed(tmp_path, monkeypatch):
    """After kill -9, in a first and in a resumed stream, the files are those of an uninterrupted
    run, byte for byte. While a process lives, its state is refused to others; its lock ends with
    it."""
    source = tmp_path / "a.mp4"
    state = tmp_path / "state"
    once, often = tmp_path / "once", tmp_path / "often"
    once.mkdir()
    often.mkdir()
    data_command.write_toy(1, 0.3, source)
    assert call(stream_command, command_words(once, source, "--last-k=3"))[0] == 0
    line = command_words(often, source, "--last-k=3", f"--state={state}")

    with killed_after_a_save(line, state) as process:
        # stopped, so that it changes no file while another process is refused
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        before = snapshot(tmp_path)
        assert call(stream_command, line) == (
            1, f"error: {state}: is in use by another stream.py; end that one first, or give "
               f"another --state\n")
        assert snapshot(tmp_path) == before

    # the files as they are on the disk between two frames: what a kill would leave
    killed = tmp_path / "killed"

    def copy_files():
        shutil.copytree(often, killed)
        shutil.copy(state, killed / "state")

    monkeypatch.setattr(suspend, "EVERY", 0.0)
    assert call_until_row(line, 6, copy_files, monkeypatch)[0] == 0
    shutil.move(killed / "state", state)
    shutil.rmtree(often)
    shutil.move(killed, often)

    code, errors = call(stream_command, line)
    assert code == 0 and "goes on after" in errors
    assert contents(often) == contents(once)
    assert not list(tmp_path.glob(".state.*"))
    before = snapshot(tmp_path)
    assert call(stream_command, line) == (
        0, f"{state}: {source} is narrated to its end; delete it to begin anew\n")
    assert snapshot(tmp_path) == before


class Half:
    """A stream of features in a folder: the command, and the narrator that it loads."""

    def __init__(self, model, folder):
        self.model = model
        self.line = command_words(folder, folder / "x.safetensors", "--model=m",
                                  f"--state={folder / 's'}")

    def load(self, *_, **changes):
        vars(self.model.config).update(changes)
        self.model.slow_because = None
        self.model.merge = lambda: self.model
        return self.model


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The model and the folder of a stream that was interrupted half-way."""
    folder = tmp_path_factory.mktemp("half")
    model, x = talking(last_k=2)
    save_file({"x": x}, folder / "x.safetensors")
    save_file({"x": x + 0.1}, folder / "y.safetensors")
    half = Half(copy.deepcopy(model), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_command, "load_narrator", half.load)
        assert stop_at_row(half.line, 19, patch)[0] == 130
    assert (folder / "s").exists()
    return model, folder


@pytest.fixture
def half(template, tmp_path, monkeypatch):
    model, folder = template
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    half = Half(copy.deepcopy(model), tmp_path)
    monkeypatch.setattr(stream_command, "load_narrator", half.load)
    return half


def test_interrupted_and_resumed(half, tmp_path, monkeypatch):
    """Output written after the last save is narrated again. No changed setting is reported."""
    assert len(rows_of(tmp_path / "trace")) == 19
    assert stop_at_row(half.line, 9, monkeypatch)[0] == 130
    code, errors = call(stream_command, half.line)
    assert code == 0 and "goes on with" not in errors
    assert contents(tmp_path) == contents_at_once(half, tmp_path)
    assert len(rows_of(tmp_path / "trace")) == 40
    assert len(rows_of(tmp_path / "jsonl")) > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_a_recording(half, tmp_path, monkeypatch, number):
    """It is saved at the next frame at which it can be, and the command says where it goes on."""
    (tmp_path / "s").unlink()
    handler = signal.getsignal(signal.SIGINT)
    code, errors = signal_at_row(half.line, 9, monkeypatch, number)
    frame = read_state(tmp_path / "s")[0]["stream"]["frame"]
    assert code == 130 and 10 <= frame <= 13
    saved = f"s: saved; the same command goes on after {frame} frames, at 00:00:0{frame / 2}\n"
    assert saved in errors and errors.endswith("interrupted\n")
    assert signal.getsignal(signal.SIGINT) is handler

    code, errors = call(stream_command, half.line)
    assert code == 0 and f"goes on after {frame} frames" in errors
    assert contents(tmp_path) == contents_at_once(half, tmp_path)

    without_state = [word for word in half.line if "--state" not in word]
    code, errors = signal_at_row(without_state, 9, monkeypatch)
    assert code == 130 and errors.endswith("interrupted\n") and "saved" not in errors


def test_ctrl_c_saves_several_recordings(half, tmp_path, monkeypatch):
    """Each recording that has begun is saved; one that has not begins the next time."""
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "z.safetensors")
    inputs = [str(tmp_path / f"{name}.safetensors") for name in "xyz"]
    line = [*inputs, "--model=m", "--device=cpu", "--batch=2"]
    once, often, states = tmp_path / "once", tmp_path / "often", tmp_path / "states"
    assert call(stream_command, [*line, f"--jsonl={once}"])[0] == 0

    line = [*line, f"--jsonl={often}", f"--state={states}"]
    code, errors = signal_at_row(line, 9, monkeypatch)
    assert code == 130, errors
    assert errors.count(": saved; the same command goes on") == 2, errors
    assert {file.name for file in states.iterdir()} == {"x.state", "y.state"}
    assert call(stream_command, line)[0] == 0

    def sentences(folder):
        rows = [row for name in "xyz" for row in rows_of(folder / f"{name}.jsonl")]
        return [(row["n"], row["frame"], row["text"]) for row in rows]

    assert sentences(often) == sentences(once)


def test_what_may_differ(half, tmp_path):
    """Thresholds and bounds, which are reported; names of models; the place of the source."""
    state = tmp_path / "s"
    moved = tmp_path / "moved" / "z.safetensors"
    moved.parent.mkdir()
    (tmp_path / "x.safetensors").rename(moved)
    half.line[0] = str(moved)
    half.model.config.llm = "another/name"
    theta = half.model.config.theta
    changes = ["--theta=0.5", "--refractory=1", "--static", "--lookahead=2", "--max-segment=9"]
    code, errors = call(stream_command, [*half.line, *changes])
    assert code == 0 and "goes on after" in errors
    reports = [line for line in errors.splitlines() if "goes on with" in line]
    assert reports == [
        f"{state}: goes on with theta = 0.5 (was {theta}), refractory = 1.0 (was 4.0), "
        f"max_segment = 9.0 (was None), static = True (was False)"]
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(40))


def test_several_inputs(half, tmp_path, monkeypatch):
    """Each has a state of its own in a folder; one that is finished stays as it is."""
    inputs = [str(tmp_path / f"{name}.safetensors") for name in "xy"]
    line = [*inputs, "--model=m", "--device=cpu", "--batch=1"]
    once, often, states = tmp_path / "once", tmp_path / "often", tmp_path / "states"
    assert call(stream_command, [*line, f"--jsonl={once}", f"--trace={once}"])[0] == 0

    line = [*line, f"--jsonl={often}", f"--trace={often}", f"--state={states}"]
    assert stop_at_row(line, 65, monkeypatch)[0] == 130
    assert {file.name for file in states.iterdir()} == {"x.state", "y.state"}
    code, errors = call(stream_command, line)
    assert code == 0
    assert "x.safetensors is narrated to its end" in errors
    assert "y.state: goes on after" in errors
    names = ["x.jsonl", "x.trace.jsonl", "y.jsonl", "y.trace.jsonl"]
    assert contents(once, names) == contents(often, names)


# ------------------------------------------------------------------ what is refused

def assert_refused(half, folder, message):
    """The command ends with one line, and changes no file."""
    before = snapshot(folder)
    code, errors = call(stream_command, half.line)
    assert code == 1, errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert re.search(message, errors), errors
    assert snapshot(folder) == before


@pytest.mark.parametrize("option, message", [
    ("--last-k=3", r"another last_k \(2; here 3\)"),
    ("--fps=3", "another fps"),
    ("--state={folder}/srt", "is given twice"),
    ("--state={folder}/srt/s", "srt/s: cannot be"),
])
def test_another_option_is_refused(half, tmp_path, option, message):
    half.line.append(option.format(folder=tmp_path))
    assert_refused(half, tmp_path, message)


def test_another_source_is_refused(half, tmp_path):
    half.line[0] = str(tmp_path / "y.safetensors")
    assert_refused(half, tmp_path, "another source")


def test_fewer_outputs_are_refused(half, tmp_path):
    half.line.remove(f"--vtt={tmp_path / 'vtt'}")
    assert_refused(half, tmp_path, "was saved with --jsonl --srt --vtt --trace;")


@pytest.mark.parametrize("parameter, message", [
    ("memory.z", "another weights of its memory"),
    ("connector.2.bias", "another weights of its connector"),
    ("llm.lm_head.lora_B.weight", "language model, or with another LoRA"),
    ("llm.model.layers.1.mlp.down_proj.lora_B.weight", "language model, or with another LoRA"),
    ("llm.model.layers.0.mlp.up_proj.base_layer.weight", "language model"),
])
def test_other_weights_are_refused(half, tmp_path, parameter, message):
    with torch.no_grad():
        half.model.get_parameter(parameter).mul_(1.2)
    assert_refused(half, tmp_path, message)


def test_another_tokenizer_is_refused(half, tmp_path):
    half.model.layout.tokenizer.add_tokens(["zzz"])
    assert_refused(half, tmp_path, "another tokenizer")


def other_header(path, **changes):
    """Rewrite a state file with another header."""
    header, tensors = read_state(path)
    save_file(tensors, path, {"state": json.dumps(header | changes)})


def without_tensors(path):
    """Rewrite a state file with a slot number alone."""
    header, _ = read_state(path)
    tensors = {"cache.slots": torch.zeros(3).long()}
    save_file(tensors, path, {"state": json.dumps(header)})


def truncated(path):
    os.truncate(path, path.stat().st_size - 100)


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage, message", [
    (truncated, "is damaged"),
    (lambda state: state.write_bytes(os.urandom(1000)), "is damaged"),
    (lambda state: state.write_bytes(b""), "is damaged"),
    (lambda state: shutil.copy(state.with_name("y.safetensors"), state), "is damaged"),
    (without_tensors, "is damaged"),
    (lambda state: other_header(state, format=1, stream={"decided": [0.5]}), "is damaged"),
    (lambda state: other_header(state, format=3), "has format 3, not 2"),
    (directory, "is a directory"),
], ids=["truncated", "random bytes", "empty", "features", "other tensors", "damaged format 1",
        "a later format", "directory"])
def test_a_file_that_is_no_state_is_refused(half, tmp_path, damage, message):
    damage(tmp_path / "s")
    assert_refused(half, tmp_path, message)


def test_a_missing_output_is_refused(half, tmp_path):
    (tmp_path / "srt").unlink()
    assert_refused(half, tmp_path, "srt: is missing")


def test_a_shorter_output_is_refused(half, tmp_path):
    os.truncate(tmp_path / "jsonl", 30)
    assert_refused(half, tmp_path, "jsonl: is shorter than it was")


def test_another_file_under_the_name_of_an_output_is_refused(half, tmp_path):
    """It would be cut off where the state goes on."""
    diary = "".join(f"{number}\n" for number in range(9999))
    (tmp_path / "srt").write_text(diary)
    assert_refused(half, tmp_path, "srt: is not the file that it was")
    assert (tmp_path / "srt").read_text() == diary


def test_another_vision_model():
    """Its answer to a test picture is compared, with the tolerance of another dtype."""
    model = at_every_frame()

    def answers(scale):
        def encode(pictures):
            return Eyes().encode_batches([pictures])[0] * torch.arange(32) * scale
        return model_answers(model, open_stream(model), encode)

    suspend.check_model_answers("s", answers(1.01), answers(1), 5e-2)
    with pytest.raises(BadData, match="another vision model"):
        suspend.check_model_answers("s", answers(2), answers(1), 5e-2)


def test_another_dtype(tmp_path):
    """A state in float32 goes on in bfloat16, with nearly the same p([SKIP])."""
    model, x = talking(last_k=2)
    context = open_stream(model)
    steps = narrate(model, x, context=context)
    list(islice(steps, 12))
    answers = model_answers(model, open_stream(model), None)
    write_state(tmp_path / "s", context, {}, answers)

    half_precision = copy.deepcopy(model)
    half_precision.llm.to(torch.bfloat16)
    resumed = open_stream(half_precision)
    answers = model_answers(half_precision, resumed, None)
    header, tensors = read_state(tmp_path / "s")
    suspend.check_model_answers("s", tensors, answers, 5e-2)
    with pytest.raises(BadData):
        suspend.check_model_answers("s", tensors, answers, 1e-6)
    unpack(resumed, header["stream"], tensors)
    assert resumed.cache.keys[0].dtype == torch.bfloat16
    in_float32 = next(steps)
    in_bfloat16 = next(narrate(half_precision, x[12:], context=resumed))
    assert in_float32.frame == in_bfloat16.frame == 12
    assert 0.8 < in_float32.p_skip / in_bfloat16.p_skip < 1.25


# ------------------------------------------------------------------ live

def at_every_frame(**changes):
    """A narrator that narrates at every frame."""
    return tiny(last_k=2, fps=10.0, theta=1.0, theta_low=1.0, max_new_tokens=2, **changes)


def live(folder, model, ask=DirectPasses(), names=("jsonl", "trace", "state")):
    """A live input with these output files in a folder, and its Decisions and rows."""
    files = {name: folder / name.replace("state", "s") for name in names}
    run = stream_command.Input(lavfi(25), "", files, True)
    return run, run.decisions(model, Eyes(), arguments(), ask)


def narrate_live(count, *live_arguments, **live_options):
    """The first Decisions and rows of a live input, which is closed then; and the input."""
    run, steps = live(*live_arguments, **live_options)
    first_steps = list(islice(steps, count))
    steps.close()
    return run, first_steps


def test_a_camera_goes_on(tmp_path):
    """It is saved after each narration. Numbers go on, and so does time, by the wall clock."""
    model = at_every_frame()
    first_run, before = narrate_live(6, tmp_path, model)
    time.sleep(0.4)
    second_run, after = narrate_live(3, tmp_path, model)
    numbers = [row["n"] for row in rows_of(tmp_path / "jsonl")]
    assert numbers == list(range(9)) == [step.frame for step, _ in before + after]
    last_end = before[-1][1]["end"]
    assert after[0][1]["start"] == last_end
    assert after[0][1]["end"] - last_end > 0.4
    passed = second_run.video.arrived - first_run.video.arrived     # by the monotonic clock
    assert abs(after[-1][1]["end"] - last_end - passed) < 0.1
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(9))


@pytest.fixture
def no_repeats(monkeypatch):
    """Each sentence is a subtitle, even if it is that of the frame before."""
    monkeypatch.setattr(camera, "REPEAT", -1.0)


def test_a_killed_camera_loses_no_line(tmp_path, no_repeats):
    """Output written after the last save stays, except half a line; numbers go on after it."""
    names = "jsonl", "srt", "vtt", "trace", "state"
    model = at_every_frame()
    _, steps = live(tmp_path, model, names=names)
    list(islice(steps, 3))
    saved = (tmp_path / "s").read_bytes()
    list(islice(steps, 3))
    assert len(rows_of(tmp_path / "trace")) == 6        # no row waits for the next one
    steps.close()

    half_lines = {
        "jsonl": '{"n": 6, "fra',
        "srt": "7\n00:00:00,6",
        "vtt": "00:00:00.600 --> 00:00:00.700\nYou l",
        "trace": '{"frame": 6',
    }
    before = {}
    for name, half_line in half_lines.items():
        before[name] = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before[name] + half_line)
    (tmp_path / "s").write_bytes(saved)                 # as if killed before the next save
    for _ in range(2):
        narrate_live(2, tmp_path, model, names=names)

    for name, text in before.items():
        assert (tmp_path / name).read_text().startswith(text)
    ten = list(range(10))
    rows = rows_of(tmp_path / "jsonl")
    assert [row["n"] for row in rows] == [row["frame"] for row in rows] == ten
    assert [row["frame"] for row in rows_of(tmp_path / "trace")] == ten
    cues = (tmp_path / "srt").read_text().split("\n\n")[:-1]
    assert [int(cue.split("\n")[0]) for cue in cues if "-->" in cue] == list(range(1, 11))
    assert (tmp_path / "vtt").read_text().count(" --> ") == 10


@pytest.mark.parametrize("names", [
    ("jsonl", "trace"),
    ("jsonl", "srt", "vtt"),
    ("srt", "state"),
    ("vtt", "state"),
])
def test_a_camera_appends(tmp_path, no_repeats, names):
    """Also without --state, and after a damaged state was deleted, as its message says."""
    model = at_every_frame()
    for _ in range(3):
        narrate_live(2, tmp_path, model, names=names)
        (tmp_path / "s").unlink(missing_ok=True)
    if "jsonl" in names:
        assert [row["n"] for row in rows_of(tmp_path / "jsonl")] == list(range(6))
    if "trace" in names:
        assert [row["frame"] for row in rows_of(tmp_path / "trace")] == list(range(6))
    if "srt" in names:
        text = (tmp_path / "srt").read_text()
        assert re.findall(r"^(\d+)\n\d", text, re.M) == list("123456")
    if "vtt" in names:
        text = (tmp_path / "vtt").read_text()
        assert text.count("WEBVTT") == 1 and text.count(" --> ") == 6


def test_a_live_trace_has_one_row_for_a_frame(tmp_path):
    """When a live source ends, its last frame is decided twice: the second row stays."""
    path = tmp_path / "trace"
    for start in (0, 2):
        with ExitStack() as stack:
            writers = Writers({"trace": path}, stack, live=True)
            writers.trace({"frame": 0, "narrate": True})
            writers.trace({"frame": 1, "narrate": False})
            writers.trace({"frame": 1, "narrate": True})
        assert rows_of(path)[start:] == [{"frame": start, "narrate": True},
                                         {"frame": start + 1, "narrate": True}]


def test_cues_are_numbered_on_after_one_without_words(tmp_path):
    path = tmp_path / "a.srt"
    for _ in range(2):
        with ExitStack() as stack:
            writers = Writers({"srt": path}, stack, live=True)
            for n, text in enumerate(["You look.", ""]):
                writers.sentence({"n": n, "frame": n, "start": n, "end": n + 1, "text": text})
    assert re.findall(r"^(\d+)$", path.read_text(), re.M) == list("1234")


@pytest.mark.parametrize("content, message", [
    ("a diary\n", "jsonl: is not what --jsonl writes"),
    ('{"n": 3, "frame": 7\n', "jsonl: its last line is damaged"),
])
def test_a_camera_leaves_other_files_alone(tmp_path, content, message):
    (tmp_path / "jsonl").write_text(content)
    _, steps = live(tmp_path, at_every_frame(), names=["jsonl"])
    with pytest.raises(BadData, match=message):
        next(steps)
    assert (tmp_path / "jsonl").read_text() == content


class Interrupted(DirectPasses):
    """Ctrl-C while the stream waits for a frame, after `frames` frames."""

    def __init__(self, frames):
        self.left = frames

    def wait(self, ready):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().wait(ready)


def narrate_live_until_ctrl_c(folder, model, frames):
    _, steps = live(folder, model, Interrupted(frames))
    with pytest.raises(KeyboardInterrupt):
        list(steps)


def test_a_camera_is_interrupted(tmp_path):
    """Ctrl-C between two frames: every frame before is saved. The segment is restarted, because
    the camera shows something else by then."""
    model = at_every_frame(max_segment=30.0)
    model.config.theta = model.config.theta_low = -1.0
    narrate_live_until_ctrl_c(tmp_path, model, 5)
    assert read_state(tmp_path / "s")[0]["stream"]["frame"] == 5
    assert len(rows_of(tmp_path / "trace")) == 5
    for frames in (0, 0, 3):                            # 0: interrupted before a picture comes
        narrate_live_until_ctrl_c(tmp_path, model, frames)
    rows = rows_of(tmp_path / "trace")
    assert [row["frame"] for row in rows] == list(range(8))
    assert [row["frame"] for row in rows if "restart" in row] == [5]

    model.config.theta = model.config.theta_low = 1.0
    _, steps = live(tmp_path, model)
    step, row = next(steps)
    assert (step.frame, row["n"], row["start"]) == (8, 1, 0.1)
