"""Checks the official `anthropic` package against a running cluster: messages, streams, token counts and
errors."""

import anthropic
from checks import PROMPT, check, equal, raised, run

MESSAGES = [{"role": "user", "content": PROMPT}]


class Cluster:
    def __init__(self, url, model):
        self.client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=60)
        self.settings = {"model": model, "max_tokens": 32, "messages": MESSAGES}

    def create(self, extra=None, **fields):
        return self.client.messages.create(**{**self.settings, **fields}, extra_body={"seed": 7, **(extra or {})})

    def stream(self, extra=None, **fields):
        return self.client.messages.stream(**{**self.settings, **fields}, extra_body={"seed": 7, **(extra or {})})


@check
def a_message_has_text_usage_and_a_reason(cluster):
    message = cluster.create()
    assert message.id.startswith("msg_") and message.type == "message", message
    equal((message.role, message.model, len(message.content)), ("assistant", cluster.settings["model"], 1))
    assert message.content[0].type == "text" and message.content[0].text, message
    equal((message.stop_reason, message.stop_sequence), ("max_tokens", None))
    equal(message.usage.output_tokens, 32)
    assert message.usage.input_tokens > 0, message.usage


@check
def a_streamed_message_is_the_whole_one(cluster):
    for fields in ({}, {"extra": {"temperature": 0}}, {"system": "Be brief.", "max_tokens": 9}):
        whole = cluster.create(**fields)
        with cluster.stream(**fields) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        equal("".join(pieces), whole.content[0].text)
        equal((final.content[0].text, final.stop_reason), (whole.content[0].text, whole.stop_reason))
        equal(final.usage.output_tokens, whole.usage.output_tokens)
        assert len(pieces) > 1, pieces


@check
def events_come_in_anthropics_order(cluster):
    events = [event.type for event in cluster.create(stream=True)]
    equal(events[:2], ["message_start", "content_block_start"])
    equal(events[-3:], ["content_block_stop", "message_delta", "message_stop"])
    equal(set(events[2:-3]), {"content_block_delta"})


@check
def speculation_changes_no_text(cluster):
    for temperature in (0, 1):
        texts = {
            cluster.create(extra={"temperature": temperature, "speculation": speculation}).content[0].text
            for speculation in ({"enabled": False}, {"num_draft_tokens": 4}, {"num_draft_tokens": 8})
        }
        equal(len(texts), 1)


@check
def blocks_and_turns_are_read(cluster):
    blocks = [{"role": "user", "content": [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]}]
    equal(cluster.create(messages=blocks).content[0].text, cluster.create().content[0].text)
    turns = [*MESSAGES, {"role": "assistant", "content": "def"}, {"role": "user", "content": "Go on."}]
    assert cluster.create(messages=turns).content[0].text


@check
def a_stop_sequence_ends_the_message_and_is_named(cluster):
    text = cluster.create().content[0].text
    stop = text[8:11]
    message = cluster.create(stop_sequences=["never said", stop])
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop))
    equal(message.content[0].text, text[: text.index(stop)])
    with cluster.stream(stop_sequences=["never said", stop]) as stream:
        final = stream.get_final_message()
    equal((final.stop_reason, final.stop_sequence), ("stop_sequence", stop))


@check
def tokens_are_counted_as_they_are_billed(cluster):
    fields = {"model": cluster.settings["model"], "messages": MESSAGES, "system": "Be brief."}
    usage = cluster.create(system="Be brief.").usage
    counted = cluster.client.messages.count_tokens(**fields).input_tokens
    equal(counted, usage.input_tokens + usage.cache_read_input_tokens)


TOOLS = [
    {
        "name": name,
        "input_schema": {
            "type": "object",
            "properties": {key: {"type": "string", "enum": values}},
            "required": [key],
            "additionalProperties": False,
        },
    }
    for name, key, values in [("get_weather", "city", ["Bern", "Z\u00fcrich"]), ("send", "to", ["a", "b"])]
]


@check
def tools_are_called_whatever_is_drafted(cluster):
    for choice in ({"type": "any"}, {"type": "tool", "name": "send"}, {"type": "any", "disable_parallel_tool_use": True}):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
        extra = {"temperature": 0.7}

        def calls(message):
            assert all(block.type == "tool_use" for block in message.content if message.stop_reason == "tool_use"), message
            return [(block.name, block.input) for block in message.content if block.type == "tool_use"]

        whole = cluster.create(extra={**extra, "speculation": {"num_draft_tokens": 4}}, **fields)
        plain = cluster.create(extra={**extra, "speculation": {"enabled": False}}, **fields)
        equal((plain.stop_reason, calls(plain)), (whole.stop_reason, calls(whole)))
        with cluster.stream(extra=extra, **fields) as stream:
            streamed = stream.get_final_message()
        equal(streamed.stop_reason, whole.stop_reason)
        if whole.stop_reason == "max_tokens":
            continue
        equal((whole.stop_reason, calls(streamed)), ("tool_use", calls(whole)))
        for name, given in calls(whole):
            key, values = {"get_weather": ("city", ["Bern", "Z\u00fcrich"]), "send": ("to", ["a", "b"])}[name]
            assert given[key] in values, given
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "42"} for block in whole.content]
        turns = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        assert cluster.create(messages=turns).content[0].text


@check
def what_is_wrong_is_said_in_anthropics_shape(cluster):
    error = raised(anthropic.NotFoundError, lambda: cluster.create(model="nobody"))
    equal(error.body["error"]["type"], "not_found_error")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    error = raised(anthropic.BadRequestError, lambda: cluster.create(tools=tools))
    equal(error.body["error"]["type"], "invalid_request_error")
    assert "tools" in error.body["error"]["message"], error
    error = raised(anthropic.BadRequestError, lambda: cluster.create(extra={"temperature": 3}))
    assert "temperature must be between 0 and 2, not 3" in error.body["error"]["message"], error
    assert error.request_id, "an error names its request"
    assert cluster.create().content[0].text


run("anthropic", anthropic.__version__, Cluster)
