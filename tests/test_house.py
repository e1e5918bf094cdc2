"""The house: what stands where, imports that only point down, one meaning for each name."""
import ast
from collections import defaultdict

import pytest

from helpers import ROOT

TOP = ["clam.py", "data.py", "evaluate.py", "narrator.py", "stream.py", "train.py"]
FOLDERS = ["baselines", "experiments", "support", "toy"]
CODE = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] in TOP + FOLDERS]
# imports point down: a file may import what its row names, and files of its own folder
BELOW = {"support": [], "clam": ["support"], "baselines": ["clam", "support"],
         "narrator": ["baselines", "clam", "support"],
         "toy.paint": [], "toy.world": ["toy.paint", "support"],
         "data": ["narrator", "baselines", "clam", "toy.world", "support"],
         "stream": ["narrator", "baselines", "clam", "support"],
         "toy.stages": ["narrator", "baselines", "clam", "toy.world", "support"],
         "train": ["data", "stream", "narrator", "baselines", "clam", "toy", "support"],
         "evaluate": ["data", "stream", "narrator", "baselines", "clam", "toy", "support"],
         "experiments": ["train", "evaluate", "data", "stream", "narrator", "baselines", "clam", "toy", "support"]}


def module(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path):
    """Modules of this repository that a file imports, anywhere in it."""
    known = {module(p) for p in CODE}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in known)


def test_six_files_at_the_top():
    assert sorted(path.name for path in ROOT.glob("*.py")) == TOP


@pytest.mark.parametrize("path", CODE, ids=module)
def test_imports_point_down(path):
    name = module(path)
    own = name.split(".")[0]
    if path.stem == "__init__":
        assert not list(imports(path))
        return
    allowed = next(below for key, below in BELOW.items() if key in (name, own))
    if own in ("support", "baselines", "experiments"):
        allowed = [*allowed, own]
    for imported in imports(path):
        assert any(imported == a or imported.startswith(a + ".") for a in allowed), f"{name} imports {imported}"


def test_no_circles():
    above = {module(path): set(imports(path)) for path in CODE}
    while above:
        free = [name for name, needs in above.items() if not needs & above.keys()]
        assert free, f"these import each other: {sorted(above)}"
        for name in free:
            del above[name]


def test_a_name_is_defined_once():
    """No function or class of the top level of a file has a namesake in another one (main aside)."""
    places = defaultdict(list)
    for path in CODE:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "main":
                places[node.name].append(module(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", CODE, ids=module)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
