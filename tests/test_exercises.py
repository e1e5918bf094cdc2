"""EXERCISES.md keeps its promises. With --slow, each change is made in a copy, and the named tests
are run there. Where a reader writes the lines, a second diff is an answer."""
import re
import shutil
import subprocess
import sys

import pytest

from evaluate import cider
from helpers import ROOT
from support.common.disk import read_jsonl

TEXT = (ROOT / "EXERCISES.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]
CHANGES = [section for section in SECTIONS if "```diff" in section]
WRITTEN = [section for section in CHANGES if section.count("```diff") == 2]
COPIED = ("*.py", "pytest.ini", "beyond", "support", "toy", "tests")
# tests that take seconds; most of them narrate the kitchen, too
LONG_TESTS = ("test_output_formats", "test_cache_is_bounded")
KITCHEN = (r"The kitchen: (\d+) narrations, (\d+) as before(?:, (\d+) one frame later)?; "
           r"the cache holds at most (\d+) tokens")


def number_of(section: str) -> str:
    return section.split(".")[0]


def apply(section: str, folder, which: int = 0) -> None:
    """Make a change, the first or second of a section. Its old lines must be there once."""
    diff = re.findall(r"```diff\n(.*?)```", section, re.S)[which]
    path = folder / re.search(r"`([\w/]+\.py)`", section)[1]
    source = path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in "- ")
        new = "".join(line[1:] for line in lines if line[0] in "+ ")
        assert source.count(old) == 1, f"{path.name} does not have this once:\n{old}"
        source = source.replace(old, new)
    compile(source, path.name, "exec")
    path.write_text(source, encoding="utf-8")


def promised(section: str) -> tuple[list[str], list[str]]:
    """The tests of which a section says that they pass, and that they fail; no long ones."""
    happens = re.search(r"<summary>What happens</summary>(.*?)</details>", section, re.S)[1]
    before, _, bullets = happens.partition("\n* ")
    promises = []
    for text in (before, bullets):
        names = re.findall(r"`((?:\w+/)?test_\w+\.py::test_\w+(?:\[[^\]`]+\])?)`", text)
        promises.append([name for name in names if not any(test in name for test in LONG_TESTS)])
    return tuple(promises)


class Copy:
    def __init__(self, folder, section: str | None):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.mp4")
        for pattern in COPIED:
            for source in ROOT.glob(pattern):
                if source.is_dir():
                    shutil.copytree(source, folder / source.name, ignore=ignored)
                else:
                    shutil.copy(source, folder)
        if section:
            apply(section, folder)

    def run(self, *words) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *map(str, words)], cwd=self.folder,
                              capture_output=True, text=True)

    def outcomes(self, names: list[str]) -> dict[str, list[str]]:
        """Of each named test, that of all its cases: PASSED, FAILED or ERROR."""
        tests = [f"tests/{name}" for name in names]
        report = self.run("-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", *tests)
        cases = re.findall(r"^(PASSED|FAILED|ERROR) tests/(.*?)(?: - .*)?$", report.stdout, re.M)
        outcomes = {}
        for name in names:
            outcomes[name] = [outcome for outcome, case in cases
                              if name in (case, case.partition("[")[0])]
            assert outcomes[name], report.stdout
        return outcomes

    def narrate(self) -> tuple[list[tuple[int, str]], dict[int, float], int]:
        """The kitchen: (frame, sentence) of each narration, p([SKIP]) of each frame, and the largest
        cache. AssertionError with the message of a command that fails."""
        kitchen = ROOT / "toy" / "kitchen.mp4"
        command = self.run("stream.py", kitchen, "--jsonl", "a.jsonl", "--trace", "a.trace")
        assert command.returncode == 0, command.stderr
        sentences = [(row["frame"], row["text"]) for row in read_jsonl(self.folder / "a.jsonl")]
        trace = read_jsonl(self.folder / "a.trace")
        cache = int(re.search(r"cache at most (\d+) tokens", command.stderr)[1])
        return sentences, {row["frame"]: row["p_skip"] for row in trace}, cache


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("unchanged"), None).narrate()


@pytest.mark.slow
def test_the_kitchen_without_a_change(unchanged):
    sentences, _, cache = unchanged
    words = r"Unchanged, it gives (\d+) narrations,\s+and the cache holds at most (\d+) tokens"
    assert (str(len(sentences)), str(cache)) == re.search(words, TEXT).groups()


@pytest.mark.slow
@pytest.mark.parametrize("section", CHANGES, ids=number_of)
def test_a_change_does_what_is_promised(section, unchanged, tmp_path):
    """Tests pass and fail (a name without [...] stands for all of its cases: if they are to fail,
    each does), and sentences stay and move."""
    copy = Copy(tmp_path, section)
    passing, failing = promised(section)
    assert failing
    outcomes = copy.outcomes(passing + failing)
    for names, allowed in ((passing, {"PASSED"}), (failing, {"FAILED", "ERROR"})):
        for name in names:
            assert set(outcomes[name]) <= allowed, name

    section = re.sub(r"\s+", " ", section)
    promise = re.search(KITCHEN, section)
    at_most = re.search(r"The kitchen: at most (\d+) narrations as before", section)
    if promise:
        compare_kitchens(section, promise, unchanged[0], *copy.narrate())
    elif at_most:
        sentences, _, _ = copy.narrate()
        stayed = [sentence for sentence in sentences if sentence in unchanged[0]]
        assert len(stayed) <= int(at_most[1])
    elif "The kitchen stays" not in section:   # the command says what a named test says
        quoted = re.search(r"::test_\w+`: `([^`]+)`", section)[1]
        with pytest.raises(AssertionError, match=re.escape(quoted)):
            copy.narrate()


@pytest.mark.slow
@pytest.mark.parametrize("section", WRITTEN, ids=number_of)
def test_an_answer_passes_the_tests_that_judge_it(section, unchanged, tmp_path):
    copy = Copy(tmp_path, section)
    apply(section, copy.folder, which=1)
    _, judges = promised(section)
    for name, outcomes in copy.outcomes(judges).items():
        assert set(outcomes) == {"PASSED"}, name
    assert copy.narrate() == unchanged


def test_scores_by_hand():
    """The scores of the first, the third and the second pair of the table."""
    section, = (section for section in SECTIONS if "by hand" in section.splitlines()[0])
    rows = re.findall(r"^\| (You .*\.) \| (You .*\.) \|$", section, re.M)
    first, second, third = cider(rows)
    assert f"The first pair: {first:.2f}<" in section
    assert f"The third pair: {third:.2f}<" in section
    assert f"perfect here: {second:.0f}." in section
    assert cider(rows[1:2]) == [0.0]


def compare_kitchens(section: str, promise: re.Match, before: list, after: list, p_skip: dict,
                     cache: int) -> None:
    frames = {frame for frame, _ in after}
    stayed = [sentence for sentence in before if sentence in after]
    moved = [frame for frame, _ in before if frame not in frames and frame + 1 in frames]
    number, stay, move, largest = promise.groups()
    assert (len(after), len(stayed), cache) == (int(number), int(stay), int(largest))
    assert move is None or len(moved) == int(move)
    words = r"p\(\[SKIP\]\) is (\S+) to (\S+) at the frame that now waits, then (\S+) to (\S+)\. "
    probabilities = re.search(words, section)
    if probabilities:
        waiting = [p_skip[frame] for frame in moved]
        narrating = [p_skip[frame + 1] for frame in moved]
        measured = [min(waiting), max(waiting), min(narrating), max(narrating)]
        assert measured == pytest.approx([float(p) for p in probabilities.groups()], abs=0.01)


@pytest.mark.parametrize("section", CHANGES, ids=number_of)
def test_changes_can_be_made(section, tmp_path):
    file = re.search(r"`([\w/]+\.py)`", section)[1]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / file, tmp_path / file)
    for which in range(section.count("```diff")):
        apply(section, tmp_path, which)


def test_named_tests_exist():
    files = (ROOT / "tests").rglob("test_*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"\b(test_\w+)\b(?!\.py)", TEXT))
    assert len(names) > 10
    for name in names:
        assert f"def {name}(" in code, name
