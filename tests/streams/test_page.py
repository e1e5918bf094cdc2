"""The player's page and the live page, in a real Chromium (tests/browser.py); what they know of the
cache."""
import argparse
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
from streams.bounds import open_stream
from support.common.errors import BadData

KITCHEN = ROOT / "toy" / "kitchen.mp4"
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium")
READY = "document.documentElement.dataset.ready"
TEXT = "[...document.querySelectorAll(%r)].map(e => e.textContent)"


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def embedded(page: str) -> dict:
    """The data of a page."""
    return json.loads(gzip.decompress(b64decode(page.split('id="data">')[1].split("<")[0])))


def made(rows: int, every: int = 9) -> tuple[list[dict], list[dict]]:
    """Trace and JSONL of a stream that narrates each `every` frames and keeps the last ten, as
    stream.py counts."""
    trace = []
    said = []
    numbers = random.Random(0)
    position = 0
    visual = 0                                  # tokens in the cache
    text = 41
    kept = []                                   # tokens of each narration in the cache
    for frame in range(rows):
        narrate = frame % every == 0
        if frame == 0:
            p = None
        elif narrate:
            p = numbers.uniform(0, 0.4)
        else:
            p = 1 - numbers.random() ** 9 / 3
        position += 11
        opens_segment = frame > 0 and visual == 0
        visual += 23 if opens_segment else 11
        if opens_segment:
            text += 2
        if narrate:
            words = numbers.randint(4, 9)
            said.append({"n": len(said), "frame": frame, "start": max(0, frame - every + 1) / 2,
                         "end": (frame + 1) / 2, "text": f"You open drawer {len(said)}.",
                         "p_skip": p, "tokens": [7] * words})
            kept = [*kept, words + 4][-10:]
            text = 41 + sum(kept) - 2
            visual = 0
        trace.append({"frame": frame, "p_skip": p, "theta": None if frame == 0 else 0.5,
                      "narrate": narrate, "position": position, "text_tokens": text,
                      "visual_tokens": visual, "forced": frame == 0,
                      "kept": [max(0, len(said) - 10), len(said) - 1]})
    return trace, said


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A folder with JSONL, trace and page of toy/kitchen.mp4, as the bundled narrator narrates it,
    and with what was served at the end; Ctrl-C ended it."""
    folder = tmp_path_factory.mktemp("kitchen")

    def look(pages):
        for what in ("narrations.jsonl", "video", "frame.jpg", ""):
            (folder / f"served {what}").write_bytes(ask(pages.url, "/" + what)[2])
        raise KeyboardInterrupt

    files = [f"--{name}={folder / name}" for name in ("jsonl", "trace")]
    argv = ["stream.py", str(KITCHEN), "--device", "cpu", *files,
            f"--html={folder / 'page.html'}", "--serve", "0"]
    with (mock.patch("sys.argv", argv), mock.patch.object(serve.Pages, "wait", look),
          pytest.raises(SystemExit) as end):
        stream_command.main()
    assert end.value.code == 130
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def served(pages: dict[str, serve.Page], port: int = 0) -> str:
    return serve.serve(pages, "127.0.0.1", port)


def by_frame(said: list[dict]) -> dict[int, dict]:
    return {narration["frame"]: narration for narration in said}


def filled(source, trace: list[dict], said: list[dict], **options) -> serve.Page:
    page = serve.Page(str(source), **options)
    narrations = by_frame(said)
    for row in trace:
        page.tell(row, narrations.get(row["frame"]))
    return page


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- what is in the cache

def narrated(model, record, context, frames, at):
    """Narrate at the given frames, as stream.py does; the record gets each Decision before it is
    yielded."""
    x, narrations = video(model, frames, at)
    for decision in narrate(model, x, given=dict(narrations), context=context):
        narration = None
        if decision.narration:
            narration = vars(decision.narration)
        record.add(trace_row(decision, model.layout), narration)
        yield decision


@pytest.mark.parametrize("changes", [
    {"last_k": 10},
    {"last_k": 2},
    {"last_k": 1},
    {"last_k": 0},
    {"last_k": None},
    {"last_k": 2, "memory": "none"},
    {"last_k": 2, "keep_newline": True},
    {"prune": False, "memory": "none"},
], ids=str)
def test_a_record_knows_what_is_in_the_cache(changes):
    """From the trace: which narrations the next segment sees, and how long each part is."""
    model = tiny(llm=grouped(), **changes)
    if changes == {"last_k": 10}:
        model.layout.assistant += model.layout.encode("So, ")
    record = player.Record()
    at = sorted({0, *random.Random(1).sample(range(1, 30), 13)})
    context = open_stream(model)
    cache = context.cache
    caches = []                                 # (narrations, text tokens) after each narration
    for decision in narrated(model, record, context, 30, at):
        in_cache = sorted(set(cache.number[cache.kind == NARRATION].tolist()))
        first, last = decision.kept or (0, -1)
        assert in_cache == list(range(first, last + 1))
        if decision.narration:
            caches.append((in_cache, cache.text))

    prompt = record.sizes["prompt"]
    for (in_cache, text), narration in zip(caches, record.narrations, strict=True):
        end = narration["n"] + 1
        kept = narration["kept"]
        assert in_cache == list(range(end - kept, end))
        narration_tokens = sum(one["size"] for one in record.narrations[end - kept:end])
        newlines = end - kept if changes.get("keep_newline") else 0
        # EOT and newline of the last narration are not fed yet
        not_yet = 2 if kept > 0 else 0
        assert prompt + narration_tokens - not_yet + newlines == text
    layout = model.layout
    assert prompt == len(layout.prompt + layout.user + layout.newline)
    assert record.sizes["frame"] == layout.J + 1
    assert record.sizes["memory"] == (layout.M + 2 if layout.M else 0)


def test_a_few_sentences_of_which_none_is_kept():
    model = tiny(llm=grouped(), last_k=0)
    record = player.Record()
    layout = model.layout
    prompt = len(layout.prompt + layout.user + layout.newline)
    for _ in narrated(model, record, open_stream(model), 21, (0, 20)):
        assert not any(narration["kept"] for narration in record.narrations)
        assert record.sizes["prompt"] == prompt


def test_a_trace_of_before_does_not_say_what_is_kept():
    trace, said = made(40)
    for row in trace:
        del row["kept"]
    record = filled("a.safetensors", trace, said).record
    assert record.sizes == {"prompt": 0, "memory": 12, "frame": 11}
    assert [narration["kept"] for narration in record.narrations] == [0] * 5


def test_a_record_goes_on_after_a_restart():
    """The prompt's length is known again when all sentences that are kept have been seen."""
    trace, said = made(300)
    narrations = by_frame(said)
    record = player.Record()
    for row in trace[100:]:
        record.add(row, narrations.get(row["frame"]))
        if len(record.narrations) >= 10:
            assert record.sizes["prompt"] == 41
        else:
            assert record.sizes["prompt"] == 0
    assert {narration["kept"] for narration in record.narrations} == {10}


def test_a_record_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(player, "KEPT", 50)
    trace, said = made(300)
    narrations = by_frame(said)
    record = player.Record()
    for row in trace[:90]:
        record.add(row, narrations.get(row["frame"]))
    before = record.so_far()
    content = record.content()
    for row in trace[90:]:
        record.add(row, narrations.get(row["frame"]))
    assert before.content() == content
    assert len(record.content()["rows"]["p"]) < 100 and record.first > 0


def test_data_in_pieces(monkeypatch):
    monkeypatch.setattr(player, "PIECE", 7)
    content = filled("camera", *made(100)).record.content(live=None)
    rows = {}
    for name, column in content["rows"].items():
        rows[name] = column if name == "first" else column.tolist()
    whole = content | {"rows": rows}
    assert "".join(player.json_pieces(content)) == json.dumps(whole)
    assert json.loads(gzip.decompress(b64decode(player.packed(content)))) == whole


def test_a_record_is_bounded(monkeypatch):
    monkeypatch.setattr(player, "KEPT", 50)
    trace, said = made(1000)
    page = filled("rtsp://user:secret@10.0.0.7/door?password=x", trace, said)
    rows = page.record.content(live=None)["rows"]
    assert 50 <= len(rows["p"]) <= 100
    assert rows["first"] + len(rows["p"]) == 1000
    assert rows["text"][-1] == trace[-1]["text_tokens"]
    assert page.record.narrations[0]["frame"] >= rows["first"]
    assert "secret" not in page.html()
    assert page.title == "rtsp://10.0.0.7/..."
    assert len(filled("camera", trace, said, wanted=False).record) == 0


def test_files_that_do_not_fit_get_one_line(tmp_path):
    trace, said = made(40)
    jsonl = lines(tmp_path / "n.jsonl", said)
    trace_file = lines(tmp_path / "t.jsonl", trace)
    bad = tmp_path / "bad.jsonl"
    assert len(player.read_record(jsonl, trace_file)) == 40
    assert len(player.read_record(jsonl, None).narrations) == 5

    for rows, message in ((said[:-1], "differ"), ([{**said[0], "end": -1}], "line 1"),
                          ([{"text": 3}], "line 1")):
        with pytest.raises(BadData, match=message):
            player.read_record(lines(bad, rows), trace_file)
    for changes in ({"frame": "a"}, {"frame": {}}, {"frame": math.nan}, {"frame": 1.5}, {"n": []},
                    {"tokens": 3}, {"wall": 5}, {"end": math.nan}):
        lines(bad, [said[0], said[1] | changes, *said[2:]])
        for trace_or_none in (trace_file, None):
            with pytest.raises(BadData, match="line 2"):
                player.read_record(bad, trace_or_none)

    for rows in (trace[:3] + trace[4:], [{**trace[0], "p_skip": "x"}], [{"frame": 0}]):
        with pytest.raises(BadData, match="is no row of a trace"):
            player.read_record(jsonl, lines(bad, rows))
    for changes in ({"time": "x"}, {"time": 1e300}, {"time": None}, {"p_skip": math.nan},
                    {"theta": math.inf}, {"frame": "a"}, {"frame": {}}, {"position": 1e300},
                    {"kept": "a"}, {"kept": {}}, {"kept": [1, "a"]}, {"kept": [3]}):
        lines(bad, [trace[0] | changes, *trace[1:]])
        with pytest.raises(BadData, match="line 1: is no row of a trace"):
            player.read_record(jsonl, bad)


def test_what_is_not_finite_gets_one_line():
    """p([SKIP]) of damaged weights or features: told, not a traceback."""
    trace, said = made(3)
    page = filled("a.safetensors", trace[:2], said)
    with pytest.raises(BadData, match="frame 2: p.*is nan"):
        page.tell(trace[2] | {"p_skip": math.nan}, None)
    assert len(page.record) == 2


def test_command_line(tmp_path):
    """With --embed the page holds the video; without, its address."""
    trace, said = made(40)
    jsonl = lines(tmp_path / "n.jsonl", said)
    trace_file = lines(tmp_path / "t.jsonl", trace)
    page = tmp_path / "p.html"

    def run(*words):
        argv = ["player", *map(str, words)]
        with mock.patch("sys.argv", argv), pytest.raises(SystemExit) as end:
            player.main()
        return end.value.code

    assert run(KITCHEN, jsonl, "--trace", trace_file, "--embed", "-o", page) == 0
    embedded_video = page.read_text().split("base64,")[1].split('"')[0]
    assert b64decode(embedded_video) == KITCHEN.read_bytes()
    source = tmp_path / "a & b'.mp4"
    source.write_bytes(KITCHEN.read_bytes())
    assert run(source, jsonl, "-o", page) == 0
    assert 'src="a%20%26%20b%27.mp4"' in page.read_text()
    assert run(tmp_path / "none.mp4", jsonl) == 1
    assert run(jsonl, jsonl, "-o", page) == 1  # no video
    assert run(KITCHEN, jsonl, "-o", jsonl) == 1
    assert run(KITCHEN) == 2


def test_stream_writes_and_serves_the_same_page(kitchen):
    """--html of stream.py is the page of the command line above, byte by byte."""
    record = player.read_record(kitchen / "jsonl", kitchen / "trace")
    address = player.video_address(KITCHEN, kitchen / "page.html")
    page = (kitchen / "page.html").read_text()
    assert page == player.make_page("kitchen.mp4", record.content(live=None), address)
    assert (kitchen / address).resolve() == KITCHEN
    assert (kitchen / "served video").read_bytes() == KITCHEN.read_bytes()
    assert (kitchen / "served narrations.jsonl").read_text() == (kitchen / "jsonl").read_text()
    assert (kitchen / "served frame.jpg").read_bytes()[:2] == b"\xff\xd8"
    in_file = embedded(page)
    in_served = embedded((kitchen / "served ").read_text())
    assert in_served.pop("live")["camera"] is False and in_file.pop("live") is None
    assert in_file == in_served


# ---------------------------------------------------------------------- the page in a browser

VIDEO_READY = READY + " && document.querySelector('video').readyState >= 2"
LIT = "document.querySelector('#list [aria-current] span')?.textContent"
CAPTION = "document.querySelector('video').textTracks[0].activeCues?.[0]?.text"


def wait_for_second(tab, second: float, tolerance: float = 0.1):
    """Until the video is at this second."""
    tab.wait(f"Math.abs(document.querySelector('video').currentTime - {second}) < {tolerance}")


def points_of_curve(tab) -> int:
    return tab.js("document.querySelector('#p').getAttribute('d').split('L').length")


@needs_chromium
@pytest.mark.parametrize("where", ["file", "served"])
def test_page(where, kitchen, browser):
    """Lines, search, keys and curve seek; the line is lit, the caption shown; nothing else is
    loaded, no error."""
    said = read(kitchen / "jsonl")
    if where == "file":
        url = (kitchen / "page.html").as_uri()
    else:
        url = served({"": filled(KITCHEN, read(kitchen / "trace"), said)})
    starts = [narration["start"] for narration in said]
    tab = browser.tab(url)
    tab.wait(VIDEO_READY)
    tab.js("window.v = document.querySelector('video'), 0")
    tab.click("#list button", 20)
    wait_for_second(tab, starts[20])
    text = json.dumps(said[20]["text"])
    tab.wait(f"{LIT} === {text} && {CAPTION} === {text}")

    tab.key("/")
    tab.type("fridge")
    hits = [i for i, narration in enumerate(said) if "fridge" in narration["text"]]
    assert len(hits) > 3
    assert tab.js("document.querySelector('#hits').value") == f"{len(hits)} found"
    # Enter goes to the next hit, from the 20th sentence on; with shift, to the one before
    first = next(k for k, i in enumerate(hits) if i >= 20)
    for k, shift in ((first, False), (first + 1, False), (first, True)):
        tab.key("Enter", shift)
        assert tab.js("document.querySelector('#hits').value") == f"{k + 1} of {len(hits)}"
        wait_for_second(tab, starts[hits[k]])
    assert tab.js(TEXT % "mark") == ["fridge"] * len(hits)
    tab.key("Escape")

    hit = hits[first]
    tab.key("]")
    wait_for_second(tab, starts[hit + 1])
    tab.key("[")
    for key, seconds in (("ArrowRight", 5), ("ArrowLeft", 0), (".", 0.5), (",", 0)):
        tab.key(key)
        wait_for_second(tab, starts[hit] + seconds)
    tab.key("c")
    assert tab.js("v.textTracks[0].mode") == "hidden"
    tab.key(" ")
    tab.wait(f"!v.paused && v.currentTime > {starts[hit]} + 0.3")
    tab.key(" ")
    tab.wait("v.paused")

    x, y, width = tab.js("(box => [box.x, box.y, box.width])"
                         "(document.querySelector('#chart').getBoundingClientRect())")
    tab.press(x + 40 + (width - 50) / 2, y + 60)        # the middle, between the margins
    wait_for_second(tab, 76, 1)
    points = points_of_curve(tab)
    tab.key("+")
    tab.wait(f"document.querySelector('#p').getAttribute('d').split('L').length < {points}")
    assert tab.problems() == []
    own_addresses = ("file:" if where == "file" else url, "data:", "blob:")
    assert all(address.startswith(own_addresses) for address in tab.requests())
    tab.close()


@needs_chromium
def test_captions_as_told(kitchen, browser):
    """By default a sentence is shown with what it describes; as told, from the end of that on."""
    said = read(kitchen / "jsonl")
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(VIDEO_READY)

    def wait_for_sentence(n):
        """Until it is the caption, and its line is lit."""
        tab.wait(f"{CAPTION} === {json.dumps(said[n]['text'])} && {LIT} === {CAPTION}")

    tab.js(f"document.querySelector('video').currentTime = {said[20]['start'] + 0.3}")
    wait_for_sentence(20)
    tab.click("#as-told")
    wait_for_sentence(19)
    assert tab.js("document.querySelector('#as-told').getAttribute('aria-pressed')") == "true"
    tab.click("#list button", 20)
    wait_for_second(tab, said[20]["end"])
    wait_for_sentence(20)
    tab.key("t")
    wait_for_sentence(21)
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
    trace, said = made(200)
    message = ""
    if kind in ("camera", "waiting"):
        page = serve.Page("rtsp://10.0.0.7/door")
        if kind == "camera":
            feed(page, trace, said, 0, 200)
        url = served({"": page})
    else:
        sources = {"pipe": "-", "features": "a.safetensors"}
        source = sources.get(kind, tmp_path / "sub" / "my video.mp4")
        (tmp_path / "sub").mkdir()
        if kind == "hevc":
            hevc(source)
            message = "If it is HEVC"
        if kind == "moved":
            shutil.copy(KITCHEN, source)
            message = "The video is not beside this page: there is no sub/my video.mp4."
        file = tmp_path / "page.html"
        file.write_text(filled(source, trace, said).html(file))
        if kind == "moved":
            source.unlink()
        url = file.as_uri()
    first_words = "Waiting for the first sentence" if kind == "waiting" else "You open drawer"
    tab = browser.tab(url)
    for width in (1280, 390):
        tab.size(width, 800)
        tab.wait(READY)
        missing = "document.querySelector('#missing').textContent"
        tab.wait(f"{missing}.includes({json.dumps(message)})")
        tab.js("document.querySelector('#said').scrollIntoView()")
        tab.wait("""(() => {
            const box = document.querySelector('#list').getBoundingClientRect()
            const first = document.elementFromPoint(box.x + box.width / 2, box.y + 15)
            return first?.innerText.includes('%s')
        })()""" % first_words)
        if kind != "waiting":
            assert tab.js("document.querySelector('#list').clientHeight") > 150
        assert tab.js("document.documentElement.scrollWidth") <= width
    assert [text for text in tab.problems() if "ERR_FILE_NOT_FOUND" not in text] == []
    tab.close()


@needs_chromium
def test_the_strip_is_the_cache(kitchen, browser):
    """Frame by frame: tokens of prompt, kept sentences, memory and frames, which sum up to the
    trace's; a sentence's frames leave after it."""
    trace = read(kitchen / "trace")
    narrations = by_frame(read(kitchen / "jsonl"))
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(VIDEO_READY)
    frames = 0                                  # of the segment, before this one
    last = -1                                   # number of the last narration
    tab.js("document.querySelector('video').currentTime = 55.51")
    for row in trace[111:135]:
        frame = row["frame"]
        tab.wait(f"document.querySelector('#why').textContent.startsWith('Frame {frame},')")
        boxes = tab.js("[...document.querySelectorAll('.box')].map("
                       "e => [e.className, e.querySelector('b').textContent])")
        if frame > 111 + 12:                    # from here on, `frames` and `last` are known
            assert sum("frame" in classes for classes, _ in boxes) == frames + 1
            kept = []
            leaving = set()
            for classes, text in boxes:
                if "said" in classes.split() and "new" not in classes:
                    kept.append(int(text))
                if "leaving" in classes:
                    leaving.add(classes.split()[1])
            assert kept == list(range(last - 9, last + 1))
            if row["narrate"]:
                assert leaving == {"said", "memory", "frame"}
            else:
                assert leaving == set()
                total = tab.js("document.querySelector('#totals strong').textContent")
                assert int(total.split()[1]) == row["text_tokens"] + row["visual_tokens"]
        frames += 1
        if row["narrate"]:
            frames = 0
        if frame in narrations:
            last = narrations[frame]["n"]
        tab.key(".")
    tab.wait("document.querySelectorAll('.frame.drawn').length")    # the pictures are there, too
    tab.close()


@needs_chromium
def test_hostile_text_stays_text(tmp_path, browser):
    text = "</script><img src=x onerror=\"document.title='bad'\"><b>&amp;"
    trace, said = made(40)
    said[1]["text"] = said[2]["text"] = text
    record = player.read_record(lines(tmp_path / "n", said), lines(tmp_path / "t", trace))
    page = tmp_path / "page.html"
    address = player.video_address(KITCHEN, page)
    page.write_text(player.make_page(text, record.content(live=None), address))
    tab = browser.tab(page.as_uri())
    tab.wait(VIDEO_READY)
    tab.click("#list button", 1)
    tab.wait(CAPTION)
    assert tab.js(TEXT % "#list span")[1] == text
    assert tab.js("document.querySelector('h1').textContent") == text
    cue = "document.querySelector('video').textTracks[0].activeCues[0]"
    assert tab.js(f"{cue}.getCueAsHTML().textContent") == text
    tab.key("/")
    tab.type("<img src")
    assert tab.js(TEXT % "mark") == ["<img src"] * 2
    assert tab.js("document.images.length") == 1        # the picture of the live page
    assert tab.problems() == []
    tab.close()


@needs_chromium
def test_a_day_is_one_small_page(tmp_path, browser):
    trace, said = made(172_800)
    narrations = by_frame(said)
    record = player.Record()
    for row in trace:
        record.add(row, narrations.get(row["frame"]))
    page = tmp_path / "page.html"
    page.write_text(player.make_page("day", record.content(live=None)))
    tab = browser.tab("data:text/html,empty")
    tab.ask("Performance.enable", timeDomain="threadTicks")     # this tab's own work (s)
    tab.open(page.as_uri())
    ready = int(tab.wait(READY, 30))
    metrics = tab.ask("Performance.getMetrics")["metrics"]
    [work] = [metric["value"] for metric in metrics if metric["name"] == "TaskDuration"]
    assert page.stat().st_size <= 2_000_000 and len(said) == 19_200
    assert work <= 2, work
    assert points_of_curve(tab) < 6000
    tab.js("document.querySelectorAll('#list button')[15000].click()")
    tab.wait("document.querySelector('#why').textContent.startsWith('Frame 1349')")
    assert tab.js("document.querySelectorAll('#list .seen').length") == 10
    megabytes = page.stat().st_size / 1e6
    print(f"a day: {megabytes:.2f} MB, {work:.2f} s of work, ready after {ready} ms",
          file=sys.stderr)
    tab.close()


@needs_chromium
def test_keyboard_and_screen_reader(kitchen, browser):
    """The keyboard alone reaches all there is; everything has a role and a name."""
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(VIDEO_READY)
    tab.meets("button", "You heat the green bottle.")
    assert tab.meets("image", "prompt 41")[1].startswith("prompt 41")
    tree = tab.tree()
    for node in (("heading", "kitchen.mp4"), ("searchbox", "Search the sentences"),
                 ("region", "Video"), ("region", "Sentences"), ("region", "What the model sees"),
                 ("slider", "Time"), ("button", "Keys"), ("button", "Show less time"),
                 ("button", "Show more time")):
        assert node in tree, node
    for role, name in tree:
        if role in ("button", "slider", "searchbox", "image", "region", "heading"):
            assert name, role
    reached = set()
    tab.js("document.querySelectorAll('#list li').forEach((e, i) => i > 1 && e.remove())")
    name_of = "e => e.id || e.closest('#list')?.id || e.tagName"
    for _ in range(24):
        tab.key("Tab")
        reached.add(tab.js(f"({name_of})(document.activeElement)"))
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
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.problems() == []
    assert tab.js("""[...document.querySelectorAll('section, header *')].filter(
        e => e.getBoundingClientRect().right > innerWidth + 1).length""") == 0
    tab.close()


@needs_chromium
def test_picture_for_the_readme(kitchen, browser, tmp_path):
    """assets/player.png is the page at a sentence of the kitchen; this test draws it anew where it
    is missing."""
    from PIL import Image
    target = ROOT / "assets" / "player.png"
    tab = browser.tab((kitchen / "page.html").as_uri(), 1280, 822)
    tab.wait(VIDEO_READY)
    tab.js("document.querySelector('video').currentTime = 100.2")
    tab.wait("document.querySelectorAll('.frame.drawn.leaving').length === 8")
    tab.screenshot(tmp_path / "page.png")
    tab.close()
    picture = Image.open(tmp_path / "page.png").convert("RGB")
    picture = picture.quantize(256, dither=Image.Dither.NONE)
    assert picture.size == (1280, 822) and len(picture.getcolors()) > 100
    picture.save(tmp_path / "small.png", optimize=True)
    assert 30_000 < (tmp_path / "small.png").stat().st_size < 150_000
    if not target.exists():
        target.write_bytes((tmp_path / "small.png").read_bytes())
    assert target.stat().st_size < 150_000 and Image.open(target).size == picture.size


# ---------------------------------------------------------------------- the live page

def feed(page: serve.Page, trace, said, begin: int, end: int):
    narrations = by_frame(said)
    for row in trace[begin:end]:
        page.see(np.full((1, 48, 64, 3), row["frame"] % 256, np.uint8))
        page.tell(row, narrations.get(row["frame"]))


@needs_chromium
def test_live(browser, monkeypatch):
    """A sentence is on the page at once; the server may die and come back, resumed or anew."""
    monkeypatch.setattr(serve, "Server", Mortal)
    trace, said = made(200)
    texts = [narration["text"] for narration in said]
    page = serve.Page("rtsp://10.0.0.7/door")
    feed(page, trace, said, 0, 100)
    url = served({"": page})
    tab = browser.tab(url)
    shown = TEXT % "#list span"
    tab.wait(READY + " && document.querySelector('#state').textContent === 'live'")
    assert tab.js(shown) == texts[:12]
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
    assert late <= 5, late                              # 0.1 s where the machine is not busy
    print(f"live: {late:.3f} s until a sentence is on the page", file=sys.stderr)

    # killed, and resumed a little before where it was
    again = serve.Page("rtsp://10.0.0.7/door")
    _, port = host_and_port(url)
    Mortal.alive.pop().kill()
    tab.wait("document.querySelector('#state').textContent === 'no connection'")
    feed(again, trace, said, 95, 99)
    served({"": again}, port)
    # The rows after these come again.
    tab.wait("document.querySelector('#facts').textContent.endsWith(' 99 frames')")
    assert tab.js(shown) == texts[:11]
    feed(again, trace, said, 99, 127)
    tab.wait(f"({shown}).length === 15")
    assert tab.js(shown) == texts[:15]
    tab.wait("document.querySelector('#totals').textContent.startsWith('prompt 4110 sentences')")
    assert "other" not in tab.js("document.querySelector('#totals').textContent")
    feed(again, trace, said, 127, 200)
    tab.wait(f"({shown}).length === 23")
    assert tab.js(shown) == texts[:23]
    # a new stream: the page begins anew
    Mortal.alive.pop().kill()
    new = serve.Page("rtsp://10.0.0.7/door")
    feed(new, trace, said, 0, 20)
    served({"": new}, port)
    tab.wait(f"({shown}).length === 3")
    assert [text for text in tab.problems() if "ERR_" not in text] == []
    tab.close()


@needs_chromium
def test_an_outage_is_said(browser):
    """No new pictures: the page says so, and the curve has a gap where there were none."""
    trace, said = made(100)
    page = serve.Page("rtsp://10.0.0.7/door")
    for row in trace:
        row["time"] = row["frame"] / 2
        if row["frame"] >= 50:
            row["time"] += 30
    feed(page, trace, said, 0, 90)
    page.newest_at -= 20
    tab = browser.tab(served({"": page}))
    state = "document.querySelector('#state').textContent"
    old = "document.querySelector('#stage').classList.contains('old')"
    tab.wait(f"{state}.startsWith('no new picture for 00:2')")
    assert tab.js(old)
    feed(page, trace, said, 90, 91)
    tab.wait(f"{state} === 'live' && !{old}")
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


def host_and_port(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    return host, int(port)


def ask(url: str, path: str, **headers) -> tuple[int, dict, bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_what_the_server_answers(tmp_path):
    trace, said = made(30)
    data = KITCHEN.read_bytes()
    recorded = filled(KITCHEN, trace, said)
    live = serve.Page("camera")
    url = served({"kitchen": recorded, "a b": live})
    assert ask(url, "/")[2].decode().count("<li>") == 2
    assert embedded(ask(url, "/kitchen/")[2].decode())["live"]["after"].endswith("-30")
    assert ask(url, "/kitchen/video")[2] == data
    size = len(data)
    for wanted, code, body in (("bytes=100-199", 206, data[100:200]),
                               ("bytes=-10", 206, data[-10:]), ("x", 200, data),
                               (f"bytes={size}-", 416, b""), ("bytes=975000-", 206, data[975000:])):
        assert ask(url, "/kitchen/video", Range=wanted)[::2] == (code, body)
    jsonl = ask(url, "/kitchen/narrations.jsonl")[2]
    assert [json.loads(line) for line in jsonl.splitlines()] == said
    recorded.sentences.append(dict(said[-1], text="Again.", repeat=True))
    vtt = ask(url, "/kitchen/narrations.vtt")[2]
    assert b"Again." not in vtt                         # as in a file of --vtt
    assert vtt.startswith(b"WEBVTT\n\n00:00:00.000 --> 00:00:00.5")

    assert ask(url, "/a%20b/frame.jpg")[0] == 404
    live.see(np.full((2, 31, 45, 6), 200, np.uint8))
    status, headers, body = ask(url, "/a%20b/frame.jpg")
    (tmp_path / "x.jpg").write_bytes(body)
    with av.open(str(tmp_path / "x.jpg")) as file:
        picture = next(file.decode(video=0)).to_ndarray(format="rgb24")
    assert picture.shape == (31, 45, 3)
    assert status == 200 and headers["Content-Type"] == "image/jpeg"
    assert "Access-Control-Allow-Origin" not in headers

    for path in ("/nothing", "/kitchen/nothing", "/../../etc/passwd", "/kitchen/%2e%2e/video",
                 "/a%20b/video"):
        assert ask(url, path)[0] == 404
    for host, code in (("evil.example", 403), ("localhost:1", 200), ("[::1]:80", 200),
                       ("127.0.0.1", 200), ("", 403)):
        assert ask(url, "/", Host=host)[0] == code
    _, port = host_and_port(url)
    with pytest.raises(BadData, match="another port"):
        served({}, port)


def listener(url: str, after: str = "") -> socket.socket:
    """A client that has asked for events, and reads none yet."""
    host, port = host_and_port(url)
    client = socket.create_connection((host, port))
    request = f"GET /events?after={after} HTTP/1.1\r\nHost: {host}\r\n\r\n"
    client.sendall(request.encode())
    return client


def test_nobody_delays_the_stream(monkeypatch):
    """Clients that read nothing cost the stream no more than none; who comes back gets what is
    missing, once."""
    monkeypatch.setattr(serve, "RING", 50)
    trace, said = made(3000)
    page = serve.Page("camera")
    url = served({"": page})
    feed(page, trace, said, 0, 1000)
    stalled = []
    for _ in range(10):
        client = listener(url)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
        stalled.append(client)
    longest = 0.0                                       # seconds for a row
    for frame in range(1000, 3000):
        began = time.perf_counter()
        feed(page, trace, said, frame, frame + 1)
        longest = max(longest, time.perf_counter() - began)
    # if one waited for a client, it would wait for ever
    assert longest < 2, longest
    for client in stalled:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    for after, rows in ((f"{page.process}-2990", 10), (f"{page.process}-10", 50),
                        ("other-2990", 50)):
        client = listener(url, after)
        answer = b""
        while answer.count(b"event: row") < rows:
            answer += client.recv(65536)
        client.close()
        ids = [line for line in answer.splitlines() if line.startswith(b"id: ")]
        numbers = [int(line.rpartition(b"-")[2]) for line in ids]
        assert numbers == list(range(3001 - rows, 3001))


def test_several_inputs_and_options(tmp_path):
    args = mock.Mock(html=str(tmp_path / "out"), serve=None, host=serve.HOST, state=None)
    runs = []
    for name in "ab":
        run = mock.Mock(source=f"{name}.safetensors", files={}, live=False)
        run.name = name                                 # of Mock, `name` is another option
        runs.append(run)
    pages = serve.Pages(args, runs)
    pages.wait()                                        # returns: nothing is served
    trace, said = made(20)
    for run in runs:
        with run.page:
            run.page.tell(trace[0], said[0])
    content = embedded((tmp_path / "out" / "b.html").read_text())
    assert content["said"][0]["text"] == said[0]["text"]

    defaults = {"html": None, "serve": None, "host": serve.HOST, "state": None}
    diary = tmp_path / "diary.html"
    diary.write_text("mine")
    run = mock.Mock(source="camera", files={}, live=True)
    args = argparse.Namespace(**defaults | {"html": str(diary)})
    with pytest.raises(BadData, match="diary.html: is there already, and is not what --html writes"):
        serve.Pages(args, [run])

    for changes in ({"host": "0.0.0.0"}, {"html": "/dev/null/x", "several": False},
                    {"html": str(tmp_path / "page.html"), "state": "s"}):
        with pytest.raises((BadData, OSError)):
            serve.Pages(mock.Mock(**defaults | changes), runs[:1])
    serve.Page("a.safetensors", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()        # until there is something to show


# ---------------------------------------------------------------------- who may ask, and how much

def raw(url: str, text: bytes, seconds: float = 5) -> bytes:
    """What the server answers to these bytes, until it closes the connection or is silent."""
    answer = b""
    with socket.create_connection(host_and_port(url), timeout=seconds) as client:
        client.sendall(text)
        with suppress(OSError):
            while piece := client.recv(65536):
                answer += piece
    return answer


def test_no_header_prints_a_traceback(capfd):
    trace, said = made(30)
    page = filled(KITCHEN, trace, said)
    url = served({"": page})
    process = page.process.encode()
    many = b"9" * 5000
    other_digit = "²".encode("latin1")
    for wanted in (many + b"-", b"0-" + many, b"-" + many, other_digit + b"-"):
        request = (b"GET /video HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%b\r\n"
                   b"Connection: close\r\n\r\n" % wanted)
        assert raw(url, request).startswith(b"HTTP/1.1 200")
    for path, header in (
            (b"/events", b"Last-Event-ID: " + process + b"-" + many),
            (b"/events?after=" + process + b"-" + other_digit, b"X: 1"),
            (b"/events?after=" + process + b"-" + many, b"X: 1")):
        request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, header)
        # no id: all that there is
        assert raw(url, request, 0.3).count(b"event: row") == 30
    for path, header in ((b"/", b"Host: " + many), (many * 20, b"Host: localhost")):
        request = b"GET %b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (path, header)
        assert raw(url, request)[9:12] != b"200"
    assert capfd.readouterr().err == ""


def test_connections_are_limited():
    """A hundred that are half open cost a few threads; the stream goes on, and so does the server
    when they leave."""
    trace, said = made(100)
    page = serve.Page("camera")
    url = served({"": page})
    threads = threading.active_count()
    clients = []
    for _ in range(100):
        client = socket.create_connection(host_and_port(url), timeout=5)
        clients.append(client)
        with suppress(OSError):
            client.sendall(b"GET / HT")
    feed(page, trace, said, 0, 100)
    assert threading.active_count() <= threads + serve.CONNECTIONS
    for client in clients[serve.CONNECTIONS:]:
        with suppress(ConnectionError):
            assert client.recv(100)[9:12] in (b"", b"503")
    for client in clients:
        client.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ask(url, "/")[0] == 200


def test_a_slow_request_is_closed(monkeypatch):
    monkeypatch.setattr(serve, "HEAD", 0.4)
    url = served({"": filled("camera", *made(20))})
    client = socket.create_connection(host_and_port(url), timeout=0.05)
    began = time.monotonic()
    ended = False
    while not ended and time.monotonic() < began + 10:  # the client is never silent for long
        try:
            client.sendall(b"x")
            ended = client.recv(10) == b""
        except TimeoutError:
            pass
        except ConnectionError:
            ended = True
    assert ended
    # two requests in one connection
    requests = b"GET /narrations.vtt HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    assert raw(url, requests).count(b"WEBVTT") == 2


def test_no_page_delays_the_stream(monkeypatch):
    """While pages are made, rows are told; all who ask at once get one page, and its events go on
    where it ends."""
    trace, said = made(100)
    page = filled("camera", trace[:50], said)
    url = served({"": page})
    told = threading.Event()
    original = player.Record.content
    ends_of_pages = []

    def content(record, **options):
        assert told.wait(30)
        ends_of_pages.append(options["live"]["after"])
        return original(record, **options)

    monkeypatch.setattr(player.Record, "content", content)
    answers = []
    clients = []
    for _ in range(6):
        clients.append(threading.Thread(target=lambda: answers.append(ask(url, "/")[2])))
    for client in clients:
        client.start()
    while not page.making.locked():
        time.sleep(0.01)
    feed(page, trace, said, 50, 100)
    told.set()
    for client in clients:
        client.join()
    assert len(answers) == 6 and len(set(answers)) == 1
    assert ends_of_pages == [f"{page.process}-50"]
    data = embedded(answers[0].decode())
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
