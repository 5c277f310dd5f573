"""Checks `guidellm`, a load generator for inference servers, against a running cluster: requests of each
format succeed, and the report has the speculation metrics."""

import importlib.metadata
import json
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

    def requests(self, request_format):
        """Runs guidellm and returns the successful requests of its report."""
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            command = [str(pathlib.Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
            command += ["--backend", f"kind=openai_http,target={self.url},model={self.model},request_format={request_format}"]
            command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
            command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"]
            command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
            found = json.loads(report.read_text())["benchmarks"][0]["requests"]
        assert not found["errored"], found["errored"][0]["info"]["error"]
        equal(len(found["successful"]), REQUESTS)
        return found["successful"]


@check
def conversations_are_answered_as_long_as_they_were_asked_to_be(cluster):
    for request in cluster.requests("/v1/chat/completions"):
        equal(request["output_tokens"], TOKENS)


@check
def completions_say_what_speculation_did(cluster):
    told = [request["response_metrics"] for request in cluster.requests("/v1/completions")]
    drafted = [metrics["speculative_decoding"] for metrics in told if metrics]
    assert drafted, "nothing was drafted"
    for did in drafted:
        equal(sum(did["acceptance_histogram"]), did["num_spec_steps"])
        assert did["num_draft_tokens"] >= did["num_accepted_draft_tokens"], did


run("guidellm", importlib.metadata.version("guidellm"), Cluster)
