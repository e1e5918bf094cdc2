"""What is read is what runs: `python stream.py toy/kitchen.mp4` enters every function that the README
names for the stream, and each of them, spoiled, changes what is printed."""
import inspect
import os
import sys
from textwrap import dedent

import pytest
from safetensors.torch import save_file

import narrator as nar
import stream
from clam import CLAM
from beyond.commands import stream_command
from helpers import ROOT, kitchen_tokens
from test_commands import outcome
from test_readme import code_rows

# what the README's table names for training, or as an oracle
OF_TRAINING = {
    "CLAM.recurrence", "CLAM.chunked", "Narrator.forward", "Narrator.parallel", "Narrator.loss",
    "Tokens.labels", "attention_mask",
}


def printed(source: str) -> str:
    code, out, errors = outcome(stream_command, [source])
    assert code == 0, errors
    return out


def names_of_the_stream() -> list[tuple[str, str]]:
    """(file, function or class) of the README's table, but for what is of training."""
    names = []
    for _, code in code_rows("README.md"):
        for file, of_file in code.items():
            if file in ("stream.py", "narrator.py", "clam.py"):
                names += [(file, name) for name in of_file if name not in OF_TRAINING]
    return names


def test_the_first_command_enters_what_the_readme_names(monkeypatch):
    monkeypatch.chdir(ROOT)
    entered = set()

    def note(frame, event, argument):          # of each call of a function in Python
        entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        text = printed("toy/kitchen.mp4")
    finally:
        sys.settrace(before)
    assert len(text.splitlines()) == 43
    functions = {(os.path.basename(file), name) for file, name in entered
                 if os.path.dirname(file) == str(ROOT)}
    functions |= {(file, name.partition(".")[0]) for file, name in functions}      # classes
    names = set(names_of_the_stream())
    assert len(names) > 15 and names <= functions, names - functions


@pytest.fixture(scope="module")
def short_kitchen(tmp_path_factory):
    """The frame tokens of the kitchen's first 14 seconds, and what is printed of them."""
    file = tmp_path_factory.mktemp("kitchen") / "kitchen.safetensors"
    save_file({"x": kitchen_tokens(28)}, file)
    return str(file), printed(str(file))


@pytest.mark.parametrize("function, line, spoiled", [
    # Eq. 1, and the threshold that it is compared with
    (stream.Context.trigger, "return logits.softmax(-1)[self.layout.skip].item()", "return 1.0"),
    (stream.threshold, "return config.theta_low", "return config.theta"),
    # the rule: what is discarded at line 18
    (nar.visible, "visual = (kind == VISUAL) & in_segment", "visual = kind == VISUAL"),
    # the position counter, line 11
    (stream.Context.feed, "self.position = next_position", "pass"),
    # Eq. 2, line 5
    (stream.Context.update_memory, "self.state = memory.step(x[None], before)", "pass"),
    (CLAM.step, "return self.advance(state, *effect)", "return effect[1]"),
    # M_t = Q S_t, line 17
    (CLAM.read, "return self.norm_m(y + self.mlp(y))", "return torch.zeros_like(y)"),
], ids=lambda value: getattr(value, "__qualname__", "-"))
def test_a_spoiled_line_changes_what_is_printed(function, line, spoiled, short_kitchen, monkeypatch):
    source = dedent(inspect.getsource(function))
    assert source.count(line) == 1
    changed = {}
    exec(source.replace(line, spoiled), function.__globals__, changed)
    monkeypatch.setattr(function, "__code__", changed[function.__name__].__code__)
    file, before = short_kitchen
    assert printed(file) != before
