#!/usr/bin/env python3
"""Click through the console in headless Chromium and write its screenshots.

    tests/console/check.py --outrider target/debug/outrider [--screenshots target/console]
    tests/console/check.py --url http://127.0.0.1:8002/ [--screenshots target/console]

Starts `outrider up` on free ports, or uses a running console (--url), and drives a real browser over the
DevTools protocol with mouse and keyboard events. It generates an answer, runs a race, opens the pages of
lanes, pools and requests, and checks the pair. It fails on any visible error: an error in the browser's
console, a page that stays empty, or token ids that differ.
"""

import argparse
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "programs"))

import up  # noqa: E402
from browser import open_browser  # noqa: E402


def main():
    settings = parse_arguments()
    settings.screenshots.mkdir(parents=True, exist_ok=True)
    if settings.url:
        return check(settings.url, settings.screenshots)
    process = up.start(settings.outrider, *settings.up)
    try:
        check(up.wait_for_line(process, "console: "), settings.screenshots)
    finally:
        process.terminate()
        process.wait()


def check(url, screenshots):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser, page = open_browser(profile)
        try:
            click_through(page, url, screenshots)
        finally:
            browser.terminate()
            browser.wait()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--outrider", help="path of the built `outrider` binary")
    source.add_argument("--url", help="URL of a running console with a draft and a target worker")
    parser.add_argument("--screenshots", type=pathlib.Path, default=pathlib.Path("target/console"), help="directory for the screenshots")
    parser.add_argument("up", nargs="*", help="further arguments of `outrider up`, after --")
    return parser.parse_args()


def click_through(page, url, screenshots):
    screenshots.mkdir(parents=True, exist_ok=True)
    page.set_dark_mode(False)
    page.call("Page.navigate", url=url)
    page.wait_until("the model name", "document.querySelector('#model option')?.value")

    page.click("#generate")
    page.wait_until("the end of the answer", "!document.querySelector('.answer.running') && document.querySelectorAll('.token[data-id]').length > 0"
               " && !document.querySelector('#generate').disabled")
    tokens = page.evaluate("document.querySelectorAll('.token[data-id]').length")
    assert tokens == 64, f"{tokens} tokens instead of the requested 64"
    page.click("#answers .token")
    page.evaluate("document.querySelector('#answers .token').focus()")
    page.press_key("ArrowRight")
    details = page.evaluate("document.querySelector('#token-details').textContent")
    assert details.startswith("Position 1:"), f"after the arrow key the page shows {details!r}"
    page.screenshot(screenshots / "playground.png")

    # A fixed k, because the lane's choice depends on the machine.
    page.evaluate("document.querySelector('#k').value = '4'")
    page.click("#race")
    verdict = page.wait_until("the end of the race", "!document.querySelector('#race').disabled && document.querySelector('#verdict').textContent")
    print(f"race: {verdict}")
    assert verdict.startswith("Identical: all 64 token ids are equal."), verdict
    id_lists = page.evaluate("[...document.querySelectorAll('.answer')].map((a) => [...a.querySelectorAll('[data-id]')].map((t) => t.dataset.id).join())")
    assert len(id_lists) == 2 and id_lists[0] == id_lists[1], "the ids on the page differ"
    drafted = page.evaluate("[...document.querySelectorAll('.answer')].map((a) => a.querySelectorAll('.token.drafted').length)")
    assert drafted[0] == 0 and drafted[1] > 0, f"drafted tokens: {drafted}"
    page.screenshot(screenshots / "race.png")
    page.set_dark_mode(True)
    page.screenshot(screenshots / "race-dark.png")

    for name, content in (("lanes", "#lanes .lane svg circle.chosen"), ("pools", "#pools tbody tr"), ("requests", "#requests .timeline svg rect")):
        page.click(f"nav a[href='#{name}']")
        page.wait_until(f"content on the page {name}", f"document.querySelectorAll({json.dumps(content)}).length")
        assert page.evaluate("document.querySelector('nav a[aria-current]').hash") == f"#{name}"
        page.screenshot(screenshots / f"{name}.png")
    page.click("nav a[href='#pair']")
    # The status of the pair appears before its button is enabled.
    page.wait_until("the page Pair", "document.querySelector('#pair-status').textContent && document.querySelector('#pair-check').getBoundingClientRect().width && !document.querySelector('#pair-check').disabled")
    page.click("#pair-check")
    page.wait_until("the start of the check", "document.querySelector('#pair-status').textContent.startsWith('Check')")
    status = page.wait_until("the report of the check", "!document.querySelector('#pair-check').disabled && document.querySelector('#pair-status').textContent")
    print(f"pair: {status} {page.evaluate('document.querySelector(`#pair-report .verdict`)?.textContent')}")
    task_types = page.evaluate("[...document.querySelectorAll('#pair-report table:first-of-type tbody tr td:first-child')].map((cell) => cell.textContent)")
    assert status.startswith("Checked in") and "sql" in task_types and "all" in task_types, f"{status}: {task_types}"
    page.screenshot(screenshots / "pair.png")

    page.click("nav a[href='#pools']")
    page.evaluate("document.querySelector('#skip').click()")
    assert page.evaluate("document.querySelector('nav a[aria-current]').hash") == "#pools", "the skip link leaves the page"
    assert page.evaluate("document.querySelectorAll('#pools tbody tr').length") >= 2, "the page Pools lists fewer than two workers"
    assert page.evaluate("document.querySelector('#problem').hidden"), page.evaluate("document.querySelector('#problem').textContent")
    assert not page.errors, f"errors in the browser: {json.dumps(page.errors, indent=1)}"
    print(f"the console works; screenshots are in {screenshots}")


if __name__ == "__main__":
    main()
