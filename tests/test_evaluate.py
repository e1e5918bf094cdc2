"""Evaluation (§4.1, App. B.5): alignment by hand, and the commands."""
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import numpy as np
import pytest
import torch

import evaluate
import narrator as nar
from beyond.commands import evaluate_command
from helpers import save_features, tiny
from support.common.disk import read_jsonl
from support.common.java import java_problem
from support.common.options import Parser, model_options, settings_given, trigger_options
from support.files.sentences import NarratedVideo as Truth, Sentence
from toy import world
from toy.words import ToySentence
from test_data import write_toy
from test_train import epic


pytestmark = pytest.mark.usefixtures("no_java")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where an evaluation of a data set keeps its predictions."""
    monkeypatch.setattr(evaluate_command, "KEPT", tmp_path / "kept")
    return tmp_path / "kept"


def command(*args, ok=True, main=evaluate_command.main):
    """Run a command here -> its output, parsed with --json. With ok=False: its line of error."""
    out = io.StringIO()
    err = io.StringIO()
    with (mock.patch("sys.argv", ["command", *map(str, args)]),
          redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end):
        main()
    assert (end.value.code == 0) == ok, err.getvalue()
    if not ok:
        errors = [line for line in err.getvalue().splitlines()
                  if line.startswith("error") or "Traceback" in line]
        assert end.value.code == 1 and len(errors) == 1, err.getvalue()
        assert errors[0].startswith("error: "), err.getvalue()
        return errors[0]
    if "--json" in args:
        return json.loads(out.getvalue().splitlines()[-1])
    return out.getvalue()


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def test_segments_are_chained_and_turned():
    assert evaluate.segments([2, 5, 4], start=1.0).tolist() == [[1, 2], [2, 5], [4, 5]]
    assert evaluate.segments([]).shape == (0, 2)


@pytest.mark.parametrize("predicted", [
    [], [Sentence(2, "a")], [Sentence(2, "a"), Sentence(2, "b")], [Sentence(99, "late")],
    [Sentence(5, "a"), Sentence(1, "b")], [Sentence(2, "")]])
@pytest.mark.parametrize("true", [
    [Sentence(2, "a")], [Sentence(2, ""), Sentence(2, "b")], [Sentence(3, "a b c"), Sentence(1, "d")]])
def test_edges_give_finite_numbers(true, predicted):
    result, _ = evaluate_command.measures_of({"v": Truth([true])}, {"v": predicted})
    assert all(np.isfinite(value) for value in result.values() if value is not None)
    assert 0 <= result["f1"] <= 1 and result["narrations"] == len(true)
    if not predicted and all(sentence.text for sentence in true):
        assert result["f1"] == result["cider"] == result["rouge_l"] == 0


def test_the_toys_own_measures_by_hand():
    """In v, one memory word of two is right, and the third sentence is wrong without memory. In w
    there is only the first, and its file has no memory words.
    """
    true = [ToySentence(0.5, "You look."),
            ToySentence(2, "You tap the fridge hiding the red cup.", ("red", "cup")),
            ToySentence(4, "You wash the pan.")]
    predicted = [Sentence(0.5, "You look."),
                 Sentence(2, "You tap the fridge hiding the red pan."),
                 Sentence(4, "You wash the cup.")]
    truths = {"v": Truth([true]), "w": Truth([[Sentence(0.5, "You look.")]])}
    result, each = evaluate_command.measures_of(truths, {"v": predicted, "w": predicted[:1]})
    assert (result["f1"], result["exact"], result["memory_words"]) == (1, 0.5, 0.5)
    assert result["exact_without_memory"] == pytest.approx(2 / 3)
    assert each["v"]["exact"] == pytest.approx(1 / 3)
    assert (each["w"]["exact"], each["w"]["memory_words"]) == (1, None)


def test_a_video_without_truth_is_left_out():
    truths = {"a": Truth([[Sentence(2, "x")]]), "b": Truth([[]]), "c": Truth([[Sentence(2, "x")]])}
    predictions = {"a": [Sentence(2, "x")], "b": [Sentence(1, "y")], "c": []}
    result, each = evaluate_command.measures_of(truths, predictions)
    assert (set(each), result["videos"]) == ({"a", "c"}, 2)
    assert (result["without_truth"], result["predicted"]) == (1, 1)
    assert result["precision"] == result["recall"] == result["f1"] == 0.5
    with pytest.raises(evaluate.BadData, match="no video has a true narration"):
        evaluate.evaluate({"b": Truth([[], []])}, {"b": []})


def test_pace_by_hand():
    """Narrations a minute and seconds a segment, predicted and true. Of files, a video lasts until
    the last true narration (6 s); of streams, what was streamed (30 s).
    """
    annotator = [Sentence(4, "x"), Sentence(7, "y")]
    predicted = [Sentence(n, "x") for n in (2, 3, 4)]

    def pace(truth, predicted):
        measures, _ = evaluate.measure_video(truth, predicted)
        return list(measures.values())[3:]                  # after precision, recall and F1

    # an annotator without a narration does not count
    assert pace(Truth([annotator, []], 1.0), predicted) == [30, 1, 20, 3]
    assert pace(Truth([annotator, annotator], 1.0), []) == [0, None, 20, 3]
    assert pace(Truth([annotator, []], 1.0, 30.0), predicted) == [6, 1, 4, 3]
    assert pace(Truth([[Sentence(1, "x")]], 1.0), predicted) == [None, 1, None, 0]     # no length

    truths = {"a": Truth([annotator], 1.0), "b": Truth([[Sentence(6, "x")]])}
    result, each = evaluate_command.measures_of(truths, {"a": predicted, "b": []})
    assert (each["a"]["segment_s"], each["b"]["segment_s"]) == (1, None)
    assert (result["segment_s"], result["true_segment_s"]) == (1, (3 + 6) / 2)


def test_groups_of_length():
    minutes = {"a": 1.9, "b": 2, "c": 2.1, "d": 4, "e": 7.9, "f": 8, "g": 60}
    assert evaluate.by_duration(minutes) == [
        ("<= 2 min", ["a", "b"]), ("2 - 4 min", ["c", "d"]), ("4 - 8 min", ["e"]),
        (">= 8 min", ["f", "g"])]


TRUE = {"a": [{"time": 2.0, "text": "You open the fridge."}, {"time": 5, "text": "You wash the cup."}]}


def folder_of(path, files):
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


ROW = {"n": 0, "frame": 3, "start": 0.0, "end": 2.0, "text": "You open the fridge.", "tokens": [1]}
CUE = "1\n00:00:00,000 --> 00:00:02,000\nYou open the fridge.\n\n"


@pytest.mark.parametrize("pred, gt, narrations", [
    ({"p.json": TRUE}, {"g.json": TRUE}, 2),
    ({"p.json": TRUE}, {"g.json": {"a": [TRUE["a"]]}}, 2),
    # several annotators
    ({"p.json": TRUE}, {"g.json": {"a": [TRUE["a"], TRUE["a"][:1]]}}, 3),
    # what stream.py writes, and the toy's ground truth
    ({"a.jsonl": json.dumps(ROW)},
     {"a.json": {"fps": 2, "duration": 4.0, "narrations": [TRUE["a"][0] | {"memory": []}]}}, 1),
    # a file for each video, with an object around the narrations
    ({"a.json": {"narrations": TRUE["a"]}, "b.srt": CUE},
     {"a.json": {"narrations": TRUE["a"]}, "b.json": {"narrations": TRUE["a"][:1]}}, 3),
    # a folder on both sides, with what macOS and stream.py put beside
    ({"a.jsonl": json.dumps(ROW), "a.trace.jsonl": "{}", "._a.json": "\x00\x05\x16\x07Mac OS X",
      "b.vtt": "WEBVTT\n\n00:00.000 --> 00:02.000\nYou open the fridge.\n"},
     {"a.srt": CUE, "b.srt": CUE}, 2),
    # of one video each, whatever their names
    ({"p.json": {"mine": TRUE["a"]}}, {"g.json": TRUE}, 2),
    # a video without a true narration is left out
    ({"p.json": TRUE | {"b": []}}, {"g.json": TRUE | {"b": [[], []]}}, 2),
])
def test_score_reads_every_form(tmp_path, pred, gt, narrations):
    result = command("score", "--pred", folder_of(tmp_path / "pred", pred),
                     "--gt", folder_of(tmp_path / "gt", gt), "--json")
    assert (result["f1"], result["narrations"]) == (1, narrations)
    assert result["rouge_l"] == pytest.approx(1)


def test_rows_without_the_numbers_of_a_stream_are_refused(tmp_path):
    rows = write(tmp_path / "p.jsonl", TRUE["a"][0] | {"video": "a"})
    assert "with its number n" in command("score", "--pred", rows, "--gt", rows, ok=False)
    said = [{"n": n, "end": n + 1, "text": "x", "wall": f"2026-05-01T12:00:0{n}"} for n in range(2)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in said))        # a camera's
    assert command("score", "--pred", rows, "--gt", rows, "--json")["f1"] == 1


def test_score_refuses_a_video_in_two_files(tmp_path):
    once = folder_of(tmp_path / "once", {"x.json": TRUE})
    twice = folder_of(tmp_path / "twice", {"x.json": TRUE, "y.json": TRUE})
    for pred, gt in ((once, twice), (twice, once)):
        error = command("score", "--pred", pred, "--gt", gt, ok=False)
        assert "y.json, video a: the video has narrations in another file, too" in error


@pytest.mark.parametrize("predicted, true, message", [
    ([1], TRUE, "narration 0: expected {"),
    ({"b": [], "c": []}, TRUE, "videos are in one of"),
    ({}, {}, "nothing to score"),
    ({"a": []}, {"a": {"start": 0}}, "list of narrations"),
    ({"a": []}, {"a": []}, "no video has"),
    ([TRUE["a"][0] | {"of": 1}, TRUE["a"][1] | {"of": 2}], TRUE, "'of' differs from row to row"),
    ({"a": [TRUE["a"][0] | {"by": 1}, TRUE["a"][1] | {"by": 2}]}, TRUE, "'by' differs from row to row"),
    (TRUE, {"a": [[TRUE["a"][0] | {"by": 1}, TRUE["a"][1] | {"by": 2}]]}, "'by' differs from row to row"),
    ([{"start": 3, "end": 1, "text": "x"}], TRUE, "it starts at 3 and ends at 1"),
])
def test_bad_files_get_one_line(tmp_path, predicted, true, message):
    pred = write(tmp_path / "p.json", predicted)
    gt = write(tmp_path / "g.json", true)
    assert message in command("score", "--pred", pred, "--gt", gt, ok=False)


def test_times_of_another_unit_or_origin_are_told(capsys):
    """In milliseconds, as the time of day, backwards; not 3 s late."""
    true = [Sentence(row["time"], row["text"]) for row in TRUE["a"]]
    for scale, origin, is_told in ((1000, 0, True), (1, 3600, True), (-1, 0, True), (1, 3, False)):
        moved = [Sentence(scale * sentence.time + origin, sentence.text) for sentence in true]
        evaluate_command.tell_of_other_times({"a": Truth([true])}, {"a": moved})
        assert ("1 of 1 videos have no prediction within" in capsys.readouterr().err) == is_told


def test_partial(tmp_path):
    pred = write(tmp_path / "p.json", TRUE)
    gt = write(tmp_path / "g.json", TRUE | {"b": TRUE["a"]})
    assert "--partial" in command("score", "--pred", pred, "--gt", gt, ok=False)
    scored = command("score", "--pred", pred, "--gt", gt, "--partial", "--json")
    assert (scored["videos"], scored["meteor"]) == (1, None)


def test_files_that_say_memory_are_no_toy_videos(tmp_path):
    of_videos = write(tmp_path / "all.json", {"a": [{"time": 1, "text": "x", "memory": ["x"]}]})
    cues = tmp_path / "a.srt"
    cues.write_text('1\n00:00:01,000 --> 00:00:02,000\nYou say "memory".\n')
    for truth in (of_videos, cues):
        assert command("score", "--pred", truth, "--gt", truth, "--json")["exact"] == 1


def test_stream_is_resumable(tmp_path):
    for name in "ab":
        write_toy(tmp_path / f"{name}.mp4")
    two_videos = ("stream", "--data", "toy", "--root", tmp_path, "--json")
    first = command(*two_videos, "--by-duration", "--show", 1)      # with JSON at the end
    assert first["videos"] == 2 and 0 <= first["f1"] <= 1
    assert first["by_duration"]["<= 2 min"]["videos"] == 2
    out = tmp_path / "out"
    assert command(*two_videos, "--output", out)["cider"] == first["cider"]

    finished, unfinished = sorted((out / "predictions").iterdir())
    time = finished.stat().st_mtime_ns
    texts = [row["text"] for row in read_jsonl(unfinished)]
    unfinished.unlink()                        # as if killed before the second video
    assert command(*two_videos, "--output", out)["cider"] == first["cider"]
    assert finished.stat().st_mtime_ns == time
    assert [row["text"] for row in read_jsonl(unfinished)] == texts


def test_the_bundled_narrator_is_as_good_as_the_readme_says():
    """Alignment in time, and the words that only visual memory can give, on three test videos."""
    result = command("stream", "--data", "toy", "--limit", 3, "--device", "cpu", "--json")
    assert result["videos"] == 3 and result["narrations"] > 24
    for measure in ("f1", "memory_words", "exact"):
        assert result[measure] >= 0.95, measure


def test_annotated_data_sets(tmp_path):
    epic(tmp_path / "root")
    tiny(width=16, max_new_tokens=5).save(tmp_path / "model")
    arguments = ("--data", "ek100", "--root", tmp_path / "root", "--model", tmp_path / "model", "--json")
    result = command("stream", *arguments, "--output", tmp_path / "out")
    assert result["videos"] == 6 and result["narrations"] == 2 * 2 + 2 * 3 + 2 * 4
    paces = [2 / 3, 3 / 5.5, 4 / 7.5]          # narrations / seconds that were streamed
    expected = 60 * np.mean(paces)
    assert result["true_narrations_per_minute"] == pytest.approx(expected)
    first_row, *_ = read_jsonl(tmp_path / "out" / "predictions" / "val_0_0_6.jsonl")
    assert (first_row["start"], first_row["end"]) == (0.4, 0.9)
    teacher = command("teacher", *arguments)
    assert teacher["videos"] == 6 and teacher["ppl"] > 1
    assert command("teacher", *arguments, "--max-frames", 6)["ppl"] != teacher["ppl"]


def test_predictions_of_other_settings_weights_or_programs_are_not_taken(tmp_path, monkeypatch):
    root = tmp_path / "root"
    epic(root, videos=1)
    model = tiny(width=16, max_new_tokens=2)
    model.save(tmp_path / "model")

    def run(*options, ok=True):
        return command("stream", "--data", "ek100", "--root", root, "--model", tmp_path / "model",
                       "--limit", 1, "--output", tmp_path / "out", "--json", *options, ok=ok)

    assert run() == run()
    assert "float32, here torch.bfloat16" in run("--dtype", "bfloat16", ok=False)
    assert "static = False, here True" in run("--static", ok=False)
    assert "last_k = None, here 3" in run("--last-k", 3, ok=False)
    for p in model.trainable().values():
        torch.nn.init.zeros_(p)
    model.save(tmp_path / "model")
    assert "made with weights =" in run(ok=False)
    monkeypatch.setattr(evaluate_command, "digest_of_program", lambda: "another")
    assert "; the program, of hash =" in run(ok=False)


def test_last_k_all():
    """--last-k replaces the value of a FlowNar-C checkpoint; not given, it stays."""
    parser = Parser()
    model_options(parser, nar.Config)
    trigger_options(parser, nar.Config)
    for words, expected in (("", {}), ("--last-k 5", {"last_k": 5}), ("--last-k all", {"last_k": None}),
                            ("--static --theta 0.3", {"theta": 0.3, "theta_low": 0.3})):
        assert settings_given(parser.parse_args(words.split()), nar.Config) == expected


def test_videos_are_grouped_by_their_own_length(tmp_path):
    """Not by the narrated part of it (5 s here). 8 minutes belong to the last group."""
    epic(tmp_path)
    metadata = tmp_path / "features_metadata.json"
    metadata.write_text(metadata.read_text().replace('10.0, "path": "val_0', '480.0, "path": "val_0'))
    save_features(tmp_path, {"val_0": torch.zeros(961, 10, 16)})
    tiny(width=16, max_new_tokens=5).save(tmp_path / "model")
    for protocol in ("teacher", "stream"):
        result = command(protocol, "--data", "ek100", "--root", tmp_path, "--model",
                         tmp_path / "model", "--limit", 1, "--by-duration", "--json")
        assert list(result["by_duration"]) == [">= 8 min"]
    # where the long one has no true narration, there are no long ones
    said = {"val_0": [], "val_1": [{"time": 1, "text": "You look."}]}
    write(tmp_path / "segment_summaries.json",
          {name: {"0,5": {"a": {"narration": rows}}} for name, rows in said.items()})
    result = command("stream", "--data", "ego4d", "--root", tmp_path, "--model", tmp_path / "model",
                     "--by-duration", "--json")
    assert list(result["by_duration"]) == ["<= 2 min"] and result["without_truth"] == 1


def test_teacher_command():
    with mock.patch.object(nar.VisionEncoder, "forward", autospec=True,
                           side_effect=nar.VisionEncoder.forward) as encode:
        result = command("teacher", "--data", "toy", "--limit", 1, "--json", "--by-duration")
    pictures = sum(len(call.args[1]) for call in encode.call_args_list)
    assert pictures == len(next(world.kitchens("test", 1)))        # each is encoded once
    assert result["ppl"] >= 1 and 0 <= result["fluency"] <= 1 and result["by_duration"]
    # the bundled narrator's memory is in use
    assert result["tokens_differ"] > 0.1 and result["read_outs_differ"] > 0.1


def test_teacher_forcing_needs_a_first_narration(tmp_path):
    write(tmp_path / "a.json", {"video": "a.mp4", "fps": 2, "duration": 4.0,
                                "narrations": [{"time": 2.0, "text": "You look."}]})
    assert "at the first frame" in command("teacher", "--data", "toy", "--root", tmp_path, ok=False)


def test_rouge_without_a_common_word():
    assert evaluate.rouge_l([("a", "b"), ("a", "")]) == [0, 0]


@pytest.mark.skipif(java_problem() is not None, reason=f"METEOR {java_problem()}")
def test_meteor():
    perfect = ("You open the fridge.", "You open the fridge.")
    scores, corpus = evaluate.meteor([perfect, ("You open  it", ""), ("a", "b")])
    assert scores == pytest.approx([1, 0, 0]) and 0 < corpus < 1


@pytest.mark.parametrize("java, reason", [
    (None, "No such file"),
    ("echo 'no memory' >&2; exit 1", "no memory"),
    ("while read line; do echo 0,5; done", "could not convert"),
])
def test_what_java_lacks_is_said(monkeypatch, tmp_path, capsys, java, reason):
    """Java is not there, ends at once, or writes other numbers: all other scores stand."""
    package = tmp_path / "pycocoevalcap" / "meteor"
    package.mkdir(parents=True)
    (package / "meteor.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("pycocoevalcap")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PATH", str(tmp_path))
    if java:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{java}\n")
        (tmp_path / "java").chmod(0o755)
    corpus, _ = evaluate.caption_scores([("You open it.", "You open it.")], with_meteor=True)
    said = capsys.readouterr().err
    assert "METEOR is not computed: " in said and reason in said
    assert corpus["rouge_l"] == 1 and "meteor" not in corpus
