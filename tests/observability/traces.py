#!/usr/bin/env python3
"""Check that a request's trace from three processes is complete in a real collector and its viewer.

    tests/observability/traces.py --outrider target/debug/outrider [--screenshots docs/console]

Starts Phoenix (PyPI: arize-phoenix), which collects spans over OTLP and shows them in a browser, and
`outrider up`, whose router, draft worker and target worker export to it: once over gRPC, once over HTTP. Each
time the check sends one request and reads its trace from Phoenix. The trace must have one root and no orphan,
and the `draft` and `verify` spans of the workers must be children of the router's `round` spans. Then
headless Chromium opens the trace and takes a screenshot. Phoenix is used because Jaeger and Tempo are not in
the registries that this repository uses.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/programs"))

import up  # noqa: E402
from browser import open_browser  # noqa: E402
from ports import free_port  # noqa: E402

TIMEOUT_SECONDS = 120
REQUEST = {
    "prompt": "def reverse(items):", "max_tokens": 24, "seed": 7, "temperature": 0.0, "ignore_eos": True,
    "speculation": {"num_draft_tokens": 4},
}
# The process that creates a span, by the prefix of its `code.file.path`.
ROUTER, WORKER = "router/", "worker/"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outrider", required=True, help="path of the built `outrider` binary")
    parser.add_argument("--screenshots", type=pathlib.Path, default=ROOT / "docs/console", help="directory for the screenshot")
    settings = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        phoenix, grpc = start_phoenix(stack, directory)
        trace_id = None
        for protocol, endpoint in (("http/protobuf", phoenix), ("grpc", grpc)):
            trace_id, spans = send_request(settings.outrider, protocol, endpoint, phoenix)
            print(f"{protocol}: trace {trace_id} has {len(spans)} spans: {check(spans)}")
        browser, page = open_browser(directory)
        stack.callback(browser.wait)
        stack.callback(browser.terminate)
        take_screenshot(page, phoenix, trace_id, settings.screenshots / "trace.png")


def start_phoenix(stack, directory):
    """Starts Phoenix on free ports. Returns the URLs of its pages (and OTLP over HTTP) and of OTLP over
    gRPC."""
    http, grpc = free_port(), free_port()
    environment = dict(
        os.environ, PHOENIX_WORKING_DIR=directory, PHOENIX_HOST="127.0.0.1", PHOENIX_PORT=str(http),
        PHOENIX_GRPC_PORT=str(grpc), PHOENIX_TELEMETRY_ENABLED="false", PHOENIX_ALLOW_EXTERNAL_RESOURCES="false",
    )
    log = stack.enter_context(open(pathlib.Path(directory) / "phoenix.log", "w+"))
    process = subprocess.Popen(
        [sys.executable, "-m", "phoenix.server.main", "serve"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    url = f"http://127.0.0.1:{http}"

    def is_healthy():
        if process.poll() is not None:
            log.seek(0)
            raise SystemExit(f"Phoenix exited with status {process.returncode}:\n{log.read()}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return urllib.request.urlopen(f"{url}/healthz", timeout=5).status == 200

    wait_until("Phoenix", is_healthy)
    return url, f"http://127.0.0.1:{grpc}"


def send_request(outrider, protocol, endpoint, phoenix):
    """Sends one request to a cluster that exports to `endpoint`. Returns the id and the spans of its
    trace."""
    environment = dict(
        os.environ, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol, OTEL_TRACES_SAMPLER="always_on"
    )
    process = up.start(outrider, "--ballast", "0", env=environment)
    try:
        url = up.wait_for_line(process, "outrider is ready at ")
        body = json.dumps(REQUEST | {"model": models(url)[0]}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))
    finally:
        # Buffered spans are exported when the processes exit.
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_SECONDS)
    root = wait_until("the request's span in Phoenix", lambda: root_of(phoenix, answer["id"]))
    trace_id = root["context"]["trace_id"]
    # All processes have exited, so Phoenix has all spans or will have them soon.
    spans = wait_until("all spans in Phoenix", lambda: if_complete(spans_of(phoenix, trace_id)))
    return trace_id, spans


def models(url):
    return [model["id"] for model in json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"]]


def root_of(phoenix, response_id):
    spans = all_spans(phoenix)
    found = [span for span in spans if span["attributes"].get("gen_ai.response.id") == response_id]
    return found[0] if found else None


def spans_of(phoenix, trace_id):
    return [span for span in all_spans(phoenix) if span["context"]["trace_id"] == trace_id]


def all_spans(phoenix):
    try:
        return json.load(urllib.request.urlopen(f"{phoenix}/v1/projects/default/spans?limit=1000"))["data"]
    except urllib.error.HTTPError as error:
        # The project does not exist before the first span.
        if error.code == 404:
            return []
        raise


def if_complete(spans):
    """Returns the spans if all rounds that the request reports and a draft are among them, else None."""
    counts = collections.Counter(span["name"] for span in spans)
    rounds = next((int(span["attributes"]["outrider.spec.rounds"]) for span in spans if span["name"] == "request"), None)
    return spans if rounds and counts["round"] == counts["verify"] == rounds and counts["draft"] else None


def check(spans):
    """Raises if the spans are not one tree over three processes. Returns a count of the spans by name."""
    by_id = {span["context"]["span_id"]: span for span in spans}
    roots = [span for span in spans if span["parent_id"] is None]
    assert [root["name"] for root in roots] == ["request"], f"roots: {[root['name'] for root in roots]}"
    orphans = [span["name"] for span in spans if span["parent_id"] not in by_id and span not in roots]
    assert not orphans, f"spans whose parent is missing: {orphans}"
    for name, process in (("request", ROUTER), ("round", ROUTER), ("draft", WORKER), ("verify", WORKER)):
        files = [span["attributes"]["code.file.path"] for span in spans if span["name"] == name]
        assert files and all(file.startswith(process) for file in files), f"{name}: {files}"
    for span in spans:
        if span["name"] in ("draft", "verify"):
            assert by_id[span["parent_id"]]["name"] == "round", f"the parent of {span['name']} is {by_id[span['parent_id']]['name']}"
    counts = collections.Counter(span["name"] for span in spans)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def take_screenshot(page, phoenix, trace_id, path):
    project = json.load(urllib.request.urlopen(f"{phoenix}/v1/projects"))["data"][0]["id"]
    page.call("Page.navigate", url=f"{phoenix}/projects/{project}/traces/{trace_id}")
    page_text = "(document.body?.innerText ?? '')"
    page.wait_until("the trace's spans on the page", f"['request', 'round', 'draft', 'verify'].every((name) => {page_text}.includes(name))")
    # Select the first verification, as a user does; only then does the page load its attributes.
    page.evaluate("[...document.querySelectorAll('*')].find((e) => !e.children.length && e.textContent === 'verify').id = 'selected-span'")
    page.click("#selected-span")
    page.wait_until("the span's attributes on the page", f"{page_text}.includes('outrider.spec.accepted')")
    page.screenshot(path)
    print(f"screenshot of the trace in Phoenix: {path}")


def wait_until(description, condition):
    """Calls the condition until it returns a true value. Returns that value."""
    start = time.monotonic()
    while not (value := condition()):
        if time.monotonic() - start > TIMEOUT_SECONDS:
            raise SystemExit(f"timed out after {TIMEOUT_SECONDS} s waiting for {description}")
        time.sleep(0.2)
    return value


if __name__ == "__main__":
    main()
