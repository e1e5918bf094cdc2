"""The list of the paper's tables, what carries it out, and the tables of experiments/README.md."""
import json
import re
import sys
from functools import partial

import pytest

from commands import data as data_command, evaluate as evaluation, train as training_command
from experiments import efficiency, objects, paper, runs, summary, tables
from experiments.runs import (
    Experiment, Runner, base_and_name, evaluate_command, needed, result, train_command,
)
from helpers import ROOT
from support.common.errors import BadData
from test_commands import Parsed, catch_parser


def test_rows_are_complete():
    for table in paper.TABLES.values():
        for row in table.rows:
            for numbers in filter(None, [row.paper, *row.more.values()]):
                assert len(numbers.split()) == len(table.paper.split()), row
            assert base_and_name(row.training)[1] in paper.TRAININGS
        assert len({base_and_name(row.training)[0] for row in table.rows}) == 1       # narrators of one base
        assert {column.evaluation for column in table.columns} <= paper.EVALUATIONS.keys()
        assert len({row.label for row in table.rows}) == len(table.rows)
        assert table.seeds == (2 if table in map(paper.TABLES.get, ("T1", "T3", "T5")) else 1)
    used = {base_and_name(row.training)[1] for table in paper.TABLES.values() for row in table.rows}
    assert used == paper.TRAININGS.keys()
    assert {"T" + str(i) for i in range(1, 18)} - {"T8"} <= paper.TABLES.keys()


@pytest.mark.parametrize("name", paper.TRAININGS)
def test_training_commands_are_understood(name, monkeypatch):
    given = paper.TRAININGS[name]
    monkeypatch.setattr(sys, "argv", train_command(name, 1, "out/tables"))
    options = training_command.parse()
    assert (options.data, options.seed, options.output) == ("toy", 1, f"out/tables/{name}-1")
    for kind in ("llm", "vision", "look", "init"):
        assert (getattr(options, kind) is None) == (getattr(given, kind) is None), kind
    assert "llm" not in train_command("flownar-c", 0, "out") and "--llm" in train_command("flownar-c", 1, "out")


@pytest.mark.parametrize("name", paper.TRAININGS)
def test_a_base_is_a_world_of_its_own(name):
    """The commands of base2/NAME are those of NAME, in another folder."""
    for seed in (0, 1):
        assert [word.replace("out/", "out/base2/") for word in train_command(name, seed, "out")] == train_command(
            f"base2/{name}", seed, "out")


MAINS = {"evaluate.py": evaluation, "data.py": data_command, "experiments.efficiency": efficiency,
         "experiments.summary": summary, "experiments.objects": objects}


def understood(command: list[str], monkeypatch):
    """A command, without `python`, through its own parser -> its options."""
    monkeypatch.setattr(sys, "argv", command[command[0] == "-m":])
    if sys.argv[0] == "train.py":
        return training_command.parse()
    with catch_parser(), pytest.raises(Parsed) as caught:
        MAINS[sys.argv[0]].main()
    return caught.value.args[0].parse_args(sys.argv[1:])


@pytest.mark.parametrize("data", ["ego4d", "egoexo4d", "ek100"])
def test_commands_for_real_data(data, monkeypatch):
    """All are understood; a narrator is trained in one way, is read where it was written, and starts from one of Ego4D
    that is trained, too."""
    trained, started = {}, set()
    for table in paper.TABLES.values():
        for row in table.rows:
            for line in runs.real_commands(row, table, data):
                words = line.split()[1:]
                options = understood(words, monkeypatch)
                if words[0] == "train.py":
                    assert trained.setdefault(options.output, line) == line and options.data == data
                    started |= {options.init} - {None}
                    assert options.epochs == (4 if data == "ek100" else 2)
                elif words[0] == "evaluate.py":
                    assert options.model in trained
    ego4d = {line.split()[-1] for table in paper.TABLES.values() for row in table.rows
             for line in runs.real_commands(row, table, "ego4d") if "train.py" in line}
    assert started <= ego4d and bool(started) == (data != "ego4d")


def test_evaluation_commands_are_understood(monkeypatch):
    for table in paper.TABLES.values():
        assert {column.evaluation for column in table.columns if not column.toy} <= paper.REAL_EVALUATIONS.keys()
        for experiment in needed(table, [0]):
            understood(evaluate_command(experiment, "out/tables"), monkeypatch)
    ran = []
    monkeypatch.setattr(data_command, "toy_command", ran.append)
    for command in paper.VIDEOS:
        data_command.run(command.format(videos="out/videos").split()[1:])
    assert len(ran) == len(paper.VIDEOS)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two trainings, the second on models of the first, one evaluation, and commands that only say what they are."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    row = lambda training: paper.Row(training, training, "1.0")
    table = paper.Table("Small", "ego4d", "PPL", [paper.Column("F1", "stream", "f1")],
                        [row("flownar-c"), row("flownar")], 2)
    monkeypatch.setattr(tables, "TABLES", {"T0": table})
    ran = []

    def run(self, command, name):
        ran.append(name)
        if "broken" in command:
            raise BadData("it broke")
        if command[0] == "train.py":
            folder = tmp_path / command[command.index("--output") + 1]
            (folder / "narrator.json").write_text("{}")
        return 'words\n{"f1": 0.5, "text": "none", "by_duration": {"<= 2 min": {"f1": 1, "cider": null}}}\n'

    monkeypatch.setattr(Runner, "run", run)
    return table, ran


def test_nothing_is_done_twice(small):
    table, ran = small
    wanted = needed(table, [0, 1])
    assert Runner("out", 3, "w")(wanted) == []
    assert sorted(ran) == sorted([f"{training}-{seed}" for training in ("flownar", "flownar-c") for seed in (0, 1)]
                                 + [experiment.name for experiment in wanted])
    for seed in (0, 1):
        assert ran.index("flownar-c-0") < ran.index(f"flownar-{seed}") < ran.index(f"flownar-stream-{seed}")
    kept = result(wanted[0], "w")
    assert kept["measures"] == {"f1": 0.5, "by_duration/<= 2 min/f1": 1, "by_duration/<= 2 min/cider": None}
    assert kept["train"].startswith("python train.py --data toy") and kept["seed"] == 0
    assert kept["commits"].keys() == {"train", "evaluate"}
    ran.clear()
    assert Runner("out", 1, "w")(wanted) == [] and ran == []


def test_a_training_that_was_interrupted_is_resumed(small, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(Runner, "run", lambda self, command, name: commands.append(command))
    for _ in range(2):
        Runner("out", 1, "w").train("flownar-c", 0)
    assert commands[0] + ["--resume"] == commands[1]


def test_a_narrator_of_another_command_is_refused(small, monkeypatch, tmp_path):
    experiment = needed(small[0], [0])[0]
    Runner("out", 1, "w").train("flownar-c", 0)
    monkeypatch.setitem(paper.TRAININGS, "flownar-c", paper.Training("--last-k 3"))
    assert "out/flownar-c-0 was trained by another command; delete it" in Runner("out", 1, "w")([experiment])[0]
    (tmp_path / "out" / "flownar-c-0" / runs.MADE).unlink()
    assert "does not say how it was trained; delete it" in Runner("out", 1, "w")([experiment])[0]
    assert not runs.RESULTS.exists()


def test_a_narrator_and_videos_of_another_world_are_refused(small, tmp_path):
    experiment = needed(small[0], [0])[0]
    assert Runner("out", 1, "w")([experiment]) == []
    (failed,) = Runner("out", 1, "another")([experiment])
    assert "out/flownar-c-0 was trained by another world; delete it" in failed
    (tmp_path / "out" / "videos").mkdir()
    Runner("out", 1, "w").make_videos()
    with pytest.raises(BadData, match="videos shows another world; delete it"):
        Runner("out", 1, "another").make_videos()


def test_costs_do_not_depend_on_the_seed(small, monkeypatch):
    table = small[0]._replace(columns=[paper.Column("GMACs", "cost", "gmacs")])
    monkeypatch.setitem(paper.EVALUATIONS, "cost", "cost")
    monkeypatch.setitem(tables.TABLES, "T0", table)
    monkeypatch.setattr(runs, "measures", lambda printed: {"gmacs": 2.5})
    Runner("out", 1, "w")(needed(table, [1]))
    assert tables.as_json("T0", [1], "w")["flownar"] == {"gmacs": 2.5} == tables.as_json("T0", None, "w")["flownar"]


def test_a_damaged_result_is_named(small):
    Runner("out", 1, "w")(needed(small[0], [0]))
    file = next(runs.RESULTS.glob("*.json"))
    file.write_text('{"train": 1}')
    with pytest.raises(BadData, match=f"{file.name}: is not a result"):
        tables.list_costs(["T0"], None, "w")


def test_a_failure_is_named_and_others_go_on(small):
    table, _ = small
    wanted = needed(table, [0])
    failed = Runner("out", 1, "w")([wanted[0]._replace(options="broken"), wanted[1]])
    assert failed == ["flownar-c-stream-broken-0: it broke"] and result(wanted[1], "w")


def test_results_of_other_commands_and_worlds_are_not_shown(small, monkeypatch):
    table, _ = small
    experiment = needed(table, [0])[0]
    Runner("out", 1, "w")([experiment])
    assert result(experiment, "w") and not result(experiment, "another")
    monkeypatch.setitem(paper.TRAININGS, "flownar-c", paper.Training("--last-k 3", llm=None, vision=None))
    assert not result(experiment, "w")
    (runs.RESULTS / f"{experiment.name}.json").write_text("[]")
    with pytest.raises(BadData, match="is not a result"):
        result(experiment, "w")


def test_tables_show_means_and_how_many_seeds(small):
    table, _ = small
    Runner("out", 1, "w")(needed(table, [0, 1])[:-1])
    assert tables.markdown("T0", None, "w").splitlines() == [
        "| T0. Small (paper: Ego4D) | *PPL* | F1 | seeds |", "| --- | --- | --- | --- |",
        "| flownar-c | *1.0* | 0.500 | 2 |", "| flownar | *1.0* | 0.500 | 1 |"]
    assert tables.as_json("T0", None, "w") == {"flownar-c": {"f1": 0.5}, "flownar": {"f1": 0.5}}


def test_rows_of_different_bases_are_noticed(small, tmp_path, capsys):
    table, _ = small
    wanted = needed(table, [0, 1])
    for number, part in enumerate((wanted[:2], wanted[2:])):
        Runner("out", 1, "w")(part)
        tables.warn_of_bases("T0", None, "w")
        assert ("do not compare" in capsys.readouterr().err) == (number > 0)
        (tmp_path / "out" / "flownar-c-0" / "llm").mkdir(exist_ok=True)
        (tmp_path / "out" / "flownar-c-0" / "llm" / "model.safetensors").write_bytes(b"another")


def with_recipe(monkeypatch, number):
    for module in (runs, tables):
        monkeypatch.setattr(module, "RECIPE", number)


def test_results_of_another_recipe_are_apart(small, monkeypatch, tmp_path, capsys):
    """They are shown in rows of their own, never averaged with today's, and made anew when the table is completed."""
    table, ran = small
    Runner("out", 1, "w")(needed(table, [0, 1]))
    today = tables.markdown("T0", None, "w")
    with_recipe(monkeypatch, runs.RECIPE + 1)
    earlier = runs.RECIPE - 1
    assert tables.markdown("T0", None, "w").splitlines() == [
        f"{line} {more} |" for line, more in zip(today.splitlines(), ("recipe", "---", earlier, earlier))]
    tables.list_costs(["T0"], None, "w")
    assert "0 of 4 results; lacks 4" in (said := capsys.readouterr().out) and "4 of an earlier recipe" in said
    experiment = needed(table, [1])[0]
    assert "out/flownar-c-0 was trained by another recipe; delete it" in Runner("out", 1, "w")([experiment])[0]
    ran.clear()
    monkeypatch.setattr(runs, "measures", lambda printed: {"f1": 0.75})
    assert Runner("new", 1, "w")([experiment]) == [] and "flownar-c-1" in ran
    assert tables.markdown("T0", None, "w").splitlines()[2:] == [
        f"| flownar-c | *1.0* | 0.750 | 1 | {runs.RECIPE} |", f"| flownar-c | *1.0* | 0.500 | 1 | {earlier} |",
        f"| flownar | *1.0* | 0.500 | 2 | {earlier} |"]
    assert tables.as_json("T0", None, "w") == {"flownar-c": {"f1": 0.75}, f"flownar-c (recipe {earlier})": {"f1": 0.5},
                                               f"flownar (recipe {earlier})": {"f1": 0.5}}
    tables.warn_of_bases("T0", None, "w")
    assert "T0: its rows are of different recipes" in capsys.readouterr().err


def test_what_is_missing_changes_no_name(small, monkeypatch):
    """Of two evaluations with one measure, the second one keeps its name, and the row says how few seeds it has."""
    table = small[0]._replace(columns=[paper.Column("F1", "idle", "f1"), paper.Column("F1", "stream", "f1")])
    monkeypatch.setitem(tables.TABLES, "T0", table)
    Runner("out", 1, "w")([e for e in needed(table, [0, 1]) if e.evaluation == "stream"][:1])
    assert tables.as_json("T0", None, "w")["flownar-c"] == {"stream/f1": 0.5}
    assert tables.markdown("T0", None, "w").splitlines()[2] == "| flownar-c | *1.0* | - | 0.500 | 0-1 |"


def printed(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tables", *arguments])
    monkeypatch.setattr(tables, "command_line", lambda run: run())
    tables.main()
    return capsys.readouterr().out


def test_the_command(capsys, monkeypatch):
    run = partial(printed, capsys, monkeypatch)
    with pytest.raises(BadData, match="there is no table T99; choose of T1, T2"):
        run("T99")
    real = run("T1", "--data", "ek100")
    assert "FlowNar-C: 24.09T 22.7M" in real and "python train.py --data ek100 --last-k 10 --init" in real
    shown = run("T5", "T9", "--show", "--json").splitlines()
    assert json.loads(shown[-1]).keys() == {"T5", "T9"} and shown[0].startswith("| T5. Memory design (paper: Ego4D) |")
    listed = run("--list").splitlines()
    assert len(listed) == len(paper.TABLES) + 1 and re.match(r"results by commit: [0-9a-f]{10}", listed[-1])
    commands = run("T5", "--commands").splitlines()
    assert "  CLAM: 2.086 2.237 45.4% 52.2%" in commands and len(commands) > 50
    with pytest.raises(BadData, match="T4 has no numbers of EPIC-Kitchens in the paper, but of Ego4D"):
        run("T4", "--data", "ek100")
    assert "T16." in run("--data", "ek100")


def test_the_readmes_tables_are_the_results():
    """Between <!-- NAME --> and <!-- end --> stands what `experiments.tables NAME --show` prints."""
    worlds, page = runs.fingerprint_of_worlds(), (ROOT / "experiments" / "README.md").read_text()
    shown = re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert {name for name, _ in shown} == paper.TABLES.keys()
    for name, text in shown:
        assert text == tables.markdown(name, None, worlds), name


def test_results_belong_to_the_list():
    """Each file in experiments/results is of an experiment that some table shows, made by today's commands."""
    worlds = runs.fingerprint_of_worlds()
    names = {e.name: e for table in paper.TABLES.values() for e in needed(table, range(2))}
    for file in runs.RESULTS.glob("*.json"):
        assert file.stem in names and result(names[file.stem], worlds), file.name
        assert json.loads(file.read_text())["recipe"] in paper.RECIPES, file.name


def test_names_tell_experiments_apart():
    every = [e for table in paper.TABLES.values() for e in needed(table, range(2))]
    assert len({e.name for e in every}) == len(set(every))
    assert Experiment("a", "hard", "--static --theta 0.7", 1).name == "a-hard-static-theta-0.7-1"
