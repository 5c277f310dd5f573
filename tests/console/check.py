#!/usr/bin/env python3
"""Click through the console in headless Chromium and write its screenshots.

    tests/console/check.py --outrider target/debug/outrider [--screenshots docs/console]
    tests/console/check.py --url http://127.0.0.1:8002/ [--screenshots docs/console]

Starts `outrider up` on free ports, or uses a running console (--url), and drives a real browser over the
DevTools protocol with mouse and keyboard events. It generates an answer, runs a race, opens the pages of
lanes, pools and requests, and checks the pair. It fails on any visible fault: an error in the browser's
console, a page that stays empty, or token ids that differ.
"""

import argparse
import json
import pathlib
import tempfile

import up
from browser import open_browser


def main():
    settings = parse_arguments()
    settings.screenshots.mkdir(parents=True, exist_ok=True)
    if settings.url:
        return check(settings.url, settings.screenshots)
    running = up.start(settings.outrider, *settings.up)
    try:
        check(up.told(running, "console: "), settings.screenshots)
    finally:
        running.terminate()
        running.wait()


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

    # A fixed k, because the lane's choice depends on the machine.
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
    # The page shows the status of the pair before its button is enabled.
    page.until("the pair's page", "document.querySelector('#pair-status').textContent && document.querySelector('#pair-check').getBoundingClientRect().width && !document.querySelector('#pair-check').disabled")
    page.click("#pair-check")
    page.until("the check's begin", "document.querySelector('#pair-status').textContent.startsWith('Check')")
    status = page.until("the pair's report", "!document.querySelector('#pair-check').disabled && document.querySelector('#pair-status').textContent")
    print(f"pair: {status} {page.value('document.querySelector(`#pair-report .verdict`)?.textContent')}")
    kinds = page.value("[...document.querySelectorAll('#pair-report table:first-of-type tbody tr td:first-child')].map((cell) => cell.textContent)")
    assert status.startswith("Checked in") and "sql" in kinds and "all" in kinds, f"{status}: {kinds}"
    page.screenshot(screenshots / "pair.png")

    page.click("nav a[href='#pools']")
    assert page.value("document.querySelectorAll('#pools tbody tr').length") >= 2, "a target and a draft worker"
    assert page.value("document.querySelector('#problem').hidden"), page.value("document.querySelector('#problem').textContent")
    assert not page.problems, f"the browser complained: {json.dumps(page.problems, indent=1)}"
    print(f"the console works: screenshots in {screenshots}")


if __name__ == "__main__":
    main()
