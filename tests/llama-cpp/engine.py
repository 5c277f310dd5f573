#!/usr/bin/env python3
"""Compare the CPU engine's forward times with llama.cpp's, by weight format and rows, and check the goals.

    python tests/llama-cpp/engine.py --model random:CONFIG.json --gguf DIR --llama DIR --speed FILE [--isa avx2|full] [--formats int8] [--rounds 3]

--gguf holds bf16.gguf, q8_0.gguf and q4_0.gguf (written by to_gguf.py). --llama is the output of build.sh.
--speed is the engine's example `speed` from a release build.

For each format, each round runs our engine and then llama.cpp (forwards.cpp). The fastest time of all rounds
is reported. Both are measured with --context tokens already in the KV cache. Logits are computed for all rows
up to 16 rows, and for the last row only above that. With one thread the time is CPU time, because other
programs disturb it less; with several threads it is wall-clock time.

--prefix is a command under which every program runs, as in --prefix "taskset -c 1". --old FILE runs another
build of `speed` in the same rounds.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess

# Our weight formats and the llama.cpp types that they are compared with.
FORMATS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
# "one" and "512": minimum ratio of our tokens/s to llama.cpp's at 1 and at 512 rows. "8" and "16": maximum
# ratio of the time of 8 and of 16 rows to that of 1 row, checked with AVX2 only.
GOALS = {
    "bf16": {"one": 1.1, "8": 1.4, "16": 2.4, "512": 1.3},
    "int8": {"one": 1.3, "8": 2.2, "16": 3.8, "512": 1.5},
    "int4": {"one": 1.2, "8": 2.6, "16": 4.4, "512": 1.4},
}


def main():
    settings = parse_arguments()
    times, lines = {}, []
    for round_number in range(settings.rounds):
        for weights in settings.formats:
            for name, program in speed_builds(settings).items():
                heading, milliseconds_by_rows = run_speed(settings, program, weights)
                lines.append(heading)
                record_fastest(times, (weights, name), milliseconds_by_rows)
            record_fastest(times, (weights, "llama.cpp"), run_llama(settings, FORMATS[weights]))
        print(f"round {round_number + 1} of {settings.rounds} finished", flush=True)
    print("\n".join(sorted(set(lines))))
    print(table(settings, times))
    print(goals_table(settings, times))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory, or random:CONFIG.json for random weights")
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="directory of the GGUF files of the same shape")
    parser.add_argument("--llama", type=pathlib.Path, required=True, help="output directory of build.sh")
    parser.add_argument("--speed", required=True, help="release build of the engine's example `speed`")
    parser.add_argument("--old", help="another build of `speed` to compare")
    parser.add_argument("--isa", default="full", choices=["full", "avx2"], help="full: all instruction sets; avx2: without AVX-512 (full)")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), help="weight formats of our engine (bf16,int8,int4)")
    parser.add_argument("--rows", default="1,2,4,8,16,32,512", help="numbers of rows per forward (1,2,4,8,16,32,512)")
    parser.add_argument("--context", type=int, default=64, help="tokens already in the KV cache (64)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--prefix", default="", help="command under which every program runs")
    return parser.parse_args()


def speed_builds(settings):
    old = {"old": settings.old} if settings.old else {}
    return old | {"ours": settings.speed}


def record_fastest(times, key, milliseconds_by_rows):
    best = times.setdefault(key, {})
    for rows, milliseconds in milliseconds_by_rows.items():
        best[rows] = min(best.get(rows, milliseconds), milliseconds)


def run(settings, command, **environment):
    command = shlex.split(settings.prefix) + [str(part) for part in command]
    completed = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if completed.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{completed.stdout}{completed.stderr}")
    return completed.stdout


def run_speed(settings, program, weights):
    isa = {"OUTRIDER_ISA": "avx2"} if settings.isa == "avx2" else {}
    text = run(settings, [program, settings.model, settings.threads, weights, settings.rows, settings.context], **isa)
    lines = re.findall(r"^ +(\d+) rows +([\d.]+) ms +([\d.]+) ms CPU", text, re.MULTILINE)
    return text.splitlines()[0], {int(rows): float(cpu if settings.threads == 1 else clock) for rows, clock, cpu in lines}


def run_llama(settings, name):
    library = {"LD_LIBRARY_PATH": str(settings.llama / "avx2/bin")} if settings.isa == "avx2" else {}
    command = [settings.llama / "forwards", settings.gguf / f"{name}.gguf", settings.threads, settings.rows, settings.context]
    lines = run(settings, command, **library).splitlines()
    return {int(rows): float(cpu if settings.threads == 1 else clock) for rows, clock, cpu in map(str.split, lines)}


def table(settings, times):
    rows = [int(rows) for rows in settings.rows.split(",")]
    heading = "| ms | " + " | ".join(f"{rows} rows" for rows in rows) + " |"
    separator = "|" + "---|" * (len(rows) + 1)
    name = lambda key: f"llama.cpp {FORMATS[key[0]]}" if key[1] == "llama.cpp" else f"{key[1]} {key[0]}"
    line = lambda key: f"| {name(key)} | " + " | ".join(f"{times[key][rows]:.2f}" for rows in rows) + " |"
    return "\n".join([heading, separator] + [line(key) for key in times])


def goals_table(settings, times):
    formats = settings.formats
    lines = ["| | " + " | ".join(formats) + " |", "|---|" + "---|" * len(formats)]

    def add(label, figure):
        cells = [figure(weights, times[weights, "ours"], times[weights, "llama.cpp"]) for weights in formats]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    def at_least(value, goal):
        return f"{value:.2f} (goal: at least {goal}, {'met' if value >= goal else 'missed'})"

    def at_most(value, goal):
        return f"{value:.2f} (goal: at most {goal}, {'met' if value <= goal else 'missed'})"

    measured = times[formats[0], "ours"]
    if 1 in measured:
        add("1 row, tokens/s over llama.cpp's", lambda name, ours, theirs: at_least(theirs[1] / ours[1], GOALS[name]["one"]))
    for rows in [8, 16] if settings.isa == "avx2" and 1 in measured else []:
        if rows in measured:
            add(f"{rows} rows over 1 row", lambda name, ours, _: at_most(ours[rows] / ours[1], GOALS[name][str(rows)]))
    if 512 in measured:
        add("512 rows, tokens/s over llama.cpp's", lambda name, ours, theirs: at_least(theirs[512] / ours[512], GOALS[name]["512"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
