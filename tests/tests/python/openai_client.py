"""Checks the official `openai` package against running Outrider clusters: models, completions, chats, streams
and errors.

Started by ../openai_client.rs with the URLs of the clusters. Each check is a function that raises an
exception on failure. All checks run, each prints one line, and the exit code is 0 if all passed.
"""

import argparse
import json
import re
import sys
import traceback
from typing import Annotated, Literal

import openai
import pydantic
from openai import OpenAI

CODE = "Write a Python function that reverses a list.\n"
SQL = "Table: orders(id, customer, total)\nQuestion: What is the highest total of each customer?\nSQL:"
CHAT = [{"role": "user", "content": "Write a Python function that reverses a list."}]

# Forces drafting, whatever the lane's policy decides.
DRAFTED = {"speculation": {"num_draft_tokens": 4}}

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Clusters:
    """Clients of the clusters that the test started. They do not retry, so that checks see every response."""

    def __init__(self, arguments):
        def client(base_url, api_key="unused"):
            return OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=60)

        self.open = client(arguments.open)
        self.small = client(arguments.small)
        self.stopped = client(arguments.stopped)
        self.with_key = client(arguments.keys, arguments.api_key)
        self.with_wrong_key = client(arguments.keys, arguments.api_key + "x")
        self.model = self.open.models.list().data[0].id
        with open(arguments.tokenizer, encoding="utf-8") as file:
            self.vocabulary = json.load(file)["model"]["vocab"]

    def complete(self, **fields):
        settings = {"model": self.model, "prompt": CODE, "max_tokens": 32, "seed": 7}
        return self.open.completions.create(**{**settings, **fields})

    def chat(self, **fields):
        settings = {"model": self.model, "messages": CHAT, "max_completion_tokens": 32, "seed": 7}
        return self.open.chat.completions.create(**{**settings, **fields})

    def token_id(self, token):
        """Returns the id of a token as spelled in logprobs. Byte-level BPE writes spaces and line feeds as
        letters."""
        return self.vocabulary[token.replace(" ", "\u0120").replace("\n", "\u010a")]

    def prompt_tokens(self, prompt):
        echoed = self.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=0).choices[0]
        return echoed.logprobs.tokens


def assert_equal(left, right):
    assert left == right, f"{left!r} is not {right!r}"


def speculation_of(usage):
    return usage.model_extra["speculation"]


def assert_raises(error_class, call):
    try:
        call()
    except openai.OpenAIError as error:
        assert type(error) is error_class, f"{error!r} is a {type(error).__name__}, not a {error_class.__name__}"
        return error
    raise AssertionError(f"no {error_class.__name__} was raised")


# Models.


@check
def models_are_listed_and_retrieved(clusters):
    models = list(clusters.open.models.list())
    assert_equal([model.id for model in models], ["target"])
    model = clusters.open.models.retrieve("target")
    assert_equal((model.id, model.object, model.model_extra["max_model_len"]), ("target", "model", 2048))


# Non-streaming responses.


@check
def a_completion_has_text_usage_and_a_fingerprint(clusters):
    answer = clusters.complete(extra_body=DRAFTED)
    choice, usage = answer.choices[0], answer.usage
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion", answer
    assert choice.text and choice.finish_reason == "length" and choice.logprobs is None, choice
    assert_equal(usage.completion_tokens, 32)
    assert_equal(usage.prompt_tokens, len(clusters.prompt_tokens(CODE)))
    assert_equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    speculation = speculation_of(usage)
    assert 0 < speculation["accepted_tokens"] <= speculation["draft_tokens"], speculation
    assert 0 < speculation["rounds"] < 32 and speculation["acceptance_length"] > 1, speculation
    assert_equal(speculation["disabled_reason"], None)
    assert_equal(answer.model_extra["seed"], 7)
    assert_equal(answer.system_fingerprint, clusters.open.models.retrieve("target").model_extra["system_fingerprint"])


@check
def a_conversation_is_answered(clusters):
    answer = clusters.chat(max_completion_tokens=5)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion", answer
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content, message
    assert_equal((answer.usage.completion_tokens, answer.choices[0].finish_reason), (5, "length"))
    assert answer.system_fingerprint and speculation_of(answer.usage)["rounds"] >= 1, answer
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    assert_equal(clusters.chat(messages=parts, max_completion_tokens=5).choices[0].message.content, message.content)


@check
def a_prompt_of_token_ids_equals_its_text(clusters):
    ids = [[clusters.token_id(token) for token in clusters.prompt_tokens(prompt)] for prompt in (CODE, SQL)]
    from_text = clusters.complete(prompt=[CODE, SQL])
    from_ids = clusters.complete(prompt=ids)
    assert_equal([choice.index for choice in from_ids.choices], [0, 1])
    assert_equal([choice.text for choice in from_ids.choices], [choice.text for choice in from_text.choices])
    assert_equal(clusters.complete(prompt=ids[1]).choices[0].text, from_text.choices[1].text)


@check
def three_choices_differ_and_are_reproducible(clusters):
    for request, text_of in (
        (clusters.complete, lambda choice: choice.text),
        (clusters.chat, lambda choice: choice.message.content),
    ):
        first, second = (request(n=3, seed=11, temperature=1).choices for _ in range(2))
        texts = [text_of(choice) for choice in first]
        assert_equal([choice.index for choice in first], [0, 1, 2])
        assert_equal(len(set(texts)), 3)
        assert_equal([text_of(choice) for choice in second], texts)
        assert_equal(text_of(request(seed=11, temperature=1).choices[0]), texts[0])
        assert text_of(request(seed=12, temperature=1).choices[0]) not in texts


@check
def speculation_does_not_change_the_text(clusters):
    for temperature in (0, 0.7, 1):
        answers = {
            name: clusters.complete(temperature=temperature, extra_body={"speculation": speculation})
            for name, speculation in (
                ("plain", {"num_draft_tokens": 0}),
                ("off", {"enabled": False}),
                ("four", {"num_draft_tokens": 4}),
            )
        }
        assert_equal(len({answer.choices[0].text for answer in answers.values()}), 1)
        usage = {name: speculation_of(answer.usage) for name, answer in answers.items()}
        for name in ("plain", "off"):
            assert_equal((usage[name]["draft_tokens"], usage[name]["rounds"]), (0, 32))
            assert_equal(usage[name]["disabled_reason"], "request")
        assert usage["four"]["draft_tokens"] > 0 and usage["four"]["rounds"] < 32, usage


# Streams.


@check
def a_streamed_completion_equals_the_complete_one(clusters):
    complete_answer = clusters.complete()
    options = {"include_usage": True, "include_speculation": True}
    chunks = list(clusters.complete(stream=True, stream_options=options, extra_body=DRAFTED))
    *pieces, last = chunks
    assert len(pieces) > 2, chunks
    assert_equal("".join(piece.choices[0].text for piece in pieces), complete_answer.choices[0].text)
    assert_equal([piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason], ["length"])
    assert_equal((last.choices, last.usage.completion_tokens), ([], 32))
    assert all(piece.usage is None for piece in pieces)
    assert_equal({chunk.system_fingerprint for chunk in chunks}, {complete_answer.system_fingerprint})
    spans = [piece.choices[0].model_extra["speculation"] for piece in pieces]
    assert_equal(sum(span["num_tokens"] for span in spans), 32)
    assert_equal(sum(span["num_drafted"] for span in spans), speculation_of(last.usage)["accepted_tokens"])


@check
def a_streamed_conversation_equals_the_complete_one(clusters):
    complete_answer = clusters.chat(n=2)
    chunks = list(clusters.chat(n=2, stream=True, stream_options={"include_usage": True}))
    texts, roles = ["", ""], [[], []]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += [choice.delta.role] if choice.delta.role else []
    assert_equal(texts, [choice.message.content for choice in complete_answer.choices])
    assert_equal(roles, [["assistant"], ["assistant"]])
    assert_equal(chunks[-1].usage.total_tokens, complete_answer.usage.total_tokens)
    assert_equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"})


@check
def a_stream_without_options_has_no_usage(clusters):
    assert all(chunk.usage is None and chunk.choices for chunk in clusters.chat(stream=True))


# Usage.


@check
def usage_reports_cached_tokens(clusters):
    for speculation in ({"enabled": False}, {"num_draft_tokens": 4}):
        prompt = f"# {speculation}\n" + CODE * 20
        request = {"prompt": prompt, "extra_body": {"speculation": speculation}}
        first, second = (clusters.complete(**request) for _ in range(2))
        assert_equal(second.choices[0].text, first.choices[0].text)
        assert_equal(first.usage.prompt_tokens_details.cached_tokens, 0)
        cached, all_tokens = second.usage.prompt_tokens_details.cached_tokens, second.usage.prompt_tokens
        # Only whole blocks are cached, and the last token is always computed.
        assert all_tokens - 64 < cached < all_tokens, (cached, all_tokens)


@check
def speculation_metrics_have_vllms_format(clusters):
    complete_answer = clusters.complete(extra_body=DRAFTED)
    metrics = complete_answer.model_extra["metrics"]["speculative_decoding"]
    usage, histogram = speculation_of(complete_answer.usage), metrics["acceptance_histogram"]
    assert_equal((metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]), (usage["draft_tokens"], usage["accepted_tokens"]))
    assert_equal(sum(histogram), metrics["num_spec_steps"])
    assert_equal(sum(accepted * count for accepted, count in enumerate(histogram)), usage["accepted_tokens"])
    assert_equal((metrics["num_spec_tokens"], len(histogram)), (4, 5))
    assert_equal(metrics["draft_acceptance_rate"], usage["accepted_tokens"] / usage["draft_tokens"])
    assert_equal(metrics["mean_acceptance_length"], 1 + usage["accepted_tokens"] / metrics["num_spec_steps"])
    last = list(clusters.complete(stream=True, stream_options={"include_usage": True}, extra_body=DRAFTED))[-1]
    assert_equal(sorted(last.model_extra["metrics"]["speculative_decoding"]), sorted(metrics))
    assert "metrics" not in clusters.complete(n=2, extra_body=DRAFTED).model_extra
    assert "metrics" not in clusters.complete(extra_body={"disable_spec_decode": True}).model_extra


@check
def timings_are_reported_on_request(clusters):
    request = {"extra_body": {**DRAFTED, "timings_per_token": True}}
    complete_answer = clusters.complete(**request)
    streamed = list(clusters.complete(stream=True, **request))[-1]
    for timings, usage in ((complete_answer.model_extra["timings"], complete_answer.usage), (streamed.model_extra["timings"], None)):
        assert_equal(timings["predicted_n"], 32)
        assert timings["predicted_ms"] > 0 and timings["draft_n"] >= timings["draft_n_accepted"] > 0, timings
        assert usage is None or timings["prompt_n"] + timings["cache_n"] == usage.prompt_tokens, timings
    assert "timings" not in clusters.complete().model_extra


# Responses.


@check
def a_streamed_response_equals_the_complete_one(clusters):
    request = {"model": clusters.model, "input": CHAT[0]["content"], "max_output_tokens": 24, "extra_body": {"seed": 7}}
    complete_answer = clusters.open.responses.create(**request)
    assert_equal((complete_answer.status, complete_answer.incomplete_details.reason), ("incomplete", "max_output_tokens"))
    assert_equal(complete_answer.output_text, clusters.chat(max_completion_tokens=24).choices[0].message.content)
    assert_equal((complete_answer.usage.output_tokens, complete_answer.usage.input_tokens_details.cached_tokens is None), (24, False))
    with clusters.open.responses.stream(**request) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert_equal(deltas, complete_answer.output_text)
    events = list(clusters.open.responses.create(**request, stream=True))
    assert_equal((events[0].type, events[-1].type), ("response.created", "response.incomplete"))
    assert_equal([event.sequence_number for event in events], list(range(len(events))))
    assert_equal(events[-1].response.output_text, complete_answer.output_text)


@check
def log_probabilities_of_a_response_are_those_of_a_chat_completion(clusters):
    def scores(tokens):
        return [(token.token, token.logprob, [(top.token, top.logprob) for top in token.top_logprobs]) for token in tokens]

    expected = clusters.chat(max_completion_tokens=24, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    request = {"model": clusters.model, "input": CHAT[0]["content"], "max_output_tokens": 24, "extra_body": {"seed": 7}}
    request |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    complete_answer = clusters.open.responses.create(**request)
    assert_equal(len(expected), 24)
    assert_equal(scores(complete_answer.output[0].content[0].logprobs), scores(expected))
    events = list(clusters.open.responses.create(**request, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert_equal([token for event in deltas for token in scores(event.logprobs)], scores(expected))
    assert_equal(scores(events[-1].response.output[0].content[0].logprobs), scores(expected))


@check
def a_response_continues_an_earlier_one(clusters):
    def request(**fields):
        settings = {"model": clusters.model, "max_output_tokens": 8, "extra_body": {"seed": 7}}
        return clusters.open.responses.create(**{**settings, **fields})

    first = request(input="One")
    second = request(input="Two", previous_response_id=first.id)
    turns = [("user", "One"), ("assistant", first.output_text), ("user", "Two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert_equal(second.output_text, clusters.chat(messages=messages, max_completion_tokens=8).choices[0].message.content)
    assert_equal(clusters.open.responses.retrieve(second.id).output_text, second.output_text)
    clusters.open.responses.delete(first.id)
    assert_raises(openai.NotFoundError, lambda: clusters.open.responses.retrieve(first.id))
    error = assert_raises(openai.BadRequestError, lambda: request(input="x", previous_response_id=first.id))
    assert_equal(error.code, "previous_response_not_found")
    unstored = request(input="One", store=False)
    assert_raises(openai.NotFoundError, lambda: clusters.open.responses.retrieve(unstored.id))


# Log probabilities.


@check
def a_conversation_has_log_probabilities(clusters):
    answer = clusters.chat(temperature=0, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert_equal(len(tokens), answer.usage.completion_tokens)
    assert_equal(bytes(byte for token in tokens for byte in token.bytes).decode(), answer.choices[0].message.content)
    for token in tokens:
        top = [candidate.logprob for candidate in token.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and top[0] <= 0, token
        # A greedy token is the most likely one.
        assert_equal((token.token, token.logprob), (token.top_logprobs[0].token, top[0]))
    streamed = clusters.chat(temperature=0, logprobs=True, top_logprobs=3, stream=True)
    choices = [choice for chunk in streamed for choice in chunk.choices]
    assert_equal([token for choice in choices if choice.logprobs for token in choice.logprobs.content], tokens)


@check
def a_completion_has_log_probabilities(clusters):
    answer = clusters.complete(temperature=1, logprobs=2)
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert_equal("".join(logprobs.tokens), text)
    assert_equal(len(logprobs.token_logprobs), answer.usage.completion_tokens)
    at = 0
    for token, logprob, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        # The sampled token is listed even if it is not among the most likely ones.
        assert 2 <= len(top) <= 3 and logprob <= 0 and top[token] == logprob, (token, logprob, top)
        assert_equal(offset, at)
        at += len(token)


@check
def an_echo_repeats_and_scores_the_prompt(clusters):
    scored = clusters.complete(echo=True, max_tokens=0, logprobs=1)
    choice = scored.choices[0]
    assert_equal((choice.text, scored.usage.completion_tokens), (CODE, 0))
    first, *others = choice.logprobs.token_logprobs
    assert first is None and others and all(logprob <= 0 for logprob in others), choice.logprobs
    assert_equal(len(choice.logprobs.tokens), scored.usage.prompt_tokens)
    echoed = clusters.complete(echo=True)
    assert_equal(echoed.choices[0].text, CODE + clusters.complete().choices[0].text)
    streamed = clusters.complete(echo=True, stream=True)
    assert_equal("".join(choice.text for chunk in streamed for choice in chunk.choices), echoed.choices[0].text)


# Stop conditions and sampling parameters.


@check
def a_stop_string_across_a_token_boundary_ends_the_text(clusters):
    answer = clusters.complete(logprobs=0, max_tokens=64)
    text, tokens = answer.choices[0].text, answer.choices[0].logprobs.tokens
    boundaries, at = [], 0
    for left, right in zip(tokens, tokens[1:]):
        at += len(left)
        stop = left[-1:] + right[:1]
        if len(stop) == 2 and text.find(stop) == at - 1 and at > 8:
            boundaries.append((stop, at - 1))
    assert len(boundaries) >= 3, f"fewer than three token boundaries to stop at in {text!r}"
    for stop, end in boundaries[:3]:
        stopped = clusters.complete(max_tokens=64, stop=stop)
        assert_equal((stopped.choices[0].text, stopped.choices[0].finish_reason), (text[:end], "stop"))
        assert stopped.usage.completion_tokens < 64, stopped.usage
        streamed = list(clusters.complete(max_tokens=64, stop=["never there", stop], stream=True))
        assert_equal("".join(chunk.choices[0].text for chunk in streamed), text[:end])
        assert_equal(streamed[-1].choices[0].finish_reason, "stop")


@check
def a_stop_string_ends_a_conversation(clusters):
    complete_answer = clusters.chat().choices[0].message.content
    word = complete_answer.split()[2]
    stopped = clusters.chat(stop=[word])
    assert_equal((stopped.choices[0].message.content, stopped.choices[0].finish_reason), (complete_answer[: complete_answer.find(word)], "stop"))


@check
def a_bias_forbids_and_forces_tokens(clusters):
    first = clusters.complete(temperature=0, max_tokens=1, logprobs=0).choices[0].logprobs.tokens[0]
    forbidden = clusters.complete(temperature=0, logprobs=0, logit_bias={clusters.token_id(first): -100})
    assert first not in forbidden.choices[0].logprobs.tokens, forbidden
    forced = clusters.complete(max_tokens=5, logit_bias={clusters.token_id("def"): 100})
    assert_equal(forced.choices[0].text, "def" * 5)


@check
def penalties_reduce_repetition(clusters):
    def distinct(**fields):
        return len(set(clusters.complete(temperature=0, max_tokens=96, logprobs=0, **fields).choices[0].logprobs.tokens))

    plain = distinct()
    for fields in (
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 1.5}},
    ):
        assert distinct(**fields) > plain, (fields, plain)


@check
def additional_sampling_fields_are_accepted(clusters):
    greedy = clusters.complete(temperature=0).choices[0].text
    assert_equal(clusters.complete(temperature=1, extra_body={"top_k": 1}).choices[0].text, greedy)
    assert_equal(clusters.complete(temperature=1, extra_body={"min_p": 1}).choices[0].text, greedy)
    assert_equal(clusters.complete(temperature=1, top_p=0).choices[0].text, greedy)
    tagged = clusters.complete(temperature=0, extra_body={"task_type": "code"}, extra_headers={"x-task-type": "sql"})
    assert_equal(tagged.choices[0].text, greedy)


# Errors.


@check
def an_invalid_value_raises_a_bad_request_error(clusters):
    error = assert_raises(openai.BadRequestError, lambda: clusters.complete(temperature=-1))
    assert_equal((error.status_code, error.param, error.type), (400, "temperature", "invalid_request_error"))
    assert "temperature must be between 0 and 2, not -1" in error.message, error.message
    error = assert_raises(openai.BadRequestError, lambda: clusters.chat(max_completion_tokens=4096))
    assert_equal((error.code, error.param), ("context_length_exceeded", "max_completion_tokens"))
    error = assert_raises(openai.BadRequestError, lambda: clusters.complete(temperature=3, stream=True))
    assert_equal(error.param, "temperature")


@check
def a_wrong_key_raises_an_authentication_error(clusters):
    error = assert_raises(openai.AuthenticationError, clusters.with_wrong_key.models.list)
    assert_equal((error.status_code, error.code), (401, "invalid_api_key"))
    request = {"model": "target", "prompt": CODE, "max_tokens": 4}
    assert_raises(openai.AuthenticationError, lambda: clusters.with_wrong_key.completions.create(**request))
    assert clusters.with_key.completions.create(**request).choices[0].text


@check
def an_unknown_model_raises_a_not_found_error(clusters):
    error = assert_raises(openai.NotFoundError, lambda: clusters.complete(model="nobody"))
    assert_equal((error.status_code, error.code, error.param), (404, "model_not_found", "model"))
    assert_raises(openai.NotFoundError, lambda: clusters.open.models.retrieve("nobody"))
    error = assert_raises(openai.BadRequestError, lambda: clusters.open.embeddings.create(model="target", input="text"))
    assert_equal(error.param, "model")


@check
def a_large_body_is_rejected_with_413(clusters):
    # The package has no dedicated class for this status.
    error = assert_raises(openai.APIStatusError, lambda: clusters.complete(prompt="x" * (3 << 20)))
    assert_equal((error.status_code, error.code), (413, "request_too_large"))
    assert "2097152 bytes" in error.message, error.message


@check
def a_full_router_raises_a_rate_limit_error(clusters):
    def request(client, **fields):
        return client.completions.create(model="target", prompt=CODE, **fields)

    with request(clusters.small, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        for fields in ({}, {"stream": True}):
            error = assert_raises(openai.RateLimitError, lambda: request(clusters.small, max_tokens=4, **fields))
            assert_equal((error.status_code, error.code), (429, "overloaded"))
            assert_equal(error.response.headers["retry-after"], "1")
    # Closing the stream frees capacity, at the latest before the last retry.
    assert request(clusters.small.with_options(max_retries=3), max_tokens=4).choices[0].text


@check
def an_unreachable_server_raises_a_connection_error(clusters):
    assert_raises(openai.APIConnectionError, lambda: clusters.stopped.models.list())


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "enum": values}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key, values in [("get_weather", "city", ["Bern", "Z\u00fcrich"]), ("send", "to", ["a", "b"])]
]


@check
def a_parsed_answer_is_an_instance_of_its_model(clusters):
    class Ticket(pydantic.BaseModel):
        kind: Literal["bug", "question"]
        urgent: bool
        tags: Annotated[list[Literal["a", "b"]], pydantic.Field(max_length=2)]

    for temperature in (0, 1):
        settings = {"model": clusters.model, "messages": CHAT, "seed": 7, "temperature": temperature, "max_tokens": 120}
        texts = set()
        for k in (0, 4, 8):
            answer = clusters.open.chat.completions.parse(
                **settings, response_format=Ticket, extra_body={"speculation": {"num_draft_tokens": k}}
            )
            assert_equal(answer.choices[0].finish_reason, "stop")
            assert isinstance(answer.choices[0].message.parsed, Ticket)
            texts.add(answer.choices[0].message.content)
        assert_equal(len(texts), 1)


@check
def an_output_restricted_to_choices_is_one_of_them(clusters):
    choices = ["positive", "negative", "neither \"one\""]
    answer = clusters.chat(extra_body={"structured_outputs": {"choice": choices}})
    assert answer.choices[0].message.content in choices
    answer = clusters.complete(extra_body={"guided_regex": "[a-c]{3}-[0-9]"})
    assert re.fullmatch("[a-c]{3}-[0-9]", answer.choices[0].text), answer


@check
def required_tools_are_called(clusters):
    named = {"type": "function", "function": {"name": "send"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for tool_choice, names in (("required", {"get_weather", "send"}), (named, {"send"}), (allowed, {"send"})):
        fields = {"tools": TOOLS, "tool_choice": tool_choice, "max_completion_tokens": 400}
        complete_answer = clusters.chat(**fields)
        if complete_answer.choices[0].finish_reason == "length":
            continue
        assert_equal(complete_answer.choices[0].finish_reason, "tool_calls")
        calls = [(call.function.name, call.function.arguments) for call in complete_answer.choices[0].message.tool_calls]
        assert calls and all(name in names for name, _ in calls), calls
        for name, arguments in calls:
            key, values = {"get_weather": ("city", ["Bern", "Z\u00fcrich"]), "send": ("to", ["a", "b"])}[name]
            assert json.loads(arguments)[key] in values, calls
        streamed = []
        for chunk in clusters.chat(**fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.function.name:
                    assert_equal(call.index, len(streamed))
                    streamed.append((call.function.name, ""))
                name, arguments = streamed[-1]
                streamed[-1] = (name, arguments + call.function.arguments)
        assert_equal(streamed, calls)
        # Send the answer back with the tool's result.
        message = complete_answer.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
        assert clusters.chat(messages=[*CHAT, message, *results]).choices[0].message.content


@check
def speculation_does_not_change_tool_calls_of_responses(clusters):
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    named = {"type": "function", "name": "send"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for tool_choice in ("required", named, allowed):
        request = {"model": clusters.model, "input": CHAT, "tools": tools, "tool_choice": tool_choice, "max_output_tokens": 400}
        request["temperature"] = 0.7

        def create(**extra):
            return clusters.open.responses.create(**request, extra_body={"seed": 7, **extra})

        complete_answer = create(speculation={"num_draft_tokens": 4})
        calls = [(item.name, item.arguments, item.status) for item in complete_answer.output if item.type == "function_call"]
        plain = create(speculation={"enabled": False}).output
        assert_equal([(item.name, item.arguments, item.status) for item in plain if item.type == "function_call"], calls)
        with clusters.open.responses.stream(**request, extra_body={"seed": 7}) as stream:
            events = list(stream)
        arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        # The package's `get_final_response` requires a completed response.
        final = events[-1].response
        assert_equal(arguments, [arguments for _, arguments, _ in calls])
        assert_equal([(item.name, item.arguments, item.status) for item in final.output], calls)
        if complete_answer.status == "incomplete":
            continue
        for name, arguments, _ in calls:
            key, values = {"get_weather": ("city", ["Bern", "Z\u00fcrich"]), "send": ("to", ["a", "b"])}[name]
            assert json.loads(arguments)[key] in values, calls
        # Send the results back, once with the calls and once with `previous_response_id`.
        function_calls = [item for item in complete_answer.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "42"} for item in function_calls]
        settings = {"model": clusters.model, "max_output_tokens": 16, "extra_body": {"seed": 7}}
        resent = clusters.open.responses.create(input=[*CHAT, *complete_answer.output, *results], **settings)
        stored = clusters.open.responses.create(input=results, previous_response_id=complete_answer.id, **settings)
        assert resent.output_text and resent.output_text == stored.output_text, (resent, stored)
    error = assert_raises(
        openai.BadRequestError,
        lambda: clusters.open.responses.create(
            model=clusters.model, input=CHAT, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}]
        ),
    )
    assert_equal(error.param, "tools[0].type")


@check
def a_parsed_response_is_an_instance_of_its_model(clusters):
    class Ticket(pydantic.BaseModel):
        kind: Literal["bug", "question"]
        urgent: bool

    request = {"model": clusters.model, "input": CHAT, "text_format": Ticket, "max_output_tokens": 120}
    parsed = [
        clusters.open.responses.parse(**request, extra_body={"seed": 7, "speculation": speculation}).output_parsed
        for speculation in ({"enabled": False}, {"num_draft_tokens": 4})
    ]
    assert isinstance(parsed[0], Ticket) and parsed[0] == parsed[1], parsed


@check
def an_invalid_schema_raises_a_bad_request_error(clusters):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strong"}}}
    error = assert_raises(openai.BadRequestError, lambda: clusters.chat(response_format=schema))
    assert_equal(error.param, "response_format.json_schema.schema")


@check
def requests_succeed_after_all_errors(clusters):
    assert_equal(clusters.complete().choices[0].text, clusters.complete().choices[0].text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", required=True, help="URL of a cluster without keys")
    parser.add_argument("--keys", required=True, help="URL of a cluster that requires a key")
    parser.add_argument("--api-key", required=True, help="API key of that cluster")
    parser.add_argument("--small", required=True, help="URL of a cluster that runs one sequence and queues none")
    parser.add_argument("--stopped", required=True, help="URL on which no process listens")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of the target")
    clusters = Clusters(parser.parse_args())
    failures = 0
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        try:
            function(clusters)
            print(f"ok    {name}", flush=True)
        except Exception:
            failures += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
    print(f"openai {openai.__version__}: {len(CHECKS) - failures} of {len(CHECKS)} checks passed")
    sys.exit(1 if failures else 0)


main()
