"""The list of the paper's tables, the runner, and the tables of experiments/README.md."""
import json
import re
import sys

import pytest

from commands import data as data_command, evaluate as evaluation, train as training_command
from experiments import ages, efficiency, knowledge, objects, paper, runs, summary, tables
from experiments.runs import (
    Experiment, Runner, evaluate_command, needed, real_commands, result, train_command,
)
from helpers import ROOT
from support.common.disk import write_json
from support.common.errors import BadData
from test_commands import Parsed, catch_parser

ALL_TABLES = list(paper.TABLES.values())
WITH_SEEDS = (
    "T1", "T2", "T3", "T5", "T7", "T9", "T13", "T14", "T15", "shift", "knowledge", "ages", "start",
    "one-loss",
)
SEEDS = {name: 3 for name in WITH_SEEDS} | {"trainings": 6}


# ------------------------------------------------------------------------------- paper.py

@pytest.mark.parametrize("name", paper.TABLES)
def test_a_table_is_complete(name):
    table = paper.TABLES[name]
    assert table.seeds == SEEDS.get(name, 1)
    for row in table.rows:
        for numbers in [row.paper, *row.other_numbers.values()]:
            assert numbers == "" or len(numbers.split()) == len(table.paper.split()), row
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    for column in table.columns:
        assert column.evaluation in paper.EVALUATIONS
        assert column.toy or column.evaluation in paper.REAL_EVALUATIONS
    measures = {column.header: column for column in table.columns}
    for claim in table.claims:
        assert {claim.first, claim.second} <= set(labels)
        assert measures[claim.column].measure in runs.EACH
        assert "--per-video" in paper.EVALUATIONS[measures[claim.column].evaluation]


def test_every_table_and_training_is_there():
    numbered = {f"T{number}" for number in range(1, 18)} - {"T8"}
    assert numbered <= paper.TABLES.keys()
    used = {row.training for table in ALL_TABLES for row in table.rows}
    assert used == paper.TRAININGS.keys()


# ------------------------------------------------------------------------------- commands

MAINS = {
    "evaluate.py": evaluation,
    "data.py": data_command,
    "experiments.efficiency": efficiency,
    "experiments.summary": summary,
    "experiments.objects": objects,
    "experiments.ages": ages,
    "experiments.knowledge": knowledge,
}


def parsed(command: list[str], monkeypatch):
    """The options of a command without `python`, read by its own parser."""
    words = command[1:] if command[0] == "-m" else command
    monkeypatch.setattr(sys, "argv", words)
    if words[0] == "train.py":
        return training_command.parse()
    with catch_parser(), pytest.raises(Parsed) as caught:
        MAINS[words[0]].main()
    parser = caught.value.args[0]
    return parser.parse_args(words[1:])


@pytest.mark.parametrize("name", paper.TRAININGS)
def test_training_commands_are_understood(name, monkeypatch):
    options = parsed(train_command(name, 1, "out/tables"), monkeypatch)
    assert (options.data, options.seed) == ("toy", 1)
    assert options.output == f"out/tables/{name}-1"
    # A narrator sees as all others do, or learns that from the narrator that it starts from.
    assert bool(options.vision) != bool(options.init)


def test_narrators_share_a_base():
    """Encoder, language model and stage `look`, but for those whose own are what is compared."""
    base = f"--vision {paper.VISION} --llm {paper.LLM} --look {paper.LOOK}"
    others = {"lion", "second", "second-tuned", "large", "large-slow", "cls"}
    for name in paper.TRAININGS.keys() - others:
        assert base in " ".join(train_command(name, 1, "out")), name
    for file in (paper.VISION, paper.LLM, paper.LOOK):
        assert (ROOT / file).exists()
    assert "--llm toy" not in " ".join(train_command("large", 0, "out"))
    assert "--look" not in train_command("cls", 0, "out")
    assert "--init out/flownar-2" in " ".join(train_command("second-tuned", 2, "out"))


def real_lines(data: str) -> list[str]:
    """The commands of all rows of all tables for a real data set."""
    lines = []
    for table in ALL_TABLES:
        for row in table.rows:
            lines += real_commands(row, table, data)
    return lines


def test_rows_of_a_table_share_a_warm_up():
    """Each command names it, as the toy's default is not the paper's."""
    for name, table in paper.TABLES.items():
        warm_ups = set()
        for row in table.rows:
            command = train_command(row.training, 0, "out")
            warm_ups.add(command[command.index("--warmup") + 1])
        if name not in ("trainings", "start"):             # these compare warm-ups
            assert len(warm_ups) == 1, name


@pytest.mark.parametrize("data", ["ego4d", "egoexo4d", "ek100"])
def test_commands_for_real_data(data, monkeypatch):
    """A narrator is trained in one way only, is read where it was written, and starts from a
    narrator that Ego4D's commands train."""
    trained = {}                               # output -> command
    starts = set()
    for line in real_lines(data):
        command = line.split()[1:]
        options = parsed(command, monkeypatch)
        if command[0] == "train.py":
            assert trained.setdefault(options.output, line) == line
            assert options.data == data
            assert options.epochs == (4 if data == "ek100" else 2)
            if options.init:
                starts.add(options.init)
        elif command[0] == "evaluate.py":
            assert options.model in trained
    of_ego4d = {line.split()[-1] for line in real_lines("ego4d") if "train.py" in line}
    assert starts <= of_ego4d
    assert bool(starts) == (data != "ego4d")


def test_evaluation_commands_are_understood(monkeypatch):
    for table in ALL_TABLES:
        for experiment in needed(table, [0]):
            parsed(evaluate_command(experiment, "out/tables"), monkeypatch)
    for command in paper.VIDEOS:
        parsed(command.format(videos="out/videos").split(), monkeypatch)


def test_names_tell_experiments_apart():
    assert Experiment("a", "hard", "--static --theta 0.7", 1).name == "a-hard-static-theta-0.7-1"
    experiments = {experiment for table in ALL_TABLES for experiment in needed(table, range(2))}
    assert len({experiment.name for experiment in experiments}) == len(experiments)


# ------------------------------------------------------------------------------- the runner

EACH_VIDEO = {"a": {"f1": 0.5, "exact": 1.0, "memory_words": None},
              "b": {"f1": 0.5, "exact": 0.0, "memory_words": 0.123456}}
PRINTED = {"f1": 0.5, "text": "none", "by_duration": {"<= 2 min": {"f1": 1, "cider": None}}}


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """A small table, T0, whose commands do nothing. The names of the commands that ran.

    It has two trainings, of which the second one starts from the first, and one evaluation.
    """
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runs, "fingerprint_of_worlds", lambda: "w")
    monkeypatch.setattr(runs, "fingerprint_of_base", lambda: "b")
    monkeypatch.setitem(paper.TRAININGS, "second", paper.Training(init="first"))
    monkeypatch.setitem(paper.TRAININGS, "first", paper.Training("--last-k 10"))
    rows = [paper.Row(training, training, "1.0") for training in ("first", "second")]
    columns = [paper.Column("F1", "stream", "f1")]
    table = paper.Table("Small", "ego4d", "PPL", columns, rows, seeds=2)
    monkeypatch.setattr(tables, "TABLES", {"T0": table})
    names = []

    def run(self, command, name):
        names.append(name)
        if "broken" in command:
            raise BadData("it broke")
        if command[0] == "train.py":
            folder = tmp_path / command[command.index("--output") + 1]
            (folder / "narrator.json").write_text("{}")
            (folder / "narrator-log.jsonl").write_text('{"step": 0, "loss": 0.25}\n')
        if "--per-video" in command:
            file = tmp_path / command[command.index("--per-video") + 1]
            write_json(file, EACH_VIDEO)
        return f"words\n{json.dumps(PRINTED)}\n"

    monkeypatch.setattr(Runner, "run", run)
    return names


def of_table(seeds: list[int]) -> list[Experiment]:
    return needed(tables.TABLES["T0"], seeds)


def carry_out(experiments: list[Experiment], folder: str = "out", jobs: int = 1) -> list[str]:
    """The errors of a new runner."""
    return Runner(folder, jobs)(experiments)


def test_nothing_is_done_twice(ran):
    experiments = of_table([0, 1])
    assert carry_out(experiments, jobs=3) == []
    trained = ["first-0", "first-1", "second-0", "second-1"]
    assert sorted(ran) == sorted(trained + [experiment.name for experiment in experiments])
    for seed in (0, 1):
        first, second, last = f"first-{seed} second-{seed} second-stream-{seed}".split()
        assert ran.index(first) < ran.index(second) < ran.index(last)
    ran.clear()
    assert carry_out(experiments) == []
    assert carry_out(experiments, folder="empty") == []         # the results are enough
    assert ran == []


def test_narrators_are_trained_side_by_side():
    a0, a1, b0 = (Experiment("a", "stream", "", 0), Experiment("a", "stream", "", 1),
                  Experiment("b", "stream", "", 0))
    idle, teacher = (a0._replace(evaluation=name) for name in ("idle", "teacher"))
    assert runs.narrators_first([a0, idle, teacher, b0, a1]) == [a0, b0, a1, idle, teacher]


def test_predictions_are_made_where_only_their_result_is_there(ran, monkeypatch):
    monkeypatch.setitem(paper.EVALUATIONS, "objects", "objects.py --pred {long}")
    monkeypatch.setattr(Runner, "make_videos", lambda self: None)
    long, objects = (Experiment("first", name, "", 0) for name in ("long", "objects"))
    carry_out([long])
    ran.clear()
    assert carry_out([objects], folder="empty") == []
    assert ran == ["first-0", long.name, objects.name]
    # a result that no table may show is not written
    other = objects._replace(seed=1)
    assert carry_out([other], folder="other") == []
    assert result(other) and not result(long._replace(seed=1))


def test_what_a_result_holds(ran):
    experiment = of_table([0])[0]
    carry_out([experiment])
    kept = result(experiment)
    assert kept["measures"] == {
        "f1": 0.5,
        "by_duration/<= 2 min/f1": 1,
        "by_duration/<= 2 min/cider": None,
    }
    assert kept["train"].startswith("python train.py --data toy")
    assert kept["evaluate"].startswith("python evaluate.py stream --data toy")
    assert (kept["seed"], kept["worlds"], kept["base"]) == (0, "w", "b")
    assert kept["recipe"] == runs.RECIPE
    assert kept["losses"] == {"narrator": 0.25}
    assert kept["videos"] == {
        "memory_words": {"a": None, "b": 0.1235},
        "exact": {"a": 1.0, "b": 0.0},
        "f1": {"a": 0.5, "b": 0.5},
    }
    assert kept["commits"].keys() == kept["minutes"].keys() == {"train", "evaluate"}


def test_an_interrupted_training_is_resumed(ran, monkeypatch):
    commands = []
    monkeypatch.setattr(Runner, "run", lambda self, command, name: commands.append(command))
    for _ in range(2):
        Runner("out", 1).train("first", 0)
    assert commands[0] + ["--resume"] == commands[1]


def test_a_narrator_of_another_kind_is_refused(ran, monkeypatch, tmp_path):
    """One of another command, world, recipe or base, or nobody knows of which."""
    experiment = of_table([0])[0]
    Runner("out", 1).train("first", 0)

    def refused(words: str):
        (error,) = carry_out([experiment])
        assert f"out/first-0 {words}; delete it, or choose another --output" in error
        assert not runs.RESULTS.exists()

    with monkeypatch.context() as patch:
        patch.setitem(paper.TRAININGS, "first", paper.Training("--last-k 3"))
        refused("was trained with another command")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "fingerprint_of_worlds", lambda: "another")
        refused("was trained with another worlds")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "RECIPE", runs.RECIPE + 1)
        refused("was trained with another recipe")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "fingerprint_of_base", lambda: "another")
        refused("was trained with another base")
    (tmp_path / "out" / "first-0" / runs.MADE).unlink()
    refused("does not say how it was trained")


def test_videos_of_another_world_are_refused(ran, monkeypatch, tmp_path):
    (tmp_path / "out" / "videos").mkdir(parents=True)
    Runner("out", 1).make_videos()
    assert ran == ["videos"] * len(paper.VIDEOS)
    monkeypatch.setattr(runs, "fingerprint_of_worlds", lambda: "another")
    with pytest.raises(BadData, match="videos shows another world; delete it"):
        Runner("out", 1).make_videos()


def test_a_failure_is_named_and_others_go_on(ran):
    first, second = of_table([0])
    errors = carry_out([first._replace(options="broken"), second])
    assert errors == ["first-stream-broken-0: it broke"]
    assert result(second)


def test_the_error_of_a_failed_command_is_its_last_message(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "fingerprint_of_worlds", lambda: "w")
    runner = Runner("out", 1)
    assert runner.run(["-c", "print('here')"], "fine") == "here\n"
    script = "import sys; sys.exit('first\\rlast message')"
    with pytest.raises(BadData, match=r"^last message \(see .*failed.log\)$"):
        runner.run(["-c", script], "failed")
    with pytest.raises(BadData, match="exit code 3"):
        runner.run(["-c", "raise SystemExit(3)"], "silent")


def test_results_of_other_commands_recipes_worlds_and_bases_are_not_shown(ran, monkeypatch):
    experiment = of_table([0])[0]
    carry_out([experiment])
    assert result(experiment)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "fingerprint_of_worlds", lambda: "another")
        assert not result(experiment)
    monkeypatch.setitem(paper.TRAININGS, "first", paper.Training("--last-k 3"))
    assert not result(experiment)


@pytest.mark.parametrize("content", ['{"train": 1}', "[]"])
def test_a_damaged_result_is_named(ran, content):
    experiment = of_table([0])[0]
    carry_out([experiment])
    file = runs.RESULTS / f"{experiment.name}.json"
    file.write_text(content)
    with pytest.raises(BadData, match=f"{file.name}: is not a result of experiments.tables"):
        tables.list_costs(["T0"], None)


# ------------------------------------------------------------------------------- tables

def test_tables_show_means_deviations_and_how_many_seeds(ran, monkeypatch):
    numbers = iter([0.5, 0.5, 0.75])           # first-0, second-0, first-1
    monkeypatch.setattr(runs, "measures", lambda printed: {"f1": next(numbers)})
    carry_out(of_table([0, 1])[:-1])
    assert tables.markdown("T0", None).splitlines() == [
        "| T0. Small (paper: Ego4D) | *PPL* | F1 | seeds |",
        "| --- | --- | --- | --- |",
        "| first | *1.0* | 0.625 ± 0.177 | 2 |",
        "| second | *1.0* | 0.500 | 1 |",
    ]
    deviation = pytest.approx(0.25 / 2 ** 0.5)
    assert tables.as_json("T0", None) == {
        "first": {"f1": {"mean": 0.625, "std": deviation, "n": 2}},
        "second": {"f1": {"mean": 0.5, "std": None, "n": 1}},
    }


def test_a_failed_training_is_said_and_not_counted(ran, monkeypatch):
    """One whose loss at its end is far above that of another seed."""
    losses = {"first-0": 0.1, "first-1": 0.3, "second-0": 0.1, "second-1": 0.12}
    monkeypatch.setattr(runs, "losses_of", lambda folder: {"narrator": losses[folder.name]})
    carry_out(of_table([0, 1]))
    lines = tables.markdown("T0", None).splitlines()
    assert lines[2:] == [
        "| first | *1.0* | 0.500 | 1 |",
        "| second | *1.0* | 0.500 ± 0.000 | 2 |",
        "",
        "* first, seed 1: its training has failed (loss 0.300 at its end), and is not counted",
    ]
    assert tables.as_json("T0", None)["first"]["f1"]["n"] == 1


def test_claims_have_intervals(ran, monkeypatch):
    column = paper.Column("words", "stream", "memory_words")
    claims = [paper.Claim("first", "second", "words")]
    table = tables.TABLES["T0"]._replace(columns=[column], claims=claims)
    monkeypatch.setitem(tables.TABLES, "T0", table)
    carry_out(of_table([0])[:1])
    assert "*1.0* | - " in tables.markdown("T0", None).splitlines()[-1]        # no claim yet
    carry_out(of_table([0]))
    assert tables.markdown("T0", None).splitlines()[-2:] == [
        "",
        "* first - second, words: +0.000 [+0.000, +0.000], seeds 1 and 1: cannot be told apart",
    ]


def test_costs_do_not_depend_on_the_seed(ran, monkeypatch):
    table = tables.TABLES["T0"]._replace(columns=[paper.Column("GMACs", "cost", "gmacs")])
    monkeypatch.setitem(tables.TABLES, "T0", table)
    monkeypatch.setattr(runs, "measures", lambda printed: {"gmacs": 2.5})
    carry_out(of_table([1]))
    for seeds in ([1], None):
        assert tables.as_json("T0", seeds)["second"] == {"gmacs": {"mean": 2.5, "std": None, "n": 1}}


def test_what_is_missing_changes_no_name(ran, monkeypatch):
    """Where two evaluations have one measure, the second one keeps its name. The column "seeds"
    says that a cell has none."""
    columns = [paper.Column("F1", "idle", "f1"), paper.Column("F1", "stream", "f1")]
    monkeypatch.setitem(tables.TABLES, "T0", tables.TABLES["T0"]._replace(columns=columns))
    streamed = [experiment for experiment in of_table([0]) if experiment.evaluation == "stream"]
    carry_out(streamed[:1])
    assert tables.as_json("T0", None)["first"].keys() == {"stream/f1"}
    row = tables.markdown("T0", None).splitlines()[2]
    assert row == "| first | *1.0* | - | 0.500 | 0-1 |"


# ------------------------------------------------------------------------------- the command

@pytest.fixture
def lines_of(capsys, monkeypatch):
    """A function: the command with arguments -> the lines that it prints."""
    monkeypatch.setattr(tables, "command_line", lambda run: run())

    def run(arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["tables", *arguments.split()])
        tables.main()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("arguments, message", [
    ("T99", "there is no table T99; choose of T1, T2"),
    ("T4 --data ek100", "T4 has no numbers of EPIC-Kitchens in the paper, but of Ego4D"),
    ("ages --data ego4d", "ages is not in the paper: it has commands for the toy alone"),
])
def test_refusals(lines_of, arguments, message):
    with pytest.raises(BadData, match=message):
        lines_of(arguments)


def test_one_thing_is_done_at_a_time(lines_of, capsys):
    for arguments in ("T5 --show --list", "--list --json", "T5 --commands --json", "--page T5",
                      "--page --seeds 5", "T1 --data ek100 --json"):
        with pytest.raises(SystemExit) as end:
            lines_of(arguments)
        assert end.value.code == 2


def test_a_seed_counts_once():
    assert tables.seeds_of(tables.TABLES["T5"], [1, 0, 1]) == [1, 0]


def test_a_folder_may_have_spaces():
    train = runs.train_command("flownar", 0, "my tables")
    assert train[-2:] == ["--output", "my tables/flownar-0"]
    experiment = runs.Experiment("flownar", "stream", "", 0)
    assert runs.evaluate_command(experiment, "my tables")[-2] == "my tables/flownar-0"


def test_commands_are_printed(lines_of):
    lines = lines_of("T5 --commands")
    assert "  CLAM: 2.086 2.237 45.4% 52.2%" in lines
    assert len(lines) > 50
    text = "\n".join(lines_of("T1 --data ek100"))
    assert "FlowNar-C: 24.09T 22.7M" in text
    assert "python train.py --data ek100 --last-k 10 --init" in text
    all_tables = lines_of("--data ek100")
    assert "T16. Size of the language model: PPL TimeDiff Fluency LM-Corr." in all_tables


@pytest.mark.parametrize("name", paper.TABLES)
def test_printed_commands_read_only_what_earlier_ones_have_written(lines_of, name):
    lines = [line.split() for line in lines_of(f"{name} --commands --seeds 3")]
    commands = [words for words in lines if words[:1] == ["python"]]
    made = set()
    read = 0
    for words in commands:
        for option in ("--model", "--init", "--root", "--gt", "--pred"):
            if option in words:
                path = words[words.index(option) + 1].removesuffix("/predictions")
                assert path in made, words
                read += 1
        if "--output" in words:
            made.add(words[words.index("--output") + 1])
    assert read >= len({row.training for row in paper.TABLES[name].rows})


def test_results_are_shown_and_listed(lines_of):
    lines = lines_of("T5 T9 --show --json")
    assert lines[0].startswith("| T5. Memory design (paper: Ego4D) |")
    assert json.loads(lines[-1]).keys() == {"T5", "T9"}
    lines = lines_of("--list")
    assert len(lines) == len(paper.TABLES) + 1
    assert re.match(r"results by commit: [0-9a-f]{10}", lines[-1])


# ------------------------------------------------------------------------------- the results

def rows_with_results(table: paper.Table) -> int:
    count = 0
    for row in table.rows:
        experiments = needed(table._replace(rows=[row]), range(table.seeds))
        if any(result(experiment) for experiment in experiments):
            count += 1
    return count


def test_the_readmes_tables_are_the_results():
    """Between <!-- NAME --> and <!-- end --> is the output of `experiments.tables NAME --show`. A
    table is there if at least two of its rows have results."""
    shown = dict(tables.TABLE_OF_PAGE.findall(tables.PAGE.read_text()))
    with_results = {name for name, table in paper.TABLES.items() if rows_with_results(table) > 1}
    assert shown.keys() == with_results
    for name, text in shown.items():
        assert text == tables.markdown(name, None), name


def test_intervals_in_the_text_are_those_of_the_tables():
    """With either sign: a is above b by as much as b is below a."""
    text = tables.PAGE.read_text()
    number = r"([+-]?\d\.\d{3})"
    interval = re.compile(rf"\[{number},\s{number}\]")
    shown = set()
    for table in tables.TABLE_OF_PAGE.finditer(text):
        for low, high in interval.findall(table[2]):
            shown |= {(float(low), float(high)), (-float(high), -float(low))}
    in_text = interval.findall(tables.TABLE_OF_PAGE.sub("", text))
    assert in_text
    for low, high in in_text:
        assert (float(low), float(high)) in shown, (low, high)


def test_the_page_is_written_anew(tmp_path, monkeypatch):
    page = tables.PAGE.read_text()
    old = tmp_path / "README.md"
    old.write_text(page.replace("| CLAM | *2.086* |", "| CLAM | *9.999* |"))
    assert "9.999" in old.read_text()
    monkeypatch.setattr(tables, "PAGE", old)
    tables.update_page()
    assert old.read_text() == page


def test_results_belong_to_the_list():
    """Each result is of an experiment that some table shows, made by today's commands."""
    experiments = {}
    for table in ALL_TABLES:
        for experiment in needed(table, range(table.seeds)):
            experiments[experiment.name] = experiment
    for file in runs.RESULTS.glob("*.json"):
        assert file.stem in experiments, file.name
        assert result(experiments[file.stem]), file.name
