"""Checks `langchain-openai` against a running cluster: a chat model and an LLM, invoked, streamed and
batched."""

import importlib.metadata

from checks import PROMPT, check, equal, run
from langchain_openai import ChatOpenAI, OpenAI


class Cluster:
    def __init__(self, url, model):
        settings = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "seed": 7, "max_retries": 0}
        self.chat = ChatOpenAI(max_completion_tokens=32, temperature=0.7, **settings)
        self.responses = ChatOpenAI(max_completion_tokens=32, temperature=0.7, use_responses_api=True, **{**settings, "seed": None}, extra_body={"seed": 7})
        self.llm = OpenAI(max_tokens=32, temperature=0.7, **settings)


@check
def a_chat_model_says_the_same_streamed(cluster):
    whole = cluster.chat.invoke(PROMPT)
    assert whole.content and whole.usage_metadata["output_tokens"] == 32, whole
    equal("".join(chunk.content for chunk in cluster.chat.stream(PROMPT)), whole.content)


@check
def responses_say_what_conversations_say(cluster):
    whole = cluster.responses.invoke(PROMPT)
    equal(whole.text, cluster.chat.invoke(PROMPT).content)
    equal("".join(chunk.text for chunk in cluster.responses.stream(PROMPT)), whole.text)


@check
def a_batch_is_answered_in_order(cluster):
    prompts = [PROMPT, "Say something else.", PROMPT]
    answers = [message.content for message in cluster.chat.batch(prompts)]
    equal(answers, [cluster.chat.invoke(prompt).content for prompt in prompts])


@check
def an_llm_completes_the_same_streamed(cluster):
    whole = cluster.llm.invoke(PROMPT)
    assert whole
    equal("".join(cluster.llm.stream(PROMPT)), whole)


run("langchain-openai", importlib.metadata.version("langchain-openai"), Cluster)
