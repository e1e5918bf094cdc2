"""The player's page and the live page, in a real Chromium (tests/browser.py); what they know of the
cache."""
import gzip
import http.client
import json
import math
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path
from unittest import mock

import av
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from browser import CHROMIUM, Browser
from commands import stream as stream_command
from commands.stream import trace_row
from helpers import ROOT, grouped, narrate, tiny, video
from narrator import NARRATION
from streams import page as player, serve
from streams.bounds import open_stream
from support.common.errors import BadData
from test_commands import call

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
    words = [sys.executable, "stream.py", str(KITCHEN), "--device", "cpu", "--serve", "0"]
    words += [f"--{name}={folder / name}" for name in ("jsonl", "trace", "html")]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    url = ""
    for line in process.stderr:
        url = url or line.partition("page: ")[2].strip()
        if line.startswith("done"):
            break
    for what in ("video", "frame.jpg", ""):
        (folder / f"served {what}").write_bytes(ask(url, "/" + what)[2])
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    (folder / "html").rename(folder / "page.html")
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def by_frame(said: list[dict]) -> dict[int, dict]:
    return {narration["frame"]: narration for narration in said}


def filled(source, trace: list[dict], said: list[dict], path=None) -> serve.Page:
    narrations = by_frame(said)
    with serve.Page(str(source), path) as page:
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
        record.add(trace_row(decision, model.layout, context.cache), narration)
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
    record = player.Record()
    at = sorted({0, *random.Random(1).sample(range(1, 30), 13)})
    context = open_stream(model)
    cache = context.cache
    caches = []                                 # (narrations, text tokens) after each narration
    for decision in narrated(model, record, context, 30, at):
        tokens = cache.tokens
        in_cache = sorted({number for kind, number in zip(tokens.kind, tokens.number)
                           if kind == NARRATION})
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


def test_a_record_is_bounded(monkeypatch):
    monkeypatch.setattr(player, "KEPT", 50)
    trace, said = made(1000)
    page = filled("rtsp://user:secret@10.0.0.7/door?password=x", trace, said)
    rows = page.record.content()["rows"]
    assert len(rows["p"]) == 50
    assert rows["first"] + len(rows["p"]) == 1000
    assert rows["text"][-1] == trace[-1]["text_tokens"]
    assert page.record.narrations[0]["frame"] >= rows["first"]
    assert "secret" not in page.html()
    assert page.title == "rtsp://10.0.0.7/..."


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
    for changes, message in (({"frame": 8}, "differ"), ({"frame": {}}, "line 2"),
                             ({"tokens": 3}, "line 10"),
                             ({"end": math.nan}, "line 2")):
        lines(bad, [said[0], said[1] | changes, *said[2:]])
        with pytest.raises(BadData, match=message):
            player.read_record(bad, trace_file)

    for rows in (trace[:3] + trace[4:], [{**trace[0], "p_skip": "x"}, *trace[1:]]):
        with pytest.raises(BadData, match="is no row of a trace"):
            player.read_record(jsonl, lines(bad, rows))
    for changes in ({"time": "x"}, {"time": None}, {"p_skip": math.nan}, {"theta": math.inf},
                    {"kept": "a"}, {"kept": [1, "a"]}, {"kept": [3]}):
        lines(bad, [trace[0] | changes, *trace[1:]])
        with pytest.raises(BadData, match="line 1: is no row of a trace"):
            player.read_record(jsonl, bad)


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
    assert page == player.make_page("kitchen.mp4", record.content(), address)
    assert (kitchen / address).resolve() == KITCHEN
    assert (kitchen / "served video").read_bytes() == KITCHEN.read_bytes()
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
        url = serve.serve(filled(KITCHEN, read(kitchen / "trace"), said), 0)
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


@needs_chromium
@pytest.mark.parametrize("kind", ["camera", "waiting", "features", "moved"])
def test_sentences_without_a_video(kind, tmp_path, browser):
    """Where no video plays, the sentences can be read, and the page says what is missing."""
    trace, said = made(200)
    message = ""
    if kind in ("camera", "waiting"):
        page = serve.Page("rtsp://10.0.0.7/door")
        if kind == "camera":
            feed(page, trace, said, 0, 200)
        url = serve.serve(page, 0)
    else:
        source = "a.safetensors"
        if kind == "moved":
            source = tmp_path / "my video.mp4"
            shutil.copy(KITCHEN, source)
            message = "The video is not beside this page: there is no my video.mp4."
        file = tmp_path / "page.html"
        filled(source, trace, said, str(file))
        if kind == "moved":
            source.unlink()
        url = file.as_uri()
    first_words = "Waiting for the first sentence" if kind == "waiting" else "You open drawer"
    tab = browser.tab(url)
    tab.wait(READY)
    tab.wait(f"document.querySelector('#missing').textContent.includes({json.dumps(message)})")
    tab.wait(f"document.querySelector('#list').innerText.includes('{first_words}')")
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


HOSTILE = "</script><img src=x onerror=\"document.title='bad'\"><b>&amp;@data@"


def test_hostile_text_is_no_html():
    trace, said = made(40)
    for sentence in said:
        sentence["text"] = HOSTILE
    page = player.make_page(HOSTILE, filled("a.mp4", trace, said).record.content(), HOSTILE)
    assert embedded(page)["said"][0]["text"] == HOSTILE
    template = player.TEMPLATE.read_text()
    for tag in ("<script", "<img", "<b>"):
        assert page.count(tag) == template.count(tag)


@needs_chromium
def test_hostile_text_stays_text(tmp_path, browser):
    text = HOSTILE
    trace, said = made(40)
    said[1]["text"] = said[2]["text"] = text
    record = player.read_record(lines(tmp_path / "n", said), lines(tmp_path / "t", trace))
    page = tmp_path / "page.html"
    address = player.video_address(KITCHEN, page)
    page.write_text(player.make_page(text, record.content(), address))
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
@pytest.mark.parametrize("width", [360, 768, 1900])
def test_no_page_is_too_wide(width, kitchen, browser):
    tab = browser.tab((kitchen / "page.html").as_uri(), width, 800, dark=width == 768)
    tab.wait(READY)
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.problems() == []
    assert tab.js("""[...document.querySelectorAll('section, header *')].filter(
        e => e.getBoundingClientRect().right > innerWidth + 1).length""") == 0
    tab.close()


# ---------------------------------------------------------------------- the live page

def feed(page: serve.Page, trace, said, begin: int, end: int):
    narrations = by_frame(said)
    for row in trace[begin:end]:
        page.picture = np.full((48, 64, 3), row["frame"] % 256, np.uint8)
        page.tell(row, narrations.get(row["frame"]))


@needs_chromium
def test_live(browser, monkeypatch):
    """A sentence is on the page at once; the server may die and come back, resumed or anew."""
    monkeypatch.setattr(serve, "Server", Mortal)
    trace, said = made(200)
    texts = [narration["text"] for narration in said]
    page = serve.Page("rtsp://10.0.0.7/door")
    feed(page, trace, said, 0, 100)
    url = serve.serve(page, 0)
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
    assert late <= 5, late                              # 0.1 s where the machine is not busy
    print(f"live: {late:.3f} s until a sentence is on the page", file=sys.stderr)

    # killed, and resumed a little before where it was
    again = serve.Page("rtsp://10.0.0.7/door")
    _, port = host_and_port(url)
    Mortal.alive.pop().kill()
    tab.wait("document.querySelector('#state').textContent === 'no connection'")
    feed(again, trace, said, 95, 99)
    serve.serve(again, port)
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
    serve.serve(new, port)
    tab.wait(f"({shown}).length === 3")
    assert [text for text in tab.problems() if "ERR_" not in text] == []
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
    url = serve.serve(filled(KITCHEN, trace, said), 0)
    assert embedded(ask(url, "/")[2].decode())["live"]["after"].endswith("-30")
    assert ask(url, "/video")[2] == data
    for wanted, code, body in (("bytes=100-199", 206, data[100:200]), ("x", 200, data),
                               ("bytes=975000-", 206, data[975000:]),
                               (f"bytes={'9' * 500}-", 200, data), ("bytes=²-", 200, data)):
        assert ask(url, "/video", Range=wanted)[::2] == (code, body)

    camera = serve.Page("camera")
    url = serve.serve(camera, 0)
    assert ask(url, "/frame.jpg")[0] == 404
    camera.picture = np.full((31, 45, 6), 200, np.uint8)
    status, headers, body = ask(url, "/frame.jpg")
    (tmp_path / "x.jpg").write_bytes(body)
    with av.open(str(tmp_path / "x.jpg")) as file:
        picture = next(file.decode(video=0)).to_ndarray(format="rgb24")
    assert picture.shape == (31, 45, 3)
    assert status == 200 and headers["Content-Type"] == "image/jpeg"
    assert "Access-Control-Allow-Origin" not in headers

    for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/video", "/video"):
        assert ask(url, path)[0] == 404
    for host, code in (("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403),
                       ("localhost:1", 200), ("127.0.0.1", 200)):
        assert ask(url, "/", Host=host)[0] == code
    _, port = host_and_port(url)
    with pytest.raises(BadData, match="another port"):
        serve.serve(camera, port)


@pytest.mark.parametrize("words, message", [
    (["a.mp4", "b.mp4", "--serve"], "--serve shows one input"),
    (["a.mp4", "--html", "p.html", "--state", "s"], "python -m streams.page"),
    (["a.safetensors", "--html", "diary.html"], "diary.html: is there already, and is not what"),
])
def test_pages_that_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diary.html").write_text("mine")
    save_file({"x": torch.zeros(1, 10, 1024)}, "a.safetensors")
    code, errors = call(stream_command, words)
    assert code == 1 and message in errors
    assert (tmp_path / "diary.html").read_text() == "mine"


def listener(url: str, after: str = "") -> socket.socket:
    """A client that has asked for events, and reads none yet."""
    host, port = host_and_port(url)
    client = socket.create_connection((host, port))
    request = f"GET /events?after={after} HTTP/1.1\r\nHost: {host}\r\n\r\n"
    client.sendall(request.encode())
    return client


def test_nobody_delays_the_stream(monkeypatch, capfd):
    """Clients that read nothing cost the stream no more than none; who comes back gets what is
    missing, once."""
    monkeypatch.setattr(serve, "RING", 50)
    trace, said = made(3000)
    page = serve.Page("camera")
    url = serve.serve(page, 0)
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
    assert capfd.readouterr().err == ""                 # clients that leave are no news
