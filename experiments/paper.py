"""What the paper's tables compare: what is trained, what is evaluated, and the paper's numbers (§4, App. C).

TRAININGS       name -> the options of train.py that make the narrator
EVALUATIONS     name -> the command that measures a narrator
TABLES          name -> rows: a label, a training, options of the evaluations, the paper's numbers
RECIPE          the number of the code's recipe, of which today's results are
base2/          before a training: with another base (`on_base2`)

`tables.py` shows them, `runs.py` carries them out. Table 8 is `data.py stats`. Not in the miniature: copied rows of
other works (all but FlowNar in Table 17), EgoExo4D and EPIC-Kitchens, which have rows of the same kind. `--data` prints
the commands for the real data sets. Where the toy's sizes are not the paper's, a row's name says so.
"""
from typing import NamedTuple

# ------------------------------------------------------------------------------------------- what is trained

# What the toy's code makes of a command, as a number that each result carries. Raise it by one, and say here what is
# new, whenever the same commands would train another narrator, or would measure the same one differently, by more than
# rounding: toy/stages.py (what a stage learns, its steps), train.py, narrator.py, clam.py, baselines/,
# evaluate.py. Code that is only arranged anew is the same recipe; of another world, runs.py has a fingerprint.
RECIPES = {
    1: "stages look and recall list what is shown in random order (before commit 96122e3)",
    2: "they list it in the order of the places",
}
RECIPE = max(RECIPES)

IDLE = "--idle 0.5 --epochs 2"                          # half of the videos have idle time
LONGER = "--idle 0.5 --epochs 4"                        # as the bundled narrator was trained


class Training(NamedTuple):
    """Options of train.py: the method's, further ones for the toy and for real data; whose weights it starts from.

    In the toy, also the trainings whose frozen language model and vision encoder it has, and those whose stage `look`
    it starts from: seed 0's for all seeds. So all rows of a table see equally well. On real data, it may be the same
    as another training, or need features of its own.
    """
    method: str = ""
    toy: str = IDLE
    real: str = ""
    llm: str | None = "flownar-c"
    vision: str | None = "flownar-c"
    look: str | None = "flownar-c"
    init: str | None = None
    scratch: bool = False                               # also on real data, where others start from Ego4D's narrator
    same: str | None = None
    features: str | None = None


SECOND = "--idle 0.5 --world second --limit 40 --epochs 20"
ALL, ONLINE, MOD = "--last-k all", "--memory none --no-prune", "--memory none --no-prune --mod-keep 0.2"
LION = "--memory none --no-prune --mod-keep 0.5"
LARGE = "--llm meta-llama/Meta-Llama-3-8B-Instruct"
TRAININGS = {
    "flownar-c": Training("--last-k 10"),                       # with seed 0, trains encoder and language model
    "flownar": Training(ALL),
    "online": Training(ONLINE),
    "mod": Training(MOD),
    "lion": Training(LION, IDLE + " --width-second 128", "--width-second 768", look="lion"),
    "none": Training(f"--memory none {ALL}"),
    "recent": Training(f"--memory recent {ALL}"),
    "kmeans": Training(f"--memory kmeans {ALL}"),
    "moviechat": Training(f"--memory moviechat {ALL}"),
    "tokenmlp": Training(f"--memory tokenmlp {ALL}"),
    "retnet": Training(f"--memory retnet {ALL}"),
    "retnet-4": Training(f"--memory retnet {ALL}", LONGER),
    "flownar-4": Training(ALL, LONGER, same="flownar"),
    "scalar": Training(f"--memory scalar {ALL}"),
    "paper-loss": Training(ALL, IDLE + " --no-remember", same="flownar"),       # CLAM without the stage `remember`
    "none-0": Training("--memory none --last-k 0"),
    "clam-0": Training("--last-k 0"),
    "clam-3": Training("--last-k 3"),
    "clam-7": Training("--last-k 7"),
    "tokens-5": Training(ALL, IDLE + " --memory-tokens 5", "--memory-tokens 10"),
    "tokens-15": Training(ALL, IDLE + " --memory-tokens 15", "--memory-tokens 30"),
    "tokens-25": Training(ALL, IDLE + " --memory-tokens 25", "--memory-tokens 50"),
    "hard": Training(ALL, IDLE + " --world hard", same="flownar"),
    "hard-online": Training(ONLINE, IDLE + " --world hard", same="online"),
    "second": Training(ALL, SECOND, look="second", scratch=True, same="flownar"),
    "second-tuned": Training(ALL, SECOND, llm=None, vision=None, look=None, init="flownar", same="flownar"),
    "narrations": Training("--narration-memory 20"),
    "large": Training(ALL, IDLE + " --llm-width 256", LARGE, llm="large", look="large", same="flownar"),
    "cls": Training(ONLINE, IDLE + " --grid 0", "--root data/cls", look="cls",
                    features="data.py encode VIDEO... --grid 0 --output data/cls/features"),
}

# ------------------------------------------------------------------------------------------- what is evaluated

EVALUATIONS = {                                         # {videos}, {long}: folders; {keep}: for what can be resumed
    "stream": "evaluate.py stream --data toy --limit 60 --batch 8 --output {keep}",
    "idle": "evaluate.py stream --data toy --limit 60 --batch 8 --output {keep} --world idle",
    "long": "evaluate.py stream --data toy --batch 4 --output {keep} --by-duration --root {videos}",
    "hard": "evaluate.py stream --data toy --limit 60 --batch 8 --output {keep} --world hard",
    "second": "evaluate.py stream --data toy --limit 60 --batch 8 --output {keep} --world second",
    "teacher": "evaluate.py teacher --data toy --limit 60",
    "long-teacher": "evaluate.py teacher --data toy --max-frames 2000 --by-duration --root {videos}",
    "second-teacher": "evaluate.py teacher --data toy --limit 60 --world second",
    "cost": "-m experiments.efficiency --frames 480 --streams 1",
    "summary": "-m experiments.summary --llm none --pred {long} --gt {videos}",
    "objects": "-m experiments.objects --llm none --pred {long} --gt {videos}",
}
STREAM = "evaluate.py stream --data {data} --model {out} --output {keep}"
TEACHER = "evaluate.py teacher --data {data} --model {out}"
NARRATIONS = "--pred {keep}/predictions --data {data} --llm meta-llama/Meta-Llama-3-8B-Instruct"
REAL_EVALUATIONS = {                                    # what they are on real data; the others are the toy's alone
    "stream": STREAM, "long": f"{STREAM} --by-duration", "hard": STREAM, "second": STREAM,
    "teacher": TEACHER, "long-teacher": f"{TEACHER} --by-duration", "second-teacher": TEACHER,
    "cost": "-m experiments.efficiency --model {out} --streams 1",
    "summary": f"-m experiments.summary {NARRATIONS}", "objects": f"-m experiments.objects {NARRATIONS}",
}
VIDEOS = [f"data.py toy --seed {5_100_000 + 1000 * i} --count {count} --minutes {minutes} --output {{videos}}"
          for i, (minutes, count) in enumerate(((1, 6), (3, 4), (6, 3), (11, 2)))]

# ------------------------------------------------------------------------------------------- what is shown


class Column(NamedTuple):
    """A measure of an evaluation, as `--json` of its command calls it; {} is the row's part of the name."""
    header: str
    evaluation: str
    measure: str
    toy: bool = False                                   # of the toy alone


class Row(NamedTuple):
    """`training` may begin with the name of a base, as in base2/flownar; `options` go to the evaluations of the table's
    columns; `part` is what a measure's {} stands for; `more` has the paper's numbers for further data sets."""
    label: str
    training: str
    paper: str
    options: str = ""
    part: str = ""
    more: dict[str, str] = {}


class Table(NamedTuple):
    title: str
    data: str                                           # the data set of the paper's numbers
    paper: str                                          # headers of the paper's numbers
    columns: list[Column]
    rows: list[Row]
    seeds: int = 1
    real: str = ""                                      # options of train.py on real data, for all rows


def on_base2(*rows: Row) -> list[Row]:
    """These rows, with narrators of a base of their own: another training of the same encoder, language model and stage
    `look`. Numbers can be compared only where the base is the same."""
    return [row._replace(training=f"base2/{row.training}") for row in rows]


def streamed(evaluation: str = "stream", before: str = "") -> list[Column]:
    """Columns of the self-conditioned protocol."""
    names = {"Prec.": "precision", "Rec.": "recall", "F1": "f1", "C": "cider", "M": "meteor", "R": "rouge_l"}
    return [Column(header, evaluation, before + measure) for header, measure in names.items()] + [
        Column("exact", evaluation, before + "exact", toy=True),
        Column("memory words", evaluation, before + "memory_words", toy=True)]


def teacher(evaluation: str = "teacher", before: str = "") -> list[Column]:
    """Columns of the teacher-forced protocol."""
    names = {"PPL": "ppl", "TimeDiff": "time_diff", "Fluency": "fluency", "LM-Corr.": "lm_correctness"}
    return [Column(header, evaluation, before + measure) for header, measure in names.items()]


MEMORY = [Column("memory words", "stream", "memory_words", toy=True), Column("idle", "idle", "memory_words", toy=True),
          Column("11 minutes", "long", "by_duration/>= 8 min/memory_words", toy=True)]
COST = [Column("GMACs", "cost", "gmacs"), Column("cache, MB", "cost", "cache_mb")]
SC, TF = "Prec. Rec. F1 C M R", "PPL TimeDiff Fluency LM-Corr."
LENGTHS = ("<= 2 min", "2 - 4 min", "4 - 8 min", ">= 8 min")

TABLES = {
    "T1": Table("Self-conditioned streaming narration", "ego4d", "MACs Cache " + SC, COST + streamed(), [
        Row("VideoLLM-online", "online", "18.06T 737.6M 47.59 11.23 16.29 28.04 11.33 29.86",
            more={"egoexo4d": "22.45T 878.5M 50.96 26.36 31.77 69.88 23.53 50.19",
                  "ek100": "29.82T 1096.0M 51.07 8.74 12.98 29.00 14.23 45.26"}),
        Row("VideoLLM-MoD", "mod", "9.64T 482.6M 45.74 10.80 14.75 27.01 10.78 28.78",
            more={"egoexo4d": "13.21T 567.0M 50.83 24.66 28.05 61.90 22.67 48.28",
                  "ek100": "15.99T 707.3M 48.36 8.87 13.06 33.93 13.83 46.23"}),
        Row("FlowNar-C", "flownar-c", "16.50T 20.2M 51.03 12.17 17.90 34.48 11.95 31.44",
            more={"egoexo4d": "20.39T 21.2M 52.48 26.69 32.82 71.64 24.31 50.72",
                  "ek100": "24.09T 22.7M 52.71 19.21 25.20 37.28 14.39 45.41"}),
        Row("FlowNar", "flownar", "16.70T 59.2M 53.55 18.21 24.85 35.64 12.14 31.64",
            more={"egoexo4d": "21.12T 125.9M 51.40 27.28 32.99 75.33 24.46 51.29",
                  "ek100": "24.42T 65.3M 49.12 23.12 29.12 46.63 14.93 46.25"})], 2),
    "T2": Table("Teacher-forced narration", "ego4d", TF, teacher(), on_base2(
        Row("VideoLLM-online, 1 token", "cls", "2.430 2.320 42.6% -"),
        Row("VideoLLM-online", "online", "2.400 2.050 45.3% 49.0%"),
        Row("VideoLLM-MoD", "mod", "2.410 2.040 45.2% 48.9%"),
        Row("LION-FS", "lion", "2.090 2.150 46.1% 52.4%"),
        Row("FlowNar-C", "flownar-c", "2.006 2.219 46.1% 53.5%"),
        Row("FlowNar", "flownar", "1.995 2.195 46.4% 53.9%")), real=LARGE),
    "T3": Table("Visual history, self-conditioned", "ego4d", "C M R", streamed() + MEMORY[2:], [
        Row("none", "none", "30.40 11.36 30.54"), Row("recent", "recent", "30.16 11.42 30.59"),
        Row("all, no DCM", "online", "28.04 11.33 29.86"), Row("CLAM", "flownar", "35.64 12.14 31.64")], 2),
    "T4": Table("Trigger (toy: ends that are hard to see)", "ego4d", SC, streamed("hard"), on_base2(
        Row("static, VideoLLM-online", "hard-online", "37.11 10.46 12.68 24.26 11.34 28.90", "--static --theta 0.7"),
        Row("static, FlowNar", "hard", "35.84 15.68 16.78 30.28 11.69 30.38", "--static --theta 0.7"),
        Row("dynamic, VideoLLM-online", "hard-online", "47.59 11.23 16.29 28.04 11.33 29.86"),
        Row("dynamic, FlowNar", "hard", "53.55 18.21 24.85 35.64 12.14 31.64"))),
    "T5": Table("Memory design", "ego4d", TF, MEMORY + teacher(), [
        Row("recent", "recent", "2.115 2.257 45.0% 51.7%"), Row("K-Means", "kmeans", "2.114 2.248 45.0% 51.7%"),
        Row("MovieChat", "moviechat", "2.105 2.265 45.1% 51.9%"),
        Row("TokenMLP", "tokenmlp", "2.127 2.274 44.6% 51.3%"),
        Row("Refac. RetNet", "retnet", "2.092 2.239 45.3% 52.1%"), Row("one gate per head", "scalar", ""),
        Row("CLAM without `remember`", "paper-loss", ""), Row("CLAM", "flownar", "2.086 2.237 45.4% 52.2%"),
        Row("Refac. RetNet, 4 epochs", "retnet-4", ""), Row("CLAM, 4 epochs", "flownar-4", "")], 2),
    "T6": Table("Duration, teacher-forced", "ek100", TF, teacher("long-teacher", "by_duration/{}/"), [
        Row(part, "flownar", numbers, "", part) for part, numbers in zip(LENGTHS, (
            "2.254 1.749 39.0% 52.6%", "2.337 3.057 43.1% 50.1%", "2.188 3.181 42.0% 52.7%",
            "2.279 3.326 42.0% 52.4%"))]),
    "T7": Table("Duration, self-conditioned", "ek100", SC, streamed("long", "by_duration/{}/"), [
        Row(part, "flownar", numbers, "", part) for part, numbers in zip(LENGTHS, (
            "57.05 32.58 40.21 77.47 17.07 49.21", "48.51 23.14 29.01 54.99 15.98 46.89",
            "44.07 17.80 23.15 59.60 15.96 47.05", "41.41 12.79 16.93 37.94 14.13 45.46"))]),
    "T9": Table("Visual history, teacher-forced", "ego4d", "MACs Cache PPL TimeDiff", COST + teacher()[:2], [
        Row("none", "none", "14.02T 57.5M 2.122 2.248"), Row("recent", "recent", "15.68T 58.8M 2.115 2.257"),
        Row("all, no DCM", "online", "18.06T 737.6M 2.118 2.245"), Row("CLAM", "flownar", "16.70T 59.2M 2.086 2.237")]),
    "T10": Table("Pretraining (toy: a second kitchen)", "ek100", TF, teacher("second-teacher") + [
        Column("F1", "second", "f1", toy=True), Column("exact", "second", "exact", toy=True)], on_base2(
        Row("from scratch", "second", "2.935 2.716 40.1% 43.2%", more={"egoexo4d": "2.005 1.095 33.0% 39.1%"}),
        Row("pretrained", "second-tuned", "2.266 2.679 41.2% 51.9%", more={"egoexo4d": "1.778 1.022 38.7% 46.4%"}),
        Row("zero-shot", "flownar", ""))),
    "T11": Table("Trigger (toy: as Table 4)", "ek100", SC, streamed("hard"), on_base2(
        Row("static, VideoLLM-online", "hard-online", "48.79 7.94 10.52 28.54 14.21 45.77", "--static --theta 0.7"),
        Row("static, FlowNar", "hard", "38.39 19.39 18.04 37.33 14.66 45.26", "--static --theta 0.7"),
        Row("dynamic, VideoLLM-online", "hard-online", "51.07 8.74 12.98 29.00 14.23 45.26"),
        Row("dynamic, FlowNar", "hard", "49.12 23.12 29.12 46.63 14.93 46.25"))),
    "T12": Table("Thresholds (toy: ends that are hard to see)", "ek100", SC, streamed("hard"), on_base2(
        Row("static 0.8", "hard", "5.24 20.16 7.38 33.00 14.59 44.50", "--static --theta 0.8"),
        Row("static 0.7", "hard", "38.39 19.39 18.04 37.33 14.66 45.26", "--static --theta 0.7"),
        Row("static 0.6", "hard", "49.34 8.00 11.38 34.50 14.15 45.84", "--static --theta 0.6"),
        Row("static 0.4", "hard", "47.65 5.10 8.03 36.02 14.04 46.09", "--static --theta 0.4"),
        Row("dynamic 0.8", "hard", "49.12 23.12 29.12 46.63 14.93 46.25"),
        Row("dynamic 0.7", "hard", "50.42 8.30 12.32 37.58 14.19 45.91", "--theta 0.7"))),
    "T13": Table("Narration history", "ego4d", "MACs Cache PPL TimeDiff", COST + teacher()[:2] + MEMORY[:1], [
        Row("no frames, no narrations", "none-0", "12.55T 11.4M 2.182 2.289"),
        Row("CLAM, no narrations", "clam-0", "16.42T 13.0M 2.168 2.278"),
        Row("CLAM, last 3", "clam-3", "16.44T 15.2M 2.150 2.271"),
        Row("CLAM, last 7", "clam-7", "16.47T 18.1M 2.136 2.264"),
        Row("CLAM, last 10", "flownar-c", "16.50T 20.2M 2.111 2.245"), Row("CLAM, all", "flownar", "")]),
    "T14": Table("Memory tokens", "ego4d", "MACs Cache PPL Fluency",
                 COST + [teacher()[0], teacher()[2]] + MEMORY, on_base2(
        Row("10 (toy: 5)", "tokens-5", "15.88T 58.5M 2.094 45.2%"),
        Row("20 (toy: 10)", "flownar", "16.70T 59.2M 2.086 45.4%"),
        Row("30 (toy: 15)", "tokens-15", "17.52T 59.9M 2.099 45.2%"),
        Row("50 (toy: 25)", "tokens-25", "19.15T 61.3M 2.098 45.3%"))),
    "T15": Table("CLAM on narrations", "ego4d", TF, teacher() + MEMORY[:1], on_base2(
        Row("CLAM", "narrations", "2.174 2.275 44.0% 50.2%"), Row("last 10", "flownar-c", "2.111 2.245 45.0% 51.7%"))),
    "T16": Table("Size of the language model", "ego4d", TF, teacher() + MEMORY[:1], on_base2(
        Row("1B (toy: 0.9 M)", "flownar", "2.086 2.237 45.4% 52.2%", more={"ek100": "2.266 2.679 41.2% 51.9%"}),
        Row("8B (toy: 3.6 M)", "large", "1.995 2.195 46.4% 53.9%", more={"ek100": "2.105 2.635 41.5% 53.8%"}))),
    "T17": Table("Video summary (toy: condensed by rule)", "ego4d", "C M R", [
        Column("C", "summary", "cider"), Column("M", "summary", "meteor"), Column("R", "summary", "rouge_l")], on_base2(
        Row("FlowNar", "flownar", "11.20 17.94 32.63"), Row("VideoLLM-online", "online", ""))),
    "objects": Table("Objects that are right (App. C.1)", "egoexo4d", "accuracy",
                     [Column("accuracy", "objects", "object_accuracy")], on_base2(
        Row("VideoLLM-online", "online", "33.8%"), Row("VideoLLM-MoD", "mod", "25.8%"),
        Row("FlowNar", "flownar", "36.6%"))),
}
