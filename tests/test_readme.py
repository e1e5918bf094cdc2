"""The README and the other pages tell the truth: names of files and functions, commands and their
options, links, numbers that stand twice.
"""
import ast
import importlib
import re
import shlex
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from helpers import ROOT
from test_commands import Parsed, catch_parser
from test_house import FLOORS

FOLDERS = ("baselines", "commands", "streams", "support", "toy", "experiments")
TO_CODE = "docs/paper_to_code.md"

PAGES = {}                                     # {path: text}
for folder in (".", "docs", "toy", "experiments"):
    for file in sorted((ROOT / folder).glob("*.md")):
        PAGES[file.relative_to(ROOT).as_posix()] = file.read_text()
README = PAGES["README.md"]
EXERCISES = PAGES["EXERCISES.md"]


def table_rows(text: str) -> list[list[str]]:
    """The cells of all tables of a page, row by row."""
    rows = []
    for line in re.findall(r"^\|.*\|$", text, re.M):
        cells = line.strip("|").split("|")
        rows.append([cell.strip() for cell in cells])
    return rows


class CodeRow(NamedTuple):
    """A row of a table that says where a part of the paper is in the code."""
    page: str
    paper: str                                 # the part, such as "§3.3, Eq. 2"
    code: dict[str, set[str]]                  # {file: names of functions and classes in it}


def code_rows(page: str) -> list[CodeRow]:
    """Rows that contain: `file.py`: `function`, `Class`, `Class.method`."""
    result = []
    for cells in table_rows(PAGES[page]):
        code = {}
        row = " | ".join(cells)
        for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", row):
            code.setdefault(path, set()).update(re.findall(r"`([\w.]+)`", names))
        if code:
            result.append(CodeRow(page, cells[0], code))
    return result


def commands(text: str) -> set[str]:
    """The commands of a page, without `python` or `torchrun` and without comments."""
    start = r"(?:python|torchrun --nproc-per-node \d+) "
    program = r"(?:-m [\w.]+|\w+\.py)"
    arguments = r"(?: [^\n`#>]*)?"
    return {command.strip() for command in re.findall(f"{start}({program}{arguments})", text)}


CODE_ROWS = code_rows("README.md") + code_rows(TO_CODE)
COMMANDS = [(page, command) for page in sorted(PAGES) for command in sorted(commands(PAGES[page]))]


# ------------------------------------------------------------- files, rooms, imports

def test_every_top_file_has_a_row():
    rows = re.findall(r"^\| `(\w+\.py)` \| [^|]* \| [^|]* \|$", README, re.M)
    assert sorted(rows) == sorted(path.name for path in ROOT.glob("*.py"))


def test_every_room_has_a_row():
    rows = re.findall(r"^\| `([\w/]+)/` \| [^|]* \|$", README, re.M)
    rooms = {"tests", "docs"}
    for name in FOLDERS:
        for path in (ROOT / name).rglob("*.py"):
            if path.stem != "__init__":
                rooms.add(path.parent.relative_to(ROOT).as_posix())
    assert sorted(rows) == sorted(rooms)


def test_the_order_of_imports_is_that_of_the_house():
    """`experiments` -> ... -> `support`: each step of it is a floor of tests/test_house.py."""
    chain = re.search(r"^`experiments` ->.*?\.$", README, re.M | re.S)[0]
    steps = [re.findall(r"`([\w.]+)`", step) for step in chain.split("->")]
    assert len(steps) == len(FLOORS)

    def is_in(module: str, name: str) -> bool:
        return module == name or module.startswith(name + ".")

    for names, modules in zip(reversed(steps), FLOORS):
        for module in modules:
            assert any(is_in(module, name) for name in names), module
        for name in names:
            assert any(is_in(module, name) for module in modules), name


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_mentioned_exist(page):
    """All Python files, and other files of the rooms. A test file may be named without tests/."""
    rooms = "|".join([*FOLDERS, "tests", "docs", "assets"])
    endings = "html|json|jsonl|md|mp4|png|safetensors"
    python = re.findall(r"(?<![\w./])([\w/]+\.py)\b", PAGES[page])
    others = re.findall(rf"(?<![\w./])((?:{rooms})/[\w/.]+\.(?:{endings}))\b", PAGES[page])
    for name in python + others:
        assert (ROOT / name).is_file() or (ROOT / "tests" / name).is_file(), name


# ------------------------------------------------------------- from the paper to the code

def defined_names(path: Path) -> set[str]:
    """The functions and classes of a file, and Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    names.add(f"{node.name}.{child.name}")
    return names


@pytest.mark.parametrize("row", CODE_ROWS, ids=lambda row: f"{row.page}-{row.paper}")
def test_paper_to_code(row):
    for file, names in row.code.items():
        assert (ROOT / file).is_file(), file
        missing = names - defined_names(ROOT / file)
        assert not missing, f"{file}: {missing}"


@pytest.mark.parametrize("page", ["README.md", TO_CODE])
def test_every_line_of_algorithm_2_is_there(page):
    lines = set()
    for row in code_rows(page):
        # "line 3", "lines 3-5", "lines 3 and 4"
        for first, last in re.findall(r"lines? (\d+)(?:(?:-| and )(\d+))?", row.paper):
            lines.update(range(int(first), int(last or first) + 1))
    assert lines >= set(range(1, 20))


@pytest.mark.parametrize("part", ["§3.1", "§3.2", "Eq. 1", "§3.3", "Eq. 2", "§3.4", "§3.5",
                                  "Fig. 4", "App. B.5", "App. B.6"])
def test_the_paper_is_there(part):
    assert any(part in row.paper for row in code_rows(TO_CODE))


# ------------------------------------------------------------- commands

def module_of(words: list[str]) -> str:
    """The module with the `main` of a command: that of `python stream.py` is in commands/."""
    if words[0] == "-m":
        return words[1]
    name = words[0].removesuffix(".py")
    if (ROOT / "commands" / f"{name}.py").exists():
        return f"commands.{name}"
    return name


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_exist(page, command, tmp_path, monkeypatch):
    """Each command of the pages with all its options, through that command's own parser."""
    (tmp_path / "out" / "videos").mkdir(parents=True)          # --data needs a folder that exists
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    module = module_of(words)
    arguments = words[2:] if words[0] == "-m" else words[1:]
    if module.startswith("tests."):
        return
    with mock.patch("sys.argv", ["command"]), catch_parser(), pytest.raises(Parsed) as caught:
        importlib.import_module(module).main()
    parser = caught.value.args[0]
    errors = StringIO()
    with redirect_stderr(errors):
        try:
            parser.parse_args(arguments)
        except SystemExit as end:
            assert not end.code, errors.getvalue()             # --help exits with 0


def test_commands_are_found():
    """With and without arguments, and in each page but the one that has none."""
    assert {"stream.py toy/kitchen.mp4", "narrator.py", "clam.py"} <= commands(README)
    assert {page for page, _ in COMMANDS} == PAGES.keys() - {TO_CODE}


def test_the_first_command_narrates():
    first_block = README.split("```")[1]
    assert "pip install -r requirements.txt && python stream.py toy/kitchen.mp4\n" in first_block


# ------------------------------------------------------------- links

def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: str) -> list[tuple[Path, str]]:
    """The links of a page to files: (file, name of a heading or "")."""
    links = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" not in link:
            name, _, heading = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            links.append((target.resolve(), heading))
    return links


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings_and_files(page):
    for target, heading in links_of(page):
        assert target.exists(), target
        if heading:
            assert heading in anchors(target.read_text()), f"{target}#{heading}"


def test_every_page_is_linked_from_the_readme():
    targets = {target for target, _ in links_of("README.md")}
    for page in PAGES.keys() - {"README.md"}:
        assert (ROOT / page).resolve() in targets, page


# ------------------------------------------------------------- numbers and exercises

def test_numbers_of_the_readme_are_those_of_the_pages():
    """The numbers of each row of its results stand in one row of a page that it links."""
    known = []
    for page in ("experiments/README.md", "docs/speed.md", "toy/README.md"):
        known += [set(row) for row in table_rows(PAGES[page])]
    section = README.split("\n## Results\n")[1].split("\n## ")[0]
    checked = 0
    for label, *cells in table_rows(section):
        if all(re.search(r"\d", cell) for cell in cells):
            assert any(set(cells) <= row for row in known), label
            checked += 1
    assert checked > 10


def exercises() -> list[str]:
    """The sections of EXERCISES.md."""
    return EXERCISES.split("\n## ")[1:]


@pytest.mark.parametrize("exercise", exercises(), ids=lambda text: text.splitlines()[0])
def test_exercises_quote_code(exercise):
    """The lines that each hunk replaces stand in the file exactly once."""
    source = (ROOT / re.search(r"`(\w+\.py)`", exercise)[1]).read_text()
    diff = exercise.split("```diff\n")[1].split("```")[0]
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        old_lines = [line[1:] for line in hunk.splitlines(keepends=True) if line[0] in "- "]
        old = "".join(old_lines)
        assert old
        assert source.count(old) == 1, old


def test_tests_that_the_exercises_name_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py)", EXERCISES))
    assert len(named) > 10
    for name in named:
        assert f"def {name}(" in tests, name
