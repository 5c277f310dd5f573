"""Checks `vllm bench serve`, which needs no GPU, against a running cluster: all requests succeed, and it
reads the speculation metrics from /metrics."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from checks import assert_equal, check, run

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
            completed = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
            (result,) = pathlib.Path(folder).glob("*.json")
            results = json.loads(result.read_text())
        assert_equal([results["completed"], results["total_output_tokens"]], [REQUESTS, REQUESTS * TOKENS])
        return results


@check
def completions_succeed_and_speculation_metrics_are_read(cluster):
    results = cluster.bench("openai", "/v1/completions", speculation={"num_draft_tokens": 4})
    drafts, drafted, accepted = (results[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < accepted <= drafted <= 4 * drafts, (drafts, drafted, accepted)


@check
def conversations_without_speculation_draft_nothing(cluster):
    results = cluster.bench("openai-chat", "/v1/chat/completions", speculation={"enabled": False})
    assert not results.get("spec_decode_draft_tokens"), results


run("vllm", importlib.metadata.version("vllm"), Cluster)
