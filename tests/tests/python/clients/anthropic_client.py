"""Checks the official `anthropic` package against a running cluster: messages, streams, token counts and
errors."""

import anthropic
from checks import PROMPT, assert_equal, assert_raises, check, run

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
def a_message_has_text_usage_and_a_stop_reason(cluster):
    message = cluster.create()
    assert message.id.startswith("msg_") and message.type == "message", message
    assert_equal((message.role, message.model, len(message.content)), ("assistant", cluster.settings["model"], 1))
    assert message.content[0].type == "text" and message.content[0].text, message
    assert_equal((message.stop_reason, message.stop_sequence), ("max_tokens", None))
    assert_equal(message.usage.output_tokens, 32)
    assert message.usage.input_tokens > 0, message.usage


@check
def a_streamed_message_equals_the_complete_one(cluster):
    for fields in ({}, {"extra": {"temperature": 0}}, {"system": "Be brief.", "max_tokens": 9}):
        complete_message = cluster.create(**fields)
        with cluster.stream(**fields) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert_equal("".join(pieces), complete_message.content[0].text)
        assert_equal((final.content[0].text, final.stop_reason), (complete_message.content[0].text, complete_message.stop_reason))
        assert_equal(final.usage.output_tokens, complete_message.usage.output_tokens)
        assert len(pieces) > 1, pieces


@check
def events_arrive_in_anthropics_order(cluster):
    events = [event.type for event in cluster.create(stream=True)]
    assert_equal(events[:2], ["message_start", "content_block_start"])
    assert_equal(events[-3:], ["content_block_stop", "message_delta", "message_stop"])
    assert_equal(set(events[2:-3]), {"content_block_delta"})


@check
def speculation_does_not_change_the_text(cluster):
    for temperature in (0, 1):
        texts = {
            cluster.create(extra={"temperature": temperature, "speculation": speculation}).content[0].text
            for speculation in ({"enabled": False}, {"num_draft_tokens": 4}, {"num_draft_tokens": 8})
        }
        assert_equal(len(texts), 1)


@check
def content_blocks_and_turns_are_accepted(cluster):
    blocks = [{"role": "user", "content": [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]}]
    assert_equal(cluster.create(messages=blocks).content[0].text, cluster.create().content[0].text)
    turns = [*MESSAGES, {"role": "assistant", "content": "def"}, {"role": "user", "content": "Go on."}]
    assert cluster.create(messages=turns).content[0].text


@check
def a_stop_sequence_ends_the_message_and_is_reported(cluster):
    text = cluster.create().content[0].text
    stop = text[8:11]
    message = cluster.create(stop_sequences=["never said", stop])
    assert_equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop))
    assert_equal(message.content[0].text, text[: text.index(stop)])
    with cluster.stream(stop_sequences=["never said", stop]) as stream:
        final = stream.get_final_message()
    assert_equal((final.stop_reason, final.stop_sequence), ("stop_sequence", stop))


@check
def counted_tokens_equal_the_reported_usage(cluster):
    fields = {"model": cluster.settings["model"], "messages": MESSAGES, "system": "Be brief."}
    usage = cluster.create(system="Be brief.").usage
    counted = cluster.client.messages.count_tokens(**fields).input_tokens
    assert_equal(counted, usage.input_tokens + usage.cache_read_input_tokens)


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
def speculation_does_not_change_tool_calls(cluster):
    for choice in ({"type": "any"}, {"type": "tool", "name": "send"}, {"type": "any", "disable_parallel_tool_use": True}):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
        extra = {"temperature": 0.7}

        def calls(message):
            assert all(block.type == "tool_use" for block in message.content if message.stop_reason == "tool_use"), message
            return [(block.name, block.input) for block in message.content if block.type == "tool_use"]

        complete_message = cluster.create(extra={**extra, "speculation": {"num_draft_tokens": 4}}, **fields)
        without_speculation = cluster.create(extra={**extra, "speculation": {"enabled": False}}, **fields)
        assert_equal((without_speculation.stop_reason, calls(without_speculation)), (complete_message.stop_reason, calls(complete_message)))
        with cluster.stream(extra=extra, **fields) as stream:
            streamed = stream.get_final_message()
        assert_equal(streamed.stop_reason, complete_message.stop_reason)
        if complete_message.stop_reason == "max_tokens":
            continue
        assert_equal((complete_message.stop_reason, calls(streamed)), ("tool_use", calls(complete_message)))
        for name, tool_input in calls(complete_message):
            key, values = {"get_weather": ("city", ["Bern", "Z\u00fcrich"]), "send": ("to", ["a", "b"])}[name]
            assert tool_input[key] in values, tool_input
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "42"} for block in complete_message.content]
        turns = [*MESSAGES, {"role": "assistant", "content": complete_message.content}, {"role": "user", "content": results}]
        assert cluster.create(messages=turns).content[0].text


@check
def errors_have_anthropics_format(cluster):
    error = assert_raises(anthropic.NotFoundError, lambda: cluster.create(model="nobody"))
    assert_equal(error.body["error"]["type"], "not_found_error")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    error = assert_raises(anthropic.BadRequestError, lambda: cluster.create(tools=tools))
    assert_equal(error.body["error"]["type"], "invalid_request_error")
    assert "tools" in error.body["error"]["message"], error
    error = assert_raises(anthropic.BadRequestError, lambda: cluster.create(extra={"temperature": 3}))
    assert "temperature must be between 0 and 2, not 3" in error.body["error"]["message"], error
    assert error.request_id, "an error names its request"
    assert cluster.create().content[0].text


run("anthropic", anthropic.__version__, Cluster)
