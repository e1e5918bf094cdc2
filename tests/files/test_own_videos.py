"""Your own videos (--data FOLDER): narrations as people write them, splits, features made once, the whole way."""
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import narrator as nar
import train
from baselines.variants import load_narrator
from commands import data as data_command, evaluate as evaluate_command, train as train_command
import evaluate
from helpers import TOY
from streams.subtitles import srt_cue
from support.common.errors import BadData
from support.common.options import DATASETS
from support.files import encoding, own_videos
from support.files.cues import read_cues
from support.files.narrations import read_predictions, read_truth
from support.files.tracks import Notes
from test_evaluate import command

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    monkeypatch.setattr(evaluate, "java_problem", lambda: "needs Java")


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Three toy videos with their .json in `toy`; in `own` the same videos with .srt files alone, encoded."""
    toy, mine = tmp_path_factory.mktemp("toy"), tmp_path_factory.mktemp("own")
    data_command.run(["toy", "--seed", "4", "--minutes", "0.15", "--count", "3", "--output", str(toy)])
    for path in toy.glob("*.json"):
        rows = [(0.0, ""), *((y["time"], y["text"]) for y in json.loads(path.read_text())["narrations"])]
        (mine / f"{path.stem}.srt").write_text("".join(
            srt_cue(n, start, end, text) for n, ((start, _), (end, text)) in enumerate(pairwise(rows))))
        shutil.copy(path.with_suffix(".mp4"), mine)
    encode(mine)
    return toy, mine


def encode(folder, *more):
    data_command.run(["encode", "--data", str(folder), "--model", str(TOY), "--device", "cpu", *more])


def made(folder, frames, text="0.5,You look.\n4,You sit.\n", width=4, **settings):
    """A folder of videos that need not be decoded: their features are there, and .csv files."""
    (folder / "features").mkdir(parents=True, exist_ok=True)
    for name, count in frames.items():
        (folder / f"{name}.mp4").write_bytes(b"a video")
        (folder / f"{name}.csv").write_text(text)
        x = torch.arange(float(count))[:, None, None].expand(count, 10, width).contiguous()
        save_file({"features": x}, folder / "features" / f"{name}.safetensors",
                  {"vision": "v", "fps": "2.0", "grid": "3", "duration": str(count / 2), "size": "7"} | settings)
    encoding.write_metadata(folder / "features")
    return folder


def samples(folder, split="all", **more):
    return list(data.load_dataset(str(folder), split=split, **more))


# ---------------------------------------------------------------------- the whole way

def test_subtitles_alone_give_what_the_toy_loader_gives(toys):
    """The same narrations on the same frames, the same tokens (up to bf16), the same figures."""
    toy, mine = toys
    vision = nar.VisionEncoder(str(TOY / "vision"))
    pairs = list(zip(samples(mine), data.load_dataset("toy", toy), strict=True))
    for ours, theirs in pairs:
        for name in ("name", "narrations", "fps", "num_frames", "duration", "offset", "origin"):
            assert getattr(ours, name) == getattr(theirs, name), name
        one, two = (torch.stack(list(sample.tokens(vision, 8))) for sample in (ours, theirs))
        assert one.shape == two.shape and torch.allclose(one, two, atol=0.02, rtol=0.02)
    ours = command("stream", "--data", mine, "--split", "all", "--json")
    theirs = command("stream", "--data", "toy", "--root", toy, "--json")
    assert ours == {name: value for name, value in theirs.items() if name in ours}
    assert ours["videos"] == 3 and ours["f1"] > 0.8
    ours = command("teacher", "--data", mine, "--split", "all", "--json")
    assert ours == pytest.approx(command("teacher", "--data", "toy", "--root", toy, "--json"), rel=0.01)


def test_four_commands(toys, tmp_path, capsys):
    """From the folder to a narrator fine-tuned on it, whose features, rate and models are those of the folder."""
    mine, out = toys[1], tmp_path / "out"
    encode(mine)
    data_command.run(["stats", "--data", str(mine), "--json"])
    printed = capsys.readouterr()
    stats = json.loads(printed.out.splitlines()[-1])
    assert stats["videos"] == 3 and stats["split"] == "all" and "segments [s]: " in printed.out
    train_command.train(train.Options(data=str(mine), init=str(TOY), output=str(out), device="cpu", epochs=4.0, batch=2))
    log = [json.loads(line) for line in (out / "narrator-log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] and log[-1]["val_loss"] > 0
    result = command("stream", "--data", mine, "--model", out, "--json", "--output", tmp_path / "kept")
    assert result["videos"] == 1 and result["f1"] > 0.5
    assert Path(load_narrator(str(out)).config.vision) == TOY / "vision"
    encode(mine, "--model", str(out))                                  # nothing to do: the same vision model
    name, = read_predictions(tmp_path / "kept" / "predictions")
    scored = command("score", "--pred", tmp_path / "kept" / "predictions", "--gt", mine, "--partial", "--json")
    assert scored["cider"] == pytest.approx(result["cider"]) and scored["f1"] == result["f1"]
    assert name in {path.stem for path in mine.glob("*.srt")}


def test_published_weights_are_fine_tuned_and_new_ones_started(tmp_path):
    """--init with a folder of the published format; without it, the features' vision model and rate are taken over."""
    folder, x = tmp_path / "own", load_file(GOLDEN / "video.safetensors")["video_101"]
    made(folder, {"a": len(x), "b": len(x)}, "1,You put the pot.\n5,You talk to a woman.\n", x.shape[2])
    known = {"data": str(folder), "output": str(tmp_path / "out"), "device": "cpu", "epochs": 1.0}
    train_command.train(train.Options(**known, init=str(GOLDEN / "flownar")))
    model = load_narrator(str(tmp_path / "out"))
    assert model.config.readout == "cls" and model.config.width == x.shape[2]
    slow = made(tmp_path / "slow", {"a": 20, "b": 20}, width=16, fps="1.0", vision="some/model")
    known |= {"data": str(slow), "memory_heads": 2, "memory_tokens": 4, "lora_rank": 4}
    with pytest.raises(BadData, match="1 frames a second; the narrator needs .* 2"):
        train_command.train(train.Options(data=str(slow), init=str(TOY), output=str(tmp_path / "no"), device="cpu"))
    train_command.train(train.Options(**known, llm=str(TOY / "llm"), overwrite=True))
    config = load_narrator(str(tmp_path / "out")).config
    assert (config.fps, config.vision) == (1.0, "some/model")
    assert "2 frames a second, the narrator needs 1" in command(
        "stream", "--data", folder, "--model", tmp_path / "out", ok=False)


def test_options_of_training():
    """Few videos need small batches; what is given stays."""
    few, many = train.Options(data="."), train.Options(data="ego4d")
    assert (few.batch, few.epochs, many.batch, many.epochs) == (4, 10.0, 64, 2.0)
    assert train.Options(data=".", batch=3).batch == 3 and few.lr == many.lr


# ---------------------------------------------------------------------- narrations

SRT = """\ufeff1
00:00:00,000 --> 00:00:01,500
<i>You look</i>
around the {\\an8}room.

00:00:02.000 --> 0:03.5 X1:0
42 cups &amp; a pan

3
00:00:03,000 --> 00:00:09,000

4
00:00:05,000 --> 00:00:06,000
- ... -
5
00:00:04,000 --> 00:00:08,000
Is it done?
"""
VTT = """WEBVTT - my video
Kind: captions

STYLE
::cue { color: red }

NOTE no cue

first
00:01.000 --> 00:02.000 align:start
<v Ann><c.loud>You</c> <00:01.500>sit,

1:00:03.000 --> 1:00:04.000
You cut a &lt;3 shaped cake!
"""
SENTENCES = {
    "a.srt": (SRT, [(1.5, "You look around the room."), (3.5, "42 cups & a pan."), (8, "Is it done?")],
              {"cues with markup cleaned": 1, "sentences without a full stop given one": 1,
               "narrations without words left out": 2, "overlapping cues, each put at its end": 3,
               "narrations that were not in order of time": 2}),
    "a.vtt": (VTT, [(2, "You sit."), (3604, "You cut a <3 shaped cake!")],
              {"cues with markup cleaned": 1, "sentences without a full stop given one": 1}),
    "a.csv": ("62.5,You sit.\n0:01,\"You cut, then stir.\"\n\n00:00:03.5,\n", [(1, "You cut, then stir."),
              (62.5, "You sit.")], {"narrations that were not in order of time": 3,
                                    "narrations without words left out": 1}),
    "b.csv": ("Start,End,Text,by\n0,1.5,You sit,x\n1.5,1:02,You « go »,y\n", [(1.5, "You sit."), (62, "You « go ».")],
              {"sentences without a full stop given one": 2}),
    "c.csv": ("0,5;You cut, then stir.\n2;You sit.\n", [(0.5, "You cut, then stir."), (2, "You sit.")], {}),
    "d.csv": ("time\ttext\n1\tYou sit…\n2\tYou say \"go!\"\n", [(1, "You sit…"), (2, 'You say "go!"')], {})}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_of_subtitles_and_tables(tmp_path, name):
    content, rows, counts = SENTENCES[name]
    (tmp_path / name).write_text(content)
    notes = Notes()
    assert read_cues(tmp_path / name, notes) == rows
    assert {what: n for what, n in notes.counts.items() if n} == counts


@pytest.mark.parametrize("name, content, says", [
    ("a.srt", "1\n00:00:01,000 -> 00:00:02,000\nYou sit.\n", "line 1: expected a cue's number"),
    ("a.srt", "1\n00:00:01,000 --> 2,x\nYou sit.\n", "line 2: expected times"),
    ("a.srt", "1\n00:61:00,000 --> 00:62:00,000\nYou sit.\n", "line 2: expected times"),
    ("a.srt", "1\n00:00:03,000 --> 00:00:02,000\nYou sit.\n", "line 2: the cue ends before"),
    ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\nYou sit.\n\nYou stand.\n", "line 5: .*empty line inside"),
    ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n\n", "has no narrations"), ("a.srt", "", "has no narrations"),
    ("a.vtt", "1\n00:01.000 --> 00:02.000\nYou sit.\n", "line 1: .*WEBVTT"), ("a.vtt", "", "WEBVTT"),
    ("a.csv", "0.5,You sit.\n1,You cut, then stir.\n", "line 2: has 3 columns, not 2; quote"),
    ("a.csv", "0.5,You sit.\nsoon,You stir.\n", "line 2: the time must be"),
    ("a.csv", "when,what\n0.5,You sit.\n", "line 1: expected time,text"), ("a.csv", "You sit.\n", "line 1: expected"),
    ("a.csv", "-1,You sit.\n", "line 1"), ("a.csv", "", "has no narrations"),
    ("a.csv", f"1,\"{'x' * 200_000}\"\n", "is not CSV"),
    ("a.json", "{", "is not JSON"), ("a.json", '{"narrations": 3}', "expected a list"), ("a.json", "3", "a list"),
    ("a.json", '[{"time": "1", "text": "x"}]', "narration 0"),
    ("a.json", '[{"time": -1, "text": "x"}]', "narration 0")])
def test_bad_narrations_are_refused_by_name(tmp_path, name, content, says):
    made(tmp_path, {"a": 20})
    (tmp_path / "a.csv").unlink()
    (tmp_path / name).write_text(content)
    for attempt in (samples, encode):
        with pytest.raises(BadData, match=says) as error:
            attempt(tmp_path)
        assert name in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    made(tmp_path, {"a": 20})
    (tmp_path / "a.csv").write_bytes("1,Öffne.".encode("latin-1"))
    with pytest.raises(BadData, match=r"a\.csv: is not UTF-8"):
        samples(tmp_path)


def test_placed_on_frames(tmp_path, capsys):
    """Points on frames of their own, none beyond the end; a sample begins with its first narration."""
    text = "2.2,You look.\n4,You sit.\n4,You stand.\n3.8,You cut.\n9.9,You stir.\n11,You eat.\n12,You go.\n"
    sample, = samples(made(tmp_path, {"a": 20}, text))
    assert sample.narrations == [(0, "You look."), (3, "You cut."), (4, "You sit."), (5, "You stand."),
                                 (14, "You stir."), (15, "You eat.")]
    assert (sample.num_frames, sample.duration, sample.offset, sample.origin) == (16, 10.0, 2.0, 2.0)
    assert sample.read(0, 16)[:, 0, 0].tolist() == list(range(4, 20))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "1 narrations beyond the end of their video moved to its last frame" in said
    assert "3 narrations moved by a frame or more" in said and "1 narrations beyond the end of their video left" in said
    cut, = samples(tmp_path, max_frames=7)
    assert (cut.num_frames, len(cut.narrations), cut.duration) == (6, 4, 10.0)
    truth = evaluate_command.truth_of(sample)
    assert [y.time for y in truth.annotators[0]] == [2.5, 4.0, 4.5, 5.0, 9.5, 10.0] and truth.start == 2.0
    made(tmp_path, {"a": 20}, "1,You sit.\n11,You cut.\n12,You stir.\n")
    with pytest.raises(BadData, match=r"a\.csv: 2 of 3 narrations are beyond the end of the video \(10 s\)"):
        samples(tmp_path)


def test_own_json_with_memory_words(tmp_path):
    """The toy's form, its words for memory included; a plain list will do."""
    folder = made(tmp_path, {"a": 20, "b": 20})
    for path in folder.glob("*.csv"):
        path.unlink()
    rows = [{"time": 0.5, "text": "You look."}, {"time": 3, "text": "You tap the red cup", "memory": ["red"]}]
    (folder / "a.json").write_text(json.dumps({"video": "a.mp4", "fps": 30, "duration": 3, "narrations": rows}))
    (folder / "b.json").write_text(json.dumps(rows))
    one, two = samples(folder)
    assert one.narrations == two.narrations == [(0, "You look."), (5, "You tap the red cup.")]
    assert one.memory_words == two.memory_words == [(), ("red",)]


def test_scores_of_subtitles(tmp_path):
    """evaluate.py score reads them on both sides; a .jsonl beside its own .srt counts once."""
    for name, text in (("a", "You sit."), ("b", "You stand.")):
        (tmp_path / f"{name}.srt").write_text(srt_cue(0, 0, 1, "You look.") + srt_cue(1, 1, 3, text))
    (tmp_path / "pred").mkdir()
    (tmp_path / "pred" / "a.jsonl").write_text('{"end": 1.0, "text": "You look."}\n{"end": 3.0, "text": "You sit."}\n')
    (tmp_path / "pred" / "a.srt").write_text("not read")
    (tmp_path / "pred" / "b.vtt").write_text("WEBVTT\n\n00:00.000 --> 00:03.000\nYou sit.\n")
    assert {name: len(y.annotators[0]) for name, y in read_truth(tmp_path).items()} == {"a": 2, "b": 2}
    scored = command("score", "--pred", tmp_path / "pred", "--gt", tmp_path, "--json")
    assert (scored["videos"], scored["predicted"], scored["recall"]) == (2, 3, 0.75)
    alone = command("score", "--pred", tmp_path / "pred" / "b.vtt", "--gt", tmp_path / "b.srt", "--json")
    assert (alone["predicted"], alone["precision"], alone["recall"]) == (1, 1.0, 0.5)


# ---------------------------------------------------------------------- files and splits

def names(folder, split):
    return [sample.name for sample in samples(folder, split)]


def test_split_by_share(tmp_path):
    """A fifth for validation, by name: never none, never all, and the same when others come."""
    folder = made(tmp_path, {f"v{n}": 20 for n in range(40)})
    train_, val = names(folder, "train"), names(folder, "val")
    assert sorted(train_ + val) == names(folder, "all") and 3 <= len(val) <= 13
    with pytest.raises(BadData, match=r"none of its 40 videos is for test; write their names into .*test\.txt"):
        samples(folder, "test")
    with pytest.raises(BadData, match="unknown split 'dev'; choose one of train, val, test, all"):
        samples(folder, "dev")
    made(folder, {f"w{n}": 20 for n in range(40)})
    assert set(names(folder, "val")) >= set(val)
    pair = made(tmp_path / "pair", {"a": 20, "b": 20})
    assert {*names(pair, "train"), *names(pair, "val")} == {"a", "b"} and len(names(pair, "val")) == 1
    single = made(tmp_path / "single", {"a": 20})
    assert names(single, "train") == ["a"]
    with pytest.raises(BadData, match=r"val\.txt \(train.py --val-limit 0 needs none\)"):
        samples(single, "val")


def test_split_by_file(tmp_path, capsys):
    folder = made(tmp_path, {name: 20 for name in "abcd"} | {"e.f": 20})
    (folder / "val.txt").write_text("b.mp4\n\ne.f\n")
    assert (names(folder, "train"), names(folder, "val")) == (["a", "c", "d"], ["b", "e.f"])
    assert [sample.name for sample in samples(folder, "train", limit=2)] == ["a", "c"]
    (folder / "test.txt").write_text("c")
    assert (names(folder, "train"), names(folder, "test")) == (["a", "d"], ["c"])
    capsys.readouterr()
    (folder / "train.txt").write_text("a")
    assert names(folder, "train") == ["a"] and "1 videos of no split left out" in capsys.readouterr().err
    (folder / "val.txt").unlink()
    assert names(folder, "val") == ["b", "d", "e.f"]
    (folder / "train.txt").write_text("a\nc\n")
    with pytest.raises(BadData, match=r"test\.txt, line 1: c is in train\.txt, too"):
        samples(folder)
    (folder / "test.txt").write_text("x.mp4\n")
    with pytest.raises(BadData, match=r"test\.txt, line 1: .* has no video 'x\.mp4' with narrations"):
        samples(folder)


def test_what_lies_in_the_folder(tmp_path, capsys):
    """Other files do not matter, features stand for a video that is gone; what is ambiguous is refused."""
    folder = made(tmp_path, {"a": 20, "b": 20})
    (folder / "b.mp4").unlink()
    (folder / "c.MP4").write_bytes(b"x")
    for name in ("notes.csv", "readme.txt", ".a.srt", "settings.json"):
        (folder / name).write_text("x")
    assert names(folder, "all") == ["a", "b"] and "1 videos without narrations left out" in capsys.readouterr().err
    (folder / "a.srt").write_text(srt_cue(0, 0, 1, "You sit."))
    with pytest.raises(BadData, match=r"a\.srt: a\.csv has the same name"):
        samples(folder)
    (folder / "a.srt").rename(folder / "a.mov")
    with pytest.raises(BadData, match=r"a\.mp4: a\.mov has the same name"):
        samples(folder)
    (tmp_path / "bare").mkdir()
    with pytest.raises(BadData, match="has no video with narrations beside it, such as"):
        samples(tmp_path / "bare")


# ---------------------------------------------------------------------- features

def test_only_what_is_new_or_has_changed_is_encoded(toys, tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(toys[1], folder)
    first, second, third = sorted(folder.glob("*.mp4"))
    files = [own_videos.feature_file(folder, video.stem) for video in (first, second, third)]
    before = [file.read_bytes() for file in files]
    done = []
    monkeypatch.setattr(encoding, "Video", lambda source, *more, real=encoding.Video, **how: (
        done.append(Path(source).name), real(source, *more, **how))[1])
    encode(folder)
    assert done == []
    os.utime(second, (1, 1))
    files[2].unlink()
    encode(folder)
    assert done == [second.name, third.name] and files[0].read_bytes() == before[0]
    assert all(torch.equal(load_file(file)["features"], load_file(own_videos.feature_file(toys[1], file.stem))["features"])
               for file in files)
    encode(folder, "--fps", "4")
    assert done[2:] == [first.name, second.name, third.name] and samples(folder)[0].fps == 4.0
    shutil.copy(own_videos.feature_file(toys[1], first.stem), files[0])
    with pytest.raises(BadData, match="was made with fps = 4.0, others with 2.0: python data.py encode --data"):
        samples(folder)
    shutil.copy(second, first)
    with pytest.raises(BadData, match=rf"was not made of the {first.stem} that is there now: python data.py encode"):
        samples(folder)
    files[0].unlink()
    with pytest.raises(BadData, match=f"{first.stem} is not encoded yet: python data.py encode --data"):
        samples(folder)


def test_a_video_of_the_same_size_and_another_time_is_said(tmp_path, capsys):
    """It may be a copy, or another video: one line for all of them, and the features are used."""
    times = {"mtime": "1000000000"}
    folder = made(tmp_path, dict.fromkeys("abc", 10), **times)
    for name in "abc":
        os.utime(folder / f"{name}.mp4", ns=(10 ** 9, 10 ** 9))
    assert len(samples(folder)) == 3 and "written after" not in capsys.readouterr().err
    os.utime(folder / "a.mp4")
    assert len(samples(folder)) == 3
    assert f"{folder}: a.mp4 was written after the encoding, or copied" in capsys.readouterr().err
    os.utime(folder / "c.mp4")
    assert len(samples(folder)) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "written after" in line]
    assert len(lines) == 1 and lines[0].startswith(f"{folder}: a.mp4 and 1 more were written after")


def test_the_narrator_says_how_videos_are_encoded(tmp_path):
    """Its own encoder, rate and grid, unless others are given; a published folder has the published ones."""
    assert own_videos.encoder_settings(str(TOY), fps=None) == {"vision": str(TOY / "vision"), "fps": 2.0, "grid": 3}
    assert own_videos.encoder_settings(str(TOY), vision="x", fps=4.0, grid=None) == {"vision": "x", "fps": 4.0, "grid": 3}
    assert own_videos.encoder_settings(str(GOLDEN / "flownar")) == own_videos.encoder_settings(None, fps=None) == {}
    shutil.copytree(TOY, tmp_path / "two")
    settings = json.loads((TOY / "narrator.json").read_text()) | {"width_second": 8}
    (tmp_path / "two" / "narrator.json").write_text(json.dumps(settings))
    for model, says in ((tmp_path / "two", "two encoders"), (tmp_path, "missing"), (tmp_path / "no", "not a folder")):
        with pytest.raises(BadData, match=says):
            own_videos.encoder_settings(str(model))


# ---------------------------------------------------------------------- statistics and the command line

def test_numbers_to_choose_options_by():
    found = own_videos.spread([1.0] * 150 + [6.0] * 49 + [30.0])
    assert found["segment_50%"] == 1.0 and found["segments_within_4_s"] == 0.75
    assert 6.0 <= found["segment_99.5%"] < 30.0 == found["segment_100%"]
    assert "the longest 30.0" in own_videos.advice(found) and "75% within 4 s" in own_videos.advice(found)
    assert own_videos.spread([]) == {} and "one narration" in own_videos.advice({})


def test_a_folder_is_no_name_and_has_no_root(tmp_path, capsys):
    folder = made(tmp_path, {"a": 20, "b": 20})
    with pytest.raises(BadData, match="--root x is for the data sets with names"):
        samples(folder, root="x")
    with pytest.raises(BadData, match="unknown data set '.*gone'; choose one of toy, .*, or a folder of videos"):
        samples(tmp_path / "gone")
    with pytest.raises(BadData, match="no such folder"):
        encode(tmp_path / "gone")
    assert "or a folder" in command("stream", "--data", tmp_path / "gone", ok=False)
    for words in (["encode", "a.mp4"], ["encode", "a.mp4", "--output", "x", "--data", str(folder)], ["encode"],
                  ["encode", "--data", str(folder), "--output", "x"], ["stats", "--data", str(tmp_path / "gone")]):
        with pytest.raises(SystemExit) as exited:
            data_command.run(words)
        assert exited.value.code == 2
    assert "a folder of videos with narrations beside them, not" in capsys.readouterr().err
    assert data.DATASETS is DATASETS and "" not in DATASETS
