"""Figures 5, 8, 9, 12, 13: frequent words, frequency of narrations, examples with frames; and their commands."""
import json
from functools import partial
from itertools import combinations

import numpy as np
import pytest

import data
from experiments import examples, figures, frequency, words
from helpers import ROOT
from support import captions
from support.narrations import Sentence
from support.video import write_video
from test_evaluate import command, write
from test_train import epic

drawn = partial(command, main=figures.main)


@pytest.fixture(autouse=True)
def without_java(monkeypatch):
    monkeypatch.setattr(captions, "java_problem", lambda: "needs Java")


@pytest.fixture
def shown(monkeypatch):
    """The figures that would be saved, drawn."""
    kept = []
    for module in (examples, frequency, words):
        monkeypatch.setattr(module, "save_figure", lambda figure, png: (figure.canvas.draw(), kept.append(figure)))
    return kept


def boxes(axis):
    """What the texts of an axis cover, in pixels."""
    return [text.get_window_extent() for text in axis.texts]


def assert_apart(axis):
    """No text of an axis touches another one or leaves the axis (but for a pixel)."""
    found, outside = boxes(axis), axis.get_window_extent()
    assert all(a.padded(-1).overlaps(b.padded(-1)) == 0 for a, b in combinations(found, 2))
    assert all(outside.x0 - 1 <= box.x0 and box.x1 <= outside.x1 + 1 and outside.y0 - 1 <= box.y0
               and box.y1 <= outside.y1 + 1 for box in found)


# ---------------------------------------------------------------------- words

def test_words_by_hand():
    texts = ["You wash the red cup, and wash it.", "C’s son re-heats a Red Cup with the 3 pans", "The.", "你 wash"]
    assert words.count_words(texts) == {"wash": 3, "red": 2, "cup": 2, "c’s": 1, "son": 1, "re-heats": 1, "pans": 1,
                                        "你": 1}


def test_words_need_no_features(tmp_path):
    epic(tmp_path / "root", videos=3)
    for path in (tmp_path / "root").glob("features*"):
        path.unlink()
    result = drawn("words", "--data", "ek100", "--root", tmp_path / "root", "--top", 3, "--json")
    assert (result["split"], result["narrations"]) == ("val", 2 + 3 + 4)
    assert result["frequent"] == {"wash": 9, "red": 3, "cup": 3} and result["words"] == 3 * 9 - 1
    one = drawn("words", "--data", "ek100", "--root", tmp_path / "root", "--split", "train", "--limit", 1, "--json")
    assert one["narrations"] == 2


def test_words_of_the_toy(tmp_path):
    plain, second = (drawn("words", "--data", "toy", "--limit", 2, "--world", world, "--json", "--png",
                           tmp_path / "w.png") for world in ("plain", "second"))
    assert plain["frequent"].keys() != second["frequent"].keys() and plain["frequent"]["kitchen"] == 2
    assert (tmp_path / "w.png").stat().st_size > 5000
    table = drawn("words", "--data", "toy", "--limit", 2)
    assert f"{next(iter(plain['frequent'])):20}" in table.splitlines()[2]
    assert "ego4d is not in" in drawn("words", "--data", "ego4d", "--root", tmp_path, ok=False)
    assert "unknown data set" in drawn("words", "--data", "nonsense", ok=False)
    assert "for the toy" in drawn("words", "--data", "ek100", "--world", "idle", ok=False)


def test_a_split_without_narrations_gets_one_line(tmp_path):
    (tmp_path / "annotations").mkdir()
    write(tmp_path / "annotations" / "refined_val_narrations.json", {"v": []})
    assert "has no narrations" in drawn("words", "--data", "ek100", "--root", tmp_path, ok=False)


def test_bars_of_words(shown):
    words.plot_words([("cup", 9), ("$x$", 2)], "title", "w.png")
    axis, = shown.pop().axes
    assert [bar.get_width() for bar in axis.patches] == [9, 2]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["cup", "$x$"]
    assert axis.yaxis_inverted()                                                               # the first on top


# ---------------------------------------------------------------------- frequency

PACE = {"narrations_per_minute": 20.0, "segment_s": 3.0, "true_narrations_per_minute": 15, "true_segment_s": 4.0}


def test_frequency_of_several_settings(tmp_path, shown):
    true = {"v": [{"time": 30.0, "text": "You look."}, {"time": 60, "text": "You wash."}]}
    said = {"v": [{"time": time, "text": "You look."} for time in (10, 20, 30, 60)]}
    paths = [write(tmp_path / f"{name}.json", content) for name, content in (("t", true), ("p", said))]
    printed = command("score", "--pred", paths[1], "--gt", paths[0], "--json")                 # its last line, parsed
    result = tmp_path / "result.json"
    result.write_text("videos  1\n" + json.dumps(printed) + "\n")                              # as it is redirected
    assert frequency.read_pace(result) == {"narrations_per_minute": 4, "segment_s": 15,
                                           "true_narrations_per_minute": 2, "true_segment_s": 30}
    silent = write(tmp_path / "silent.json", printed | {"narrations_per_minute": 0.0, "segment_s": None})
    table = drawn("frequency", f"theta=0.8={result}", silent, "--png", tmp_path / "f.png").splitlines()
    assert table[0].split() == ["theta=0.8", "silent"]
    assert table[1].split() == ["narrations", "per", "minute", "4.000", "0.000"]
    assert table[2].split() == ["segment", "s", "15.000", "-"]
    figure, = shown
    for axis, bars, truth, labels in zip(figure.axes, ([4, 0], [15, 0]), (2, 30), (["4.0", "0.0"], ["15.0", "-"])):
        assert [bar.get_width() for bar in axis.patches] == bars
        assert [text.get_text() for text in axis.texts] == labels
        assert [lines.get_segments()[0][0][0] for lines in axis.collections] == [truth, truth]
        assert_apart(axis)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["theta=0.8", "silent"]


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "3", '{"segment_s": 3}', json.dumps(PACE | {"segment_s": "x"}),
                                  json.dumps(PACE | {"narrations_per_minute": -1}), json.dumps(PACE) + "\nmore"])
def test_what_is_no_result_gets_one_line(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    assert "last line must be" in drawn("frequency", tmp_path / "r.json", ok=False)


def test_a_missing_or_overwritten_result_gets_one_line(tmp_path):
    assert "nowhere.json: cannot be read" in drawn("frequency", "a=nowhere.json", ok=False)
    good = write(tmp_path / "r.json", PACE)
    assert "is given twice" in drawn("frequency", good, "--png", good, ok=False)
    assert drawn("frequency", f"a={good}", f"b={good}").split()[:2] == ["a", "b"]


# ---------------------------------------------------------------------- sentences in cells

def test_a_sentence_is_written_across_then_upright_then_not():
    text = "You wipe the cupboard after the green bottle."
    assert examples.fitted(text, 9, 1) == (text, 0)
    lines, rotation = examples.fitted(text, 0.8, 2)
    assert rotation == 0 and lines.replace("\n", " ") == text and lines.count("\n") >= 3
    assert examples.fitted(text, 0.8, examples.height_of(text, 0.8)) == (lines, 0)
    assert examples.fitted(text, 0.15, examples.height_of(text, 0.15)) == (text, 90)
    cut, rotation = examples.fitted(text, 0.15, 1)
    assert rotation == 90 and cut.endswith(" ...") and text.startswith(cut[:-4])
    assert examples.fitted(text, 0.15, 0.9) == examples.fitted(text, 0.05, 9) == ("", 0)
    assert examples.fitted("", 1, 1)[0] == examples.fitted("x" * 500, 0.15, 1.5)[0] == ""


def test_sentences_do_not_touch():
    """Real ones, in segments of 0.5 to 6 s, in pictures of any width."""
    plt = examples.pyplot()
    texts = [row["text"] for row in json.loads((ROOT / "toy" / "kitchen.json").read_text())["narrations"]]
    times = np.cumsum(np.resize([0.5, 1, 2.5, 6, 1.5, 0.5, 3], len(texts)))
    for width, height in ((6, 3.0), (25, 1.5), (40, 3.2), (60, 0.5)):
        figure = plt.figure(figsize=(width, height))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_xlim(0, times[-1])
        examples.draw_sentences(axis, "row", "blue", [Sentence(*pair) for pair in zip(times, texts)], [False] * 99)
        assert_apart(axis)
        assert len(axis.texts) >= (height > 1) * (width > 6) * 30
        plt.close(figure)


# ---------------------------------------------------------------------- examples

@pytest.fixture
def film(tmp_path):
    """10 s, 20 frames, the brightness of each says which; three true sentences."""
    frames = [np.full((48, 64, 3), 10 * i, np.uint8) for i in range(20)]
    write_video(tmp_path / "film.mp4", frames, 2)
    write(tmp_path / "film.json", {"video": "film.mp4", "fps": 2, "duration": 10.0, "narrations": [
        {"time": 2.0, "text": "You look."}, {"time": 5.0, "text": "You wash the cup."}, {"time": 9.0, "text": "c"}]})
    return tmp_path / "film.mp4"


def said(path, *rows):
    path.write_text("".join(json.dumps({"end": time, "text": text}) + "\n" for time, text in rows))
    return path


def test_examples_show_frames_and_sentences_at_their_times(film, tmp_path, shown):
    ours = said(tmp_path / "ours.jsonl", (2.5, "You look."), (5, "You wash the $pan$."), (9, "c"))
    theirs = said(tmp_path / "b.jsonl", (8.5, "c"))
    drawn("examples", film, "--pred", ours, "--pred", f"theirs={theirs}", "--from", 2, "--to", 8, "--png", "e.png")
    figure, = shown
    frames, truth, first, second = figure.axes
    assert [axis.get_ylabel() for axis in (truth, first, second)] == ["truth", "ours", "theirs"]
    assert all(axis.get_xlim() == (2, 8) for axis in figure.axes)
    labels = [text.get_text() for text in frames.get_xticklabels()]
    assert len(frames.images) == len(labels) == 8 and (labels[0], labels[-1]) == ("0:02.0", "0:07.5")
    for label, image, at in zip(labels, frames.images, frames.get_xticks()):
        time, (left, right, low, high) = float(label[2:]), image.get_extent()
        assert image.get_array().mean() == pytest.approx(20 * time, abs=4)
        assert left < at < right and at - 0.5 <= time <= at
        assert (right - left) / 6 * 14 / ((high - low) * 1.2) == pytest.approx(64 / 48)        # inches: not distorted
    assert [text.get_text() for text in truth.texts] == ["You wash the cup.", "c"]             # the first ends at 2 s
    assert [(text.get_text(), text.get_color()) for text in first.texts] == [
        ("You look.", "black"), ("You wash the $pan$.", "#c03020"), ("c", "black")]
    assert [text.get_position()[0] for text in truth.texts] == [3.5, 6.5]
    for axis in figure.axes[1:]:
        assert_apart(axis)


def test_examples_without_truth_have_nothing_in_red(film, tmp_path, shown):
    film.with_suffix(".json").unlink()
    ours = said(tmp_path / "ours.jsonl", (5, "x"))
    drawn("examples", film, "--pred", ours, "--from", 0, "--to", 1, "--png", "e.png")
    _, row = shown.pop().axes
    assert [(text.get_text(), text.get_color()) for text in row.texts] == [("x", "black")]
    assert "no sentences" in drawn("examples", film, "--from", 0, "--to", 1, "--png", "e.png", ok=False)


def test_a_row_is_as_high_as_its_sentences(shown):
    """Across in lines, upright in one, at most 3.2 inches; a sentence that the picture cuts asks for no more."""
    across, upright, long = "You wash the cup.", "You wash the cupboard.", "word " * 200
    height = lambda *pairs: examples.row_height([Sentence(*pair) for pair in pairs], 2.0, 12.0, 10.0)
    assert height((2, "x"), (12, across)) == height((30, across)) == height()
    assert height((2, "x"), (2.6, across)) == pytest.approx(examples.MARGIN + 2 * examples.LINE)
    assert height((2, "x"), (2.2, upright)) == pytest.approx(examples.inches(upright) + examples.MARGIN)
    assert height((2.2, upright)) == height((2, "x"), (2.05, upright)) == height()
    assert height((2, "x"), (2.2, long)) == examples.TALLEST


def test_examples_command(tmp_path):
    data.write_toy(7, 0.1, tmp_path / "video.mp4")
    video, png = tmp_path / "video.mp4", tmp_path / "e.png"
    drawn("examples", video, "--from", 0, "--to", 5, "--png", png)
    assert png.stat().st_size > 20000
    refused = lambda *more: drawn("examples", video, "--png", tmp_path / "u.png", *more, ok=False)
    ours, two = said(tmp_path / "a.jsonl", (1, "x")), write(tmp_path / "two.json", {"a": [], "b": []})
    assert "must be after" in refused("--from", 5, "--to", 5)
    assert "ends before 500 s" in refused("--from", 3, "--to", 500)
    assert "two rows are called a" in refused("--pred", ours, "--pred", f"a={ours}", "--from", 0, "--to", 3)
    assert "no narrations of video" in refused("--pred", two, "--from", 0, "--to", 3)
    assert "no narrations of video" in refused("--gt", two, "--from", 0, "--to", 3)
    assert "is given twice" in refused("--pred", tmp_path / "u.png", "--from", 0, "--to", 3)
    assert not (tmp_path / "u.png").exists()


def test_predictions_of_one_video_among_several(film, tmp_path, shown):
    """A video that a model has nothing to say of has an empty row, not another video's sentences."""
    file = write(tmp_path / "p.json", {"film": [], "other": [{"time": 3.0, "text": "You look."}]})
    drawn("examples", film, "--pred", file, "--from", 0, "--to", 5, "--png", "e.png")
    assert not shown.pop().axes[2].texts
