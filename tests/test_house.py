"""Six files on top, imports that only point down, one meaning a name, a budget a room."""
import ast
from collections import defaultdict

import pytest

from helpers import ROOT

TOP = ["clam.py", "data.py", "evaluate.py", "narrator.py", "stream.py", "train.py"]
ROOMS = ["beyond", "support", "toy"]
CODE = [path for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] in TOP + ROOMS]

# From the bottom to the top: a file may import what stands on a lower line, and its own room.
FLOORS = [
    ["support"],
    ["toy.paint", "toy.world", "toy.probe"],
    ["clam"],
    ["narrator"],
    ["data", "stream"],
    ["train", "evaluate"],
    ["toy.words", "toy.files", "toy.places"],
    ["beyond.baselines"],
    ["beyond.streams"],
    ["beyond.training"],
    ["toy.stages"],
    ["beyond.commands"],
    ["beyond.experiments"],
]


def module(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(path) -> str:
    """The folder at the top that a file is in, or in beyond/; of a file at the top, its name."""
    room, *further = path.relative_to(ROOT).parts
    if room == "beyond" and len(further) == 2:
        return f"{room}/{further[0]}"
    return room


def floor(name: str) -> int:
    for number, names in enumerate(FLOORS):
        if any(name == other or name.startswith(other + ".") for other in names):
            return number
    raise AssertionError(f"{name} stands on no floor")


def imports(path):
    """Modules of this repository that a file imports, anywhere in it but at its foot.

    The foot of a file, `if __name__ == "__main__":`, may import its command: the one line that points up.
    """
    known = {module(file) for file in CODE if file.stem != "__init__"}
    body = [node for node in ast.parse(path.read_text()).body
            if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    for node in ast.walk(ast.Module(body, [])):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in known)


def test_six_files_at_the_top():
    assert sorted(path.name for path in ROOT.glob("*.py")) == TOP


@pytest.mark.parametrize("path", CODE, ids=module)
def test_imports_point_down(path):
    name = module(path)
    if path.stem == "__init__" and name != "beyond.baselines.__init__":        # which fills tables
        assert not list(imports(path))
        return
    room = room_of(path)
    for imported in imports(path):
        same_room = imported.startswith(room.replace("/", ".") + ".")
        assert same_room or floor(imported) < floor(name), f"{name} imports {imported}"


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


# ------------------------------------------------------------- a budget of syntax nodes

# What a reader has to take in: nodes of the syntax trees, not lines, so that nothing is won by
# folding two thoughts into one line. A commit that needs more raises the number, and says why.
BUDGET = {
    "the six files": 15_040,                   # each of them is its script
    "support": 31_700,                         # trials of models, marks, whose narrations a file has
    "beyond": 10,                              # a line on what it is
    "beyond/baselines": 4_470,
    "beyond/commands": 11_250,                 # options that say what they need
    "beyond/experiments": 4_860,               # memories alone
    "beyond/streams": 12_950,                  # the clock and end of a live stream, values of a state
    "beyond/training": 4_300,                  # model cards
    "docs": 2_550,
    "toy": 9_740,
}
WHOLE = 96_900


def test_no_room_is_larger_than_its_budget():
    nodes = defaultdict(int)
    for path in [*CODE, *(ROOT / "docs").glob("*.py")]:
        room = room_of(path)
        if room in TOP:
            room = "the six files"
        nodes[room] += sum(1 for _ in ast.walk(ast.parse(path.read_text())))
    over = {room: count for room, count in nodes.items() if count > BUDGET[room]}
    assert not over, f"syntax nodes above the budget: {over}"
    assert sum(nodes.values()) <= WHOLE
