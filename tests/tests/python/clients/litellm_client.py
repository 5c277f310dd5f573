"""Checks `litellm` against a running cluster: chats and completions, streamed or not, and errors."""

import importlib.metadata

import litellm
from checks import PROMPT, assert_equal, assert_raises, check, run

MESSAGES = [{"role": "user", "content": PROMPT}]


class Cluster:
    def __init__(self, url, model):
        litellm.telemetry = False
        self.settings = {"api_base": f"{url}/v1", "api_key": "unused", "max_tokens": 32, "seed": 7, "num_retries": 0}
        self.model = model

    def chat(self, provider="openai", **fields):
        settings = {"model": f"{provider}/{self.model}", "messages": MESSAGES}
        return litellm.completion(**{**settings, **self.settings, **fields})

    def complete(self, **fields):
        settings = {"model": f"text-completion-openai/{self.model}", "prompt": PROMPT}
        return litellm.text_completion(**{**settings, **self.settings, **fields})


@check
def a_conversation_is_answered_and_streamed(cluster):
    for provider in ("openai", "hosted_vllm"):
        complete_answer = cluster.chat(provider)
        chunks = list(cluster.chat(provider, stream=True))
        assert_equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), complete_answer.choices[0].message.content)
        assert_equal((complete_answer.usage.completion_tokens, complete_answer.choices[0].finish_reason), (32, "length"))


@check
def a_completion_is_answered_and_streamed(cluster):
    complete_answer = cluster.complete()
    chunks = list(cluster.complete(stream=True))
    assert_equal("".join(chunk.choices[0].text or "" for chunk in chunks), complete_answer.choices[0].text)


@check
def usage_reports_cached_tokens(cluster):
    usage = cluster.chat().usage
    assert usage.prompt_tokens_details.cached_tokens is not None, usage


@check
def an_unknown_model_raises_a_not_found_error(cluster):
    assert_raises(litellm.NotFoundError, lambda: cluster.chat(model="openai/nobody"))
    assert_raises(litellm.BadRequestError, lambda: cluster.chat(temperature=3))
    assert cluster.chat().choices[0].message.content


run("litellm", importlib.metadata.version("litellm"), Cluster)
