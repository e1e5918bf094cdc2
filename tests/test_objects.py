"""experiments/objects.py (App. C.1): objects of sentences, which of them are right, and what the picture shows."""
import json
from functools import partial

import pytest

from experiments import objects
from support.narrations import Sentence, Truth
from test_evaluate import command, write
from test_summary import Fake
from toy import world

counted = partial(command, main=objects.main)


def said(*texts):
    return [{"time": 2.0 * n + 1, "text": text} for n, text in enumerate(texts)]


def narrated_by(kitchen):
    return [Sentence((y.frame + 1) / world.FPS, y.text) for y in kitchen.narrations]


def as_rows(sentences):
    return [{"time": y.time, "text": y.text} for y in sentences]


# ---------------------------------------------------------------------- which objects a sentence names

@pytest.mark.parametrize("kind", ["plain", "second"])
def test_templates_read_every_sentence_of_the_toy(kind):
    reader, kind = objects.ByTemplate(), world.WORLDS[kind]
    words = {"place": kind.places[2], "thing": f"{kind.colours[0]} cup"}
    for text in kind.sentences.values():
        wanted = {given for field, given in words.items() if f"{{{field}}}" in text}
        assert set(reader.objects(text.format(**words))) == wanted
    assert not reader.unread
    for wrong in ("You wash the red red cup.", "You wash the red cup", "You wash the sink.", "C runs.", "You cup."):
        assert reader.objects(wrong) == []
    assert len(reader.unread) == 5


def test_templates_do_not_mix_worlds():
    reader = objects.ByTemplate()
    assert reader.objects("You wash the lime cup.") == [] and reader.objects("You rinse the lime cup.") == ["lime cup"]


def test_one_word_but_for_article_and_plural():
    assert [objects.singular(y) for y in ("The Red Cups", "glasses", "glass", "a bus", "berries", "boxes", "knife",
                                          " dishes ", "vases", "the")] == [
        "red cup", "glass", "glass", "bus", "berry", "box", "knife", "dish", "vase", "the"]


@pytest.mark.parametrize("answer, found, unread", [
    ('["cup", "sink"]', ["cup", "sink"], 0), ('Sure: [1] then ["cup"] ["pan"]', ["cup"], 0), ("[]", [], 0),
    ("cup, sink", [], 1), ("", [], 1), ('["cup"', [], 1), ('[["cup"], 3]', ["cup"], 0), ('{"a": 1}', [], 1),
    ("[cup]", [], 1), ("[[[[" * 1000, [], 1)])
def test_lists_in_answers(answer, found, unread):
    fake = Fake(answer)
    reader = objects.ByModel(fake.ask)
    assert reader.objects("You {wash} the\ncup.") == found and len(reader.unread) == unread
    assert fake.asked[0].endswith("Sentence: You {wash} the cup.\nObjects:")


@pytest.mark.parametrize("answer, same, unread", [("Yes.", True, 0), (" **no**, they", False, 0), ("Nope", False, 1),
                                                  ("", False, 1), ("maybe yes", False, 1)])
def test_yes_or_no(answer, same, unread):
    reader = objects.ByModel(Fake(answer).ask)
    assert reader.same("mug", "cup") is same and len(reader.unread) == unread


# ---------------------------------------------------------------------- which of them are right

def test_judged_by_hand():
    """Equal objects are not asked about; others are compared with every true one."""
    fake = Fake('["The cups", "Sink", "cup"]', '["cup", "basin", "dog"]', "no", "no", "yes", "no")
    row = objects.judge(objects.ByModel(fake.ask), "a", "b")
    assert row == objects.Judged({"cup": True, "sink": True}, {"cup": True, "basin": True, "dog": False})
    assert [q.splitlines()[-2] for q in fake.asked[2:]] == [
        "Words: cup, basin", "Words: cup, dog", "Words: sink, basin", "Words: sink, dog"]
    nothing = objects.judge(objects.ByModel(Fake('["cup"]').ask), "a", "")
    assert nothing == objects.Judged({"cup": False}, {})


def test_measures_by_hand():
    rows = [objects.Judged({"a": True, "b": False}, {"a": True}), objects.Judged({}, {"z": False}),
            objects.Judged({"a": True}, {"a": True, "c": False, "d": False}), objects.Judged({"a": False}, {})]
    assert objects.object_measures(rows) == pytest.approx({
        "pairs": 3, "without_objects": 1, "true_objects": 4, "predicted_objects": 4,
        "object_accuracy": 2 / 4, "objects_found": 2 / 4,
        "object_accuracy_of_pairs": (1 + 1 / 3) / 2, "objects_found_of_pairs": (0.5 + 1 + 0) / 3})
    assert objects.object_measures([])["object_accuracy"] is None


def test_command_by_template(tmp_path):
    """Toy files in a folder, predictions in one file: one of three things is wrong, one sentence not the toy's."""
    (tmp_path / "gt").mkdir()
    true = said("You look around the kitchen.", "You wash the red cup.", "You tap the fridge hiding the blue pan.")
    write(tmp_path / "gt" / "a.json", {"video": "a.mp4", "fps": 2, "duration": 9.0, "narrations": true})
    write(tmp_path / "gt" / "b.json", {"video": "b.mp4", "fps": 2, "duration": 9.0, "narrations": true[:2]})
    told = said("You look around the kitchen.", "You heat the red cup.", "You tap the fridge hiding the blue cup.")
    pred = write(tmp_path / "p.json", {"a": told, "b": said("You x.", "You x.")})
    result = counted("--pred", pred, "--gt", tmp_path / "gt", "--json")
    assert result == pytest.approx({
        "videos": 2, "not_understood": 1, "pairs": 3, "without_objects": 2, "true_objects": 4, "predicted_objects": 3,
        "object_accuracy": 2 / 3, "objects_found": 2 / 4, "object_accuracy_of_pairs": (1 + 0.5) / 2,
        "objects_found_of_pairs": (1 + 0.5 + 0) / 3})


def test_rubbish_is_counted(tmp_path, monkeypatch):
    pred, gt = write(tmp_path / "p.json", {"a": said("You run.")}), write(tmp_path / "g.json", {"a": said("You cook.")})
    monkeypatch.setattr(objects, "Answers", Fake("???", '["egg"]'))
    result = counted("--pred", pred, "--gt", gt, "--llm", "any", "--json")
    assert (result["not_understood"], result["pairs"], result["without_objects"]) == (1, 0, 1)
    assert result["object_accuracy"] is None
    monkeypatch.setattr(objects, "Answers", Fake('["egg"]', '["mug"]', "I think so"))
    result = counted("--pred", pred, "--gt", gt, "--llm", "any", "--json")
    assert (result["not_understood"], result["pairs"], result["object_accuracy"]) == (1, 1, 0)


# ---------------------------------------------------------------------- what the picture has to do with it

def test_clutter_is_in_sight_though_not_in_use():
    """Sentences that name clutter, then what is nowhere to be seen."""
    kind = world.WORLDS["clutter"]
    kitchen = world.Kitchen(4, 10, kind)
    truth = Truth([narrated_by(kitchen)])
    thing = next(filter(None, kitchen.clutter))
    lies = {"clutter": " ".join(kind.words(thing.type, thing.colour))}
    labels = kitchen.labels()
    seen = {tuple(look) for look in labels[..., [world.TYPE, world.COLOUR]].reshape(-1, 2).tolist()}
    seen |= {(one.type, one.colour) for one in kitchen.clutter if one}
    lies["nowhere"] = next(" ".join(kind.words(k, c)) for k in range(1, 7) for c in range(1, 7) if (k, c) not in seen)
    for which, name in lies.items():
        predicted = [Sentence(y.time, f"You wash the {name}.") for y in truth.annotators[0]]
        rows = [objects.judge(objects.ByTemplate(), y.text, z.text) for y, z in zip(truth.annotators[0], predicted)]
        shown = objects.shown(kitchen, truth, predicted, rows)
        result = objects.failures(shown, kind)
        assert result["wrong_things"] == sum(
            not right for row in rows if row.found for right in row.right.values()) > 5
        assert result["wrong_in_sight"] == result["wrong_clutter"] == (which == "clutter")
        assert 0 < result["by_chance"] < 0.5 and all(one.hit for one in shown)


def test_what_is_seen_in_a_segment():
    """The frames of a segment are those after the end of the one before, up to its own."""
    kitchen = world.Kitchen(3, 6)
    truth, labels = Truth([narrated_by(kitchen)]), kitchen.labels()
    shown = objects.shown(kitchen, truth, [], [objects.Judged({}, {})] * 7)
    begin = 0
    for one, narration in zip(shown, kitchen.narrations):
        frames = range(begin, narration.frame + 1)
        cells = labels[frames].reshape(-1, labels.shape[-1])
        assert one.sight == {(cell[world.TYPE], cell[world.COLOUR]) for cell in cells.tolist() if cell[world.TYPE]}
        assert one.light == pytest.approx(sum(map(kitchen.light, frames)) / len(frames)) and not one.hit
        begin = narration.frame + 1


def test_recall_by_light(tmp_path, monkeypatch):
    """Predictions in daylight only, for videos by seed, of which nothing is rendered."""
    monkeypatch.setattr(world.Kitchen, "render", lambda *_: pytest.fail("a picture is rendered"))
    kept = {}
    for seed, kitchen in world.kitchens("test", 4, world=world.WORLDS["dark"]):
        true = narrated_by(kitchen)
        shown = objects.shown(kitchen, Truth([true]), [], [objects.Judged({}, {})] * len(true))
        kept[f"toy-{seed}"] = as_rows([one for n, one in enumerate(true) if n == 0 or shown[n].light >= 0.6
                                       or shown[min(n + 1, len(true) - 1)].light >= 0.6])
    pred = write(tmp_path / "p.json", kept)
    groups = counted("--pred", pred, "--data", "toy", "--world", "dark", "--limit", 4, "--json")["by_light"]
    assert list(groups) == ["light 0 - 0.1", "light 0.1 - 0.3", "light 0.3 - 0.6", "light >= 0.6"]
    assert groups["light >= 0.6"]["recall"] == 1 and groups["light >= 0.6"]["objects_found"] == 1
    assert groups["light 0 - 0.1"]["recall"] < 0.3 and groups["light 0 - 0.1"]["objects_found"] < 0.5
    table = counted("--pred", pred, "--data", "toy", "--world", "dark", "--limit", 4)
    assert "light >= 0.6" in table and "objects found" in table


def test_files_have_no_kitchen(tmp_path):
    """Only videos by seed are known to the world."""
    rows = said("You look around the kitchen.", "You wash the red cup.")
    pred = write(tmp_path / "p.json", {"a": rows})
    assert "by_light" not in counted("--pred", pred, "--gt", pred, "--json")
    seed, kitchen = next(world.kitchens("val", 1))
    pred = write(tmp_path / "q.json", {f"toy-{seed}": as_rows(narrated_by(kitchen))})
    result = counted("--pred", pred, "--data", "toy", "--split", "val", "--limit", 1, "--json")
    assert result["object_accuracy"] == 1 and result["wrong_things"] == 0 and result["wrong_in_sight"] is None
    assert json.dumps(result["by_light"]) and sum(y["segments"] for y in result["by_light"].values()) == len(
        kitchen.narrations)


# ---------------------------------------------------------------------- bad input

@pytest.mark.parametrize("options, says", [
    ("--gt p.json", "only the toy's sentences"), ("--gt other.json", "are not in"), ("--gt nowhere.json", "nowhere"),
    ("--gt p.json --llm nowhere", "nowhere"), ("--gt g.json --llm x --answers g.json", "given twice"),
    ("--gt g.json --llm x --answers p.txt", "does not hold answers"), ("--data ek100 --root nowhere", "error")])
def test_bad_input_of_objects(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    for name in ("p.json", "g.json", "p.txt"):
        write(tmp_path / name, {"a": said("C runs."), "b": []})
    write(tmp_path / "other.json", {"z": said("C runs."), "y": []})
    assert says in counted("--pred", "p.json", *options.split(), ok=False)


def test_objects_need_a_truth(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["objects", "--pred", "p.json"])
    with pytest.raises(SystemExit) as end:
        objects.main()
    assert end.value.code == 2 and "--gt" in capsys.readouterr().err
