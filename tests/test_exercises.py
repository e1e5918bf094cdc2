"""EXERCISES.md keeps its promises. With --slow, each change is made in a copy, the kitchen is narrated
and the named tests are run there."""
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import ROOT, TOY
from baselines.variants import load_narrator
from support.files.features import open_frames

TEXT = (ROOT / "EXERCISES.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]
COPIED = ("*.py", "pytest.ini", "baselines", "commands", "streams", "support", "toy", "experiments",
          "tests")
# tests that take seconds; most of them narrate the kitchen, too
LONG_TESTS = ("test_explain", "test_output_formats", "test_cache_is_bounded")
KITCHEN = (r"The kitchen: (\d+) narrations, (\d+) as before(?:, (\d+) one frame later)?; "
           r"the cache holds at most (\d+) tokens")
# One process for all copies, as it takes seconds to import torch. The modules of a copy are imported
# anew.
RUN = """
import json, os, sys
from pathlib import Path
import pytest, torch
from torch.utils.flop_counter import flop_registry

class Outcomes:
    def __init__(self):
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.tests[report.nodeid.removeprefix("tests/")] = report.outcome

def kitchen(frames):
    import stream
    from baselines.variants import load_narrator
    from streams.bounds import open_stream
    from support.common.errors import BadData
    try:
        narrator = load_narrator("toy/checkpoint").merge()
    except BadData as error:
        return {"error": str(error)}
    context = open_stream(narrator, lookahead=8)
    sentences = []
    p_skip = []
    tokens = []
    for step in stream.narrate(narrator, iter(frames), context=context):
        if step.narration:
            sentences.append((step.frame, step.narration.text))
        p_skip.append(step.p_skip)
        tokens.append(step.text_tokens + step.visual_tokens)
    return {"sentences": sentences, "p_skip": p_skip, "cache": max(tokens)}

known_flops = dict(flop_registry)              # a copy adds to it, and may do so only once
root = Path.cwd()
frames = torch.load("kitchen.pt")
for folder, narrates, tests in json.loads(sys.argv[1]):
    os.chdir(root / folder)
    sys.path.insert(0, os.getcwd())
    results = {"kitchen": kitchen(frames) if narrates else None}
    outcomes = Outcomes()
    if tests:
        pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[outcomes])
    (root / folder / "results.json").write_text(json.dumps(results | {"tests": outcomes.tests}))
    sys.path = [path for path in sys.path if not path.startswith(str(root))]
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None))
        if file.startswith(str(root)) or name in ("conftest", "tests.conftest"):
            del sys.modules[name]
    flop_registry.clear()
    flop_registry.update(known_flops)
"""


def apply(section: str, folder) -> None:
    """Make the change of a section in the files in a folder. Each hunk's old lines must be there
    once."""
    diff = re.search(r"```diff\n(.*?)```", section, re.S)[1]
    path = folder / re.search(r"`([\w/]+\.py)`", section)[1]
    source = path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in "- ")
        new = "".join(line[1:] for line in lines if line[0] in "+ ")
        assert source.count(old) == 1, f"{path.name} does not have this once:\n{old}"
        source = source.replace(old, new)
    path.write_text(source, encoding="utf-8")


def names_of_tests(text: str) -> list[str]:
    """The tests that a text names with their file, but for the long ones."""
    names = re.findall(r"`((?:\w+/)?test_\w+\.py::test_\w+(?:\[[^\]`]+\])?)`", text)
    return [name for name in names if not any(test in name for test in LONG_TESTS)]


def promised(section: str) -> tuple[list[str], list[str]]:
    """The tests of which a section says that they pass, and those of which it says that they
    fail."""
    folded = r"<summary>What happens</summary>(.*?)</details>"
    happens = re.search(folded, section, re.S)[1]
    before, *bullets = re.split(r"^\* ", happens, flags=re.M)
    return names_of_tests(before), names_of_tests("".join(bullets))


def copy_to(folder):
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.mp4")
    for pattern in COPIED:
        for source in ROOT.glob(pattern):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, ignore=ignored)
            else:
                shutil.copy(source, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of each section's change. The first is without a change."""
    folder = tmp_path_factory.mktemp("exercises")
    narrator = load_narrator(str(TOY))
    video = str(ROOT / "toy" / "kitchen.mp4")
    frames, _, _ = open_frames(video, narrator.config, narrator.vision_encoder(), 4)
    torch.save(torch.stack(list(frames)), folder / "kitchen.pt")

    jobs = []                                  # (folder, is the kitchen narrated?, tests)
    for number, section in enumerate(["", *SECTIONS]):
        copy = folder / str(number)
        copy_to(copy)
        tests = []
        if section:
            apply(section, copy)
            passing, failing = promised(section)
            tests = [f"tests/{name}" for name in passing + failing]
        narrates = "The kitchen stays" not in section
        jobs.append((str(number), narrates, tests))
    run = subprocess.run([sys.executable, "-c", RUN, json.dumps(jobs)], cwd=folder,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / name / "results.json").read_text()) for name, _, _ in jobs]


@pytest.mark.slow
def test_the_kitchen_without_a_change(results):
    kitchen = results[0]["kitchen"]
    words = r"Unchanged, it gives (\d+) narrations,\s+and the cache holds at most (\d+) tokens"
    sentences, cache = re.search(words, TEXT).groups()
    assert len(kitchen["sentences"]) == int(sentences)
    assert kitchen["cache"] == int(cache)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(SECTIONS) + 1))
def test_the_kitchen_is_as_promised(results, number):
    """How many sentences there are, stay and move; the probabilities where they move; the cache. Or
    the error."""
    section = re.sub(r"\s+", " ", SECTIONS[number - 1])
    kitchen = results[number]["kitchen"]
    if kitchen is None:                        # the change is in training alone
        assert "`segment_rows`" in section
        return
    promise = re.search(KITCHEN, section)
    if "error" in kitchen:
        quoted = re.search(r"::test_\w+`: `([^`]+)`", section)[1]
        assert not promise
        assert quoted in kitchen["error"]
        return

    before = results[0]["kitchen"]["sentences"]
    after = kitchen["sentences"]
    frames = {frame for frame, _ in after}
    stayed = [sentence for sentence in before if sentence in after]
    moved = [frame for frame, _ in before if frame not in frames and frame + 1 in frames]
    sentences, stay, move, cache = promise.groups()
    assert len(after) == int(sentences)
    assert len(stayed) == int(stay)
    assert kitchen["cache"] == int(cache)
    if move is not None:
        assert len(moved) == int(move)

    words = r"p\(\[SKIP\]\) is (\S+) to (\S+) at the frame that now waits, then (\S+) to (\S+)\. "
    probabilities = re.search(words, section)
    if probabilities:
        waiting = [kitchen["p_skip"][frame] for frame in moved]
        narrating = [kitchen["p_skip"][frame + 1] for frame in moved]
        measured = [min(waiting), max(waiting), min(narrating), max(narrating)]
        expected = [float(p) for p in probabilities.groups()]
        assert measured == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(SECTIONS) + 1))
def test_tests_fail_and_pass_as_promised(results, number):
    """A name without [...] stands for all of its cases: if they are to fail, each does."""
    passing, failing = promised(SECTIONS[number - 1])
    assert failing
    outcomes = results[number]["tests"]
    for names, expected in ((passing, "passed"), (failing, "failed")):
        for name in names:
            cases = [case for case in outcomes if name in (case, case.partition("[")[0])]
            assert cases, name
            assert {outcomes[case] for case in cases} == {expected}, name


@pytest.mark.parametrize("section", SECTIONS, ids=range(1, len(SECTIONS) + 1))
def test_changes_can_be_made(section, tmp_path):
    """The old lines of each change are in its file, once; its new lines are Python."""
    file = re.search(r"`([\w/]+\.py)`", section)[1]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / file, tmp_path / file)
    apply(section, tmp_path)
    source = (tmp_path / file).read_text(encoding="utf-8")
    assert source != (ROOT / file).read_text(encoding="utf-8")
    compile(source, file, "exec")


def test_named_tests_exist():
    files = (ROOT / "tests").rglob("test_*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"\b(test_\w+)\b(?!\.py)", TEXT))
    assert len(names) > 10
    for name in names:
        assert f"def {name}(" in code, name


def test_questions_come_before_outcomes():
    for section in SECTIONS:
        before, _, after = section.partition("<details><summary>What happens</summary>")
        _, _, questions = before.split("```")
        assert "?" in questions
        assert "The kitchen" not in before
        assert after.count("<details>") == 1
