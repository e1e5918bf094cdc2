"""What the paper's tables compare (§4, App. C): trainings, evaluations, and the rows of tables.

TRAININGS       name -> the options of train.py that make the narrator
EVALUATIONS     name -> the command that measures a narrator
TABLES          name -> rows: a label, a training, options of the evaluations, the paper's numbers;
                and claims, whose intervals are shown below the table (paper.json)

`tables.py` shows the tables, `runs.py` carries them out. Table 8 is `data.py stats`. Not in the
miniature: rows that the paper copies from other works, rows of EgoExo4D and EPIC-Kitchens that are
of the same kind as others, LION-FS (Table 2), a second size of the language model (Table 16), and
summaries (Table 17: asked.py). Where the toy's sizes are not the paper's, the label of the row says
so.
"""
import json
from pathlib import Path
from typing import NamedTuple

# ------------------------------------------------------------------------------- what is trained

# All narrators have the encoder and the language model of the bundled one, as the paper's have one
# SigLIP and one Llama. All start from one stage `look`, so that they see equally well. It is the
# look.safetensors that this command writes:
#   python train.py --data toy --idle 0.5 --epochs 4 --warmup 0.05 --output out/base
#       --vision toy/checkpoint/vision --llm toy/checkpoint/llm
VISION = "toy/checkpoint/vision"
LLM = "toy/checkpoint/llm"
LOOK = "experiments/base/look.safetensors"

# Half of the videos have idle time. The rate is the toy's, 7e-4: with a warm-up of 20 % it was the
# best of six pairs for every memory (experiments/earlier.md).
SHORT = "--idle 0.5 --epochs 3 --warmup 0.2"
MIMETIC = f"{SHORT} --start mimetic"
LONGER = f"{MIMETIC} --recall-steps 3600"                # three times the steps of stage `recall`
PUBLISHED = "--start published"
SECOND = "--idle 0.5 --world second --limit 40 --epochs 20 --warmup 0.2"


class Training(NamedTuple):
    """Options of train.py, and what a narrator does not take from the base."""
    method: str                                # options that are the same on real data
    course: str = SHORT                        # options of the toy
    own_look: bool = False                     # learns a stage `look` of its own
    init: str | None = None                    # starts from this narrator, of the same seed
    folder: str | None = None                  # where it lies, if nothing is to be trained


def one_loss(epochs: int) -> str:
    """The paper's loss alone: no stage `recall`."""
    return f"--idle 0.5 --epochs {epochs} --warmup 0.05 --no-recall"


ALL = "--last-k all"
ONLINE = "--memory none --no-prune"
LARGE_BANK = "--memory-tokens 16"              # a state as large as CLAM's

TRAININGS = {
    "online": Training(ONLINE),
    "mod": Training(f"{ONLINE} --mod-keep 0.2"),
    # Tables 3 and 9: visual history
    "none": Training(f"--memory none {ALL}"),
    "recent": Training(f"--memory recent {ALL}"),
    # Without the stage `recall`, which a narrator without a memory cannot learn
    "online-one-loss": Training(ONLINE, f"{SHORT} --no-recall"),
    # Table 5: memories, all trained alike
    "recent-longer": Training(f"--memory recent {ALL} {LARGE_BANK}", LONGER),
    "kmeans-longer": Training(f"--memory kmeans {ALL} {LARGE_BANK}", LONGER),
    "moviechat-longer": Training(f"--memory moviechat {ALL} {LARGE_BANK}", LONGER),
    "tokenmlp-longer": Training(f"--memory tokenmlp {ALL} {LARGE_BANK}", LONGER),
    "retnet-longer": Training(f"--memory retnet {ALL}", LONGER),
    "mimetic-longer": Training(ALL, LONGER),
    "writing-longer": Training(f"--memory writing {ALL}", LONGER),
    "mimetic-c-longer": Training("--last-k 10", LONGER),
    "mimetic-lora-frozen": Training(ALL, f"{LONGER} --freeze-lora"),
    "mimetic-frozen": Training(ALL, f"{LONGER} --freeze-memory"),
    # First weights: what is given, and what is learned
    "clam-published": Training(ALL, f"{SHORT} {PUBLISHED}"),
    "retnet-published": Training(f"--memory retnet {ALL}", f"{SHORT} {PUBLISHED}"),
    "mimetic": Training(ALL, MIMETIC),
    # The paper's loss alone
    "published": Training(ALL, f"{one_loss(3)} {PUBLISHED}"),
    "published-8": Training(ALL, f"{one_loss(8)} {PUBLISHED}"),
    # Table 13: past narrations
    "none-0": Training("--memory none --last-k 0"),
    "clam-0": Training("--last-k 0", LONGER),
    "clam-3": Training("--last-k 3", LONGER),
    "clam-7": Training("--last-k 7", LONGER),
    # Table 14: memory tokens
    "tokens-5": Training(f"{ALL} --memory-tokens 5", LONGER),
    "tokens-15": Training(f"{ALL} --memory-tokens 15", LONGER),
    "tokens-25": Training(f"{ALL} --memory-tokens 25", LONGER),
    # Tables 4, 11 and 12: the trigger
    "hard": Training(ALL, f"{LONGER} --world hard"),
    "hard-online": Training(ONLINE, f"{SHORT} --world hard"),
    # Table 10: pretraining
    "second": Training(ALL, f"{SECOND} --start mimetic --recall-steps 3600", own_look=True),
    "second-tuned": Training(ALL, SECOND, init="mimetic-longer"),
    # Table 15: CLAM on narrations
    "narrations": Training("--narration-memory 20", LONGER),
    # The narrator of the repository, a FlowNar-C
    "bundled": Training("--last-k 10", "--idle 0.5 --limit 1600 --epochs 5 --warmup 0.2 "
                        "--start mimetic --recall-steps 6000", folder="toy/checkpoint"),
    # Table 2: one token a frame
    "cls": Training(ONLINE, f"{SHORT} --grid 0", own_look=True),
}

# ------------------------------------------------------------------------------- what is evaluated

# {keep}: the folder of predictions, with which an evaluation can be resumed
# {each}: the file of each video's results, for the intervals of claims
# {videos}: the folder of VIDEOS
STREAM_TOY = "evaluate.py stream --data toy --limit 60 --output {keep} --per-video {each}"
EVALUATIONS = {
    "stream": STREAM_TOY,
    "idle": f"{STREAM_TOY} --world idle",
    "long": "evaluate.py stream --data toy --output {keep} --by-duration --root {videos}",
    "hard": f"{STREAM_TOY} --world hard",
    "second": f"{STREAM_TOY} --world second",
    "teacher": "evaluate.py teacher --data toy --limit 60 --per-video {each}",
    "long-teacher":
        "evaluate.py teacher --data toy --max-frames 2000 --by-duration --root {videos}",
    "second-teacher": "evaluate.py teacher --data toy --limit 60 --world second",
    "cost": "-m experiments.cost stream --frames 480",
    "attention": "-m experiments.attention --data toy",
}

# The commands that make the toy's long videos: 1, 3, 6 and 11 minutes
VIDEOS = [
    "data.py toy --seed 5100000 --count 6 --minutes 1 --output {videos}",
    "data.py toy --seed 5101000 --count 4 --minutes 3 --output {videos}",
    "data.py toy --seed 5102000 --count 3 --minutes 6 --output {videos}",
    "data.py toy --seed 5103000 --count 2 --minutes 11 --output {videos}",
]

# ------------------------------------------------------------------------------- what is shown

SELF_CONDITIONED = {"Prec.": "precision", "Rec.": "recall", "F1": "f1", "C": "cider", "M": "meteor",
                    "R": "rouge_l", "exact": "exact", "memory words": "memory_words"}
TEACHER_FORCED = {"PPL": "ppl", "TimeDiff": "time_diff", "Fluency": "fluency",
                  "LM-Corr.": "lm_correctness"}


class Column(NamedTuple):
    """A measure of an evaluation. {} in the measure's name stands for the row's `group`."""
    header: str
    evaluation: str
    measure: str                               # its name in what the command prints with --json


class Row(NamedTuple):
    label: str
    training: str
    paper: str = ""                            # the paper's numbers
    options: str = ""                          # options of the evaluations of the table's columns
    group: str = ""                            # the group of videos that the row is about
    seeds: list[int] = [0]                     # of its trainings


class Claim(NamedTuple):
    """Two rows whose difference in a column, first - second, is shown with its interval."""
    first: str                                 # labels of rows
    second: str
    column: str                                # header of a column


class Table(NamedTuple):
    title: str
    data: str                                  # the data set of the paper's numbers
    paper: str                                 # headers of the paper's numbers
    columns: list[Column]
    rows: list[Row]
    claims: list[Claim] = []
    percent: int = 95                          # of the claims' intervals
    dated: str = ""                            # the commit of the results, where today's has none


def columns_of(entries: list) -> list[Column]:
    """The columns of a table in paper.json. An entry is [header, evaluation, measure], or the name
    of an evaluation: all measures of its protocol."""
    columns = []
    for entry in entries:
        if isinstance(entry, list):
            columns.append(Column(*entry))
            continue
        measures = TEACHER_FORCED if entry.endswith("teacher") else SELF_CONDITIONED
        group = "by_duration/{}/" if entry.startswith("long") else ""
        columns += [Column(header, entry, group + name) for header, name in measures.items()]
    return columns


def read_tables() -> dict[str, Table]:
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for fields in tables.values():
        fields["columns"] = columns_of(fields["columns"])
        seeds = {"seeds": list(range(fields.pop("seeds")))}      # of rows that have none of their own
        fields["rows"] = [Row(**seeds | row) for row in fields["rows"]]
        fields["claims"] = [Claim(*claim) for claim in fields.get("claims", [])]
    return {name: Table(**fields) for name, fields in tables.items()}


TABLES = read_tables()
