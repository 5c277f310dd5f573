"""Checks `guidellm`, a load generator for inference servers, against a running cluster: requests of each
format succeed, and the report has the speculation metrics."""

import importlib.metadata
import json
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

    def requests(self, request_format):
        """Runs guidellm and returns the successful requests of its report."""
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            command = [str(pathlib.Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
            command += ["--backend", f"kind=openai_http,target={self.url},model={self.model},request_format={request_format}"]
            command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
            command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"]
            command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
            requests_by_status = json.loads(report.read_text())["benchmarks"][0]["requests"]
        assert not requests_by_status["errored"], requests_by_status["errored"][0]["info"]["error"]
        assert_equal(len(requests_by_status["successful"]), REQUESTS)
        return requests_by_status["successful"]


@check
def conversations_have_the_requested_length(cluster):
    for request in cluster.requests("/v1/chat/completions"):
        assert_equal(request["output_tokens"], TOKENS)


@check
def completions_report_speculation_metrics(cluster):
    metrics_of_requests = [request["response_metrics"] for request in cluster.requests("/v1/completions")]
    drafted = [metrics["speculative_decoding"] for metrics in metrics_of_requests if metrics]
    assert drafted, "nothing was drafted"
    for metrics in drafted:
        assert_equal(sum(metrics["acceptance_histogram"]), metrics["num_spec_steps"])
        assert metrics["num_draft_tokens"] >= metrics["num_accepted_draft_tokens"], metrics


run("guidellm", importlib.metadata.version("guidellm"), Cluster)
