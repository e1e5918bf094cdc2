"""The README tells the truth: names of files and functions, commands and their options."""
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

README = (ROOT / "README.md").read_text()
FILE_ROWS = re.findall(r"^\| `([\w/]+\.py)` \| [^|]* \| [^|]* \|$", README, re.M)
CODE_ROWS = re.findall(r"^\| ([^|]+) \|.* `([\w/]+\.py)`: (`[^|]*`) \|$", README, re.M)
COMMANDS = sorted(set(re.findall(r"(?:python|\d) ((?:-m [\w.]+|\w+\.py) [^\n`#]*)", README)))


def test_every_file_has_a_row():
    code = [path.relative_to(ROOT) for folder in (".", "baselines", "experiments", "support", "toy")
            for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    assert sorted(map(str, code)) == sorted(FILE_ROWS)


def names(path):
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("paper, file, functions", CODE_ROWS)
def test_paper_to_code(paper, file, functions):
    wanted = set(re.findall(r"`([\w.]+)`", functions))
    assert wanted and wanted <= names(ROOT / file)


def test_every_line_of_algorithm_2_is_there():
    lines = set()
    for paper, _, _ in CODE_ROWS:
        for first, last in re.findall(r"lines? (\d+)(?:(?:-| and )(\d+))?", paper):
            lines |= set(range(int(first), int(last or first) + 1))
    assert lines >= set(range(1, 20)) - {4} and len(CODE_ROWS) >= 40              # 4: for each frame


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line, tmp_path, monkeypatch):
    """Each command of the README with all its options, through that command's own parser."""
    (tmp_path / "out" / "videos").mkdir(parents=True)                            # --data: a folder is looked for
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    module, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0].removesuffix(".py"), words[1:])
    if module.startswith("tests."):
        return
    with mock.patch("sys.argv", ["command"]), catch_parser(), pytest.raises(Parsed) as caught:
        importlib.import_module(module).main()
    errors = StringIO()
    with redirect_stderr(errors):
        try:
            caught.value.args[0].parse_args(arguments)
        except SystemExit:
            pytest.fail(errors.getvalue())


def test_the_first_command_narrates():
    assert "pip install -r requirements.txt && python stream.py toy/kitchen.mp4\n" in README.split("```")[1]


def test_links_lead_to_headings_and_files():
    headings = re.findall(r"^#+ (.+)$", README, re.M)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert len(links) > 5
    for link in links:
        assert link[1:] in slugs if link.startswith("#") else "://" in link or (ROOT / link).exists(), link
