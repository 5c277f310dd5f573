"""Checks `litellm` against a running cluster: chats and completions, streamed or not, and errors."""

import importlib.metadata

import litellm
from checks import PROMPT, check, equal, raised, run

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
        whole = cluster.chat(provider)
        chunks = list(cluster.chat(provider, stream=True))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole.choices[0].message.content)
        equal((whole.usage.completion_tokens, whole.choices[0].finish_reason), (32, "length"))


@check
def a_completion_is_answered_and_streamed(cluster):
    whole = cluster.complete()
    chunks = list(cluster.complete(stream=True))
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), whole.choices[0].text)


@check
def usage_tells_what_was_cached(cluster):
    usage = cluster.chat().usage
    assert usage.prompt_tokens_details.cached_tokens is not None, usage


@check
def an_unknown_model_is_not_found(cluster):
    raised(litellm.NotFoundError, lambda: cluster.chat(model="openai/nobody"))
    raised(litellm.BadRequestError, lambda: cluster.chat(temperature=3))
    assert cluster.chat().choices[0].message.content


run("litellm", importlib.metadata.version("litellm"), Cluster)
