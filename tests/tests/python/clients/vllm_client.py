"""Checks `vllm bench serve`, which needs no GPU, against a running cluster: all requests succeed, and it
reads the speculation metrics from /metrics."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from checks import check, equal, run

TOKENIZER = pathlib.Path(__file__).resolve().parents[4] / "models/demo/target"
REQUESTS = 6
TOKENS = 16


class Cluster:
    def __init__(self, url, model):
        self.url, self.model = url, model

    def bench(self, backend, endpoint, **fields):
        """Runs the benchmark and returns the results that it saves."""
        with tempfile.TemporaryDirectory() as folder:
            command = [str(pathlib.Path(sys.executable).with_name("vllm")), "bench", "serve"]
            command += ["--backend", backend, "--endpoint", endpoint, "--base-url", self.url, "--model", self.model]
            command += ["--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--random-input-len", "32"]
            command += ["--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos"]
            command += ["--extra-body", json.dumps(fields), "--save-result", "--result-dir", folder]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
            (result,) = pathlib.Path(folder).glob("*.json")
            found = json.loads(result.read_text())
        equal([found["completed"], found["total_output_tokens"]], [REQUESTS, REQUESTS * TOKENS])
        return found


@check
def completions_are_answered_and_what_speculation_did_is_read(cluster):
    found = cluster.bench("openai", "/v1/completions", speculation={"num_draft_tokens": 4})
    drafts, drafted, accepted = (found[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < accepted <= drafted <= 4 * drafts, (drafts, drafted, accepted)


@check
def conversations_are_answered_and_nothing_is_drafted_where_it_is_off(cluster):
    found = cluster.bench("openai-chat", "/v1/chat/completions", speculation={"enabled": False})
    assert not found.get("spec_decode_draft_tokens"), found


run("vllm", importlib.metadata.version("vllm"), Cluster)
