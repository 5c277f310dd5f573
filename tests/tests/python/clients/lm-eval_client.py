"""Checks `lm-eval` against a running cluster with two small tasks: one scores given continuations by log
probabilities, the other generates text. lm-eval fetches the tokenizer from the cluster."""

import importlib.metadata
import json
import os
import pathlib
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import requests
from checks import assert_equal, check, run

QUESTIONS = [
    {"question": "def reverse(items):\n    return", "choices": [" items[::-1]", " blue", " SELECT"], "answer": 0},
    {"question": "SELECT name FROM", "choices": [" orders", " the the", " def"], "answer": 0},
    {"question": "1 + 1 =", "choices": [" 2", " list", " 7 7 7"], "answer": 0},
]


class Cluster:
    def __init__(self, url, model):
        self.url, self.model = url, model
        self.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self.folder.name)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        self.source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}

    def evaluate(self, task):
        arguments = {"model": self.model, "base_url": f"{self.url}/v1/completions", "num_concurrent": 2, "max_retries": 1}
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[{**self.source, **task}],
            bootstrap_iters=0,
            log_samples=True,
        )

    def score(self, question, choice):
        """Returns a choice's log probability computed by the cluster: the sum over the ids after the
        question's."""

        def ids(text):
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            return requests.post(f"{self.url}/tokenize", json=body, timeout=60).json()["tokens"]

        all_ids, start = ids(question + choice), len(ids(question))
        body = {"model": self.model, "prompt": all_ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"][start:-1])


@check
def scores_of_continuations_equal_those_of_the_cluster(cluster):
    task = {
        "task": "tiny_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    results = cluster.evaluate(task)
    samples = sorted(results["samples"]["tiny_choices"], key=lambda sample: sample["doc_id"])
    assert_equal(len(samples), len(QUESTIONS))
    num_correct = 0
    for question, sample in zip(QUESTIONS, samples):
        expected = [cluster.score(question["question"], choice) for choice in question["choices"]]
        actual = [float(response[0]) for response in sample["filtered_resps"]]
        assert all(abs(a - b) < 1e-4 for a, b in zip(actual, expected)) and len(actual) == 3, (actual, expected)
        num_correct += expected.index(max(expected)) == question["answer"]
    assert_equal(results["results"]["tiny_choices"]["acc,none"], num_correct / len(QUESTIONS))


@check
def generated_texts_equal_those_of_the_cluster(cluster):
    task = {
        "task": "tiny_texts",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    samples = cluster.evaluate(task)["samples"]["tiny_texts"]
    assert_equal(len(samples), len(QUESTIONS))
    for sample in samples:
        body = {"model": cluster.model, "prompt": sample["doc"]["question"], "max_tokens": 16, "temperature": 0, "stop": ["\n\n"]}
        answer = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
        assert_equal(sample["resps"][0][0], answer["choices"][0]["text"])


run("lm-eval", importlib.metadata.version("lm-eval"), Cluster)
