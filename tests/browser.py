"""Chromium in tests, by its DevTools protocol over two pipes (--remote-debugging-pipe): no driver, no port.

    with Browser() as browser:
        tab = browser.tab("file:///page.html")
        tab.click("#list button"), tab.wait("video.currentTime > 1"), tab.screenshot(path)
"""
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless --no-sandbox --remote-debugging-pipe --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --disable-quic --disable-gpu --mute-audio --hide-scrollbars "
         "--autoplay-policy=no-user-gesture-required --force-color-profile=srgb").split()
# Chromium reads commands from 3 and writes answers to 4
LAUNCH = ("import os; from sys import argv; "
          "os.dup2(int(argv[1]), 3), os.dup2(int(argv[2]), 4), os.execv(argv[3], argv[3:])")
KEYS = {" ": "Space", "Enter": "Enter", "Escape": "Escape", "Tab": "Tab", "ArrowLeft": "ArrowLeft",
        "ArrowRight": "ArrowRight"}
TEXT = {"Enter": "\r", "Tab": None, "Escape": None, "ArrowLeft": None, "ArrowRight": None}


class Gone(Exception):
    """The page that was asked is being replaced by another one."""


class Browser:
    """One Chromium with a profile of its own. Events that come while waiting for an answer are kept by tab."""

    def __enter__(self):
        self.profile = tempfile.mkdtemp()
        (theirs, self.out), (self.come, given) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (theirs, given)]
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen([sys.executable, "-c", LAUNCH, *map(str, high), *words], pass_fds=high,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (theirs, given, *high):
            os.close(end)
        self.number, self.rest, self.tabs = 0, b"", {}
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.out), os.close(self.come)
        shutil.rmtree(self.profile, ignore_errors=True)

    def read(self, seconds: float):
        """One message, or None."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self.rest:
            if not select.select([self.come], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            piece = os.read(self.come, 1 << 20)
            assert piece, "Chromium has ended"
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        if "method" in message and message.get("sessionId") in self.tabs:
            self.tabs[message["sessionId"]].events.append(message)
        return message

    def ask(self, method: str, session: str | None = None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self.read(deadline - time.monotonic())
            if answer and answer.get("id") == self.number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Gone
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise TimeoutError(method)

    def tab(self, url: str, width: int = 1280, height: int = 800, dark: bool = False, still: bool = True):
        """A new tab with a loaded page; `still`: nothing moves (prefers-reduced-motion)."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        self.tabs[tab.session] = tab
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            tab.ask(domain + ".enable")
        tab.size(width, height)
        features = {"prefers-color-scheme": "dark" if dark else "light",
                    "prefers-reduced-motion": "reduce" if still else "no-preference"}
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in features.items()])
        tab.open(url)
        return tab


class Tab:
    def __init__(self, browser: Browser, session: str, target: str):
        self.browser, self.session, self.target, self.events = browser, session, target, []

    def ask(self, method: str, **parameters):
        return self.browser.ask(method, self.session, **parameters)

    def size(self, width: int, height: int, scale: float = 1):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                 mobile=False)

    def open(self, url: str):
        self.ask("Page.navigate", url=url)
        self.wait("document.documentElement && document.readyState !== 'loading'")

    def js(self, expression: str):
        """The value of an expression; a promise is awaited."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30):
        """The first true value of an expression."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(Gone):
                if value := self.js(expression):
                    return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}")

    def press(self, x: float, y: float):
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click(self, selector: str, number: int = 0):
        """The middle of the element, scrolled to, once it can be met there: after a first layout, at the latest."""
        self.press(*self.wait(
            "(() => { const e = document.querySelectorAll(%s)[%d]; e.scrollIntoView({block: 'nearest'}); "
            "const b = e.getBoundingClientRect(), at = [b.x + b.width / 2, b.y + b.height / 2]; "
            "return e.contains(document.elementFromPoint(...at)) && at })()" % (json.dumps(selector), number)))

    def key(self, key: str, shift: bool = False):
        text = TEXT.get(key, key)
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        about = {"key": key, "code": KEYS.get(key, ""), "modifiers": 8 if shift else 0,
                 "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about,
                 **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str):
        for key in text:
            self.key(key)

    def screenshot(self, path, full: bool = False):
        picture = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(picture))

    def found(self, *methods: str) -> list[dict]:
        """Parameters of the events of these kinds so far."""
        self.js("1")
        return [event["params"] for event in self.events if event["method"] in methods]

    def problems(self) -> list[str]:
        """What the console shows as an error or a warning, and what was thrown."""
        thrown = [str(one["exceptionDetails"]) for one in self.found("Runtime.exceptionThrown")]
        logged = [str(one["entry"]) for one in self.found("Log.entryAdded") if one["entry"]["level"] != "info"]
        calls = self.found("Runtime.consoleAPICalled")
        said = [str(one["args"]) for one in calls if one["type"] in ("error", "warning")]
        return thrown + logged + said

    def requests(self) -> list[str]:
        return [one["request"]["url"] for one in self.found("Network.requestWillBeSent")]

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of what a screen reader meets."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        value = lambda node, name: str(node.get(name, {}).get("value", ""))
        return [(value(node, "role"), value(node, "name")) for node in nodes if not node["ignored"]]

    def meets(self, role: str, name: str = "", seconds: float = 30) -> tuple[str, str]:
        """Role and name of what a screen reader meets first with this role and this part of a name. It is waited for:
        the tree follows the page, and content out of sight (content-visibility) enters it once it is laid out."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for found in self.tree():
                if found[0] == role and name in found[1]:
                    return found
            time.sleep(0.02)
        raise AssertionError(f"no {role} {name!r} in {self.tree()}")

    def close(self):
        self.browser.ask("Target.closeTarget", targetId=self.target)
