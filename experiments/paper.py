"""What the paper's tables compare (§4, App. C): trainings, evaluations, and the rows of tables.

TRAININGS       name -> the options of train.py that make the narrator
EVALUATIONS     name -> the command that measures a narrator
TABLES          name -> rows: a label, a training, options of the evaluations, the paper's numbers;
                and claims, whose intervals are shown below the table (paper.json)
RECIPE          the number of the code's recipe; results of other recipes are not shown

`tables.py` shows the tables, `runs.py` carries them out. Table 8 is `data.py stats`. Not in the
miniature: rows that the paper copies from other works, rows of EgoExo4D and EPIC-Kitchens that are
of the same kind as others, LION-FS (Table 2), and summaries (Table 17: summary.py). Where the toy's sizes are not the
paper's, the label of the row says so.
"""
import json
from pathlib import Path
from typing import NamedTuple

# ------------------------------------------------------------------------------- what is trained

# The recipe is what the toy's code makes of a command, as a number that each result carries.
# Raise it by one, and say here what is new, whenever the same commands would train another
# narrator, or would measure the same one differently, by more than rounding: toy/stages.py (what a
# stage learns, its steps), train.py, narrator.py, clam.py, baselines/, evaluate.py. Code that is
# only arranged anew is the same recipe. Another world has another fingerprint (runs.py).
RECIPES = {
    1: "stages look and recall list what is shown in random order (before commit 96122e3)",
    2: "they list it in the order of the places",
    3: "in the order of the places in the first half of look, then in random order",
    4: "no stage remember, 1,200 steps of recall instead of 600; one base, three epochs",
}
RECIPE = max(RECIPES)

# All narrators have the encoder and the language model of the bundled one, as the paper's have one
# SigLIP and one Llama. All start from one stage `look`, so that they see equally well. It is the
# look.safetensors that this command writes:
#   python train.py --data toy --idle 0.5 --epochs 4 --warmup 0.05 --output out/base
#       --vision toy/checkpoint/vision --llm toy/checkpoint/llm
VISION = "toy/checkpoint/vision"
LLM = "toy/checkpoint/llm"
LOOK = "experiments/base/look.safetensors"

# Half of the videos have idle time.
WARM_UP_20 = "--idle 0.5 --epochs 3 --warmup 0.2"
WARM_UP_5 = "--idle 0.5 --epochs 3 --warmup 0.05"
MIMETIC = f"{WARM_UP_20} --start mimetic"
PUBLISHED = f"{WARM_UP_20} --start published"
# Three times the steps of stage `recall`. Rate and warm-up: experiments/rates.py
LONGER = f"{MIMETIC} --recall-steps 3600"
# The commit of results that are shown as they were. There CLAM had another start, made from
# statistics of the features: it told places apart and picked out what changes.
EARLIER = "c6753dc"


class Training(NamedTuple):
    """Options of train.py, and what a narrator does not take from the base."""
    method: str                                # options that are the same on real data
    course: str = WARM_UP_20                   # options of the toy
    own_look: bool = False                     # learns a stage `look` of its own
    own_llm: bool = False                      # and a language model
    init: str | None = None                    # starts from this narrator, of the same seed
    commit: str = ""                           # was made at this commit; today's code makes another


def earlier(method: str, course: str = WARM_UP_20, **others) -> Training:
    """A training of the commit EARLIER."""
    return Training(method, course, commit=EARLIER, **others)


ALL = "--last-k all"
ONLINE = "--memory none --no-prune"
MOD = "--memory none --no-prune --mod-keep 0.2"
RECENT = f"--memory recent {ALL}"
RETNET = f"--memory retnet {ALL}"
LARGE_BANK = "--memory-tokens 16"              # a state as large as CLAM's
SECOND = "--idle 0.5 --world second --limit 40 --epochs 20 --warmup 0.2"
ONE_LOSS = "--no-recall"
ONE_LOSS_8 = f"--idle 0.5 --epochs 8 --warmup 0.05 {ONE_LOSS}"
ONE_LOSS_16 = f"--idle 0.5 --epochs 16 --warmup 0.05 {ONE_LOSS}"
HARD = f"{WARM_UP_5} --world hard"
LARGE = f"{WARM_UP_5} --llm-width 256"

TRAININGS = {
    "flownar": earlier(ALL),
    "online": Training(ONLINE),
    "mod": Training(MOD),
    # Tables 3 and 9: visual history
    "none": Training(f"--memory none {ALL}"),
    "recent": Training(RECENT),
    # Table 5: memories, all trained alike
    "recent-longer": Training(f"{RECENT} {LARGE_BANK}", LONGER),
    "kmeans-longer": Training(f"--memory kmeans {ALL} {LARGE_BANK}", LONGER),
    "moviechat-longer": Training(f"--memory moviechat {ALL} {LARGE_BANK}", LONGER),
    "tokenmlp-longer": Training(f"--memory tokenmlp {ALL} {LARGE_BANK}", LONGER),
    "retnet-longer": Training(RETNET, LONGER),
    "mimetic-longer": Training(ALL, LONGER),
    "mimetic-c-longer": Training("--last-k 10", LONGER),
    "mimetic-lora-frozen": Training(ALL, f"{LONGER} --freeze-lora"),
    "mimetic-frozen": Training(ALL, f"{LONGER} --freeze-memory"),
    # First weights: what is given, and what is learned
    "clam-published": Training(ALL, PUBLISHED),
    "retnet-published": Training(RETNET, PUBLISHED),
    "mimetic": Training(ALL, MIMETIC),
    # The paper's loss alone: no stage `recall`, which a narrator without a memory cannot learn
    "online-one-loss": Training(ONLINE, f"{WARM_UP_20} {ONE_LOSS}"),
    "one-loss": earlier(ALL, f"{WARM_UP_5} {ONE_LOSS}"),
    "one-loss-8": earlier(ALL, ONE_LOSS_8),
    "one-loss-16": earlier(ALL, ONE_LOSS_16),
    "published": Training(ALL, f"{WARM_UP_5} {ONE_LOSS} --start published"),
    "published-8": Training(ALL, f"{ONE_LOSS_8} --start published"),
    # Table 13: past narrations
    "flownar-short": earlier(ALL, WARM_UP_5),
    "flownar-c-short": earlier("--last-k 10", WARM_UP_5),
    "none-0": Training("--memory none --last-k 0", WARM_UP_5),
    "clam-0": earlier("--last-k 0", WARM_UP_5),
    "clam-3": earlier("--last-k 3", WARM_UP_5),
    "clam-7": earlier("--last-k 7", WARM_UP_5),
    # Table 14: memory tokens
    "tokens-5": earlier(ALL, f"{WARM_UP_5} --memory-tokens 5"),
    "tokens-15": earlier(ALL, f"{WARM_UP_5} --memory-tokens 15"),
    "tokens-25": earlier(ALL, f"{WARM_UP_5} --memory-tokens 25"),
    # Tables 4, 11 and 12: the trigger
    "hard": earlier(ALL, HARD),
    "hard-online": Training(ONLINE, HARD),
    # Table 10: pretraining
    "second": earlier(ALL, SECOND, own_look=True),
    "second-tuned": earlier(ALL, SECOND, init="flownar"),
    # Table 15: CLAM on narrations
    "narrations": earlier("--narration-memory 20", WARM_UP_5),
    # Table 16: a larger language model
    "large": earlier(ALL, LARGE, own_look=True, own_llm=True),
    "large-slow": earlier(ALL, f"{LARGE} --lr 3.5e-4", own_look=True, own_llm=True),
    # Table 2: one token a frame
    "cls": Training(ONLINE, f"{WARM_UP_20} --grid 0", own_look=True),
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
    "knowledge": "-m experiments.knowledge",
    "interference": "-m experiments.interference",
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


class Claim(NamedTuple):
    """Two rows whose difference in a column, first - second, is shown with its interval."""
    first: str                                 # labels of rows
    second: str
    column: str                                # header of a column, of a measure in runs.EACH


class Table(NamedTuple):
    title: str
    data: str                                  # the data set of the paper's numbers
    paper: str                                 # headers of the paper's numbers
    columns: list[Column]
    rows: list[Row]
    seeds: int = 1
    claims: list[Claim] = []


SELF_CONDITIONED = {"Prec.": "precision", "Rec.": "recall", "F1": "f1", "C": "cider", "M": "meteor",
                    "R": "rouge_l", "exact": "exact", "memory words": "memory_words"}
TEACHER_FORCED = {"PPL": "ppl", "TimeDiff": "time_diff", "Fluency": "fluency",
                  "LM-Corr.": "lm_correctness"}


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
        for header, measure in measures.items():
            columns.append(Column(header, entry, group + measure))
    return columns


def read_tables() -> dict[str, Table]:
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    tables = {}
    for name, fields in content.items():
        fields["columns"] = columns_of(fields["columns"])
        fields["rows"] = [Row(**row) for row in fields["rows"]]
        fields["claims"] = [Claim(*claim) for claim in fields.get("claims", [])]
        tables[name] = Table(**fields)
    return tables


TABLES = read_tables()
