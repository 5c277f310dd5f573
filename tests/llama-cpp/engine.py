#!/usr/bin/env python3
"""Compare the CPU engine's forward times with llama.cpp's, by weight format and rows, and check the goals.

    python tests/llama-cpp/engine.py --model random:CONFIG.json --gguf DIR --llama DIR --speed FILE [--isa avx2|full] [--formats int8] [--rounds 3]

--gguf holds bf16.gguf, q8_0.gguf and q4_0.gguf (written by to_gguf.py). --llama is the output of build.sh.
--speed is the engine's example `speed` from a release build.

For each format, each round runs our engine and then llama.cpp (forwards.cpp). The fastest time of all rounds
counts. Both are measured with --context tokens already in the KV cache. Logits are computed for all rows up
to 16 rows, and for the last row only above that. The measure is CPU time with one thread, because other
programs disturb it less, and wall-clock time with several.

--prefix is a command that runs every program, as in --prefix "taskset -c 1". --old FILE runs another build of
`speed` in the same rounds.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess

# Our weight formats and the llama.cpp types that they are compared with.
FORMATS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
# "one" and "512": the least ratio of our tokens/s to llama.cpp's at 1 and at 512 rows. "8" and "16": the
# greatest ratio of the time of 8 and of 16 rows to that of 1 row, checked with AVX2 only.
GOALS = {
    "bf16": {"one": 1.1, "8": 1.4, "16": 2.4, "512": 1.3},
    "int8": {"one": 1.3, "8": 2.2, "16": 3.8, "512": 1.5},
    "int4": {"one": 1.2, "8": 2.6, "16": 4.4, "512": 1.4},
}


def main():
    settings = parse_arguments()
    times, lines = {}, []
    for round_number in range(settings.rounds):
        for ours in settings.formats:
            for name, program in programs(settings).items():
                head, found = run_speed(settings, program, ours)
                lines.append(head)
                keep(times, (ours, name), found)
            keep(times, (ours, "llama.cpp"), run_llama(settings, FORMATS[ours]))
        print(f"round {round_number + 1} of {settings.rounds} is done", flush=True)
    print("\n".join(sorted(set(lines))))
    print(table(settings, times))
    print(verdicts(settings, times))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, or random: and a config.json")
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="where the same shape lies as GGUF")
    parser.add_argument("--llama", type=pathlib.Path, required=True, help="what build.sh made")
    parser.add_argument("--speed", required=True, help="the engine's example `speed`, a release build")
    parser.add_argument("--old", help="another build of it")
    parser.add_argument("--isa", default="full", choices=["full", "avx2"], help="with all instruction sets, or without AVX-512 (full)")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), help="formats of ours (bf16,int8,int4)")
    parser.add_argument("--rows", default="1,2,4,8,16,32,512", help="rows of a forward")
    parser.add_argument("--context", type=int, default=64, help="tokens that are held before (64)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--prefix", default="", help="a command that is put before every program")
    return parser.parse_args()


def programs(settings):
    old = {"old": settings.old} if settings.old else {}
    return old | {"ours": settings.speed}


def keep(times, key, found):
    best = times.setdefault(key, {})
    for rows, milliseconds in found.items():
        best[rows] = min(best.get(rows, milliseconds), milliseconds)


def output(settings, command, **environment):
    command = shlex.split(settings.prefix) + [str(part) for part in command]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_speed(settings, program, weights):
    isa = {"OUTRIDER_ISA": "avx2"} if settings.isa == "avx2" else {}
    text = output(settings, [program, settings.model, settings.threads, weights, settings.rows, settings.context], **isa)
    lines = re.findall(r"^ +(\d+) rows +([\d.]+) ms +([\d.]+) ms CPU", text, re.MULTILINE)
    return text.splitlines()[0], {int(rows): float(cpu if settings.threads == 1 else clock) for rows, clock, cpu in lines}


def run_llama(settings, name):
    library = {"LD_LIBRARY_PATH": str(settings.llama / "avx2/bin")} if settings.isa == "avx2" else {}
    command = [settings.llama / "forwards", settings.gguf / f"{name}.gguf", settings.threads, settings.rows, settings.context]
    lines = output(settings, command, **library).splitlines()
    return {int(rows): float(cpu if settings.threads == 1 else clock) for rows, clock, cpu in map(str.split, lines)}


def table(settings, times):
    rows = [int(rows) for rows in settings.rows.split(",")]
    head = "| ms | " + " | ".join(f"{rows} rows" for rows in rows) + " |"
    rule = "|" + "---|" * (len(rows) + 1)
    name = lambda key: f"llama.cpp {FORMATS[key[0]]}" if key[1] == "llama.cpp" else f"{key[1]} {key[0]}"
    line = lambda key: f"| {name(key)} | " + " | ".join(f"{times[key][rows]:.2f}" for rows in rows) + " |"
    return "\n".join([head, rule] + [line(key) for key in times])


def verdicts(settings, times):
    formats = settings.formats
    lines = ["| | " + " | ".join(formats) + " |", "|---|" + "---|" * len(formats)]

    def add(label, figure):
        cells = [figure(weights, times[weights, "ours"], times[weights, "llama.cpp"]) for weights in formats]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    def at_least(value, goal):
        return f"{value:.2f} of {goal}" + ("" if value >= goal else ", missed")

    def at_most(value, goal):
        return f"{value:.2f} of {goal}" + ("" if value <= goal else ", missed")

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
