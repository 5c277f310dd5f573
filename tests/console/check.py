#!/usr/bin/env python3
"""Click through the console in headless Chromium and write its screenshots.

    tests/console/check.py --outrider target/debug/outrider [--screenshots docs/console]
    tests/console/check.py --url http://127.0.0.1:8002/ [--screenshots docs/console]

Starts `outrider up` on free ports and opens the console that it names, or one that runs already, and drives a real browser over the DevTools protocol
with mouse and keyboard events: it generates an answer, runs a race, looks at lanes, pools and requests, and has the pair
checked. Whatever a person
would see go wrong fails it: an error in the browser's console, a page that stays empty, ids that differ.
"""

import argparse
import base64
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import websocket

PATIENCE = 180
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}


class Page:
    """One tab."""

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
        """As a person does: with the mouse, where the element is."""
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


def main():
    settings = parse_arguments()
    settings.screenshots.mkdir(parents=True, exist_ok=True)
    if settings.url:
        return check(settings.url, settings.screenshots)
    up = subprocess.Popen(
        [settings.outrider, "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", *settings.up],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    try:
        check(console_url(up), settings.screenshots)
    finally:
        up.terminate()
        up.wait()


def check(url, screenshots):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser, page = open_browser(profile)
        try:
            walk(page, url, screenshots)
        finally:
            browser.terminate()
            browser.wait()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--outrider", help="the built `outrider`")
    what.add_argument("--url", help="a console that is served already, with a draft and a target worker")
    parser.add_argument("--screenshots", type=pathlib.Path, default=pathlib.Path("docs/console"), help="where they go")
    parser.add_argument("up", nargs="*", help="further arguments of `outrider up`, behind --")
    return parser.parse_args()


def console_url(up):
    """The console's address, once `outrider up` names it; what it prints before is passed on."""
    for line in up.stdout:
        print(line, end="", flush=True)
        if line.startswith("console: "):
            return line.removeprefix("console: ").strip()
    raise SystemExit(f"`outrider up` ended with {up.wait()} and named no console")


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


def walk(page, url, screenshots):
    page.dark(False)
    page.call("Page.navigate", url=url)
    page.until("the model's name", "document.querySelector('#model option')?.value")

    page.click("#generate")
    page.until("the answer's end", "!document.querySelector('.answer.running') && document.querySelectorAll('.token[data-id]').length > 0"
               " && !document.querySelector('#generate').disabled")
    tokens = page.value("document.querySelectorAll('.token[data-id]').length")
    assert tokens == 64, f"{tokens} tokens, not the 64 that were asked for"
    page.click("#answers .token")
    page.value("document.querySelector('#answers .token').focus()")
    page.key("ArrowRight")
    details = page.value("document.querySelector('#token-details').textContent")
    assert details.startswith("Position 1:"), f"the arrow key moved to: {details!r}"
    page.screenshot(screenshots / "playground.png")

    # A fixed k, for what a lane chooses depends on the machine.
    page.value("document.querySelector('#k').value = '4'")
    page.click("#race")
    verdict = page.until("the race's end", "!document.querySelector('#race').disabled && document.querySelector('#verdict').textContent")
    print(f"race: {verdict}")
    assert verdict.startswith("Identical: all 64 token ids are equal."), verdict
    lists = page.value("[...document.querySelectorAll('.answer')].map((a) => [...a.querySelectorAll('[data-id]')].map((t) => t.dataset.id).join())")
    assert len(lists) == 2 and lists[0] == lists[1], "the ids on the page differ"
    drafted = page.value("[...document.querySelectorAll('.answer')].map((a) => a.querySelectorAll('.token.drafted').length)")
    assert drafted[0] == 0 and drafted[1] > 0, f"drafted tokens: {drafted}"
    page.screenshot(screenshots / "race.png")
    page.dark(True)
    page.screenshot(screenshots / "race-dark.png")

    for name, what in (("lanes", "#lanes .lane svg circle.chosen"), ("pools", "#pools tbody tr"), ("requests", "#requests .trail svg rect")):
        page.click(f"nav a[href='#{name}']")
        page.until(f"something on {name}", f"document.querySelectorAll({json.dumps(what)}).length")
        assert page.value("document.querySelector('nav a[aria-current]').hash") == f"#{name}"
        page.screenshot(screenshots / f"{name}.png")
    page.click("nav a[href='#pair']")
    # The page tells what is known of the pair before its button is to be pressed.
    page.until("the pair's page", "document.querySelector('#pair-status').textContent && document.querySelector('#pair-check').getBoundingClientRect().width && !document.querySelector('#pair-check').disabled")
    page.click("#pair-check")
    page.until("the check's begin", "document.querySelector('#pair-status').textContent.startsWith('Check')")
    status = page.until("the pair's report", "!document.querySelector('#pair-check').disabled && document.querySelector('#pair-status').textContent")
    print(f"pair: {status} {page.value('document.querySelector(`#pair-report .verdict`)?.textContent')}")
    kinds = page.value("[...document.querySelectorAll('#pair-report table:first-of-type tbody tr td:first-child')].map((cell) => cell.textContent)")
    assert status.startswith("Checked in") and "sql" in kinds and "all" in kinds, f"{status}: {kinds}"
    page.screenshot(screenshots / "pair.png")

    page.click("nav a[href='#pools']")
    assert page.value("document.querySelectorAll('#pools tbody tr').length") == 2, "a target and a draft worker"
    assert page.value("document.querySelector('#problem').hidden"), page.value("document.querySelector('#problem').textContent")
    assert not page.problems, f"the browser complained: {json.dumps(page.problems, indent=1)}"
    print(f"the console works: screenshots in {screenshots}")


if __name__ == "__main__":
    main()
