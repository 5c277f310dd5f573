"""Checks `aiperf`, NVIDIA's load generator, against a running cluster: requests of each endpoint type
succeed, and aiperf reports the speculation metrics."""

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

    def profile(self, *arguments, **inputs):
        """Runs aiperf and returns the results that it exports."""
        with tempfile.TemporaryDirectory() as folder:
            command = [str(pathlib.Path(sys.executable).with_name("aiperf")), "profile"]
            command += ["--model", self.model, "--url", self.url, "--tokenizer", str(TOKENIZER), "--random-seed", "7"]
            command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "32", "--osl", str(TOKENS)]
            command += ["--use-server-token-count", "--artifact-dir", folder, "--ui", "none", *arguments]
            command += ["--extra-inputs", json.dumps({"ignore_eos": True, "temperature": 0, **inputs})]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
            results = json.loads((pathlib.Path(folder) / "profile_export_aiperf.json").read_text())
        assert_equal([results["request_count"]["avg"], results["error_summary"]], [REQUESTS, []])
        assert_equal(results["total_usage_completion_tokens"]["avg"], REQUESTS * TOKENS)
        return results


@check
def speculation_metrics_are_read_from_streams(cluster):
    results = cluster.profile("--endpoint-type", "chat", "--streaming", speculation={"num_draft_tokens": 4})
    drafted, accepted, steps = (
        results[name]["avg"] for name in ("total_draft_tokens", "total_accepted_draft_tokens", "total_spec_decode_steps")
    )
    assert drafted >= accepted > 0 and drafted <= 4 * steps, (drafted, accepted, steps)
    histogram = {int(key): count for key, count in results["pooled_spec_decode_acceptance_histogram"].items()}
    assert_equal([sum(histogram.values()), sum(key * count for key, count in histogram.items())], [steps, accepted])
    assert_equal(round(results["spec_decode_overall_draft_acceptance_rate"]["avg"], 6), round(100 * accepted / drafted, 6))
    assert results["time_to_first_token"]["avg"] > 0, results["time_to_first_token"]


@check
def usage_is_reported_with_every_chunk(cluster):
    cluster.profile("--endpoint-type", "chat", "--streaming", "--per-chunk-usage")


@check
def completions_without_speculation_report_no_draft_metrics(cluster):
    results = cluster.profile("--endpoint-type", "completions", speculation={"enabled": False})
    assert not [name for name in results if name.startswith("spec_decode_")], results.keys()


run("aiperf", importlib.metadata.version("aiperf"), Cluster)
