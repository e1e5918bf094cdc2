"""Chromium in tests, by its DevTools protocol over two pipes: no driver, no port.

As a command, it takes a picture of a page, as wide as the README shows it well:

    python tests/browser.py docs/kitchen.html#t=48.1 docs/player.png
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from PIL import Image

CHROMIUM = (shutil.which("chromium") or shutil.which("chromium-browser")
            or shutil.which("google-chrome"))
FLAGS = ("--headless --no-sandbox --remote-debugging-pipe --no-first-run "
         "--disable-background-networking --disable-component-update --disable-sync "
         "--disable-quic --disable-gpu --mute-audio --hide-scrollbars "
         "--autoplay-policy=no-user-gesture-required --force-color-profile=srgb").split()
README_SIZE = 1180, 1400                     # of a window whose picture the README shows, pixels


class Gone(Exception):
    """Another page is replacing the one that was asked."""


class Browser:
    """One Chromium with a profile of its own. Events that come before an answer are kept by tab."""

    def __enter__(self):
        self.profile = tempfile.mkdtemp()
        commands, self.out = os.pipe()
        self.come, answers = os.pipe()
        # it reads commands from 3 and writes answers to 4
        launch = f'exec "$@" <&{commands} >&{answers} 3<&0 4>&1 </dev/null >/dev/null'
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(["bash", "-c", launch, "-", *words],
                                        pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self.number = 0                              # of the last command
        self.rest = b""                              # bytes after the last message
        self.tabs = {}                               # session -> Tab
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.out)
        os.close(self.come)
        shutil.rmtree(self.profile, ignore_errors=True)

    def read(self) -> dict:
        """The next message: an answer or an event."""
        while b"\0" not in self.rest:
            piece = os.read(self.come, 1 << 20)
            assert piece, "Chromium has ended"
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def ask(self, method: str, session: str | None = None, **parameters):
        """Send a command, and wait for its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        while (answer := self.read()).get("id") != self.number:
            if answer.get("sessionId") in self.tabs:
                self.tabs[answer["sessionId"]].events.append(answer)
        if "navigated" in answer.get("error", {}).get("message", ""):
            raise Gone
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def tab(self, url: str, width: int = 1280, height: int = 800):
        """A new tab with a loaded page, on which nothing moves by itself."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        self.tabs[tab.session] = tab
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            tab.ask(domain + ".enable")
        tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                deviceScaleFactor=1, mobile=False)
        tab.ask("Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": "light"},
                          {"name": "prefers-reduced-motion", "value": "reduce"}])
        tab.ask("Page.navigate", url=url)
        tab.wait("document.readyState !== 'loading'")
        return tab

    def close_tabs(self):
        for tab in self.tabs.values():
            self.ask("Target.closeTarget", targetId=tab.target)
        self.tabs.clear()


class Tab:
    def __init__(self, browser: Browser, session: str, target: str):
        self.browser = browser
        self.session = session
        self.target = target
        self.events = []

    def ask(self, method: str, **parameters):
        return self.browser.ask(method, self.session, **parameters)

    def js(self, expression: str):
        """The value of an expression; a promise is awaited."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True,
                          awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30):
        """The first true value of an expression. While a page is loaded, there is no document."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(Gone):
                value = self.js(f"document.documentElement && ({expression})")
                if value:
                    return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}")

    def press(self, x: float, y: float):
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click(self, selector: str, number: int = 0):
        """Scroll to an element and click its middle, as soon as nothing covers it there."""
        middle = self.wait(f"""(() => {{
            const e = document.querySelectorAll({json.dumps(selector)})[{number}]
            e.scrollIntoView({{block: 'nearest'}})
            const b = e.getBoundingClientRect(), at = [b.x + b.width / 2, b.y + b.height / 2]
            return e.contains(document.elementFromPoint(...at)) && at
        }})()""")
        self.press(*middle)

    def key(self, key: str):
        event = json.dumps({"key": key, "bubbles": True})
        self.js(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {event}))")

    def problems(self) -> list[str]:
        """Exceptions, and errors and warnings of the browser and of the console."""
        self.js("1")                                 # its answer comes after the events
        problems = []
        for event in self.events:
            details = event["params"]
            kind = details.get("type") or details.get("entry", {}).get("level")
            if event["method"] == "Runtime.exceptionThrown" or kind in ("error", "warning"):
                problems.append(str(details))
        return problems

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [event["params"]["request"]["url"] for event in self.events
                if event["method"] == "Network.requestWillBeSent"]


def main():
    page, picture = sys.argv[1:]
    file, _, moment = page.partition("#")
    with Browser() as browser:
        tab = browser.tab(f"{Path(file).resolve().as_uri()}#{moment}", *README_SIZE)
        tab.ask("Page.bringToFront")
        tab.wait("document.querySelector('video').readyState >= 2")
        time.sleep(3)                        # until the player's controls and small pictures are there
        end = tab.js("document.querySelector('#context').getBoundingClientRect().bottom + 12")
        clip = {"x": 0, "y": 0, "width": README_SIZE[0], "height": end, "scale": 1}
        taken = tab.ask("Page.captureScreenshot", clip=clip)
    image = Image.open(BytesIO(b64decode(taken["data"])))
    image = image.convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
    image.save(picture, optimize=True)               # a third of the bytes


if __name__ == "__main__":
    main()
