"""Drive Debian's chromium, without a window, by the DevTools protocol."""

import json
import shutil
import subprocess
import time
from collections import deque
from contextlib import contextmanager

import pytest
from websockets.sync.client import connect

PATIENCE_SECONDS = 240


@contextmanager
def chromium(folder):
    """Yield a browser whose profile is in `folder`. Skips the test if chromium is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(
        [program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            port, path = _devtools(folder / "DevToolsActivePort", process)
            with connect(
                f"ws://127.0.0.1:{port}{path}", max_size=2**26, max_queue=None, ping_interval=None, proxy=None
            ) as socket:
                yield Browser(socket)
        finally:
            process.terminate()


def _devtools(file, process):
    """Return the port and the path of DevTools, which chromium writes to a file."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists() or len(file.read_text().split()) < 2:
        assert process.poll() is None, "chromium has ended"
        assert time.monotonic() < deadline, "chromium does not start"
        time.sleep(0.02)
    return file.read_text().split()


class Browser:
    """A browser. Pages are opened one after the other."""

    def __init__(self, socket):
        self._socket = socket
        self._sent = 0
        self.events = deque()

    def call(self, method, session=None, **parameters):
        """Call a method of the protocol and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            received = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if received.get("id") == self._sent:
                assert "error" not in received, received["error"]
                return received["result"]
            self.events.append(received)

    @contextmanager
    def page(self, url, *, width=1280, height=900, dark=False):
        """Yield a page of this width and height in CSS pixels, once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            page.open(url)
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)


class Page:
    """A page of the browser."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **parameters):
        return self._browser.call(method, self._session, **parameters)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression):
        """Return the value of a JavaScript expression; of a promise, what it comes to."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition):
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"waited in vain for {condition}"
            time.sleep(0.05)
        return value

    def text(self, selector):
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector, text):
        """Put the focus on a field and type a text into it, in place of its content."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def problems(self):
        """Return the errors and warnings of the console, and what policies have blocked, since the start."""
        self.run("1")  # the events before its answer have arrived then
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            match event["method"], event["params"]:
                case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text}}:
                    found.append(text)
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    found.append(json.dumps(details))
                case "Runtime.consoleAPICalled", {"type": "error" | "warning" | "assert"} as called:
                    found.append(json.dumps(called["args"]))
        return found

    def requested(self):
        """Return the addresses that the page has asked for."""
        self.run("1")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]
