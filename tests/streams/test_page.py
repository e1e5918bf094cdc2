"""The player's page and the live page, in a real Chromium (tests/browser.py)."""
import gzip
import http.client
import json
import os
import re
import socket
import time
from base64 import b64decode
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import av
import numpy as np
import pytest

from browser import CHROMIUM, Browser
from helpers import ROOT
from beyond.streams import page as player, serve
from beyond.streams.inputs import Input
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.files.sources import source_of
from support.files.video import Video, small_copy
from toy.places import kitchen_of
from toy.world import PLACES, Kitchen, name_of_thing
from test_commands import call
from test_stream import narrated_kitchen

KITCHEN = ROOT / "toy" / "kitchen.mp4"
READY = "document.documentElement.dataset.ready"
TEXT = "[...document.querySelectorAll(%r)].map(e => e.textContent)"
SHOWN = TEXT % "#list span"                     # the sentences on the page


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """The folder with all outputs of toy/kitchen.mp4, and with what was served at the end."""
    _, _, folder = narrated_kitchen(tmp_path_factory.getbasetemp())
    (folder / "page.html").write_bytes((folder / "html").read_bytes())
    return folder


@pytest.fixture(scope="module")
def trace(kitchen):
    """Of 304 frames; the last one has a sentence because it is the last one, in its second row."""
    rows = read_jsonl(kitchen / "trace")
    assert rows[-1]["frame"] == rows[-2]["frame"]
    return [*rows[:-2], rows[-1]]


@pytest.fixture(scope="module")
def said(kitchen):
    return read_jsonl(kitchen / "jsonl")


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with Browser() as one:
        yield one


@pytest.fixture
def browser(chromium):
    yield chromium
    chromium.close_tabs()


@pytest.fixture
def tab(kitchen, browser):
    tab = browser.tab((kitchen / "page.html").as_uri())
    tab.wait(VIDEO_READY)
    return tab


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def embedded(page: str) -> dict:
    return json.loads(gzip.decompress(b64decode(page.split('id="data">')[1].split("<")[0])))


def page_of(source: str = "rtsp://user:secret@10.0.0.7/door?password=x") -> serve.Page:
    return serve.Page(Input(source_of(source), "", {}))


def feed(page: serve.Page, trace: list[dict], said: list[dict]):
    page.record.sizes = {"prompt": 41, "memory": 12, "frame": 11}
    narrations = {narration["frame"]: narration for narration in said}
    for row in trace:
        page.picture = np.full((48, 64, 3), row["frame"] % 256, np.uint8)
        page.tell(row, narrations.get(row["frame"]))


def test_a_record_is_bounded(trace, said, monkeypatch, tmp_path):
    monkeypatch.setattr(player, "KEPT", 50)
    monkeypatch.setattr(player, "SENTENCES_KEPT", 7)
    page = page_of()
    feed(page, trace[:300], said)
    rows = page.record.content()["rows"]
    assert len(rows["p"]) == 50 and rows["first"] == 250
    assert rows["text"][-1] == trace[299]["text_tokens"]
    whole = rows["position"] + rows["text"] + rows["visual"]
    assert {type(number) for number in whole} == {int}
    assert [one["kept"] for one in page.record.narrations] == 7 * [10]
    assert b"secret" not in page.html()
    assert page.title == "rtsp://10.0.0.7/..."
    with pytest.raises(BadData, match="x.jsonl: expected the --jsonl of stream.py"):
        page.remember(str(lines(tmp_path / "x.jsonl", [{"a": 1}])))


@pytest.mark.parametrize("change, message", [
    (lambda said, trace: said.pop(), "differ"),
    (lambda said, trace: said[0].update(end="x"), "--jsonl of stream.py"),
    (lambda said, trace: trace.pop(3), "lines are missing"),
    (lambda said, trace: trace[5].update(p_skip="x"), "--trace of stream.py"),
], ids=["a sentence less", "no time", "a row less", "no number"])
def test_files_that_do_not_fit_get_one_line(trace, said, tmp_path, change, message):
    said = [dict(sentence) for sentence in said]
    trace = [dict(row) for row in trace]
    change(said, trace)
    with pytest.raises(BadData, match=message):
        player.read_record(lines(tmp_path / "n", said), lines(tmp_path / "t", trace))


def source_in(page: str) -> str:
    """The address of the video in a page; of one that the page holds, its data."""
    return re.search(r'<video id="video" src="([^"]*)"', page)[1]


def test_command_line(kitchen, said, tmp_path, monkeypatch):
    """A copy of a small video is in the page; of a large one only with --embed."""
    jsonl = kitchen / "jsonl"
    page = tmp_path / "p.html"

    def run(*words) -> int:
        return call(player, [*map(str, words), "--trace", str(kitchen / "trace")])[0]

    assert run(KITCHEN, jsonl, "-o", page) == 0
    assert 10_000 < len(source_in(page.read_text())) < KITCHEN.stat().st_size / 3
    assert page.stat().st_size < 400_000

    source = tmp_path / os.fsdecode(b"a & b'\xff.mp4")       # a name whose bytes are no text
    source.write_bytes(KITCHEN.read_bytes())
    monkeypatch.setattr(player, "SMALL", 1000)
    assert run(source, jsonl, "-o", page) == 0
    content = page.read_text(encoding="utf-8")
    assert source_in(content) == "a%20%26%20b%27%FF.mp4" and "<title>a &amp; b&#x27;?.mp4" in content
    assert len(embedded(content)["said"]) == len(said)
    assert run(source, jsonl, "--embed", "-o", page) == 0
    assert len(source_in(page.read_text())) > 1000

    assert run(tmp_path / "none.mp4", jsonl, "-o", page) == 1
    assert run(jsonl, jsonl, "-o", page) == 1               # no video
    assert run(KITCHEN, jsonl, "-o", jsonl) == 1
    assert run(KITCHEN) == 2


def test_a_copy_has_even_sides_and_the_pace_of_the_video(tmp_path):
    odd = tmp_path / "odd.mkv"
    with av.open(str(odd), "w") as container:
        stream = container.add_stream("ffv1", rate=60)
        stream.width, stream.height, stream.pix_fmt = 701, 303, "bgr0"
        for i in range(90):
            picture = np.full((303, 701, 3), 255 * (i // 45), np.uint8)     # black, then white
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(small_copy(odd))
    video = Video(copy, 10)
    assert video.size == (206, 480) and video.rate == 25
    brightness = [picture.mean() > 128 for picture in video]
    assert len(brightness) in (15, 16) and brightness.index(True) in (7, 8)     # 0.75 s of 1.5 s


def test_stream_writes_and_serves_the_same_page(kitchen):
    record = player.read_record(kitchen / "jsonl", kitchen / "trace", KITCHEN)
    page = (kitchen / "page.html").read_text()
    # x264 need not write the same bytes twice
    assert page == player.make_page("kitchen.mp4", record.content(), source_in(page))
    assert (kitchen / "served frame.jpg").read_bytes()[:2] == b"\xff\xd8"
    in_file = embedded(page)
    in_served = embedded((kitchen / "served ").read_text())
    assert in_served.pop("live")["pictures"] is True and in_file.pop("live") is None
    assert in_file == in_served


def test_the_page_in_docs_is_that_of_this_template():
    page = (ROOT / "docs" / "kitchen.html").read_text()
    assert len(page) < 400_000
    again = player.make_page("kitchen.mp4", embedded(page), source_in(page))
    assert embedded(page) == embedded(again)
    # the data are packed otherwise by each version of Python and zlib
    data = re.compile('(?<=id="data">)[^<]*')
    assert data.sub("", page) == data.sub("", again)
    assert set(embedded(page)) == set(player.Record().content())


VIDEO_READY = READY + " && document.querySelector('video').readyState >= 2"
LIT = "document.querySelector('#list [aria-current] span')?.textContent"
CUE = "document.querySelector('video').textTracks[0].activeCues?.[0]?.text"
CAPTION = "document.querySelector('#caption').textContent"


def wait_for_second(tab, second: float, tolerance: float = 0.1):
    tab.wait(f"Math.abs(document.querySelector('video').currentTime - {second}) < {tolerance}")


def test_page(kitchen, said, browser):
    """It opens at a time. Lines, keys and curve seek; the line is lit, the caption shown."""
    tab = browser.tab((kitchen / "page.html").as_uri() + "#t=1:01.5")
    tab.wait(VIDEO_READY)
    wait_for_second(tab, 61.5)
    tab.js("window.v = document.querySelector('video'), 0")
    tab.click("#list button", 20)
    # when it is written: at the beginning of the last frame of its segment
    told = said[20]["frame"] / 2
    wait_for_second(tab, told)
    tab.wait(f"{CAPTION} === {json.dumps(said[20]['text'])} && {LIT} === {CAPTION} "
             f"&& {CUE} === {CAPTION}")
    tab.key("]")
    wait_for_second(tab, said[21]["frame"] / 2)
    tab.key("[")
    for key, seconds in (("ArrowRight", 5), ("ArrowLeft", 0), (".", 0.5), (",", 0)):
        tab.key(key)
        wait_for_second(tab, told + seconds)
    tab.js("document.activeElement.blur()")
    tab.key(" ")
    tab.wait(f"!v.paused && v.currentTime > {told} + 0.3")
    tab.key(" ")
    tab.wait("v.paused")

    tab.js("document.querySelector('#chart').scrollIntoView()")
    x, y, width = tab.js("(box => [box.x, box.y, box.width])"
                         "(document.querySelector('#chart').getBoundingClientRect())")
    tab.press(x + 40 + (width - 54) / 2, y + 60)        # the middle, between the margins
    wait_for_second(tab, 76, 1)
    assert tab.problems() == []
    assert all(address.startswith(("file:", "data:", "blob:")) for address in tab.requests())


def test_what_the_memory_knows(tab, trace, said):
    """Of each place that shows nothing: what the memory said after the last sentence; is it right?"""
    true = Kitchen(7, len(json.loads(KITCHEN.with_suffix(".json").read_text())["narrations"]) - 1)
    shown = true.labels()[:, :, 0] > 0                           # [T, 9]
    read = [row for row in trace if "places" in row]
    assert [row["frame"] for row in read] == [row["frame"] for row in trace if row["narrate"]]
    classes = []
    drawn = []                                          # [how sure, how it is drawn]
    for before, sentence in zip(read[3::6], said[4::6]):
        frame = sentence["frame"]
        tab.js(f"location.hash = '#t={frame / 2 + 0.1}', 0")
        tab.wait(f"document.querySelector('#why').textContent.startsWith('Frame {frame},')")
        cells = tab.js("[...document.querySelectorAll('#places li')].map("
                       "e => [e.className, e.innerText.split('\\n').filter(Boolean)])")
        drawn += tab.js("[...document.querySelectorAll('#places b')].map(e => [parseInt("
                        "e.nextSibling.textContent.split(' ').pop()), getComputedStyle(e).opacity])")
        for place, (style, words) in enumerate(cells):
            assert words[0].split()[0] == PLACES[place]
            if shown[frame, place]:
                assert words[1:] == ["in sight"]
            if "gone" in style:             # what it showed has been told: neither thing nor number
                assert len(words[0].split()) == 1
            if "told" in style:
                thing, sure, _ = before["places"][place]
                assert not shown[before["frame"], place] and not shown[frame, place]
                assert words[1] == (thing or "nothing")
                assert words[2].endswith(f"{round(100 * sure)}%")
                last = np.flatnonzero(shown[:frame + 1, place])[-1]
                kind, colour = true.labels()[last, place, :2]
                assert ("right" in style) == (thing == name_of_thing(kind, colour))
                classes.append(style)
    opacities = [float(opacity) for _, opacity in sorted(drawn)]
    assert opacities == sorted(opacities) and opacities[0] < opacities[-1] - 0.1
    assert sum("right" in style for style in classes) > len(classes) / 3
    truths = {narration.text for narration in true.narrations}
    wrong = tab.js("[...document.querySelectorAll('#list small')].map(e => e.textContent)")
    assert all(text.removeprefix("✗ truth: ") in truths for text in wrong)


def test_tour(kitchen, browser):
    tab = browser.tab((kitchen / "page.html").as_uri(), 1366, 650)
    tab.wait(VIDEO_READY)
    tops = ("['#tour', '#stage', '#memory', '#context', '#curves'].map("
            "e => document.querySelector(e).getBoundingClientRect().top)")
    before = tab.js(tops)
    stops = tab.js("document.querySelectorAll('#stops button').length")
    assert 4 <= stops <= 6                              # without an error, there is none to show
    seen = []
    for stop in range(stops):
        tab.click("#stop-on")
        tab.wait(f"document.querySelectorAll('#stops button')[{stop}].ariaCurrent === 'step'")
        seen.append(tab.js("document.querySelector('#stop').textContent"))
        assert tab.js(tops) == before
        assert tab.js("document.querySelector('#caption').getBoundingClientRect().bottom") <= 650
        shows = re.search("shows the (.*?), and", seen[-1])
        if shows and "the model has it from the memory alone" in seen[-1]:
            tab.wait(f"[...document.querySelectorAll('#places .right b')].some("
                     f"e => e.textContent === {json.dumps(shows[1])})")
    assert len(set(seen)) == stops


def test_another_theta(tab, trace):
    """Which ends of segments would move: over the recorded p([SKIP]) alone."""
    moved = "document.querySelector('#moved').textContent"
    for theta in (0.05, 0.95):
        earlier = lost = 0
        ended = False
        for row in trace:
            would = row["p_skip"] is not None and row["p_skip"] <= theta
            if would and not row["narrate"] and not ended:
                earlier += 1
                ended = True
            if row["narrate"]:
                lost += not (row["forced"] or would or ended)
                ended = False
        tab.js(f"(e => {{ e.value = {theta}; e.dispatchEvent(new Event('input')) }})"
               f"(document.querySelector('#chosen'))")
        tab.wait(f"{moved}.startsWith('{earlier} segment')")
        assert f" {lost} would not end there" in tab.js(moved)
    tab.click("#recorded")
    tab.wait(f"{moved}.startsWith('Move it')")


def test_sentences_without_a_video(kitchen, said, tmp_path, browser):
    content = embedded((kitchen / "page.html").read_text())
    page = tmp_path / "page.html"
    page.write_text(player.make_page("a title", content, "my%20video.mp4"))
    tab = browser.tab(page.as_uri())
    tab.wait("document.querySelector('#missing').textContent.includes("
             "'The video is not beside this page: there is no my video.mp4.')")
    assert tab.js(SHOWN) == [sentence["text"] for sentence in said]
    assert [text for text in tab.problems() if "ERR_FILE_NOT_FOUND" not in text] == []


def test_the_strip_is_the_cache(tab, trace):
    """Frame by frame, its parts sum up to the trace's tokens; a sentence's frames leave after it."""
    frames = [row["frame"] for row in trace if row["narrate"]]
    begin = frames[18] + 1
    tab.js(f"document.querySelector('video').currentTime = {begin / 2 + 0.01}")
    for row in trace[begin:frames[20] + 2]:
        frame = row["frame"]
        tab.wait(f"document.querySelector('#why').textContent.startsWith('Frame {frame},')")
        boxes = tab.js("[...document.querySelectorAll('.box')].map("
                       "e => [e.className.split(' '), e.querySelector('b').textContent])")
        last = sum(f < frame for f in frames) - 1           # the last sentence before this frame
        assert sum("frame" in classes for classes, _ in boxes) == frame - frames[last]
        kept = [int(text) for classes, text in boxes if "said" in classes and "new" not in classes]
        assert kept == list(range(last - 9, last + 1))
        leaving = {classes[1] for classes, _ in boxes if "leaving" in classes}
        assert leaving == ({"said", "memory", "frame"} if row["narrate"] else set())
        total = int(tab.js("document.querySelector('#totals strong').textContent").split()[1])
        left = row["text_tokens"] + row["visual_tokens"]        # after the pruning
        without = tab.js("document.querySelector('#without').textContent")
        assert without.startswith(f"Without pruning: {row['position']:,} tokens. With it: {total}")
        if row["narrate"]:
            before = trace[frame - 1]
            fed = row["position"] - before["position"]
            assert total == before["text_tokens"] + before["visual_tokens"] + fed
        else:
            assert total == left
        tab.key(".")
    tab.wait("document.querySelectorAll('.frame.drawn').length")    # the pictures are there, too


def test_hostile_text_stays_text(trace, said, tmp_path, browser):
    """In title, address, sentences, captions, tour, memory; also text of the template."""
    text = "</script><img src=x onerror=\"document.title='bad'\"><b>&amp;@data@"
    said = [said[0], *(one | {"text": text} for one in said[1:3]), *said[3:]]
    trace = [row | {"places": [(text, 0.9, 1.0)] * 9} if "places" in row else row for row in trace]
    told = page_of(str(KITCHEN))
    told.record.kitchen = kitchen_of(KITCHEN)
    feed(told, trace, said)
    page = tmp_path / "page.html"
    source = player.video_source(KITCHEN, page)
    page.write_text(player.make_page(text, told.record.content(), source))
    tab = browser.tab(page.as_uri())
    tab.wait(VIDEO_READY)
    tab.click("#list button", 1)
    tab.wait(f"{CAPTION} === {json.dumps(text)}")
    assert tab.js(SHOWN)[1] == text
    assert tab.js("document.querySelector('h1').textContent") == "FlowNar " + text
    cue = "document.querySelector('video').textTracks[0].activeCues[0]"
    assert tab.js(f"{cue}.getCueAsHTML().textContent") == text
    tab.click("#stops button", 1)
    assert text in tab.js("document.querySelector('#stop').textContent")
    tab.js(f"location.hash = '#t={said[5]['end']}', 0")
    tab.wait(f"({TEXT % '#places b'}).includes({json.dumps(text)})")
    assert tab.js("document.images.length") == 1        # the picture of the live page
    assert tab.problems() == []


def test_live(trace, said, browser, monkeypatch, tmp_path):
    """Who comes before the stream misses nothing, nor who stays while the server dies and returns."""
    monkeypatch.setattr(serve, "Server", Mortal)
    texts = [narration["text"] for narration in said]
    frames = [narration["frame"] for narration in said]
    page = page_of()
    url = serve.serve(page, 0)
    tab = browser.tab(url)
    tab.wait(READY + " && document.querySelector('#state').textContent === 'waiting for pictures'")
    feed(page, trace[:frames[12]], said)
    # the page is loaded anew meanwhile
    tab.wait(READY + " && document.querySelector('#state').textContent === 'live'")
    tab.wait(f"({SHOWN}).length === 12")
    assert tab.js(SHOWN) == texts[:12]
    began = time.monotonic()
    feed(page, trace[frames[12]:frames[13]], said)
    tab.wait(f"({SHOWN}).length === 13")
    assert time.monotonic() - began < 5                 # 0.1 s where the machine is not busy
    tab.wait(f"{LIT} === {json.dumps(texts[12])}")
    tab.wait("document.querySelector('#picture').naturalWidth === 64 && "
             "document.querySelectorAll('.frame.drawn').length")

    _, port = host_and_port(url)
    Mortal.alive.pop().kill()
    tab.wait("document.querySelector('#state').textContent === 'no connection'")
    resumed = page_of()
    resumed.remember(str(lines(tmp_path / "n.jsonl", said[:11])))
    feed(resumed, trace[frames[11]:frames[15]], said)
    serve.serve(resumed, port)
    tab.wait(f"({SHOWN}).length === 15")
    assert tab.js(SHOWN) == texts[:15]
    feed(resumed, trace[frames[15]:], said)
    tab.wait(f"({SHOWN}).length === {len(texts)}")
    assert [text for text in tab.problems() if "ERR_" not in text] == []


def test_live_follows_until_an_earlier_moment_is_chosen(trace, said, browser):
    page = page_of()
    wall = datetime(2026, 3, 1, 14, 30, tzinfo=timezone.utc)
    said = [sentence | {"wall": (wall + timedelta(seconds=sentence["end"])).isoformat()}
            for sentence in said]
    trace = [row | {"time": row["frame"] / 2 + 0.5} for row in trace]
    feed(page, trace[:60], said)
    tab = browser.tab(serve.serve(page, 0))
    why = "document.querySelector('#why').textContent"
    tab.wait(READY + f" && {why}.startsWith('Frame 59,')")
    feed(page, trace[60:70], said)
    tab.wait(f"{why}.startsWith('Frame 69,') && {why}.includes(':30:35')")
    tab.wait("document.querySelector('#labels').textContent.includes(':30:20')")
    times = tab.js(TEXT % "#list time")
    assert [time.split(":", 1)[1] for time in times] == [
        f"30:{int(sentence['end']):02}" for sentence in said if sentence["frame"] < 70]
    tab.click("#list button", 1)
    tab.wait(f"{why}.startsWith('Frame {said[1]['frame']},')")
    feed(page, trace[70:80], said)
    tab.wait("document.querySelector('#facts').textContent.includes('80 frames')")
    assert tab.js(why).startswith(f"Frame {said[1]['frame']},")
    tab.click("#now")
    tab.wait(f"{why}.startsWith('Frame 79,')")


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
            with suppress(OSError):                             # it has left before
                client.shutdown(socket.SHUT_RDWR)


def host_and_port(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    return host, int(port)


def ask(url: str, path: str, **headers) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_what_the_server_answers(tmp_path):
    camera = page_of()
    url = serve.serve(camera, 0)
    assert ask(url, "/frame.jpg")[0] == 404
    camera.picture = np.full((31, 45, 3), 200, np.uint8)
    status, headers, body = ask(url, "/frame.jpg")
    (tmp_path / "x.jpg").write_bytes(body)
    with av.open(str(tmp_path / "x.jpg")) as file:
        picture = next(file.decode(video=0)).to_ndarray(format="rgb24")
    assert picture.shape == (31, 45, 3)
    assert status == 200 and headers["Content-Type"] == "image/jpeg"
    assert "Access-Control-Allow-Origin" not in headers

    for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/video"):
        assert ask(url, path)[0] == 404
    for host, code in (("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403),
                       ("localhost:1", 200), ("127.0.0.1", 200)):
        assert ask(url, "/", Host=host)[0] == code
    _, port = host_and_port(url)
    with pytest.raises(BadData, match="another port"):
        serve.serve(camera, port)


@pytest.mark.parametrize("headers, code", [
    ({"Sec-Fetch-Site": "none"}, 200),                          # its address was typed
    ({"Sec-Fetch-Site": "same-origin", "Origin": "{page}", "Referer": "{page}/"}, 200),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),                     # another server of this machine
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Referer": "https://evil.example/{page}/"}, 403),
    ({"Referer": "{page}.evil.example/"}, 403),
], ids=str)
def test_no_other_page_may_show_the_camera(headers, code):
    camera = page_of()
    camera.picture = np.full((31, 45, 3), 200, np.uint8)
    camera.ended = True
    url = serve.serve(camera, 0)
    headers = {name: value.format(page=url.rstrip("/")) for name, value in headers.items()}
    for path in ("/", "/frame.jpg", "/events"):
        assert ask(url, path, **headers)[0] == code


def listener(url: str, after: int) -> socket.socket:
    host, port = host_and_port(url)
    client = socket.create_connection((host, port))
    client.sendall(f"GET /events?after={after} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return client


def test_nobody_delays_the_stream(trace, said, monkeypatch, capfd):
    """Clients that read nothing cost the stream nothing; a late one gets what is kept."""
    monkeypatch.setattr(serve, "LATE", 50)
    page = page_of()
    url = serve.serve(page, 0)
    stalled = [listener(url, 0) for _ in range(3)]
    for client in stalled:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
    began = time.perf_counter()
    for _ in range(10):
        feed(page, trace, said)
    assert time.perf_counter() - began < 20             # if one waited for a client: for ever
    for client in stalled:
        client.close()

    page.__exit__()                                     # the stream ends
    # the last one knows more than there is: its events were those before a restart
    for after, rows in ((3030, 10), (10, 50), (3040, 0), (9999, 0)):
        answer = b""
        client = listener(url, after)
        while piece := client.recv(65536):
            answer += piece
        events = [json.loads(line[6:]) for line in answer.splitlines() if line[:6] == b"data: "]
        assert [event["row"]["frame"] for event in events[:-1]] == list(range(304 - rows, 304))
        assert events[-1] == {}                         # the end
    assert capfd.readouterr().err == ""                 # clients that leave are no news
