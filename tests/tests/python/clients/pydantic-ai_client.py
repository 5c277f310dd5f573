"""Checks `pydantic-ai` against a running cluster: typed answers by tools and JSON schemas, streamed or not,
and an agent that calls a tool."""

import importlib.metadata
from typing import Annotated, Literal

import pydantic
from checks import PROMPT, assert_equal, check, run
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Ticket(pydantic.BaseModel):
    kind: Literal["bug", "question"]
    urgent: bool
    tags: Annotated[list[Literal["a", "b"]], pydantic.Field(max_length=2)]


# No retries are needed: the grammar guarantees a valid answer.
OUTPUTS = [ToolOutput(Ticket, max_retries=0), NativeOutput(Ticket)]


class Cluster:
    def __init__(self, url, model):
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
        self.model = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))

    def agent(self, output, **settings):
        settings = {"max_tokens": 900, "seed": 7, "temperature": 1.0, "parallel_tool_calls": False, **settings}
        return Agent(self.model, output_type=output, retries=0, model_settings=settings)


@check
def an_answer_is_an_instance_of_its_model(cluster):
    for output in OUTPUTS:
        ticket = cluster.agent(output).run_sync(PROMPT).output
        assert isinstance(ticket, Ticket), ticket


@check
def speculation_does_not_change_the_answer(cluster):
    for output in OUTPUTS:
        tickets = [
            cluster.agent(output, extra_body={"speculation": speculation}).run_sync(PROMPT).output
            for speculation in ({"enabled": False}, {"num_draft_tokens": 4})
        ]
        assert_equal(*tickets)


@check
def a_streamed_answer_ends_equal_to_the_complete_one(cluster):
    for output in OUTPUTS:
        agent = cluster.agent(output)
        complete_answer = agent.run_sync(PROMPT).output
        *_, last = agent.run_stream_sync(PROMPT).stream_output(debounce_by=None)
        assert_equal(last, complete_answer)


@check
def text_and_usage_are_reported(cluster):
    result = cluster.agent(str, max_tokens=24).run_sync(PROMPT)
    usage = result.usage
    assert result.output and usage.input_tokens > 0 and 0 < usage.output_tokens <= 24, usage


@check
def an_agent_calls_a_tool_and_continues_with_its_result(cluster):
    requested_units = []
    for seed in range(40):
        agent = cluster.agent(OUTPUTS[0], seed=seed)

        @agent.tool_plain
        def look_up(unit: Literal["hour", "day"]) -> str:
            requested_units.append(unit)
            return "sunny"

        # The model must call a function each time: the tool, or the one that ends the run. Its output is
        # random, so either is possible.
        result = agent.run_sync(PROMPT)
        assert isinstance(result.output, Ticket), result.output
        if requested_units:
            break
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart) and part.tool_name == "look_up"]
    answers = [part for part in parts if isinstance(part, ToolReturnPart) and part.tool_name == "look_up"]
    assert_equal([part.tool_call_id for part in calls], [part.tool_call_id for part in answers])
    assert len(calls) == len(requested_units) > 0 and set(requested_units) <= {"hour", "day"}, (requested_units, parts)


run("pydantic-ai", importlib.metadata.version("pydantic-ai-slim"), Cluster)
