"""A real browser, headless, driven through its DevTools pipe: JSON over descriptors 3 and 4, each ended by a NUL."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

PATIENCE = 60  # seconds: a busy machine is not an error

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-breakpad"),
    *("--no-default-browser-check", "--disable-extensions", "--mute-audio", "--remote-debugging-pipe"),
]
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36, "Tab": 9}
KEYS |= {"Enter": 13, "Escape": 27, " ": 32}
TYPED = {"Enter": "\r", " ": " "}


class Browser:
    """Owns the process and both ends of the pipe to it."""

    def __init__(self, program: str, folder: Path):
        self.said = folder / "stderr.txt"
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        # numbers that cannot be 3 or 4, which the shell then makes of them
        passed = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs, answers)]
        words = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        shell = f'exec "$@" 3<&{passed[0]} 4>&{passed[1]} {passed[0]}<&- {passed[1]}>&-'
        with self.said.open("wb") as errors:
            self.process = subprocess.Popen(
                ["bash", "-c", shell, "browser", *words], pass_fds=passed, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip
        for end in (theirs, answers, *passed):
            os.close(end)
        self._read = b""
        self._number = 0
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **params):
        """Send a request and wait for the answer; what happens meanwhile is kept in ``events``."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline: float, waiting: str) -> dict:
        while b"\0" not in self._read:
            ready = select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]
            new = ready and os.read(self._in, 1 << 20)
            why = "the browser has ended" if ready else f"no answer of the browser in {PATIENCE} seconds"
            assert new, f"{waiting}: {why}; it said\n{self.said.read_text(errors='replace')[-2000:]}"
            self._read += new
        text, self._read = self._read.split(b"\0", 1)
        return json.loads(text)

    def close(self):
        os.close(self._out)
        os.close(self._in)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)  # it ends by itself when its pipe does
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


class Tab:
    """A page in a context of its own: nothing is remembered from another test."""

    def __init__(self, browser: Browser):
        self.browser = browser
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.opened: list[str] = []
        self.screen(1280, 900)

    def call(self, method: str, **params):
        return self.browser.call(method, self.session, **params)

    def events(self, *methods: str) -> list[dict]:
        """What has happened on this page, of these kinds."""
        ours = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [event["params"] for event in ours if event["method"] in methods]

    def screen(self, width: int, height: int, *, phone: bool = False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def media(self, media: str = "", *, colours: str = "light"):
        features = [{"name": "prefers-color-scheme", "value": colours}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, path: Path):
        self.opened.append(path.as_uri())
        self._load("Page.navigate", url=path.as_uri())

    def reload(self):
        self._load("Page.reload")

    def _load(self, method: str, **params):
        before = len(self.events("Page.loadEventFired"))
        found = self.call(method, **params)
        assert "errorText" not in found, found
        self.wait(lambda: len(self.events("Page.loadEventFired")) > before, f"{method} to end")

    def ask(self, script: str):
        """The value of an expression, as JSON carries it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, script: str):
        """Wait for an expression to be true."""
        self.wait(lambda: self.ask(f"Boolean({script})"), script)

    def wait(self, condition, what: str):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE} seconds in vain for {what}"
            time.sleep(0.02)
            self.ask("0")  # takes in what has happened

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, brought into sight; a page hears of its scrolling with the next frame."""
        return tuple(
            self.ask(f"""(async () => {{
                const found = document.querySelector({json.dumps(selector)});
                found.scrollIntoView({{block: "center", inline: "center", behavior: "instant"}});
                for (const _ of "12") await new Promise(requestAnimationFrame);
                const box = found.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()""")
        )

    def move(self, x: float, y: float):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str):
        x, y = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, x: float, y: float):
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str):
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        typed = {"text": TYPED[key]} if key in TYPED else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if typed else "rawKeyDown", **about, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def complaints(self) -> list[str]:
        """What a page must never do: warn, throw, ask for something that is not in its file."""
        self.ask("0")
        said = [
            f"console: {event['type']}: {event['args']}"
            for event in self.events("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        said += [f"thrown: {event['exceptionDetails']}" for event in self.events("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        said += [f"log: {entry['text']}" for entry in logged if entry["level"] in ("error", "warning")]
        asked = [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
        return said + [f"request: {url}" for url in asked if url not in self.opened and not url.startswith("data:")]

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = os.environ.get("CHROMIUM") or "chromium"
    found = shutil.which(program)
    if not found:
        pytest.fail(
            f"there is no browser {program}, which the tests of the report page need: on Debian say make browser; "
            "elsewhere install Chromium or Chrome and name it: make test CHROMIUM=/path/to/chrome",
            pytrace=False,
        )
    browser = Browser(found, tmp_path_factory.mktemp("browser"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def tab(browser):
    """A page that has to be quiet until the test is over."""
    browser.events.clear()
    tab = Tab(browser)
    try:
        yield tab
        assert tab.complaints() == []
    finally:
        tab.close()
