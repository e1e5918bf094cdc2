"""The player's page and the live page, in a real Chromium (tests/browser.py); what they know of the cache."""
import gzip
import http.client
import json
import math
import random
import shutil
import socket
import struct
import sys
import threading
import time
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from unittest import mock

import av
import numpy as np
import pytest

from browser import CHROMIUM, Browser
from commands import stream as stream_command
from commands.stream import trace_row
from helpers import ROOT, grouped, narrate, tiny, video
from narrator import NARRATION
from streams import page as player, serve
from streams.fast import open_stream
from support.common.errors import BadData

KITCHEN = ROOT / "toy" / "kitchen.mp4"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
READY = "document.documentElement.dataset.ready"
TEXT = "[...document.querySelectorAll(%r)].map(e => e.textContent)"


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def embedded(page: str) -> dict:
    """The data of a page."""
    return json.loads(gzip.decompress(b64decode(page.split('id="data">')[1].split("<")[0])))


def made(rows: int, every: int = 9) -> tuple[list[dict], list[dict]]:
    """Trace and JSONL of a stream that narrates each `every` frames and keeps the last ten, as stream.py counts."""
    trace, said, numbers = [], [], random.Random(0)
    position, visual, text, kept = 0, 0, 41, []
    for frame in range(rows):
        narrate = frame % every == 0
        p = None if frame == 0 else numbers.uniform(0, 0.4) if narrate else 1 - numbers.random() ** 9 / 3
        position += 11
        visual += 11 if visual or not frame else 23
        if frame and not trace[-1]["visual_tokens"]:
            text += 2
        if narrate:
            words = numbers.randint(4, 9)
            said.append({"n": len(said), "frame": frame, "start": max(0, frame - every + 1) / 2, "end": (frame + 1) / 2,
                         "text": f"You open drawer {len(said)}.", "p_skip": p, "tokens": [7] * words})
            kept = [*kept, words + 4][-10:]
            text, visual = 41 + sum(kept) - 2, 0
        trace.append({"frame": frame, "p_skip": p, "theta": None if p is None else 0.5, "narrate": narrate,
                      "position": position, "text_tokens": text, "visual_tokens": visual, "forced": frame == 0,
                      "kept": [max(0, len(said) - 10), len(said) - 1]})
    return trace, said


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A folder with JSONL, trace and page of toy/kitchen.mp4, as the bundled narrator narrates it, and with what was
    served at the end; Ctrl-C ended it."""
    folder = tmp_path_factory.mktemp("kitchen")

    def look(pages):
        for what in ("narrations.jsonl", "video", "frame.jpg", ""):
            (folder / f"served {what}").write_bytes(ask(pages.url, "/" + what)[2])
        raise KeyboardInterrupt

    files = [f"--{name}={folder / name}" for name in ("jsonl", "trace")]
    argv = ["stream.py", str(KITCHEN), "--device", "cpu", *files, f"--html={folder / 'page.html'}", "--serve", "0"]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(serve.Pages, "wait", look):
        with pytest.raises(SystemExit) as end:
            stream_command.main()
    assert end.value.code == 130
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def served(pages: dict[str, serve.Page], port: int = 0) -> str:
    return serve.serve(pages, "127.0.0.1", port)


def filled(source, trace: list[dict], said: list[dict], **options) -> serve.Page:
    page, frames = serve.Page(str(source), **options), {y["frame"]: y for y in said}
    for row in trace:
        page.tell(row, frames.get(row["frame"]))
    return page


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- what is in the cache

@pytest.mark.parametrize("changes", [{"last_k": 10}, {"last_k": 2}, {"last_k": 1}, {"last_k": 0}, {"last_k": None},
                                     {"last_k": 2, "memory": "none"}, {"last_k": 2, "keep_newline": True},
                                     {"prune": False, "memory": "none"}], ids=str)
def test_a_record_knows_what_is_in_the_cache(changes):
    """From the trace: which narrations the next segment sees, and how long each part is."""
    model, record, numbers = tiny(llm=grouped(), **changes), player.Record(), random.Random(1)
    model.layout.assistant += model.layout.encode("So, ") if changes == {"last_k": 10} else []
    at = sorted({0, *numbers.sample(range(1, 50), 16)})
    x, given = video(model, 50, at)
    context, seen = open_stream(model), []
    for decision in narrate(model, x, forced=dict(given), context=context):
        row = trace_row(decision, model.layout)
        record.add(row, decision.narration and vars(decision.narration))
        cache = context.cache
        there = sorted(set(cache.number[cache.kind == NARRATION].tolist()))
        first, last = decision.kept or (0, -1)
        assert there == list(range(first, last + 1))
        if decision.narration:
            y = record.narrations[-1]
            seen.append((sorted(set(cache.number[cache.kind == NARRATION].tolist())), cache.text))
    for (there, text), y in zip(seen, record.narrations, strict=True):
        assert there == list(range(y["n"] + 1 - y["kept"], y["n"] + 1))
        sizes = sum(z["size"] for z in record.narrations[y["n"] + 1 - y["kept"]:y["n"] + 1])
        left = y["n"] + 1 - y["kept"] if changes.get("keep_newline") else 0
        assert record.sizes["prompt"] + sizes - 2 * (y["kept"] > 0) + left == text
    layout = model.layout
    assert record.sizes["prompt"] == len(layout.prompt + layout.user + layout.newline)
    assert record.sizes["frame"] == layout.J + 1 and record.sizes["memory"] == (layout.M and layout.M + 2)


def test_a_few_sentences_of_which_none_is_kept():
    model, record = tiny(last_k=0), player.Record()
    x, given = video(model, 21, (0, 20))
    for decision in narrate(model, x, forced=dict(given)):
        row = trace_row(decision, model.layout)
        record.add(row, decision.narration and vars(decision.narration))
        assert [y["kept"] for y in record.narrations] == [0] * len(record.narrations)
        prompt = model.layout.prompt + model.layout.user + model.layout.newline
        assert record.sizes["prompt"] == len(prompt)


def test_a_trace_of_before_does_not_say_what_is_kept():
    trace, said = made(40)
    for row in trace:
        del row["kept"]
    page = filled("a.safetensors", trace, said)
    assert page.record.sizes == {"prompt": 0, "memory": 12, "frame": 11}
    assert [y["kept"] for y in page.record.narrations] == [0] * 5


def test_a_record_goes_on_after_a_restart():
    """The prompt's length is known again when all sentences that are kept have been seen."""
    trace, said = made(300)
    frames = {y["frame"]: y for y in said}
    record = player.Record()
    for row in trace[100:]:
        record.add(row, frames.get(row["frame"]))
        assert record.sizes["prompt"] == (41 if len(record.narrations) >= 10 else 0)
    assert {y["kept"] for y in record.narrations} == {10}


def test_a_record_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(player, "KEPT", 50)
    trace, said = made(300)
    frames = {y["frame"]: y for y in said}
    record = player.Record()
    for row in trace[:90]:
        record.add(row, frames.get(row["frame"]))
    before, content = record.so_far(), record.content()
    for row in trace[90:]:
        record.add(row, frames.get(row["frame"]))
    assert before.content() == content
    assert len(record.content()["rows"]["p"]) < 100 and record.first > 0


def test_data_in_pieces(monkeypatch):
    monkeypatch.setattr(player, "PIECE", 7)
    content = filled("camera", *made(100)).record.content(live=None)
    rows = {name: y if name == "first" else y.tolist() for name, y in content["rows"].items()}
    whole = content | {"rows": rows}
    assert "".join(player.json_pieces(content)) == json.dumps(whole)
    assert json.loads(gzip.decompress(b64decode(player.packed(content)))) == whole


def test_a_record_is_bounded(monkeypatch):
    monkeypatch.setattr(player, "KEPT", 50)
    trace, said = made(1000)
    page = filled("rtsp://user:secret@10.0.0.7/door?password=x", trace, said)
    rows = page.record.content(live=None)["rows"]
    assert 50 <= len(rows["p"]) <= 100 and rows["first"] + len(rows["p"]) == 1000
    assert rows["text"][-1] == trace[-1]["text_tokens"] and page.record.narrations[0]["frame"] >= rows["first"]
    assert "secret" not in page.html() and page.title == "rtsp://***@10.0.0.7/door?password=***"
    assert not len(filled("camera", trace, said, wanted=False).record)


def test_files_that_do_not_fit_get_one_line(tmp_path):
    trace, said = made(40)
    good, other = lines(tmp_path / "n.jsonl", said), lines(tmp_path / "t.jsonl", trace)
    assert len(player.read_record(good, other)) == 40 and len(player.read_record(good, None).narrations) == 5
    for rows, words in ((said[:-1], "differ"), ([{**said[0], "end": -1}], "line 1"), ([{"text": 3}], "line 1")):
        with pytest.raises(BadData, match=words):
            player.read_record(lines(tmp_path / "bad.jsonl", rows), other)
    for rows in (trace[:3] + trace[4:], [{**trace[0], "p_skip": "x"}], [{"frame": 0}]):
        with pytest.raises(BadData, match="is no row of a trace"):
            player.read_record(good, lines(tmp_path / "bad.jsonl", rows))
    for changes in ({"time": "x"}, {"time": 1e300}, {"time": None}, {"p_skip": math.nan},
                    {"theta": math.inf}, {"frame": "a"}, {"frame": {}}, {"position": 1e300},
                    {"kept": "a"}, {"kept": {}}, {"kept": [1, "a"]}, {"kept": [3]}):
        bad = lines(tmp_path / "bad.jsonl", [trace[0] | changes, *trace[1:]])
        with pytest.raises(BadData, match="line 1: is no row of a trace"):
            player.read_record(good, bad)
    for changes in ({"frame": "a"}, {"frame": {}}, {"frame": math.nan}, {"frame": 1.5}, {"n": []},
                    {"tokens": 3}, {"wall": 5}, {"end": math.nan}):
        bad = lines(tmp_path / "bad.jsonl", [said[0], said[1] | changes, *said[2:]])
        for beside in (other, None):
            with pytest.raises(BadData, match="line 2"):
                player.read_record(bad, beside)


def test_what_is_not_finite_gets_one_line():
    """p([SKIP]) of damaged weights or features: told, not a traceback."""
    trace, said = made(3)
    page = filled("a.safetensors", trace[:2], said)
    with pytest.raises(BadData, match="frame 2: p.*is nan"):
        page.tell(trace[2] | {"p_skip": math.nan}, None)
    assert len(page.record) == 2


def test_command_line(tmp_path):
    """With --embed the page holds the video; without, its address. stream.py's --html is that page, byte by byte."""
    trace, said = made(40)
    good, other, page = lines(tmp_path / "n.jsonl", said), lines(tmp_path / "t.jsonl", trace), tmp_path / "p.html"

    def run(*words):
        argv = ["player", *map(str, words)]
        with mock.patch.object(sys, "argv", argv), pytest.raises(SystemExit) as end:
            player.main()
        return end.value.code

    assert run(KITCHEN, good, "--trace", other, "--embed", "-o", page) == 0
    assert b64decode(page.read_text().split("base64,")[1].split('"')[0]) == KITCHEN.read_bytes()
    (tmp_path / "a & b'.mp4").write_bytes(b"x")
    assert run(tmp_path / "a & b'.mp4", good, "-o", page) == 0 and 'src="a%20%26%20b%27.mp4"' in page.read_text()
    assert run(tmp_path / "none.mp4", good) == 1 and run(KITCHEN, good, "-o", good) == 1 and run(KITCHEN) == 2


def test_stream_writes_and_serves_the_same_page(kitchen):
    record = player.read_record(kitchen / "jsonl", kitchen / "trace")
    address = player.video_address(KITCHEN, kitchen / "page.html")
    assert (kitchen / "page.html").read_text() == player.make_page("kitchen.mp4", record.content(live=None), address)
    assert (kitchen / address).resolve() == KITCHEN
    assert (kitchen / "served video").read_bytes() == KITCHEN.read_bytes()
    assert (kitchen / "served narrations.jsonl").read_text() == (kitchen / "jsonl").read_text()
    assert (kitchen / "served frame.jpg").read_bytes()[:2] == b"\xff\xd8"
    here, there = embedded((kitchen / "page.html").read_text()), embedded((kitchen / "served ").read_text())
    assert there.pop("live")["camera"] is False and here.pop("live") is None and here == there


# ---------------------------------------------------------------------- the page in a browser

@needs_chromium
@pytest.mark.parametrize("where", ["file", "served"])
def test_page(where, kitchen, browser):
    """Lines, search, keys and curve seek; the line is lit, the caption shown; nothing else is loaded, no error."""
    said, trace = read(kitchen / "jsonl"), read(kitchen / "trace")
    url = (kitchen / "page.html").as_uri() if where == "file" else served({"": filled(KITCHEN, trace, said)})
    tab = browser.tab(url)
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    tab.js("window.v = document.querySelector('video'), 0")
    lit = "document.querySelector('#list [aria-current] span')?.textContent"
    tab.click("#list button", 20)
    tab.wait(f"Math.abs(v.currentTime - {said[20]['start']}) < 0.1 && {lit} === {json.dumps(said[20]['text'])}")
    tab.wait(f"v.textTracks[0].activeCues?.[0]?.text === {json.dumps(said[20]['text'])}")

    tab.key("/")
    tab.type("fridge")
    found = [i for i, y in enumerate(said) if "fridge" in y["text"]]
    assert tab.js("document.querySelector('#hits').value") == f"{len(found)} found" and len(found) > 3
    after = next(k for k, i in enumerate(found) if i >= 20)
    for step, shift in ((0, False), (1, False), (0, True)):
        tab.key("Enter", shift)
        assert tab.js("document.querySelector('#hits').value") == f"{after + step + 1} of {len(found)}"
        tab.wait(f"Math.abs(v.currentTime - {said[found[after + step]]['start']}) < 0.1")
    assert tab.js(TEXT % "mark") == ["fridge"] * len(found)
    tab.key("Escape")

    tab.key("]")
    tab.wait(f"Math.abs(v.currentTime - {said[found[after] + 1]['start']}) < 0.1")
    tab.key("[")
    for key, at in (("ArrowRight", 5), ("ArrowLeft", 0), (".", 0.5), (",", 0)):
        tab.key(key)
        tab.wait(f"Math.abs(v.currentTime - {said[found[after]]['start'] + at}) < 0.1")
    tab.key("c")
    assert tab.js("v.textTracks[0].mode") == "hidden"
    tab.key(" ")
    tab.wait(f"!v.paused && v.currentTime > {said[found[after]]['start']} + 0.3")
    tab.key(" ")
    tab.wait("v.paused")

    box = tab.js("(b => [b.x, b.y, b.width])(document.querySelector('#chart').getBoundingClientRect())")
    tab.press(box[0] + 40 + (box[2] - 50) / 2, box[1] + 60)
    tab.wait("Math.abs(v.currentTime - 76) < 1")
    drawn = tab.js("document.querySelector('#p').getAttribute('d').split('L').length")
    tab.key("+")
    tab.wait(f"document.querySelector('#p').getAttribute('d').split('L').length < {drawn}")
    assert tab.problems() == []
    own = ("file:", "data:", "blob:") if where == "file" else (url, "data:", "blob:")
    assert all(one.startswith(own) for one in tab.requests())
    tab.close()


@needs_chromium
def test_captions_as_told(kitchen, browser):
    """By default a sentence is shown with what it describes; as told, from the end of that on."""
    said = read(kitchen / "jsonl")
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    lit = "document.querySelector('#list [aria-current] span')?.textContent"
    caption = "document.querySelector('video').textTracks[0].activeCues?.[0]?.text"
    tab.js(f"document.querySelector('video').currentTime = {said[20]['start'] + 0.3}")
    tab.wait(f"{caption} === {json.dumps(said[20]['text'])} && {lit} === {caption}")
    tab.click("#as-told")
    tab.wait(f"{caption} === {json.dumps(said[19]['text'])} && {lit} === {caption}")
    assert tab.js("document.querySelector('#as-told').getAttribute('aria-pressed')") == "true"
    tab.click("#list button", 20)
    tab.wait(f"Math.abs(document.querySelector('video').currentTime - {said[20]['end']}) < 0.1")
    tab.wait(f"{caption} === {json.dumps(said[20]['text'])} && {lit} === {caption}")
    tab.key("t")
    tab.wait(f"{caption} === {json.dumps(said[21]['text'])} && {lit} === {caption}")
    assert tab.problems() == []
    tab.close()


def hevc(path: Path):
    """A short video in a format that few browsers play."""
    try:
        av.codec.Codec("libx265", "w")
    except ValueError:
        pytest.skip("this PyAV has no libx265")
    with av.open(str(path), "w") as file:
        coder = file.add_stream("libx265", rate=8)
        coder.width, coder.height, coder.pix_fmt = 96, 96, "yuv420p"
        coder.options = {"x265-params": "log-level=none"}
        for n in range(8):
            picture = np.full((96, 96, 3), 30 * n, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format="yuv420p")
            file.mux(coder.encode(frame))
        file.mux(coder.encode())


@needs_chromium
@pytest.mark.parametrize("kind", ["camera", "waiting", "pipe", "features", "hevc", "moved"])
def test_sentences_without_a_video(kind, tmp_path, browser):
    """Where no video plays, the sentences can be read, and the page says what is missing."""
    (trace, said), file, message = made(200), tmp_path / "page.html", ""
    if kind in ("camera", "waiting"):
        page = serve.Page("rtsp://10.0.0.7/door")
        feed(page, trace, said, 0, 200 if kind == "camera" else 0)
        url = served({"": page})
    else:
        source = tmp_path / "sub" / "my video.mp4"
        source = {"pipe": "-", "features": "a.safetensors"}.get(kind, source)
        (tmp_path / "sub").mkdir()
        if kind == "hevc":
            hevc(source)
            message = "If it is HEVC"
        if kind == "moved":
            shutil.copy(KITCHEN, source)
            message = "The video is not beside this page: there is no sub/my video.mp4."
        file.write_text(filled(source, trace, said).html(file))
        if kind == "moved":
            source.unlink()
        url = file.as_uri()
    tab = browser.tab(url)
    for width in (1280, 390):
        tab.size(width, 800)
        tab.wait(READY)
        tab.wait(f"document.querySelector('#missing').textContent.includes({json.dumps(message)})")
        tab.js("document.querySelector('#said').scrollIntoView()")
        words = "Waiting for the first sentence" if kind == "waiting" else "You open drawer"
        tab.wait("(() => { const box = document.querySelector('#list').getBoundingClientRect(); "
                 "const first = document.elementFromPoint(box.x + box.width / 2, box.y + 15); "
                 "return first?.innerText.includes('%s') })()" % words)
        assert kind == "waiting" or tab.js("document.querySelector('#list').clientHeight") > 150
        assert tab.js("document.documentElement.scrollWidth") <= width
    assert [one for one in tab.problems() if "ERR_FILE_NOT_FOUND" not in one] == []
    tab.close()


@needs_chromium
def test_the_strip_is_the_cache(kitchen, browser):
    """Frame by frame: tokens of prompt, kept sentences, memory and frames, which sum up to the trace's; a sentence's
    frames leave after it."""
    trace, said = read(kitchen / "trace"), read(kitchen / "jsonl")
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    frames, narrated = 0, -1
    tab.js("document.querySelector('video').currentTime = 55.51")
    for row in trace[111:135]:
        tab.wait(f"document.querySelector('#why').textContent.startsWith('Frame {row['frame']},')")
        boxes = tab.js("[...document.querySelectorAll('.box')].map("
                       "e => [e.className, e.querySelector('b').textContent])")
        if row["frame"] > trace[111]["frame"] + 12:
            assert sum("frame" in name for name, _ in boxes) == frames + 1
            kept = [int(text) for name, text in boxes if "said" in name.split() and "new" not in name]
            assert kept == list(range(narrated - 9, narrated + 1))
            total = int(tab.js("document.querySelector('#totals strong').textContent").split()[1])
            assert row["narrate"] or total == row["text_tokens"] + row["visual_tokens"]
            leaving = {name.split()[1] for name, _ in boxes if "leaving" in name}
            assert leaving == ({"said", "memory", "frame"} if row["narrate"] else set())
        frames = 0 if row["narrate"] else frames + 1
        narrated = next((y["n"] for y in said if y["frame"] == row["frame"]), narrated)
        tab.key(".")
    tab.wait("document.querySelectorAll('.frame.drawn').length")                        # the pictures are there, too
    tab.close()


@needs_chromium
def test_hostile_text_stays_text(tmp_path, browser):
    text = "</script><img src=x onerror=\"document.title='bad'\"><b>&amp;"
    trace, said = made(40)
    said[1]["text"] = said[2]["text"] = text
    record = player.read_record(lines(tmp_path / "n", said), lines(tmp_path / "t", trace))
    page = tmp_path / "page.html"
    page.write_text(player.make_page(text, record.content(live=None), player.video_address(KITCHEN, page)))
    tab = browser.tab(page.as_uri())
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    tab.click("#list button", 1)
    tab.wait("document.querySelector('video').textTracks[0].activeCues?.length")
    assert tab.js(TEXT % "#list span")[1] == text == tab.js("document.querySelector('h1').textContent")
    assert tab.js("document.querySelector('video').textTracks[0].activeCues[0].getCueAsHTML().textContent") == text
    tab.key("/")
    tab.type("<img src")
    assert tab.js(TEXT % "mark") == ["<img src"] * 2
    assert tab.js("document.images.length") == 1 and tab.problems() == []               # the picture of the live page
    tab.close()


@needs_chromium
def test_a_day_is_one_small_page(tmp_path, browser):
    trace, said = made(172_800)
    record = player.Record()
    frames = {y["frame"]: y for y in said}
    for row in trace:
        record.add(row, frames.get(row["frame"]))
    page = tmp_path / "page.html"
    page.write_text(player.make_page("day", record.content(live=None)))
    tab = browser.tab("data:text/html,empty")
    tab.ask("Performance.enable", timeDomain="threadTicks")              # seconds of this tab's own work
    tab.open(page.as_uri())
    ready = int(tab.wait(READY, 30))
    work = {one["name"]: one["value"] for one in tab.ask("Performance.getMetrics")["metrics"]}["TaskDuration"]
    assert page.stat().st_size <= 2_000_000 and len(said) == 19_200 and work <= 2, work
    assert tab.js("document.querySelector('#p').getAttribute('d').split('L').length") < 6000
    tab.js("document.querySelectorAll('#list button')[15000].click()")
    tab.wait("document.querySelector('#why').textContent.startsWith('Frame 1349')")
    assert tab.js("document.querySelectorAll('#list .seen').length") == 10
    print(f"a day: {page.stat().st_size / 1e6:.2f} MB, {work:.2f} s of work, ready after {ready} ms", file=sys.stderr)
    tab.close()


@needs_chromium
def test_keyboard_and_screen_reader(kitchen, browser):
    """The keyboard alone reaches all there is; everything has a role and a name."""
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    tab.meets("button", "You heat the green bottle.")
    assert tab.meets("image", "prompt 41")[1].startswith("prompt 41")
    tree = tab.tree()
    for wanted in (("heading", "kitchen.mp4"), ("searchbox", "Search the sentences"), ("button", "Keys"),
                   ("region", "Video"), ("region", "Sentences"), ("region", "What the model sees"), ("slider", "Time"),
                   ("button", "Show less time"), ("button", "Show more time")):
        assert wanted in tree, wanted
    assert all(name for role, name in tree if role in ("button", "slider", "searchbox", "image", "region", "heading"))
    reached = set()
    tab.js("document.querySelectorAll('#list li').forEach((e, i) => i > 1 && e.remove())")
    for _ in range(24):
        tab.key("Tab")
        reached.add(tab.js("(e => e.id || e.closest('#list')?.id || e.tagName)(document.activeElement)"))
    assert {"find", "keys", "video", "list", "out", "in", "chart"} <= reached
    tab.js("document.querySelector('#list button').focus()")
    tab.key("Tab")
    tab.key("Enter")
    tab.wait("document.querySelectorAll('#list button')[1].getAttribute('aria-current') === 'true'")
    tab.key("?")
    assert tab.js("document.querySelector('dialog').open") and tab.meets("dialog", "Keys")
    tab.key("Escape")
    tab.wait("!document.querySelector('dialog').open")
    tab.close()


@needs_chromium
@pytest.mark.parametrize("width", [360, 768, 1900])
def test_no_page_is_too_wide(width, kitchen, browser):
    tab = browser.tab((kitchen / "page.html").as_uri(), width, 800, dark=width == 768)
    tab.wait(READY)
    assert tab.js("document.documentElement.scrollWidth") <= width and tab.problems() == []
    assert tab.js("[...document.querySelectorAll('section, header *')].filter(e => e.getBoundingClientRect().right > "
                  "innerWidth + 1).length") == 0
    tab.close()


@needs_chromium
def test_picture_for_the_readme(kitchen, browser, tmp_path):
    """assets/player.png is the page at a sentence of the kitchen; this test draws it anew where it is missing."""
    from PIL import Image
    target = ROOT / "assets" / "player.png"
    tab = browser.tab((kitchen / "page.html").as_uri(), 1280, 822)
    tab.wait(READY + " && document.querySelector('video').readyState >= 2")
    tab.js("document.querySelector('video').currentTime = 100.2")
    tab.wait("document.querySelectorAll('.frame.drawn.leaving').length === 8")
    tab.screenshot(tmp_path / "page.png")
    tab.close()
    picture = Image.open(tmp_path / "page.png").convert("RGB").quantize(256, dither=Image.Dither.NONE)
    assert picture.size == (1280, 822) and len(picture.getcolors()) > 100
    picture.save(tmp_path / "small.png", optimize=True)
    assert 30_000 < (tmp_path / "small.png").stat().st_size < 150_000
    if not target.exists():
        target.write_bytes((tmp_path / "small.png").read_bytes())
    assert target.stat().st_size < 150_000 and Image.open(target).size == picture.size


# ---------------------------------------------------------------------- the live page

def feed(page: serve.Page, trace, said, begin: int, end: int):
    frames = {y["frame"]: y for y in said}
    for row in trace[begin:end]:
        page.see(np.full((1, 48, 64, 3), row["frame"] % 256, np.uint8))
        page.tell(row, frames.get(row["frame"]))


@needs_chromium
def test_live(browser, monkeypatch):
    """A sentence is on the page at once; the server may die and come back, resumed or anew."""
    monkeypatch.setattr(serve, "Server", Mortal)
    (trace, said), page = made(400), serve.Page("rtsp://10.0.0.7/door")
    feed(page, trace, said, 0, 100)
    url = served({"": page})
    tab = browser.tab(url)
    shown = TEXT % "#list span"
    tab.wait(READY + " && document.querySelector('#state').textContent === 'live'")
    assert tab.js(shown) == [y["text"] for y in said[:12]]
    began = time.monotonic()
    feed(page, trace, said, 100, 109)
    tab.wait(f"({shown}).length === 13")
    late = time.monotonic() - began
    tab.wait("document.querySelector('#list [aria-current] span').textContent === "
             "'You open drawer 12.'")
    assert tab.js("document.querySelectorAll('#list [aria-current]').length") == 1
    tab.wait("document.querySelector('#picture').naturalWidth === 64 && "
             "document.querySelectorAll('.frame.drawn').length")
    assert tab.meets("log")
    assert late <= 5, late                                                      # 0.1 s where the machine is not busy
    print(f"live: {late:.3f} s until a sentence is on the page", file=sys.stderr)

    again = serve.Page("rtsp://10.0.0.7/door")                       # killed, and resumed a little before where it was
    port = int(url.rstrip("/").rsplit(":", 1)[1])
    Mortal.alive.pop().kill()
    tab.wait("document.querySelector('#state').textContent === 'no connection'")
    feed(again, trace, said, 95, 99)
    served({"": again}, port)
    # The rows after these come again.
    tab.wait("document.querySelector('#facts').textContent.endsWith(' 99 frames')")
    assert tab.js(shown) == [y["text"] for y in said[:11]]
    feed(again, trace, said, 99, 127)
    tab.wait(f"({shown}).length === 15")
    assert tab.js(shown) == [y["text"] for y in said[:15]]
    tab.wait("document.querySelector('#totals').textContent.startsWith('prompt 4110 sentences')")
    assert "other" not in tab.js("document.querySelector('#totals').textContent")
    feed(again, trace, said, 127, 200)
    tab.wait(f"({shown}).length === 23")
    assert tab.js(shown) == [y["text"] for y in said[:23]]
    Mortal.alive.pop().kill()
    new = serve.Page("rtsp://10.0.0.7/door")                                        # a new stream: it begins anew
    feed(new, trace, said, 0, 20)
    served({"": new}, port)
    tab.wait(f"({shown}).length === 3")
    assert [one for one in tab.problems() if "ERR_" not in one] == []
    tab.close()


@needs_chromium
def test_an_outage_is_said(browser):
    """No new pictures: the page says so, and the curve has a gap where there were none."""
    (trace, said), page = made(100), serve.Page("rtsp://10.0.0.7/door")
    for row in trace:
        row["time"] = row["frame"] / 2 + (30 if row["frame"] >= 50 else 0)
    feed(page, trace, said, 0, 90)
    page.newest_at -= 20
    tab = browser.tab(served({"": page}))
    text = "document.querySelector('#state').textContent"
    tab.wait(f"{text}.startsWith('no new picture for 00:2')")
    assert tab.js("document.querySelector('#stage').classList.contains('old')")
    feed(page, trace, said, 90, 91)
    tab.wait(f"{text} === 'live' && !document.querySelector('#stage').classList.contains('old')")
    for curve in ("p", "theta"):
        assert tab.js(f"document.querySelector('#{curve}').getAttribute('d')").count("M") == 2
    tab.close()


class Mortal(serve.Server):
    """A server that can be killed: nobody listens any more, and all connections are cut."""
    alive = []

    def __init__(self, *address):
        super().__init__(*address)
        self.clients = []
        self.alive.append(self)

    def process_request(self, client, address):
        self.clients.append(client)
        super().process_request(client, address)

    def kill(self):
        self.shutdown()
        self.server_close()
        for client in self.clients:
            if client.fileno() >= 0:
                client.shutdown(socket.SHUT_RDWR)


def ask(url: str, path: str, **headers) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_what_the_server_answers(tmp_path):
    (trace, said), data = made(30), KITCHEN.read_bytes()
    recorded, live = filled(KITCHEN, trace, said), serve.Page("camera")
    url = served({"kitchen": recorded, "a b": live})
    assert ask(url, "/")[2].decode().count("<li>") == 2
    assert ask(url, "/kitchen/video")[2] == data
    for wanted, code, body in (("bytes=100-199", 206, data[100:200]), ("bytes=-10", 206, data[-10:]), ("x", 200, data),
                               (f"bytes={len(data)}-", 416, b""), ("bytes=975000-", 206, data[975000:])):
        assert ask(url, "/kitchen/video", Range=wanted)[::2] == (code, body)
    rows = [json.loads(line) for line in ask(url, "/kitchen/narrations.jsonl")[2].splitlines()]
    assert rows == said and ask(url, "/kitchen/narrations.vtt")[2].startswith(b"WEBVTT\n\n00:00:00.000 --> 00:00:00.5")
    assert ask(url, "/a%20b/frame.jpg")[0] == 404
    live.see(np.full((2, 31, 45, 6), 200, np.uint8))
    status, headers, body = ask(url, "/a%20b/frame.jpg")
    (tmp_path / "x.jpg").write_bytes(body)
    with av.open(str(tmp_path / "x.jpg")) as file:
        assert next(file.decode(video=0)).to_ndarray(format="rgb24").shape == (31, 45, 3)
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and "Access-Control-Allow-Origin" not in headers
    for path in ("/nothing", "/kitchen/nothing", "/../../etc/passwd", "/kitchen/%2e%2e/video", "/a%20b/video"):
        assert ask(url, path)[0] == 404
    for host, code in (("evil.example", 403), ("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("", 403)):
        assert ask(url, "/", Host=host)[0] == code
    assert embedded(ask(url, "/kitchen/")[2].decode())["live"]["after"].endswith("-30")
    with pytest.raises(BadData, match="another port"):
        served({}, int(url.rstrip("/").rsplit(":", 1)[1]))


def listener(url: str, after: str = "") -> socket.socket:
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    client = socket.create_connection((host, int(port)))
    client.sendall(f"GET /events?after={after} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return client


def test_nobody_delays_the_stream(monkeypatch):
    """Clients that read nothing cost the stream no more than none; who comes back gets what is missing, once."""
    monkeypatch.setattr(serve, "RING", 50)
    (trace, said), page = made(3000), serve.Page("camera")
    url = served({"": page})
    began = time.perf_counter()
    feed(page, trace, said, 0, 1000)
    alone = time.perf_counter() - began
    stalled = []
    for _ in range(10):
        stalled.append(listener(url))
        stalled[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
    longest = 0
    for frame in range(1000, 3000):
        began = time.perf_counter()
        feed(page, trace, said, frame, frame + 1)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 2, longest                                # who waited for a client would wait for ever
    for client in stalled:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    print(f"{alone} ms a row alone, the longest beside ten stalled clients {longest * 1000:.1f} ms", file=sys.stderr)
    for after, rows in ((f"{page.process}-2990", 10), (f"{page.process}-10", 50), ("other-2990", 50)):
        client, got = listener(url, after), b""
        while got.count(b"event: row") < rows:
            got += client.recv(65536)
        numbers = [int(line.rpartition(b"-")[2]) for line in got.splitlines() if line.startswith(b"id: ")]
        assert numbers == list(range(3001 - rows, 3001))
        client.close()


def test_several_inputs_and_options(tmp_path):
    args = mock.Mock(html=str(tmp_path / "out"), serve=None, host=serve.HOST, state=None)
    runs = [mock.Mock(source=f"{name}.safetensors", files={}, live=False) for name in "ab"]
    for run, name in zip(runs, "ab"):
        run.name = name
    pages = serve.Pages(args, runs)
    pages.wait()                                                                    # returns: nothing is served
    trace, said = made(20)
    for run in runs:
        with run.page:
            run.page.tell(trace[0], said[0])
    assert embedded((tmp_path / "out" / "b.html").read_text())["said"][0]["text"] == said[0]["text"]
    for changes in ({"host": "0.0.0.0"}, {"html": "/dev/null/x", "several": False},
                    {"html": str(tmp_path / "page.html"), "state": "s"}):
        wrong = mock.Mock(**{"html": None, "serve": None, "host": serve.HOST, "state": None} | changes)
        with pytest.raises((BadData, OSError)):
            serve.Pages(wrong, runs[:1])
    serve.Page("a.safetensors", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()                                    # until there is something to show


# ---------------------------------------------------------------------- who may ask, and how much

def raw(url: str, text: bytes, seconds: float = 5) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    got = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as client:
        client.sendall(text)
        with suppress(OSError):
            while piece := client.recv(65536):
                got += piece
    return got


def test_no_header_prints_a_traceback(capfd):
    (trace, said), many = made(30), b"9" * 5000
    page = filled(KITCHEN, trace, said)
    url = served({"": page})
    process = page.process.encode()
    for wanted in (many + b"-", b"0-" + many, b"-" + many, "²-".encode("latin1")):
        assert raw(url, b"GET /video HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%b\r\n"
                        b"Connection: close\r\n\r\n" % wanted).startswith(b"HTTP/1.1 200")
    for path, header in ((b"/events", b"Last-Event-ID: " + process + b"-" + many),
                         (b"/events?after=" + process + "-²".encode("latin1"), b"X: 1"),
                         (b"/events?after=" + process + b"-" + many, b"X: 1")):
        request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, header)
        assert raw(url, request, 0.5).count(b"event: row") == 30       # no id: all that there is
    for path, header in ((b"/", b"Host: " + many), (many * 20, b"Host: localhost")):
        request = b"GET %b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (path, header)
        assert raw(url, request)[9:12] != b"200"
    assert capfd.readouterr().err == ""


def test_connections_are_limited():
    """Hundreds that are half open cost a few threads; the stream goes on, and so does the server
    when they leave."""
    (trace, said), page = made(100), serve.Page("camera")
    url = served({"": page})
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    threads, clients = threading.active_count(), []
    for _ in range(300):
        clients.append(socket.create_connection((host, int(port)), timeout=5))
        with suppress(OSError):
            clients[-1].sendall(b"GET / HT")
    feed(page, trace, said, 0, 100)
    assert threading.active_count() <= threads + serve.CONNECTIONS
    closed = 0
    for client in clients[serve.CONNECTIONS:]:
        with suppress(ConnectionError):
            assert client.recv(100)[9:12] in (b"", b"503")
        closed += 1
    assert closed == 300 - serve.CONNECTIONS
    for client in clients:
        client.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ask(url, "/")[0] == 200


def test_a_slow_request_is_closed(monkeypatch):
    monkeypatch.setattr(serve, "HEAD", 0.4)
    url = served({"": filled("camera", *made(20))})
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    client, began = socket.create_connection((host, int(port)), timeout=0.05), time.monotonic()
    ended = False
    while not ended and time.monotonic() < began + 10:                 # never silent for long
        try:
            client.sendall(b"x")
            ended = client.recv(10) == b""
        except TimeoutError:
            pass
        except ConnectionError:
            ended = True
    assert ended
    two = b"GET /narrations.vtt HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    assert raw(url, two).count(b"WEBVTT") == 2  # in one connection


def test_no_page_delays_the_stream(monkeypatch):
    """While pages are made, rows are told; all who ask at once get one page, and its events go on
    where it ends."""
    trace, said = made(100)
    page = filled("camera", trace[:50], said)
    url = served({"": page})
    told, content, made_pages = threading.Event(), player.Record.content, []

    def wait(record, **more):
        assert told.wait(30)
        made_pages.append(more["live"]["after"])
        return content(record, **more)

    monkeypatch.setattr(player.Record, "content", wait)
    got = []
    clients = [threading.Thread(target=lambda: got.append(ask(url, "/")[2])) for _ in range(6)]
    for client in clients:
        client.start()
    while not page.making.locked():
        time.sleep(0.01)
    feed(page, trace, said, 50, 100)
    told.set()
    for client in clients:
        client.join()
    assert len(got) == 6 and set(got) == {got[0]} and made_pages == [f"{page.process}-50"]
    data = embedded(got[0].decode())
    assert len(data["rows"]["p"]) == 50 and len(data["said"]) == 6


def test_addresses_for_other_devices(monkeypatch):
    """Where all addresses are listened at, one is printed that others can open. The machine's own
    names are answered, no other ones."""
    page = filled("camera", *made(20))
    url = serve.serve({"": page}, "0.0.0.0", 0)
    host = url.removeprefix("http://").rpartition(":")[0]
    assert host not in ("0.0.0.0", "127.0.0.1") and ask(url, "/")[0] == 200
    monkeypatch.setattr(serve, "network_address", lambda kind: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "Laptop.example.org")
    assert serve.serve({"": page}, "0.0.0.0", 0).startswith("http://Laptop.example.org:")
    here = served({"": page})
    for name, code in (("laptop.example.org", 200), ("LAPTOP:8765", 200), ("laptop.local", 200),
                       ("192.168.1.5", 200), ("[fe80::1]:80", 200), ("localhost", 200),
                       ("example.org", 403), ("laptop.evil.example", 403),
                       ("127.0.0.1.evil.example", 403)):
        assert ask(here, "/", Host=name)[0] == code, name
