"""Checks `langchain-openai` against a running cluster: a chat model and an LLM, called once, streamed and in
a batch."""

import importlib.metadata

from checks import PROMPT, assert_equal, check, run
from langchain_openai import ChatOpenAI, OpenAI


class Cluster:
    def __init__(self, url, model):
        settings = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "seed": 7, "max_retries": 0}
        self.chat = ChatOpenAI(max_completion_tokens=32, temperature=0.7, **settings)
        self.responses = ChatOpenAI(max_completion_tokens=32, temperature=0.7, use_responses_api=True, **{**settings, "seed": None}, extra_body={"seed": 7})
        self.llm = OpenAI(max_tokens=32, temperature=0.7, **settings)


@check
def a_streamed_chat_answer_equals_the_complete_one(cluster):
    complete_answer = cluster.chat.invoke(PROMPT)
    assert complete_answer.content and complete_answer.usage_metadata["output_tokens"] == 32, complete_answer
    assert_equal("".join(chunk.content for chunk in cluster.chat.stream(PROMPT)), complete_answer.content)


@check
def responses_equal_chat_completions(cluster):
    complete_answer = cluster.responses.invoke(PROMPT)
    assert_equal(complete_answer.text, cluster.chat.invoke(PROMPT).content)
    assert_equal("".join(chunk.text for chunk in cluster.responses.stream(PROMPT)), complete_answer.text)


@check
def a_batch_is_answered_in_order(cluster):
    prompts = [PROMPT, "Say something else.", PROMPT]
    answers = [message.content for message in cluster.chat.batch(prompts)]
    assert_equal(answers, [cluster.chat.invoke(prompt).content for prompt in prompts])


@check
def a_streamed_completion_equals_the_complete_one(cluster):
    complete_answer = cluster.llm.invoke(PROMPT)
    assert complete_answer
    assert_equal("".join(cluster.llm.stream(PROMPT)), complete_answer)


run("langchain-openai", importlib.metadata.version("langchain-openai"), Cluster)
