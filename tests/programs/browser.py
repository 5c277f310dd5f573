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

TIMEOUT_SECONDS = 180
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}


class Page:
    """A browser tab. `errors` collects uncaught exceptions and console errors."""

    def __init__(self, url):
        self.socket = websocket.create_connection(url, timeout=TIMEOUT_SECONDS, suppress_origin=True)
        self.ids = itertools.count(1)
        self.errors = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **SIZE)

    def call(self, method, **params):
        request_id = next(self.ids)
        self.socket.send(json.dumps({"id": request_id, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"])
            if message.get("id") == request_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_until(self, description, expression):
        """Evaluates the expression until it is true. Returns its value."""
        start = time.monotonic()
        while not (value := self.evaluate(expression)):
            if time.monotonic() - start > TIMEOUT_SECONDS:
                raise SystemExit(f"timed out after {TIMEOUT_SECONDS} s waiting for {description}: {expression}")
            time.sleep(0.05)
        return value

    def click(self, selector):
        """Sends mouse events at the center of the element."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'center' }});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def press_key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def set_dark_mode(self, is_dark):
        scheme = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path):
        self.evaluate("window.scrollTo(0, 0)")
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(picture["data"]))


def open_browser(profile):
    program = next(filter(None, map(shutil.which, BROWSERS)), None) or sys.exit(f"no browser is installed: expected one of {', '.join(BROWSERS)}")
    browser = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0",
         f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    port_file, start = pathlib.Path(profile) / "DevToolsActivePort", time.monotonic()
    while not (port_file.exists() and port_file.read_text().count("\n")):
        if browser.poll() is not None or time.monotonic() - start > TIMEOUT_SECONDS:
            raise SystemExit("the browser did not start")
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
    return browser, Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
