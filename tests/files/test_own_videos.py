"""Your own videos (--data FOLDER): narrations, splits, features, the whole way to a narrator."""
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import data
import narrator as nar
from narrator import load
from beyond.commands import data_command, train_command
from helpers import TOY
from beyond.training.anywhere import draw_start, from_anywhere, sample_from
from beyond.streams.subtitles import srt_cue
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.files import own_videos
from support.common.marks import digest_of_file
from support.files.narrations import read_predictions
from test_evaluate import command

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.usefixtures("no_java")


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Two folders of the same three videos: one with their .json, one with .srt files, encoded."""
    toy = tmp_path_factory.mktemp("toy")
    own = tmp_path_factory.mktemp("own")
    data_command.run(["toy", "--seed", "4", "--minutes", "0.15", "--count", "3", "--output", str(toy)])
    for path in toy.glob("*.json"):
        start = 0.0
        cues = []
        for number, narration in enumerate(json.loads(path.read_text())["narrations"]):
            cues.append(srt_cue(number, start, narration["time"], narration["text"]))
            start = narration["time"]
        (own / f"{path.stem}.srt").write_text("".join(cues))
        shutil.copy(path.with_suffix(".mp4"), own)
    encode(own)
    return toy, own


def encode(folder, *options):
    data_command.run(["encode", "--data", str(folder), "--model", str(TOY), "--device", "cpu", *options])


def make_folder(folder, frames, text="time,text\n0.5,You look.\n4,You sit.\n", width=4, **settings):
    """Videos {name: number of frames} with .csv files and features, as if they had been encoded."""
    (folder / "features").mkdir(parents=True, exist_ok=True)
    for name, count in frames.items():
        (folder / f"{name}.mp4").write_bytes(b"a video")
        (folder / f"{name}.csv").write_text(text)
        x = torch.arange(float(count))[:, None, None].expand(count, 10, width).contiguous()
        header = {"vision": "v", "fps": "2.0", "grid": "3", "duration": str(count / 2)} | settings
        header |= {"video": digest_of_file(folder / f"{name}.mp4")}
        save_file({"features": x}, folder / "features" / f"{name}.safetensors", header)
    return folder


def train_on(folder, output, **options):
    options |= {"data": str(folder), "output": str(output), "device": "cpu"}
    train_command.check_and_train(train_command.options_from(**options))


@pytest.fixture
def no_look_back(monkeypatch):
    """What a narrator has learned is not streamed at the end; one that knows nothing writes long."""
    monkeypatch.setattr(train_command, "tell_learned", lambda narrator, samples, kind: None)


def samples(folder, split="all", **options):
    return list(data.load_dataset(str(folder), split=split, **options))


def names(folder, split):
    return [sample.name for sample in samples(folder, split)]


def test_training_begins_anywhere(toys):
    """From any frame of a file: the latest sentence at once, which is not learned if it is an earlier
    one's, and those after it at their own frames. Frames before the first sentence are used, too.
    """
    _, own = toys
    whole = samples(own)[0]
    first, _ = whole.narrations[1]
    sample = sample_from(whole, first)                   # a file that has no sentence before this
    true = {first + frame: text for frame, text in sample.narrations}
    assert sample_from(sample, first) == sample
    for start in range(0, max(true) + 1, 5):
        part = sample_from(sample, start)
        (frame, text), *others = [(start + frame, text) for frame, text in part.narrations]
        latest = max(frame for frame in true if frame <= max(start, first))
        assert (frame, text) == (start, true[latest])
        assert dict(others) == {frame: text for frame, text in true.items() if frame > start}
        assert part.num_frames == first + sample.num_frames - start
        assert torch.equal(part.read(0, 2), sample.features.read(start, start + 2))
    chance = random.Random(0)
    drawn = Counter(draw_start(sample, chance) for _ in range(400))
    assert drawn[first] > 70 and drawn[0] > 70
    assert drawn.keys() == set(range(max(true)))

    model = load(str(TOY))
    videos_of = from_anywhere([whole], model.layout, 8, 0)
    for example in [read() for read in videos_of(0)]:
        _, learned = example.loss(model)
        is_rest = len(example.x) < whole.num_frames
        words = [len(model.layout.assistant + ids) + 1 for _, ids in example.narrations]
        last, _ = example.narrations[-1]
        assert learned == sum(words[is_rest:]) + last          # each frame but the first decides


def test_four_commands(toys, tmp_path, capsys):
    _, own = toys
    out, kept = tmp_path / "out", tmp_path / "kept"
    data_command.run(["stats", "--data", str(own), "--json"])
    stats = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert stats["videos"] == 3 and stats["split"] == "all"

    train_on(own, out, init=str(TOY), epochs=1.0)
    row, = read_jsonl(out / "narrator-log.jsonl")
    assert 0 < row["val_loss"] < 1
    said = capsys.readouterr().err
    number = r"(\d+)"
    for kind, videos in (("training", 2), ("held-out", 1)):
        told = re.search(rf"{kind} videos, {videos} of {videos} streamed: of {number} sentences "
                         rf"{number} are in time, {number} exact", said)
        sentences, in_time, exact = map(int, told.groups())
        assert sentences >= in_time > sentences / 2 and sentences >= exact > sentences / 2
        assert said.count(", written: ") >= min(3, sentences - exact)
    assert Path(load(str(out)).config.vision) == TOY / "vision"
    card = ModelCard.load(out / "README.md")
    assert card.data.tags and f"Trained on: {own.name}, 2 videos" in card.text
    assert str(tmp_path) not in card.text
    encode(own, "--model", str(out))           # nothing to do: the same vision model

    shown = command("stream", "--data", own, "--model", out, "--show", 1, "--output", kept)
    same = re.findall(r" true +(.+)\n.* written +\1\n", shown)
    assert exact >= len(same) > sentences / 2
    name, = read_predictions(kept / "predictions")
    assert (own / f"{name}.srt").exists()
    scored = command("score", "--pred", kept / "predictions", "--gt", own, "--partial", "--json")
    assert scored["f1"] > 0.5 and scored["exact"] == pytest.approx(exact / sentences)


def test_published_weights_are_fine_tuned(tmp_path, no_look_back):
    width = load_file(GOLDEN / "video.safetensors")["video_101"].shape[2]
    text = "time,text\n1,You put the pot.\n4,You talk to a woman.\n"
    folder = make_folder(tmp_path / "own", {"a": 10, "b": 10}, text, width, vision=nar.Config.vision)
    with pytest.raises(BadData, match="there is no such folder; --vision takes"):
        train_on(folder, tmp_path / "none", init=str(GOLDEN / "flownar"), vision="/no/such/folder")
    train_on(folder, tmp_path / "out", init=str(GOLDEN / "flownar"), epochs=1.0)
    config = load(str(tmp_path / "out")).config
    assert (config.readout, config.width) == ("cls", width)


def test_a_new_narrator_takes_vision_model_and_rate_of_the_features(tmp_path, no_look_back):
    slow = make_folder(tmp_path / "slow", {"a": 5, "b": 5}, width=16, fps="1.0", vision="some/model")
    with pytest.raises(BadData, match="1 frames a second, the narrator needs 2"):
        train_on(slow, tmp_path / "no", init=str(TOY))
    out = tmp_path / "out"
    train_on(slow, out, llm=str(TOY / "llm"), epochs=1.0, memory_heads=2, memory_tokens=4, lora_rank=4)
    config = load(str(out)).config
    assert (config.fps, config.vision) == (1.0, "some/model")
    fast = make_folder(tmp_path / "fast", {"a": 10, "b": 10}, width=16, vision="some/model")
    message = command("stream", "--data", fast, "--model", out, ok=False)
    assert "2 frames a second, the narrator needs 1" in message


@pytest.mark.parametrize("loss, videos, width, epochs, rate", [
    (0.4, 9, 128, 10, 2e-4),                   # known words
    (6.5, 9, 128, 400 / 3, 8e-4),              # new ones, a small language model
    (6.5, 9, 2048, 400 / 3, 2e-4),             # a large one
    (6.5, 500, 4096, 10, 2e-4),
])
def test_length_of_training(loss, videos, width, epochs, rate):
    chosen = train_command.length_of_training(loss, videos, 2, width)
    assert chosen == pytest.approx({"epochs": epochs, "lr": rate})


@pytest.mark.parametrize("name, content", [
    ("a.srt", srt_cue(0, 0, 0.5, "You look") + srt_cue(1, 1, 3, "") + srt_cue(2, 1, 4, "You tap it")),
    ("a.csv", "time,text\n4,You tap it\n3,\n0.5,You look\n"),
    ("a.json", json.dumps({"video": "a.mp4", "fps": 30, "duration": 3, "narrations": [
        {"time": 0.5, "text": "You\nlook"}, {"time": 4, "text": "You tap it", "memory": []}]})),
])
def test_each_form_gives_the_sentences_as_they_are_written(tmp_path, capsys, name, content):
    folder = make_folder(tmp_path, {"a": 20})
    (folder / "a.csv").unlink()
    (folder / name).write_text(content)
    sample, = samples(folder)
    assert sample.narrations == [(0, "You look"), (7, "You tap it")]
    is_left_out = "narrations without words left out: 1" in capsys.readouterr().err
    assert is_left_out == ("\n\n\n" in content or "3,\n" in content)


def test_bad_narrations_are_refused_by_name(tmp_path):
    for text, message in (("time,text\n1,\n", "a.csv.* has no narrations"),
                          ("time,text\n1,You sit, and go.\n", "a.csv, line 2: expected")):
        make_folder(tmp_path, {"a": 20}, text)
        for read in (samples, encode):
            with pytest.raises(BadData, match=message):
                read(tmp_path)
    (tmp_path / "a.csv").unlink()
    for narrated in ("ab", "b"):               # narrations of b would be lost, or a's
        rows = dict.fromkeys(narrated, [{"time": 1, "text": "You sit."}])
        (tmp_path / "a.json").write_text(json.dumps(rows))
        with pytest.raises(BadData, match="a.json: expected a list of narrations"):
            samples(tmp_path)


def test_placed_on_frames(tmp_path, capsys):
    sample, = samples(make_folder(tmp_path, {"a": 20}, """time,text
2.2,You look.\n4,You sit.\n4,You stand.\n3.8,You cut.\n9.9,You stir.\n10.2,You eat.\n10.5,You go."""))
    assert sample.narrations == [(0, "You look."), (3, "You cut."), (4, "You sit."),
                                 (5, "You stand."), (14, "You stir."), (15, "You eat.")]
    assert (sample.num_frames, sample.duration) == (16, 10.0)
    assert (sample.start, sample.origin) == (2.0, 2.0)
    assert sample.read(0, 16)[:, 0, 0].tolist() == list(range(4, 20))
    assert [sentence.time for sentence in sample.annotators[0]] == [2.5, 4.0, 4.5, 5.0, 9.5, 10.0]
    line, = capsys.readouterr().err.splitlines()
    assert "sentences in .csv files: 7 (a.csv: 7)" in line
    assert "narrations beyond the end of their video moved to its last frame: 1 (a.csv: 1)" in line
    assert re.search(r"narrations moved by a frame or more, .*: 3 \(a.csv: 3\)", line)
    assert "narrations beyond the end of their video left out: 1 (a.csv: 1)" in line


@pytest.mark.parametrize("times, message", [
    (range(3, 99, 4), None),
    ([-1, 4], "2 narrations on 2 frames, from -1 to 4 s"),
    ([1, 100.6], "2 narrations on 2 frames, from 1 to 100.6 s"),           # another video's
    ([time / 60 for time in range(3, 99, 4)], "24 narrations on 4 frames"),    # minutes
])
def test_narrations_that_are_not_of_the_video_are_refused(tmp_path, times, message):
    rows = [{"time": time, "text": "You cut."} for time in times]
    make_folder(tmp_path, {"a": 200})
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.json").write_text(json.dumps(rows))
    if message is None:
        assert len(samples(tmp_path)[0].narrations) == len(rows)
        return
    with pytest.raises(BadData, match=rf"a\.json: {message}, .*not of this video \(100 s, 2 frames a second\)"):
        samples(tmp_path)


def test_split_by_share(tmp_path):
    folder = make_folder(tmp_path, {f"v{n}": 20 for n in range(20)})
    for_validation = names(folder, "val")
    assert sorted(names(folder, "train") + for_validation) == names(folder, "all")
    assert 1 <= len(for_validation) <= 8
    make_folder(folder, {f"w{n}": 20 for n in range(20)})
    assert set(names(folder, "val")) >= set(for_validation)
    pair = make_folder(tmp_path / "pair", {"a": 20, "b": 20})
    assert len(names(pair, "val")) == 1
    assert {*names(pair, "train"), *names(pair, "val")} == {"a", "b"}
    single = make_folder(tmp_path / "single", {"a": 20})
    assert names(single, "train") == ["a"]


@pytest.mark.parametrize("files, split, expected", [
    ({"val": "b\n\ne.f\n"}, "val", ["b", "e.f"]),
    ({"val": "b", "test": "c"}, "train", ["a", "d", "e.f"]),
    ({"val": "b", "test": "c"}, "test", ["c"]),
    ({}, "test", r"none of its 5 videos is for test; write names .*test\.txt"),
    ({"test": "a\nb\nc\nd"}, "val", r"for val; .*val\.txt .*\(train.py --val-limit 0 needs none\)"),
    ({}, "dev", "unknown split 'dev'; choose one of train, val, test, all"),
    ({"val": "a\nc\n", "test": "c"}, "all", r"test\.txt: 'c' is .* listed twice"),
    ({"test": "a.mp4\n"}, "all", r"test\.txt: 'a\.mp4' is no video of"),
])
def test_split_by_file(tmp_path, files, split, expected):
    folder = make_folder(tmp_path, dict.fromkeys(["a", "b", "c", "d", "e.f"], 20))
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    if isinstance(expected, str):
        with pytest.raises(BadData, match=expected):
            samples(folder, split)
        return
    assert names(folder, split) == expected
    assert [sample.name for sample in samples(folder, split, limit=1)] == expected[:1]


def test_what_lies_in_the_folder(tmp_path, capsys):
    folder = make_folder(tmp_path, {"a": 20, "b": 20})
    (folder / "b.mp4").unlink()
    (folder / "c.MP4").write_bytes(b"x")
    for name in ("readme.txt", ".a.srt", "c.ass", "a.en.srt", "settings.json"):
        (folder / name).write_text("x")
    (folder / "more").mkdir()
    (folder / "more" / "d.mp4").touch()
    assert names(folder, "all") == ["a", "b"]
    notes = capsys.readouterr().err
    assert "videos or narrations left out, because" in notes
    assert ": 4 (c.MP4, a.en.srt, settings.json, more/d.mp4)" in notes
    for first, second in (("a.mov", "a.mp4"), ("a.csv", "a.srt")):
        for name in (first, second):
            (folder / name).touch()
        with pytest.raises(BadData, match=f"{second}: {first} has the same name"):
            samples(folder)
        (folder / first).unlink()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "b.mp4").touch()
    with pytest.raises(BadData, match=r"has no video with narrations beside it, .*\(b\.mp4\)"):
        samples(bare)


def test_features_of_other_settings_are_refused(tmp_path):
    """Of another video: test_marks.py."""
    folder = make_folder(tmp_path, {"a": 20}, width=16)
    make_folder(folder, {"b": 20}, width=16, fps="4.0")
    with pytest.raises(BadData, match="b: has 4 frames a second, the narrator needs 2"):
        train_on(folder, tmp_path / "out", llm=str(TOY / "llm"))
    own_videos.feature_file(folder, "a").unlink()
    with pytest.raises(BadData, match="a.safetensors: is missing: python data.py encode"):
        samples(folder)


def test_a_folder_is_no_name_and_has_no_root(tmp_path):
    folder = make_folder(tmp_path, {"a": 20})
    missing = tmp_path / "gone"
    with pytest.raises(BadData, match="--root x is for the data sets with names"):
        samples(folder, root="x")
    for read in (samples, encode):
        with pytest.raises(BadData, match="gone: no such folder; choose one of toy, .*, or a folder of videos"):
            read(missing)
    assert "no such folder" in command("stream", "--data", missing, ok=False)
