"""The pages tell the truth: names of files and functions, commands, links, numbers; the walk."""
import ast
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from helpers import ROOT, TOY
from support.files.video import Video, write_video
from test_commands import module_and_arguments, parser_of

ROOMS = ("beyond", "support", "toy", "tests", "docs")
TO_CODE = "docs/paper_to_code.md"

PAGES = {}                                     # {path: text}
for folder in (".", "docs", "toy", "beyond/experiments"):
    for file in sorted((ROOT / folder).glob("*.md")):
        PAGES[file.relative_to(ROOT).as_posix()] = file.read_text()
README = PAGES["README.md"]


def table_rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.*)\|$", text, re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def code_rows(page: str) -> list[tuple[str, dict[str, list[str]]]]:
    """(part of the paper, {file: names}) of a page's rows with `file.py`: `Class.method`."""
    result = []
    for cells in table_rows(PAGES[page]):
        code = {}
        file = ""
        for path, name in re.findall(r"`([\w/]+\.py)`:|`([A-Za-z_][\w.]*)`", cells[-1]):
            if path:
                file = path
                code[file] = []
            elif file:                         # whatever stands between the names
                code[file].append(name)
        if code:
            result.append((cells[0], code))
    return result


def commands(text: str) -> set[str]:
    """The commands of a page, without `python` or `torchrun` and without comments."""
    start = r"(?:python|torchrun --nproc-per-node \d+) "
    program = r"(?:-m [\w.]+|\w+\.py)"
    arguments = r"(?: [^\n`#>|]*)?"
    return {command.strip() for command in re.findall(f"{start}({program}{arguments})", text)}


CODE_ROWS = code_rows("README.md") + code_rows(TO_CODE)
COMMANDS = [(page, command) for page in sorted(PAGES) for command in sorted(commands(PAGES[page]))]


def test_every_file_and_every_room_has_a_row():
    files = re.findall(r"^\| `(\w+\.py)` \| [^|]* \| [^|]* \|$", README, re.M)
    assert sorted(files) == sorted(path.name for path in ROOT.glob("*.py"))
    rows = re.findall(r"^\| `([\w/]+)/` \| [^|]* \|$", README, re.M)
    rooms = {path.parent.relative_to(ROOT).as_posix() for name in ROOMS[:-2]
             for path in (ROOT / name).rglob("*.py") if path.stem != "__init__"}
    assert sorted(rows) == sorted(rooms | {"tests", "docs"})


def has_file(commit: str, name: str) -> bool:
    """Whether a file is in a commit; of a copy without its history, that is not known."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", commit], capture_output=True).returncode:
        return True
    return subprocess.run([*git, "cat-file", "-e", f"{commit}:{name}"]).returncode == 0


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_mentioned_exist(page):
    endings = "html|json|jsonl|md|mp4|png|safetensors|svg"
    for line in PAGES[page].splitlines():
        python = re.findall(r"(?<![\w./])([\w/]+\.py)\b", line)
        others = re.findall(rf"(?<![\w./])((?:{'|'.join(ROOMS)})/[\w/.]+\.(?:{endings}))\b", line)
        for name in python + others:
            is_today = (ROOT / name).is_file() or (ROOT / "tests" / name).is_file()
            commits = re.findall(r"\b[0-9a-f]{7,10}\b", line)
            assert is_today or any(has_file(commit, name) for commit in commits), name


def defined_names(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{child.name}" for child in node.body
                      if isinstance(child, ast.FunctionDef)}
    return names


def test_what_the_paper_is_in_the_code_exists():
    for part, code in CODE_ROWS:
        for file, names in code.items():
            assert (ROOT / file).is_file(), f"{part}: {file}"
            missing = set(names) - defined_names(ROOT / file)
            assert not missing, f"{part}: {file}: {missing}"


@pytest.mark.parametrize("page", ["README.md", TO_CODE])
def test_every_line_of_algorithm_2_is_there(page):
    lines = set()
    for part, _ in code_rows(page):
        # "line 3", "lines 3-5", "lines 3 and 4"
        for first, last in re.findall(r"lines? (\d+)(?:(?:-| and )(\d+))?", part):
            lines.update(range(int(first), int(last or first) + 1))
    assert lines >= set(range(1, 20))


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_exist(page, command, tmp_path, monkeypatch):
    (tmp_path / "out" / "videos").mkdir(parents=True)          # --data needs a folder that exists
    monkeypatch.chdir(tmp_path)
    module, arguments = module_and_arguments(shlex.split(command))
    try:
        parser_of(module).parse_args(arguments)
    except SystemExit as end:
        assert not end.code                                    # --help exits with 0


def test_commands_are_found():
    assert {"stream.py toy/kitchen.mp4", "narrator.py", "clam.py"} <= commands(README)
    assert {page for page, _ in COMMANDS} == PAGES.keys() - {TO_CODE}
    first_block = README.split("```")[1]
    assert "pip install -r requirements.txt\npython stream.py toy/kitchen.mp4\n" in first_block


def blocks_of_python(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def test_the_readmes_python_narrates(tmp_path, capsys):
    """At most eight lines after the imports; here with the beginning of the kitchen."""
    program = "\n".join(blocks_of_python("README.md"))
    lines = [line for line in program.splitlines() if line and "import" not in line]
    assert len(lines) <= 8
    start = tmp_path / "start.mp4"
    pictures = islice(Video(ROOT / "toy" / "kitchen.mp4", fps=2), 10)
    write_video(start, pictures, fps=2)
    assert '"toy/checkpoint"' in program and '"toy/kitchen.mp4"' in program
    program = program.replace("toy/checkpoint", str(TOY)).replace("toy/kitchen.mp4", str(start))
    exec(compile(program, "README.md", "exec"), {})
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert told[:2] == [["0.5", "You look around the kitchen."], ["4.0", "You heat the green bottle."]]


def test_the_page_on_python_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)                                   # its pictures are noise
    for block in blocks_of_python("docs/python.md"):       # each alone
        exec(compile(block, "docs/python.md", "exec"), {})
    told = capsys.readouterr().out
    assert "0.0 0.5 You look" in told and "'f1': 1.0" in told and "10.0" in told


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
    assert {(ROOT / page).resolve() for page in PAGES if page != "README.md"} <= targets


def test_numbers_of_the_readme_are_those_of_the_pages():
    known = []
    for page in ("beyond/experiments/README.md", "docs/speed.md", "toy/README.md"):
        known += [set(row) for row in table_rows(PAGES[page])]
    section = README.split("\n## Results\n")[1].split("\n## ")[0]
    rows = [cells for cells in table_rows(section)
            if all(re.search(r"\d", cell) for cell in cells[1:])]
    assert len(rows) > 5
    for label, *cells in rows:
        assert any(set(cells) <= row for row in known), label


WALK = ROOT / "docs" / "walk.py"
# cell 0 (what the cells share) with what is before it; the others
SHARED, *CELLS = re.split(r"^(?=# %% [1-9])", WALK.read_text(encoding="utf-8"), flags=re.M)


def test_the_first_cells_run(capsys):
    assert all("\nassert " in cell for cell in CELLS)
    exec(compile(SHARED + "".join(CELLS[:3]), WALK, "exec"), {"__file__": str(WALK)})
    assert "after line 18" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_to_its_end():
    run = subprocess.run([sys.executable, "docs/walk.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "training:" not in run.stderr                    # no progress bar in a file
    for cell in CELLS:
        number = re.match(r"# %% (\w+)\. ", cell)[1]
        assert f"\n{number}. " in f"\n{run.stdout}"
