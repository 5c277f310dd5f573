#!/usr/bin/env python3
"""Measure whether speculation ever slows serving down: the router's own choice against `off` or a fixed k.

Every cell starts a new `outrider up`, so the router has no statistics of its lanes. `outrider bench` sends
blocks of requests in the order own choice, other, other, own choice. No two blocks share a cached prompt.
Each run measures the cells in random order.

The table has geometric means over runs with 95% confidence intervals (Student's t on logarithms): the ratio
of the own choice's tokens/s to the other's, and the ratio of the P99 request times (with few requests a
block, that is close to the longest time). Ctrl-C prints the results so far.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys

# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom.
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]


def main():
    args = arguments()
    results = {}
    with contextlib.suppress(KeyboardInterrupt):
        measure_all(args, results)
    print_table(results)


def measure_all(args, results):
    for run in range(args.runs):
        cells = list(itertools.product(args.isa, args.temperatures, args.max_tokens, args.streams, args.against))
        random.Random(args.seed + run).shuffle(cells)
        for number, cell in enumerate(cells):
            print(f"run {run + 1} of {args.runs}, cell {number + 1} of {len(cells)}: {cell}", file=sys.stderr, flush=True)
            results.setdefault(cell, []).append(measure(args, cell, args.seed + run))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    parser.add_argument("--outrider", default="target/debug/outrider", help="the program; its workers lie beside it")
    parser.add_argument("--up", default="", help="further options of `outrider up`")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=listed(int), default=[1, 2, 4, 8, 16], help="requests at a time")
    parser.add_argument("--temperatures", type=listed(float), default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=listed(int), default=[64])
    parser.add_argument("--isa", type=listed(str), default=["native"], help="native, avx2, ..: what the workers compute with")
    parser.add_argument("--against", type=listed(str), default=["off"], help="off, or a fixed k")
    parser.add_argument("--prompts", default="models/demo/prompts")
    parser.add_argument("--block-requests", type=int, default=22, help="at least twice the streams are sent")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def measure(args, cell, seed):
    """Measures one cell. Returns the figures of both arms: (own, other)."""
    isa, temperature, max_tokens, streams, against = cell
    environment = dict(os.environ)
    if isa != "native":
        environment["OUTRIDER_ISA"] = isa
    anywhere = "127.0.0.1:0"
    up = [args.outrider, "up", "--no-evidence", "--http", anywhere, "--grpc", anywhere, "--admin", anywhere]
    servers = subprocess.Popen(
        up + args.up.split(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    try:
        url = next((found.group(1) for line in servers.stdout if (found := re.search(r"ready at (http://\S+)", line))), None)
        if url is None:
            sys.exit("`outrider up` ended before it was ready")
        bench = [args.outrider, "bench", "--url", url, "--prompts", args.prompts, "--concurrency", str(streams)]
        bench += ["--temperatures", str(temperature), "--max-tokens", str(max_tokens), "--body", "ignore_eos=true"]
        bench += ["--blocks", "2", "--block-requests", str(max(args.block_requests, 2 * streams)), "--warmup", "0"]
        bench += ["--seed", str(seed), "--json", "--arm", "own", "--arm", f"other:speculation={against}"]
        report = json.loads(subprocess.run(bench, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        os.killpg(servers.pid, signal.SIGINT)
        servers.stdout.read()
        servers.wait(timeout=60)
    of_arm = {figures["arm"]: figures for figures in report["results"] if figures["task"] == "all"}
    if of_arm["own"]["failed"] or of_arm["other"]["failed"]:
        sys.exit(f"requests failed: {of_arm['own']['failures']} {of_arm['other']['failures']}")
    return of_arm["own"], of_arm["other"]


def print_table(results):
    print("| instruction set | T | tokens | streams | against | tokens/s | own over other | P99 of the request time | accepted length |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cell, pairs in sorted(results.items()):
        own = statistics.mean(own["output_throughput"] for own, _ in pairs)
        throughput = interval([own["output_throughput"] / other["output_throughput"] for own, other in pairs])
        p99 = interval([own["p99_e2el_ms"] / other["p99_e2el_ms"] for own, other in pairs])
        length = statistics.mean(own.get("spec_decode_acceptance_length") or 1.0 for own, _ in pairs)
        isa, temperature, tokens, streams, against = cell
        print(f"| {isa} | {temperature:g} | {tokens} | {streams} | {against} | {own:.1f} | {throughput} | {p99} | {length:.2f} |")


def interval(ratios):
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    if len(logs) == 1:
        return f"{math.exp(mean):.2f}"
    half = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} [{math.exp(mean - half):.2f}, {math.exp(mean + half):.2f}]"


if __name__ == "__main__":
    main()
