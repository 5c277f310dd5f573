#!/usr/bin/env python3
"""Measure whether speculation ever slows serving down. Compares the k that the router chooses with `off` or a
fixed k.

Every cell starts a new `outrider up`, so the router has no statistics of its lanes. `outrider bench` sends
blocks of requests in the order router, other, other, router. No two blocks share a cached prompt. Each run
measures the cells in random order.

The table has geometric means over runs with 95% confidence intervals (Student's t on logarithms): the ratio
of tokens/s with the router's choice to tokens/s with the other setting, and the ratio of the P99 request
times (with few requests per block, that is close to the longest time). Ctrl-C or a failure prints the results
so far.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import shlex
import signal
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "programs"))

import up  # noqa: E402

# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom, because Python's `statistics` has none. The rule is that
# of `mean_interval` in cli/src/load/statistics.rs.
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]


def main():
    args = arguments()
    results = {}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            measure_all(args, results)
    finally:
        print_table(results)


def measure_all(args, results):
    for run in range(args.runs):
        cells = list(itertools.product(args.isa, args.temperatures, args.max_tokens, args.streams, args.against))
        random.Random(args.seed + run).shuffle(cells)
        for number, cell in enumerate(cells):
            print(f"run {run + 1} of {args.runs}, cell {number + 1} of {len(cells)}: {cell}", file=sys.stderr, flush=True)
            router, other = measure(args, cell, args.seed + run)
            throughput, p99 = ([arm[key] for arm in (router, other)] for key in ("output_throughput", "p99_e2el_ms"))
            print(f"  router and {cell[-1]}: {throughput[0]:.1f} and {throughput[1]:.1f} tokens/s, P99 {p99[0]:.0f} and {p99[1]:.0f} ms", file=sys.stderr, flush=True)
            results.setdefault(cell, []).append((router, other))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma_separated = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    parser.add_argument("--outrider", default="target/debug/outrider", help="path of `outrider`; the worker binaries must be in the same directory")
    parser.add_argument("--up", default="", help="further options of `outrider up`, as one argument, such as --up='--threads 1'")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each cell; intervals need at least 2 (3)")
    parser.add_argument("--streams", type=comma_separated(int), default=[1, 2, 4, 8, 16], help="concurrent requests (1,2,4,8,16)")
    parser.add_argument("--temperatures", type=comma_separated(float), default=[0.0, 1.0], help="sampling temperatures (0,1)")
    parser.add_argument("--max-tokens", type=comma_separated(int), default=[64], help="tokens per answer (64)")
    parser.add_argument("--isa", type=comma_separated(str), default=["native"], help="instruction sets of the workers: native, avx2, .. (native)")
    parser.add_argument("--against", type=comma_separated(str), default=["off"], help="settings to compare with: off, or a fixed k (off)")
    parser.add_argument("--prompts", default="models/demo/prompts", help="prompts of `outrider bench` (models/demo/prompts)")
    parser.add_argument("--block-requests", type=int, default=22, help="requests per block; raised to twice the number of streams (22)")
    parser.add_argument("--seed", type=int, default=1, help="seed of sampling and of the order of cells (1)")
    args = parser.parse_args()
    if min([args.runs, args.block_requests, *args.streams, *args.max_tokens]) < 1:
        parser.error("--runs, --streams, --max-tokens and --block-requests are 1 or more")
    return args


def measure(args, cell, seed):
    """Measures one cell. Returns the results of both arms: (router, other)."""
    isa, temperature, max_tokens, streams, against = cell
    environment = dict(os.environ)
    if isa != "native":
        environment["OUTRIDER_ISA"] = isa
    servers = up.start(args.outrider, "--no-evidence", *shlex.split(args.up), env=environment, start_new_session=True)
    try:
        url = up.wait_for_line(servers, "outrider is ready at ", show=False)
        bench = [args.outrider, "bench", "--url", url, "--prompts", args.prompts, "--concurrency", str(streams)]
        bench += ["--temperatures", str(temperature), "--max-tokens", str(max_tokens), "--body", "ignore_eos=true"]
        bench += ["--blocks", "2", "--block-requests", str(max(args.block_requests, 2 * streams)), "--warmup", "0"]
        bench += ["--seed", str(seed), "--json", "--arm", "router", "--arm", f"other:speculation={against}"]
        measured = subprocess.run(bench, stdout=subprocess.PIPE)
        if measured.returncode:
            sys.exit(f"`outrider bench` failed with exit code {measured.returncode}: see above")
        report = json.loads(measured.stdout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # `outrider up` has exited
            os.killpg(servers.pid, signal.SIGINT)
        servers.stdout.read()
        servers.wait(timeout=60)
        servers.errors.close()
    by_arm = {result["arm"]: result for result in report["results"] if result["task"] == "all"}
    router, other = by_arm["router"], by_arm["other"]
    if router["failed"] or other["failed"]:
        sys.exit(f"requests failed: {router['failures']} {other['failures']}")
    return router, other


def print_table(results):
    print("| instruction set | T | tokens | streams | against | tokens/s | speedup | ratio of P99 request times | acceptance length |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cell, pairs in sorted(results.items()):
        throughput = statistics.mean(router["output_throughput"] for router, _ in pairs)
        speedup = interval([router["output_throughput"] / other["output_throughput"] for router, other in pairs])
        p99 = interval([router["p99_e2el_ms"] / other["p99_e2el_ms"] for router, other in pairs])
        length = statistics.mean(router.get("spec_decode_acceptance_length") or 1.0 for router, _ in pairs)
        isa, temperature, tokens, streams, against = cell
        print(f"| {isa} | {temperature:g} | {tokens} | {streams} | {against} | {throughput:.1f} | {speedup} | {p99} | {length:.2f} |")


def interval(ratios):
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    if len(logs) == 1:
        return f"{math.exp(mean):.2f}"
    half_width = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} [{math.exp(mean - half_width):.2f}, {math.exp(mean + half_width):.2f}]"


if __name__ == "__main__":
    main()
