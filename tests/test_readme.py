"""The README and the other pages tell the truth: names of files and functions, commands and their options, links,
numbers that stand twice."""
import ast
import importlib
import re
import shlex
from contextlib import redirect_stderr
from io import StringIO
from unittest import mock

import pytest

from helpers import ROOT
from test_commands import Parsed, catch_parser
from test_house import FLOORS

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in [ROOT / "README.md", ROOT / "EXERCISES.md", *sorted((ROOT / "docs").glob("*.md")),
                      ROOT / "toy" / "README.md", ROOT / "experiments" / "README.md"]}
README = PAGES["README.md"]
FOLDERS = ("baselines", "commands", "streams", "support", "toy", "experiments")
# a table's row that names code: its first cell, and each file with the functions and classes in it
CODE_ROWS = [(page, row.split("|")[1].strip(), code)
             for page in ("README.md", "docs/paper_to_code.md")
             for row in re.findall(r"^\|.*$", PAGES[page], re.M)
             if (code := re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", row))]
COMMANDS = sorted({(page, command.strip()) for page, text in PAGES.items() for command in re.findall(
    r"(?:python|torchrun --nproc-per-node \d+) ((?:-m [\w.]+|\w+\.py)(?: [^\n`#>]*)?)", text)})


def test_every_top_file_has_a_row():
    rows = re.findall(r"^\| `(\w+\.py)` \| [^|]* \| [^|]* \|$", README, re.M)
    assert sorted(rows) == sorted(path.name for path in ROOT.glob("*.py"))


def test_every_room_has_a_row():
    rows = re.findall(r"^\| `([\w/]+)/` \| [^|]* \|$", README, re.M)
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"]
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in code}
    assert sorted(rows) == sorted(rooms | {"tests", "docs"})


def test_the_order_of_imports_is_that_of_the_house():
    """`experiments` -> ... -> `support`: each step of it is a floor of tests/test_house.py."""
    chain = re.search(r"^`experiments` ->.*?\.$", README, re.M | re.S)[0]
    steps = [re.findall(r"`([\w.]+)`", step) for step in chain.split("->")]
    assert len(steps) == len(FLOORS)
    for step, floor in zip(reversed(steps), FLOORS):
        for module in floor:
            assert any(module == name or module.startswith(name + ".") for name in step), module
        for name in step:
            assert any(module == name or module.startswith(name + ".") for module in floor), name


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_mentioned_exist(page):
    """All Python files, and other files of the rooms. A test file may be named without tests/."""
    python = re.findall(r"(?<![\w./])([\w/]+\.py)\b", PAGES[page])
    rooms = "|".join([*FOLDERS, "tests", "docs", "assets"])
    ends = "html|json|jsonl|md|mp4|png|safetensors"
    others = re.findall(rf"(?<![\w./])((?:{rooms})/[\w/.]+\.(?:{ends}))\b", PAGES[page])
    missing = {name for name in python + others
               if not (ROOT / name).is_file() and not (ROOT / "tests" / name).is_file()}
    assert not missing


def names(path):
    """The functions and classes of a file, and Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page, paper, code", CODE_ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_paper_to_code(page, paper, code):
    for file, functions in code:
        wanted = set(re.findall(r"`([\w.]+)`", functions))
        assert (ROOT / file).is_file(), file
        assert wanted <= names(ROOT / file), f"{file}: {wanted - names(ROOT / file)}"


@pytest.mark.parametrize("page", ["README.md", "docs/paper_to_code.md"])
def test_every_line_of_algorithm_2_is_there(page):
    lines = set()
    for where, paper, _ in CODE_ROWS:
        if where == page:
            for first, last in re.findall(r"lines? (\d+)(?:(?:-| and )(\d+))?", paper):
                lines |= set(range(int(first), int(last or first) + 1))
    assert lines >= set(range(1, 20))


def test_the_paper_is_there():
    papers = " ".join(paper for page, paper, _ in CODE_ROWS if page == "docs/paper_to_code.md")
    for part in ("§3.1", "§3.2", "Eq. 1", "§3.3", "Eq. 2", "§3.4", "§3.5", "Fig. 4", "App. B.5", "App. B.6"):
        assert part in papers, part


def module_of(words: list[str]) -> str:
    """The module with the `main` of a command: that of `python stream.py` is in commands/."""
    if words[0] == "-m":
        return words[1]
    name = words[0].removesuffix(".py")
    return f"commands.{name}" if (ROOT / "commands" / f"{name}.py").exists() else name


@pytest.mark.parametrize("page, line", COMMANDS)
def test_commands_exist(page, line, tmp_path, monkeypatch):
    """Each command of the pages with all its options, through that command's own parser."""
    (tmp_path / "out" / "videos").mkdir(parents=True)                            # --data: a folder is looked for
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    module, arguments = module_of(words), words[2:] if words[0] == "-m" else words[1:]
    if module.startswith("tests."):
        return
    with mock.patch("sys.argv", ["command"]), catch_parser(), pytest.raises(Parsed) as caught:
        importlib.import_module(module).main()
    errors = StringIO()
    with redirect_stderr(errors):
        try:
            caught.value.args[0].parse_args(arguments)
        except SystemExit as end:
            assert not end.code, errors.getvalue()                                # 0: --help


def test_commands_are_found():
    """In each page that has any, and those of the README, with and without arguments."""
    found = [command for page, command in COMMANDS if page == "README.md"]
    assert {"stream.py toy/kitchen.mp4", "narrator.py", "clam.py"} <= set(found)
    assert {page for page, _ in COMMANDS} == PAGES.keys() - {"docs/paper_to_code.md"}


def test_the_first_command_narrates():
    assert "pip install -r requirements.txt && python stream.py toy/kitchen.mp4\n" in README.split("```")[1]


def slugs(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings_and_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not heading or heading in slugs(target.read_text()), link


def test_every_page_is_linked_from_the_readme():
    links = {(ROOT / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in link}
    assert {(ROOT / page).resolve() for page in PAGES} - links == {(ROOT / "README.md").resolve()}


def rows_of(text: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]


def test_numbers_of_the_readme_are_those_of_the_pages():
    """Each row of its results, but for the label, is part of a row of a page that it links."""
    results = [row for row in rows_of(README.split("\n## Results\n")[1].split("\n## ")[0])
               if all(re.search(r"\d", cell) for cell in row[1:])]
    known = [set(row) for page in ("experiments/README.md", "docs/speed.md", "toy/README.md")
             for row in rows_of(PAGES[page])]
    assert len(results) > 10
    for label, *cells in results:
        assert any(set(cells) <= row for row in known), label


def test_exercises_quote_code_and_tests():
    """EXERCISES.md: what each hunk replaces is in its file once; every test that is named exists."""
    text = (ROOT / "EXERCISES.md").read_text()
    for section in text.split("\n## ")[1:]:
        source = (ROOT / re.search(r"`(\w+\.py)`", section)[1]).read_text()
        diff = section.split("```diff\n")[1].split("```")[0]
        for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
            old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in "- ")
            assert old and source.count(old) == 1, old
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py)", text))
    assert len(named) > 10 and all(f"def {name}(" in tests for name in named), named
