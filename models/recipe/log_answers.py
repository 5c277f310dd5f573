#!/usr/bin/env python3
"""Send the prompts of training rows to a router, whose request log `outrider distill` trains a draft on.

    OUTRIDER_REQUEST_LOG=log.jsonl outrider up --target DIR --draft none --no-evidence
    python models/recipe/log_answers.py --data DIR

A draft learns most from what its target writes itself. Use this before there is traffic to log. Needs no packages.
"""

import argparse
import http.client
import itertools
import json
import pathlib
import queue
import random
import sys
import threading
import time

# Greedy answers are a quarter: at other temperatures the draft sees more of the target's distribution.
TEMPERATURES = (0.0, 1.0, 0.7, 1.0)
REPORT_EVERY = 1000


def main():
    settings = parse_arguments()
    requests = plan(settings)
    waiting = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    progress = Progress(len(requests))
    # Daemons end with the process, so that Ctrl-C does not wait for the remaining requests.
    clients = [threading.Thread(target=send_all, args=(settings, waiting, progress), daemon=True) for _ in range(settings.concurrency)]
    for client in clients:
        client.start()
    try:
        for client in clients:
            client.join()
    except KeyboardInterrupt:
        progress.report()
        sys.exit("interrupted; the router has logged these answers")
    progress.report()
    if progress.failed > 0:
        sys.exit(f"{progress.failed} of {len(requests)} requests failed, the first with: {progress.first_failure}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=pathlib.Path, required=True, help="directory of .jsonl files of {task, prompt}, one file per task type")
    add("--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="the router's HTTP address (127.0.0.1:8000)")
    add("--model", default="target", help="the model's name (target)")
    add("--per-task", type=int, default=4000, help="requests per task type; prompts are repeated where there are fewer (4000)")
    add("--max-prompt-chars", type=int, default=1200, help="leave out longer prompts (1200)")
    add("--max-tokens", type=int, default=128, help="maximum tokens per answer (128)")
    add("--exclude-licence", action="append", default=[], metavar="TEXT", help="leave out rows whose `licence` contains this")
    add("--concurrency", type=int, default=24, help="requests in progress (24)")
    add("--seed", type=int, default=0, help="seed of the order of prompts (0)")
    return parser.parse_args()


def plan(settings):
    """The request bodies with their task types, in random order. The number of a request is its seed."""
    rng = random.Random(settings.seed)
    planned = []
    for file in sorted(settings.data.glob("*.jsonl")):
        prompts = read_prompts(file, settings)
        if not prompts:
            print(f"{file.stem} is left out: no prompt in {file} is short enough and of a licence that is not excluded", file=sys.stderr)
        rng.shuffle(prompts)
        planned += [(file.stem, prompt) for prompt in itertools.islice(itertools.cycle(prompts), settings.per_task)]
    if not planned:
        sys.exit(f"no prompts to send in {settings.data}: expected .jsonl files with a field `prompt` per line")
    requests = [(task, body(settings, prompt, number)) for number, (task, prompt) in enumerate(planned)]
    rng.shuffle(requests)
    return requests


def read_prompts(file, settings):
    """The distinct prompts of a file that are short enough and whose licence is not excluded."""
    with open(file, encoding="utf-8") as lines:
        rows = [parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    excluded, longest = settings.exclude_licence, settings.max_prompt_chars
    allowed = [row["prompt"] for row in rows if not any(text in (row.get("licence") or "") for text in excluded)]
    return sorted({prompt for prompt in allowed if len(prompt) <= longest})


def parse(line, location):
    try:
        row = json.loads(line)
    except ValueError as error:
        sys.exit(f"{location}: not JSON: {error}")
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        sys.exit(f"{location}: needs a text field `prompt`")
    return row


def body(settings, prompt, number):
    return json.dumps({
        "model": settings.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": settings.max_tokens,
        "temperature": TEMPERATURES[number % len(TEMPERATURES)], "seed": number,
    })


def send_all(settings, waiting, progress):
    """Sends requests one after the other until none waits. A failed one is counted, and its connection replaced."""
    connection = http.client.HTTPConnection(settings.server)
    while True:
        try:
            task, request = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            connection.request("POST", "/v1/chat/completions", request, {"content-type": "application/json", "x-task-type": task})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {answer[:200].decode(errors='replace')}")
            progress.count(json.loads(answer)["usage"]["completion_tokens"])
        # An answer that is not JSON, or has no usage, has failed as well.
        except (OSError, http.client.HTTPException, ValueError, LookupError) as failure:
            progress.count_failure(failure)
            connection.close()


class Progress:
    """Counts answers over all threads."""

    def __init__(self, total):
        self.lock = threading.Lock()
        self.total, self.done, self.tokens, self.failed = total, 0, 0, 0
        self.first_failure = None
        self.began = time.monotonic()

    def count(self, tokens):
        with self.lock:
            self.done += 1
            self.tokens += tokens
            if self.done % REPORT_EVERY == 0:
                self.report()

    def count_failure(self, failure):
        with self.lock:
            self.failed += 1
            self.first_failure = self.first_failure or failure

    def report(self):
        seconds = time.monotonic() - self.began
        print(f"{self.done:,} of {self.total:,} answers, {self.tokens:,} tokens, {self.failed} failed, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
