#!/usr/bin/env python3
"""Time per output token with the lane's own k, with fixed ones, and without speculation: interleaved, on a running router.

    outrider up --http 127.0.0.1:8000 &
    docs/measurements/choice_of_k.py --url http://127.0.0.1:8000 --prompts models/demo/prompts

Every prompt is asked in every mode before the next one, in an order that rotates; with --concurrency N, N prompts at
once, all in one mode. Modes with a fixed k run under a task type of their own, so that the lane that chooses learns
from its own rounds alone. Standard library only.
"""

import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import statistics
import time
import urllib.parse

MODES = {
    "auto": None,
    "off": {"enabled": False},
    "k=0": {"num_draft_tokens": 0},
    "k=2": {"num_draft_tokens": 2},
    "k=4": {"num_draft_tokens": 4},
}


def ask(url, prompt, mode, tokens):
    """One request; its microseconds per token after the first chunk, its text, its usage."""
    task, text = prompt
    body = {
        "model": url.model, "prompt": text, "max_tokens": tokens, "temperature": 0, "seed": 1, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "task_type": task if mode == "auto" else "fixed-" + task,
    }
    if MODES[mode] is not None:
        body["speculation"] = MODES[mode]
    connection = http.client.HTTPConnection(url.host, url.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:500]}")
    first = last = None
    words, usage = [], {}
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            usage = chunk["usage"]
        if chunk.get("choices"):
            now = time.perf_counter()
            first, last = first or now, now
            words.append(chunk["choices"][0].get("text", ""))
    connection.close()
    return (last - first) * 1e6 / max(1, usage["completion_tokens"] - 1), "".join(words), usage


def prompts_of(folder, tasks, per_task):
    chosen = []
    for task in tasks:
        lines = (pathlib.Path(folder) / f"{task}.jsonl").read_text().splitlines()[:per_task]
        for line in lines:
            row = json.loads(line)
            text = row.get("prompt") or row.get("text") or "\n".join(m["content"] for m in row["messages"])
            chosen.append((task, text[:600]))
    return chosen


def measure(url, prompts, concurrency, args):
    times = {mode: [] for mode in MODES}
    walls = {mode: 0.0 for mode in MODES}
    usage = {mode: [0, 0, 0] for mode in MODES}
    differing, turn = 0, 0
    groups = [prompts[i:i + concurrency] for i in range(0, len(prompts), concurrency)]
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for _ in range(args.repeats):
            for group in groups:
                order = list(MODES)
                order = order[turn % len(order):] + order[:turn % len(order)]
                turn += 1
                texts = {}
                for mode in order:
                    began = time.perf_counter()
                    answers = list(pool.map(lambda prompt: ask(url, prompt, mode, args.tokens), group))
                    walls[mode] += time.perf_counter() - began
                    for micros, _, used in answers:
                        times[mode].append(micros)
                        spent = used.get("speculation") or {}
                        for i, name in enumerate(("rounds", "draft_tokens", "accepted_tokens")):
                            usage[mode][i] += spent.get(name) or 0
                    texts[mode] = [text for _, text, _ in answers]
                differing += sum(texts[mode] != texts["off"] for mode in MODES)
    print(f"\n## {concurrency} at once, {len(prompts)} prompts x {args.repeats}, {args.tokens} tokens each\n")
    print("| mode | us per token, mean | median | tokens per second, whole run | acceptance length | drafted per round |")
    print("|---|---|---|---|---|---|")
    total = len(prompts) * args.repeats * args.tokens
    mean = {mode: statistics.mean(times[mode]) for mode in MODES}
    for mode in MODES:
        rounds, drafted, accepted = usage[mode]
        rounds = max(1, rounds)
        print(f"| {mode} | {mean[mode]:.0f} | {statistics.median(times[mode]):.0f} | {total / walls[mode]:.0f} "
              f"| {1 + accepted / rounds:.2f} | {drafted / rounds:.2f} |")
    best = min(("k=0", "k=2", "k=4"), key=mean.get)
    fastest = min(("k=0", "k=2", "k=4"), key=walls.get)
    print(f"\nspeed by time per token: auto/best fixed ({best}) {mean[best] / mean['auto']:.3f}, "
          f"auto/off {mean['off'] / mean['auto']:.3f}")
    print(f"speed by the whole run: auto/best fixed ({fastest}) {walls[fastest] / walls['auto']:.3f}, "
          f"auto/off {walls['off'] / walls['auto']:.3f}")
    print(f"texts that differ between modes: {differing}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", default="models/demo/prompts")
    parser.add_argument("--tasks", default="chat,code,summarization,sql")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--concurrency", default="1,8")
    args = parser.parse_args()
    parsed = urllib.parse.urlparse(args.url)
    url = argparse.Namespace(host=parsed.hostname, port=parsed.port, model=None)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
    connection.request("GET", "/v1/models")
    url.model = json.loads(connection.getresponse().read())["data"][0]["id"]
    print(f"# Time per token by choice of k\n\n{datetime.datetime.now():%Y-%m-%d %H:%M}, {os.cpu_count()} cores, "
          f"load average {os.getloadavg()[0]:.1f}, model {url.model}, tasks {args.tasks}, temperature 0.")
    prompts = prompts_of(args.prompts, args.tasks.split(","), args.per_task)
    measure_warm_up(url, prompts)
    for concurrency in map(int, args.concurrency.split(",")):
        measure(url, prompts, concurrency, args)


def measure_warm_up(url, prompts):
    for mode in ("off", "k=4"):
        ask(url, prompts[0], mode, 32)


if __name__ == "__main__":
    main()
