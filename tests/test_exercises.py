"""EXERCISES.md keeps its promises: each change is made in a copy, with the kitchen narrated and the named tests run."""
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import ROOT, TOY
from narrator import Narrator
from support.files.features import open_frames

TEXT = (ROOT / "EXERCISES.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]
NEEDED = ("*.py", "pytest.ini", "baselines", "commands", "streams", "support", "toy", "experiments", "tests")
# those that take seconds; most of them narrate the kitchen, too
SLOW = ("test_explain", "test_output_formats", "test_cache_is_bounded")
KITCHEN = (r"The kitchen: (\d+) narrations, (\d+) as before(?:, (\d+) one frame later)?; "
           r"the cache holds at most (\d+) tokens")
# One process for all copies, as it takes seconds to import torch: what is of a copy is imported anew.
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
    from narrator import Narrator
    from streams.fast import open_stream
    from support.common.errors import BadData
    try:
        narrator = Narrator.load("toy/checkpoint").merge()
    except BadData as error:
        return {"error": str(error)}
    steps = list(stream.narrate(narrator, iter(frames), context=open_stream(narrator, lookahead=8)))
    return {"said": [(y.frame, y.narration.text) for y in steps if y.narration], "p": [y.p_skip for y in steps],
            "cache": max(y.text_tokens + y.visual_tokens for y in steps)}

known = dict(flop_registry)                    # a copy adds to it, and may do so only once
here, frames, jobs = Path.cwd(), torch.load("kitchen.pt"), json.loads(sys.argv[1])
for folder, wanted, tests in jobs:
    os.chdir(here / folder)
    sys.path.insert(0, os.getcwd())
    found, outcomes = {"kitchen": kitchen(frames) if wanted else None}, Outcomes()
    if tests:
        pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[outcomes])
    (here / folder / "found.json").write_text(json.dumps(found | {"tests": outcomes.tests}))
    sys.path = [path for path in sys.path if not path.startswith(str(here))]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(here)) or name in ("conftest", "tests.conftest"):
            del sys.modules[name]
    flop_registry.clear()
    flop_registry.update(known)
"""


def apply(section: str, folder) -> None:
    """Make the change of a section in the files in a folder: each hunk's old lines must be there once."""
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


def named(text: str) -> list[str]:
    """The tests that a text names with their file."""
    return [name for name in re.findall(r"`((?:\w+/)?test_\w+\.py::test_\w+(?:\[[^\]`]+\])?)`", text)
            if not any(slow in name for slow in SLOW)]


def promised(section: str) -> tuple[list[str], list[str]]:
    """The tests of which a section says that they pass, and those of which it says that they fail."""
    happens = re.search(r"<summary>What happens</summary>(.*?)</details>", section, re.S)[1]
    before, *after = re.split(r"^\* ", happens, flags=re.M)
    return named(before), named("".join(after))


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """What came of each section's change; the first is without a change."""
    folder, jobs = tmp_path_factory.mktemp("exercises"), []
    with_kitchen = request.config.getoption("--slow")
    x = torch.zeros(0)
    if with_kitchen:
        narrator = Narrator.load(str(TOY))
        kitchen = str(ROOT / "toy" / "kitchen.mp4")
        frames, _, _ = open_frames(kitchen, narrator.config, narrator.vision_encoder(), 4)
        x = torch.stack(list(frames))
    torch.save(x, folder / "kitchen.pt")
    for number, section in enumerate(["", *SECTIONS]):
        copy = folder / str(number)
        copy.mkdir()
        for source in [path for pattern in NEEDED for path in ROOT.glob(pattern)]:
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.mp4"))
            else:
                shutil.copy(source, copy)
        tests = []
        if section:
            apply(section, copy)
            tests = [f"tests/{name}" for names in promised(section) for name in names]
        narrates = with_kitchen and "The kitchen stays" not in section
        jobs.append((str(number), narrates, tests))
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(jobs)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / number / "found.json").read_text()) for number, _, _ in jobs]


@pytest.mark.slow
def test_the_kitchen_without_a_change(found):
    kitchen = found[0]["kitchen"]
    said = re.search(r"Unchanged, it gives (\d+) narrations,\s+and the cache holds at most (\d+) tokens", TEXT)
    assert [len(kitchen["said"]), kitchen["cache"]] == [int(number) for number in said.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(SECTIONS) + 1))
def test_the_kitchen_is_as_promised(found, number):
    """How many sentences there are, stay and move; the probabilities where they move; the cache. Or the error."""
    section, kitchen = re.sub(r"\s+", " ", SECTIONS[number - 1]), found[number]["kitchen"]
    if kitchen is None:                                        # what narrates is not changed
        assert "`segment_rows`" in section
        return
    promise = re.search(KITCHEN, section)
    if "error" in kitchen:
        quoted = re.search(r"::test_\w+`: `([^`]+)`", section)[1]
        assert not promise and quoted in kitchen["error"]
        return
    before, after = found[0]["kitchen"]["said"], kitchen["said"]
    frames = {frame for frame, _ in after}
    kept = [one for one in before if one in after]
    moved = [frame for frame, _ in before if frame not in frames and frame + 1 in frames]
    sentences, stay, move, cache = promise.groups()
    assert (len(after), len(kept), kitchen["cache"]) == (int(sentences), int(stay), int(cache))
    assert move is None or len(moved) == int(move)
    waits = re.search(r"p\(\[SKIP\]\) is (\S+) to (\S+) at the frame that now waits, then (\S+) to (\S+)\. ", section)
    if waits:
        now, then = ([kitchen["p"][frame + later] for frame in moved] for later in (0, 1))
        measured = [min(now), max(now), min(then), max(then)]
        assert measured == pytest.approx([float(p) for p in waits.groups()], abs=0.01)


@pytest.mark.parametrize("number", range(1, len(SECTIONS) + 1))
def test_tests_fail_and_pass_as_promised(found, number):
    """A name without [...] stands for all of its cases: if they are to fail, each does."""
    for names, outcome in zip(promised(SECTIONS[number - 1]), ("passed", "failed")):
        for name in names:
            results = {one: result for one, result in found[number]["tests"].items()
                       if name in (one, one.partition("[")[0])}
            assert results and set(results.values()) == {outcome}, (name, results)
    assert promised(SECTIONS[number - 1])[1]


def test_named_tests_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"\b(test_\w+)\b(?!\.py)", TEXT))
    assert len(names) > 10 and all(f"def {name}(" in tests for name in names), names


def test_questions_come_before_outcomes():
    for section in SECTIONS:
        before, _, after = section.partition("<details><summary>What happens</summary>")
        assert "?" in before.split("```")[2] and after.count("<details>") == 1 and KITCHEN[:11] not in before
