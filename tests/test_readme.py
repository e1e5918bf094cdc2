"""The README tells the truth: line counts, names of files and functions, commands."""
import ast
import re

import pytest

from helpers import ROOT

README = (ROOT / "README.md").read_text()
FILE_ROWS = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.M)
CODE_ROWS = re.findall(r"^\| (?:§|Eq|Alg|Fig|App|Table)[^|]*\| `([\w/]+\.py)`: (.*) \|$", README, re.M)


def test_line_counts():
    assert len(FILE_ROWS) >= 7
    for name, count in FILE_ROWS:
        assert len((ROOT / name).read_text().splitlines()) == int(count), name


def names(path):
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            found |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)} \
                if isinstance(node, ast.ClassDef) else set()
    return found


@pytest.mark.parametrize("file, functions", CODE_ROWS)
def test_paper_to_code(file, functions):
    wanted = set(re.findall(r"`([\w.]+)`", functions))
    assert wanted and wanted <= names(ROOT / file)


def test_the_table_covers_the_paper():
    assert len(CODE_ROWS) >= 20


def test_commands_name_real_options():
    for file, options in re.findall(r"python (\w+\.py)([^\n`]*)", README):
        source = (ROOT / file).read_text()
        for option in re.findall(r"--([\w-]+)", options):
            field = option.replace("-", "_")
            assert f'"--{option}"' in source or f"    {field}: " in source or f'("{option}"' in source, (file, option)
