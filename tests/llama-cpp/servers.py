#!/usr/bin/env python3
"""Compare `outrider up` with llama.cpp's server on the same weights: tokens/s, TTFT, TPOT and CPU time.

    .deps/llama-cpp-programs/bin/python tests/llama-cpp/servers.py --outrider FILE [--weights int8] [--streams 1,4,16] [--prompt-tokens 128,1024]

Run `tests/llama-cpp/build.sh server` first. The target is the bundled one with ballast, which costs as much
as a model of 257 M parameters; the program converts it to GGUF. For each kind of drafting (none, n-grams, the
bundled draft model) both servers run at the same time, and `outrider bench` sends blocks of requests to them
alternately. Every prompt is new to both servers, so no prefix cache hit can occur. CPU time is that of all
processes of a server, divided by the number of tokens that it generated.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "models/demo"
# Layers and feed-forward width of the bundled target under `outrider up --ballast 250M`; the unit tests of
# engine/src/ballast.rs compare them with its plan.
BALLAST = "12,27392"
# Our weight formats and the llama.cpp types that they are compared with.
FORMATS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
# For each kind of drafting: our `--draft` and llama.cpp's flags. {draft} is the draft model's GGUF file.
DRAFTING = {
    "none": ("none", []),
    "ngram": ("ngram", ["--spec-type", "ngram-simple"]),
    "model": (str(MODELS / "draft"), ["-md", "{draft}", "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "-td", "{threads}"]),
}
OURS, THEIRS = ("http://127.0.0.1:8600", "http://127.0.0.1:8610")
ADMIN = "127.0.0.1:8602"
READY_SECONDS = 120


def main():
    settings = parse_arguments()
    # Raise an exception on SIGTERM, so that the servers are stopped as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gguf = make_gguf(settings)
    print("| drafting | prompt | streams | server | tokens/s | TTFT ms, median | TPOT ms | CPU ms per token | same text |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in settings.kinds.split(","):
        with servers(settings, gguf, kind) as processes:
            for length in map(int, settings.prompt_tokens.split(",")):
                for streams in map(int, settings.streams.split(",")):
                    measure(settings, processes, (kind, length, streams))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outrider", type=pathlib.Path, required=True, help="`outrider` of a release build; the other binaries must be in the same directory")
    parser.add_argument("--llama", type=pathlib.Path, default=ROOT / ".deps/llama-cpp", help="output directory of build.sh")
    parser.add_argument("--weights", default="int8", choices=FORMATS, help="format of the target's and the draft's weights (int8)")
    parser.add_argument("--kinds", default="none,ngram,model", help="kinds of drafting (none,ngram,model)")
    parser.add_argument("--streams", default="1,4,16", help="concurrent requests (1,4,16)")
    parser.add_argument("--prompt-tokens", default="128,1024", help="prompt lengths (128,1024)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per answer (64)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of requests for each server (4)")
    parser.add_argument("--block-requests", type=int, default=4, help="requests per block, at least one per stream (4)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each model (1)")
    return parser.parse_args()


def make_gguf(settings):
    """Converts the target and the draft to GGUF unless the files exist. Returns their paths by role."""
    files = {}
    for name, ballast in {"target": ["--ballast", BALLAST], "draft": []}.items():
        folder = settings.llama / f"servers/{name}"
        files[name] = folder / f"{FORMATS[settings.weights]}.gguf"
        if not files[name].exists():
            command = [sys.executable, ROOT / "tests/llama-cpp/to_gguf.py", "--model", MODELS / name, "--out", folder]
            subprocess.run([*command, "--types", FORMATS[settings.weights], *ballast], check=True, stdout=sys.stderr)
    return files


@contextlib.contextmanager
def servers(settings, gguf, kind):
    """Starts both servers and waits until they answer; stops them on exit. Yields their processes by name."""
    draft, flags = DRAFTING[kind]
    variables = {"draft": gguf["draft"], "threads": settings.threads}
    max_streams = max(map(int, settings.streams.split(",")))
    addresses = ["--http", OURS[7:], "--grpc", "127.0.0.1:0", "--admin", ADMIN]
    ours = [settings.outrider, "up", "--target", MODELS / "target", "--ballast", "250M", "--draft", draft]
    ours += ["--threads", settings.threads, *addresses, "--no-evidence"]
    # llama.cpp's KV cache needs one cell per token of each stream.
    cells = max_streams * (max(map(int, settings.prompt_tokens.split(","))) + settings.max_tokens + 32)
    theirs = [settings.llama / "full/bin/llama-server", "-m", gguf["target"], "-t", settings.threads, "-np", max_streams, "-c", cells]
    theirs += ["--port", THEIRS.rsplit(":", 1)[1], "--no-ui", *(flag.format(**variables) for flag in flags)]
    environment = os.environ | {"OUTRIDER_WEIGHTS": settings.weights}
    logs = pathlib.Path(tempfile.mkdtemp(prefix="servers-"))
    processes = {}
    try:
        for name, command in {"ours": ours, "llama.cpp": theirs}.items():
            log = (logs / f"{name}.log").open("w")
            processes[name] = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True)
        for name, url in {"ours": OURS, "llama.cpp": THEIRS}.items():
            wait_until_ready(processes[name], url, logs / f"{name}.log")
        yield processes
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGINT)
        for process in processes.values():
            process.wait()


def wait_until_ready(process, url, log):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            body = json.dumps({"model": model_of(url), "prompt": "a", "max_tokens": 1}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=10).read()
            return
        except (OSError, IndexError):
            time.sleep(0.2)
    raise SystemExit(f"a server was not ready within {READY_SECONDS} s:\n{log.read_text()[-2000:]}")


def model_of(url):
    models = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=10))
    return models["data"][0]["id"]


def measure(settings, processes, case):
    """Runs `outrider bench` for one condition and prints a table row for each server."""
    kind, length, streams = case
    requests = max(settings.block_requests, streams)
    with tempfile.TemporaryDirectory() as folder:
        prompts, report_file = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "report.json"
        texts = new_prompts(length, settings.blocks * requests)
        prompts.write_text("".join(json.dumps({"task": "text", "prompt": text}) + "\n" for text in texts))
        command = [settings.outrider, "bench", "--url", OURS, "--prompts", prompts, "--arm", f"ours:url={OURS}", "--arm", f"theirs:url={THEIRS}"]
        command += ["--concurrency", streams, "--blocks", settings.blocks, "--block-requests", requests, "--warmup", 0]
        command += ["--max-tokens", settings.max_tokens, "--body", "ignore_eos=true", "--save-json", report_file]
        cpu_before = {name: cpu_seconds(process.pid) for name, process in processes.items()}
        completed = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if completed.returncode:
            raise SystemExit(f"outrider bench failed:\n{completed.stdout}")
        report = json.loads(report_file.read_text())
    for name, arm in {"ours": "ours", "llama.cpp": "theirs"}.items():
        figures = next(result for result in report["results"] if result["arm"] == arm and result["task"] == "all")
        cpu = (cpu_seconds(processes[name].pid) - cpu_before[name]) / max(figures["total_output_tokens"], 1)
        comparison = report["comparisons"][0]["comparison"]
        cells = [kind, length, streams, name, f"{figures['output_throughput']:.1f}", f"{figures['median_ttft_ms']:.0f}", f"{figures['mean_tpot_ms']:.1f}"]
        cells += [f"{cpu * 1e3:.1f}", f"{comparison.get('same_text')} of {comparison.get('pairs')}" if name == "ours" else ""]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


class Text:
    """The bundled prompts and completions as one list of token ids. Each prompt starts at a new position."""

    num_prompts = 0

    def __init__(self):
        self.tokenizer = Tokenizer.from_file(str(MODELS / "target/tokenizer.json"))
        lines = [json.loads(line) for file in sorted((MODELS / "prompts").glob("*.jsonl")) for line in file.read_text().splitlines()]
        text = "\n\n".join(line["prompt"] + "\n" + line.get("completion", "") for line in lines)
        self.ids = self.tokenizer.encode(text).ids

    def next_prompt(self, length):
        start = Text.num_prompts * 41 % len(self.ids)
        Text.num_prompts += 1
        return self.tokenizer.decode((self.ids[start:] + self.ids)[:length])


def new_prompts(length, count):
    text = Text()
    return [text.next_prompt(length) for _ in range(count)]


def cpu_seconds(pid):
    """Returns the CPU time, in seconds, of a process and all its descendants."""
    children = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append((int(folder.name), int(fields[11]) + int(fields[12])))
    ticks_by_pid = {child: ticks for siblings in children.values() for child, ticks in siblings}
    pending, total = [pid], 0
    while pending:
        process = pending.pop()
        total += ticks_by_pid.get(process, 0)
        pending += [child for child, _ in children.get(process, [])]
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
