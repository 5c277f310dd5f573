"""Checks `instructor` against a running cluster: typed answers by tools and JSON schemas, complete and
partial."""

import importlib.metadata
from typing import Annotated, Literal

import instructor
import pydantic
from checks import PROMPT, assert_equal, check, run
from openai import OpenAI

MESSAGES = [{"role": "user", "content": PROMPT}]


class Ticket(pydantic.BaseModel):
    kind: Literal["bug", "question"]
    urgent: bool
    tags: Annotated[list[Literal["a", "b"]], pydantic.Field(max_length=2)]


class Cluster:
    def __init__(self, url, model):
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
        self.settings = {"model": model, "messages": MESSAGES, "max_tokens": 120, "seed": 7, "max_retries": 0}
        self.modes = [
            instructor.from_openai(client, mode=mode)
            for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
        ]


@check
def an_answer_is_an_instance_of_its_model(cluster):
    for client in cluster.modes:
        ticket = client.chat.completions.create(response_model=Ticket, **cluster.settings)
        assert isinstance(ticket, Ticket), ticket


@check
def speculation_does_not_change_the_answer(cluster):
    for client in cluster.modes:
        tickets = [
            client.chat.completions.create(
                response_model=Ticket, temperature=0.7, extra_body={"speculation": speculation}, **cluster.settings
            )
            for speculation in ({"enabled": False}, {"num_draft_tokens": 4})
        ]
        # Compared by fields, because each ticket also holds its raw response, whose id is unique.
        assert_equal(*[ticket.model_dump() for ticket in tickets])


@check
def a_partial_answer_ends_equal_to_the_complete_one(cluster):
    client = cluster.modes[0]
    complete_answer = client.chat.completions.create(response_model=Ticket, **cluster.settings)
    *_, last = client.chat.completions.create_partial(response_model=Ticket, **cluster.settings)
    assert_equal(last.model_dump(), complete_answer.model_dump())


run("instructor", importlib.metadata.version("instructor"), Cluster)
