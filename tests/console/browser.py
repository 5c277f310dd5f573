"""Drives headless Chromium over the DevTools protocol, with mouse and keyboard events."""

import base64
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request

import websocket

PATIENCE = 180
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}


class Page:
    """A browser tab. `problems` collects uncaught exceptions and errors of its console."""

    def __init__(self, url):
        self.socket = websocket.create_connection(url, timeout=PATIENCE, suppress_origin=True)
        self.ids = itertools.count(1)
        self.problems = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **SIZE)

    def call(self, method, **params):
        wanted = next(self.ids)
        self.socket.send(json.dumps({"id": wanted, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"])
            if message.get("id") == wanted:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, what, expression):
        began = time.monotonic()
        while not (value := self.value(expression)):
            if time.monotonic() - began > PATIENCE:
                raise SystemExit(f"{what} did not come within {PATIENCE} s: {expression}")
            time.sleep(0.05)
        return value

    def click(self, selector):
        """Sends mouse events at the center of the element."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'center' }});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def dark(self, is_dark):
        scheme = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path):
        self.value("window.scrollTo(0, 0)")
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(picture["data"]))


def open_browser(profile):
    program = next(filter(None, map(shutil.which, BROWSERS)), None) or sys.exit(f"none of {BROWSERS} is installed")
    browser = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0",
         f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    port_file, began = pathlib.Path(profile) / "DevToolsActivePort", time.monotonic()
    while not (port_file.exists() and port_file.read_text().count("\n")):
        if browser.poll() is not None or time.monotonic() - began > PATIENCE:
            raise SystemExit("the browser did not start")
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
    return browser, Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
