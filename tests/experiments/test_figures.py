"""Figures 5, 8, 9, 12, 13: frequent words, frequency of narrations, examples with frames; and their
commands."""
import json
import shutil
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from commands import data as data_command
import evaluate
from experiments import examples, figures, frequency, words
from helpers import ROOT
from support.files.narrations import Sentence
from support.files.video import write_video
from test_evaluate import command, write
from test_train import epic

run_figures = partial(command, main=figures.main)


@pytest.fixture(autouse=True)
def without_java(monkeypatch):
    monkeypatch.setattr(evaluate, "java_problem", lambda: "needs Java")


@pytest.fixture
def shown(monkeypatch):
    """The figures that would be saved, drawn."""
    drawn_figures = []

    def draw(figure, png):
        figure.canvas.draw()
        drawn_figures.append(figure)

    for module in (examples, frequency, words):
        monkeypatch.setattr(module, "save_figure", draw)
    return drawn_figures


def assert_apart(axis):
    """No text of an axis touches another text or leaves the axis (but for a pixel)."""
    outside = axis.get_window_extent()
    boxes = [text.get_window_extent() for text in axis.texts]                  # pixels
    for box in boxes:
        assert outside.x0 - 1 <= box.x0
        assert outside.y0 - 1 <= box.y0
        assert box.x1 <= outside.x1 + 1
        assert box.y1 <= outside.y1 + 1
    for box, other in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other.padded(-1))


# ---------------------------------------------------------------------- words

def test_words_by_hand():
    texts = [
        "You wash the red cup, and wash it.",
        "C’s son re-heats a Red Cup with the 3 pans",
        "The.",
        "你 wash",
    ]
    assert words.count_words(texts) == {
        "wash": 3, "red": 2, "cup": 2, "c’s": 1, "son": 1, "re-heats": 1, "pans": 1, "你": 1,
    }


def test_words_need_no_features(tmp_path):
    root = tmp_path / "root"
    epic(root, videos=3)
    for path in root.glob("features*"):
        path.unlink()
    options = ["words", "--data", "ek100", "--root", root, "--json"]
    result = run_figures(*options, "--top", 3)
    assert result["split"] == "val"
    assert result["narrations"] == 2 + 3 + 4
    assert result["frequent"] == {"wash": 9, "red": 3, "cup": 3}
    assert result["words"] == 3 * 9 - 1
    first_video = run_figures(*options, "--split", "train", "--limit", 1)
    assert first_video["narrations"] == 2


def test_words_of_the_toy(tmp_path):
    options = ["words", "--data", "toy", "--limit", 2]
    plain = run_figures(*options, "--json", "--png", tmp_path / "w.png")
    second = run_figures(*options, "--json", "--world", "second")
    assert plain["frequent"].keys() != second["frequent"].keys()
    assert plain["frequent"]["kitchen"] == 2
    assert (tmp_path / "w.png").stat().st_size > 5000
    most_frequent = next(iter(plain["frequent"]))
    assert run_figures(*options).splitlines()[2].split()[0] == most_frequent


@pytest.mark.parametrize("options, says", [
    ("--data ego4d --root .", "ego4d is not in"),
    ("--data nonsense", "unknown data set"),
    ("--data ek100 --world idle", "for the toy"),
])
def test_refusals_of_words(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    assert says in run_figures("words", *options.split(), ok=False)


def test_a_split_without_narrations_gets_one_line(tmp_path):
    (tmp_path / "annotations").mkdir()
    write(tmp_path / "annotations" / "refined_val_narrations.json", {"v": []})
    message = run_figures("words", "--data", "ek100", "--root", tmp_path, ok=False)
    assert "has no narrations" in message


def test_bars_of_words(shown):
    words.plot_words([("cup", 9), ("$x$", 2)], "title", "w.png")
    figure, = shown
    axis, = figure.axes
    assert [bar.get_width() for bar in axis.patches] == [9, 2]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["cup", "$x$"]
    assert axis.yaxis_inverted()                                               # the first on top


# ---------------------------------------------------------------------- frequency

PACE = {"narrations_per_minute": 20.0, "segment_s": 3.0,
        "true_narrations_per_minute": 15, "true_segment_s": 4.0}


def test_frequency_of_several_settings(tmp_path, shown):
    true = [{"time": 30.0, "text": "You look."}, {"time": 60, "text": "You wash."}]
    predicted = [{"time": time, "text": "You look."} for time in (10, 20, 30, 60)]
    gt = write(tmp_path / "t.json", {"v": true})
    pred = write(tmp_path / "p.json", {"v": predicted})
    printed = command("score", "--pred", pred, "--gt", gt, "--json")           # its last line
    result = tmp_path / "result.json"
    result.write_text("videos  1\n" + json.dumps(printed) + "\n")
    assert frequency.read_pace(result) == {
        "narrations_per_minute": 4, "segment_s": 15,
        "true_narrations_per_minute": 2, "true_segment_s": 30,
    }
    silent = write(tmp_path / "silent.json",
                   printed | {"narrations_per_minute": 0.0, "segment_s": None})
    table = run_figures("frequency", f"theta=0.8={result}", silent, "--png", tmp_path / "f.png")
    assert [line.split() for line in table.splitlines()[:3]] == [
        ["theta=0.8", "silent"],
        ["narrations", "per", "minute", "4.000", "0.000"],
        ["segment", "s", "15.000", "-"],
    ]
    figure, = shown
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["theta=0.8", "silent"]
    for axis, values, labels, truth in [
        (left, [4, 0], ["4.0", "0.0"], 2),
        (right, [15, 0], ["15.0", "-"], 30),
    ]:
        assert [bar.get_width() for bar in axis.patches] == values
        assert texts_of(axis) == labels
        for line in axis.collections:          # a vertical line for each setting
            first_point = line.get_segments()[0][0]
            assert first_point[0] == truth
        assert len(axis.collections) == 2
        assert_apart(axis)


@pytest.mark.parametrize("text", [
    "", "nonsense", "[]", "3", '{"segment_s": 3}',
    json.dumps(PACE | {"segment_s": "x"}),
    json.dumps(PACE | {"narrations_per_minute": -1}),
    json.dumps(PACE) + "\nmore",
])
def test_what_is_no_result_gets_one_line(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    assert "last line must be" in run_figures("frequency", tmp_path / "r.json", ok=False)


def test_a_missing_or_overwritten_result_gets_one_line(tmp_path):
    assert "nowhere.json: cannot be read" in run_figures("frequency", "a=nowhere.json", ok=False)
    good = write(tmp_path / "r.json", PACE)
    assert "is given twice" in run_figures("frequency", good, "--png", good, ok=False)
    assert run_figures("frequency", f"a={good}", f"b={good}").split()[:2] == ["a", "b"]


# ---------------------------------------------------------------------- examples

LONG = "You wipe the cupboard after the green bottle."


def draw_row(sentences, end, width=14):
    """A row of sentences from 0 to `end` s as `examples` draws it, white: its axis, drawn."""
    height = examples.row_height(sentences, 0, end, width)
    figure = examples.pyplot().figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, end)
    examples.draw_sentences(axis, "", "white", sentences, [False] * len(sentences))
    axis.set_axis_off()
    figure.canvas.draw()
    return axis


def test_a_long_sentence_is_wrapped_in_a_higher_row():
    wide = draw_row([Sentence(5.0, LONG)], end=5).texts[0]
    assert (wide.get_text(), wide.get_rotation()) == (LONG, 0)
    axis = draw_row([Sentence(1.0, LONG), Sentence(15.0, "")], end=15)
    wrapped = axis.texts[0]
    assert wrapped.get_text().count("\n") >= 2
    assert wrapped.get_text().split() == LONG.split()
    assert wrapped.get_rotation() == 0
    box = wrapped.get_window_extent()
    row = axis.get_window_extent()
    assert row.y0 <= box.y0
    assert box.y1 <= row.y1
    assert draw_row([Sentence(0.1, "x" * 500)], end=10).figure.get_figheight() <= examples.TALLEST


def test_a_sentence_is_upright_where_its_words_do_not_fit():
    axis = draw_row([Sentence(5.0, ""), Sentence(5.2, LONG), Sentence(10.0, "")], end=10)
    upright = axis.texts[1]
    assert (upright.get_text(), upright.get_rotation()) == (LONG, 90)
    assert upright.get_window_extent().y1 <= axis.get_window_extent().y1


@pytest.mark.parametrize("seconds, text", [
    (0.02, LONG), (0.2, "unbreakable" * 30), (2.0, "wide: " + "W" * 40)])
def test_sentences_stay_in_their_segments(seconds, text):
    """A row is blank around a segment, however long its sentence and however wide its letters."""
    sentence = Sentence(5.0 + seconds, text)
    axis = draw_row([Sentence(5.0, ""), sentence, Sentence(10.0, "")], end=10)
    picture = np.asarray(axis.figure.canvas.buffer_rgba())[..., :3]
    dark = np.flatnonzero((picture < 128).any((0, 2)))         # columns of pixels
    pixels_per_second = picture.shape[1] / 10
    left = 5.0 * pixels_per_second
    right = sentence.time * pixels_per_second
    assert all(left - 1 <= column <= right + 1 for column in dark)
    if seconds > 0.02:                         # long enough for a text
        assert len(dark) > 5


@pytest.fixture
def film(tmp_path):
    """10 s, 20 frames, frame i of brightness 10 i; three true sentences."""
    frames = [np.full((48, 64, 3), 10 * i, np.uint8) for i in range(20)]
    write_video(tmp_path / "film.mp4", frames, 2)
    narrations = [
        {"time": 2.0, "text": "You look."},
        {"time": 5.0, "text": "You wash the cup."},
        {"time": 9.0, "text": "c"},
    ]
    write(tmp_path / "film.json", {"video": "film.mp4", "fps": 2, "duration": 10.0,
                                   "narrations": narrations})
    return tmp_path / "film.mp4"


def write_jsonl(path, *rows):
    """A file as of stream.py --jsonl with rows (seconds, text)."""
    lines = [json.dumps({"end": time, "text": text}) for time, text in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def texts_of(axis):
    return [text.get_text() for text in axis.texts]


def test_examples_show_frames_and_sentences_at_their_times(film, tmp_path, shown):
    rows = [(2.5, "You look."), (5, "You wash the $pan$."), (9, "c")]
    ours = write_jsonl(tmp_path / "ours.jsonl", *rows)
    theirs = write_jsonl(tmp_path / "b.jsonl", (8.5, "c"))
    run_figures("examples", film, "--pred", ours, "--pred", f"theirs={theirs}",
                "--from", 2, "--to", 8, "--png", "e.png")
    figure, = shown
    frames, truth, first, second = figure.axes
    assert [axis.get_ylabel() for axis in (truth, first, second)] == ["truth", "ours", "theirs"]
    assert all(axis.get_xlim() == (2, 8) for axis in figure.axes)

    labels = [text.get_text() for text in frames.get_xticklabels()]
    assert len(frames.images) == len(labels) == 8
    assert (labels[0], labels[-1]) == ("0:02.0", "0:07.5")
    for label, image, middle in zip(labels, frames.images, frames.get_xticks()):
        time = float(label[2:])
        left, right, low, high = image.get_extent()
        assert image.get_array().mean() == pytest.approx(20 * time, abs=4)
        assert left < middle < right
        assert middle - 0.5 <= time <= middle
        inches_wide = (right - left) / 6 * 14
        inches_high = (high - low) * 1.2
        assert inches_wide / inches_high == pytest.approx(64 / 48)             # not distorted

    assert texts_of(truth) == ["You wash the cup.", "c"]           # the first one ends at 2 s
    assert [text.get_position()[0] for text in truth.texts] == [3.5, 6.5]
    assert texts_of(first) == ["You look.", "You wash the $pan$.", "c"]
    assert [text.get_color() for text in first.texts] == ["black", "#c03020", "black"]
    for axis in figure.axes[1:]:
        assert_apart(axis)


def test_examples_without_truth_have_nothing_in_red(film, tmp_path, shown):
    film.with_suffix(".json").unlink()
    ours = write_jsonl(tmp_path / "ours.jsonl", (5, "x"))
    run_figures("examples", film, "--pred", ours, "--from", 0, "--to", 1, "--png", "e.png")
    _, row = shown.pop().axes
    assert texts_of(row) == ["x"]
    assert row.texts[0].get_color() == "black"
    refusal = run_figures("examples", film, "--from", 0, "--to", 1, "--png", "e.png", ok=False)
    assert "no sentences" in refusal


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """Six seconds of a toy video, with files that do not fit it: the folder."""
    folder = tmp_path_factory.mktemp("kitchen")
    data_command.write_toy(7, 0.1, folder / "video.mp4")
    write_jsonl(folder / "a.jsonl", (1, "x"))
    write(folder / "two.json", {"a": [], "b": []})
    return folder


def test_examples_command(kitchen):
    picture = kitchen / "e.png"
    run_figures("examples", kitchen / "video.mp4", "--from", 0, "--to", 5, "--png", picture)
    assert picture.stat().st_size > 20000


@pytest.mark.parametrize("options, says", [
    ("--from 5 --to 5", "must be after"),
    ("--from 3 --to 500", "ends before 500 s"),
    ("--pred a.jsonl --pred a=a.jsonl --from 0 --to 3", "two rows are called a"),
    ("--pred two.json --from 0 --to 3", "no narrations of video"),
    ("--gt two.json --from 0 --to 3", "no narrations of video"),
    ("--pred u.png --from 0 --to 3", "is given twice"),
])
def test_refusals_of_examples(kitchen, monkeypatch, options, says):
    monkeypatch.chdir(kitchen)
    refusal = run_figures("examples", "video.mp4", "--png", "u.png", *options.split(), ok=False)
    assert says in refusal
    assert not (kitchen / "u.png").exists()


def test_predictions_of_one_video_among_several(film, tmp_path, shown):
    """A video without narrations of a model has an empty row, not another video's sentences."""
    others = [{"time": 3.0, "text": "You look."}]
    file = write(tmp_path / "p.json", {"film": [], "other": others})
    run_figures("examples", film, "--pred", file, "--from", 0, "--to", 5, "--png", "e.png")
    assert not shown.pop().axes[2].texts


def test_a_timeline_replaces_no_file_unasked(tmp_path):
    """Without --png it would stand beside the video, under its name; nor does it replace the truth."""
    video = tmp_path / "kitchen.mp4"
    video.touch()
    shutil.copy(ROOT / "toy" / "kitchen.json", tmp_path)
    (tmp_path / "kitchen.png").touch()
    error = run_figures("timeline", video, ok=False)
    assert "kitchen.png: is there already; say by --png" in error
    error = run_figures("timeline", video, "--png", tmp_path / "kitchen.json", ok=False)
    assert "kitchen.json: is given twice" in error
    error = run_figures("timeline", video, "--png", tmp_path / "a.png", "--pred", "b", ok=False)
    assert "--pred is for a trace" in error
    assert "is a directory" in run_figures("timeline", tmp_path, ok=False)
