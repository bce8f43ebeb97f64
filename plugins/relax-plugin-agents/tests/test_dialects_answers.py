# SPDX-License-Identifier: Apache-2.0
"""Answers are what the vendors' own clients read, whole and streamed, and come back from them as the turn they were."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import httpx2
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import TypeAdapter
from relax_plugin_agents.dialects.chat import ChatCompletions
from relax_plugin_agents.dialects.messages import AnthropicMessages
from relax_plugin_agents.dialects.responses import Responses
from relax_plugin_agents.model_request import ModelTurn, Sent

from relax_core.api.task import Message, ToolCall

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), AnthropicMessages()
EVERY = pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
QUESTION = [{"role": "user", "content": "hi"}]
CALLS = (ToolCall("weather", {"city": "Ośló", "days": 2}, "call_1"), ToolCall("now", {}, "call_2"))


def turn_of(text="", calls=(), finish=None):
    finish = finish or ("tool_calls" if calls else "stop")
    return ModelTurn("t1", "policy", 1_700_000_000, text, tuple(calls), finish, prompt_tokens=7, completion_tokens=3)


def events_of(dialect, turn, body, told=()):
    """The stream of a turn, of which these lengths of its text were told before it was whole."""
    sent = Sent()
    for end in sorted({length for length in told if 0 < length <= len(turn.text)}):
        partial = replace(turn, text=turn.text[:end], tool_calls=(), finish="", completion_tokens=0)
        events = list(dialect.events(partial, body, sent))
        sent = Sent(sent.events + len(events), partial.text)
        yield from (dialect.heartbeat, *events)
    yield from dialect.events(turn, body, sent)


def serve(dialect, turn, told=()):
    """A client of the vendor whose every request is answered with this turn, a heartbeat before its stream."""
    import anthropic
    import openai

    def answer(request):
        body = json.loads(request.content)
        assert request.url.path == dialect.path
        if dialect.ask(body).stream:
            events = dialect.heartbeat + "".join(events_of(dialect, turn, body, told))
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=events.encode())
        return httpx2.Response(200, json=dialect.reply(turn))

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    if dialect is MESSAGES:
        return anthropic.Anthropic(api_key="k", base_url="http://relax", http_client=client)
    return openai.OpenAI(api_key="k", base_url="http://relax/v1", http_client=client)


def streamed(dialect, turn, told=()):
    """The text and the calls that the vendor's client gathers from the stream, and the history it would send next."""
    client = serve(dialect, turn, told)
    if dialect is CHAT:
        with client.chat.completions.stream(model="policy", messages=QUESTION) as stream:
            message = stream.until_done().current_completion_snapshot.choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content or "", calls, [message.model_dump(exclude={"parsed"})]
    if dialect is RESPONSES:
        stream = client.responses.create(model="policy", input=QUESTION, stream=True)
        texts, calls, items = [], [], []
        for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            elif event.type == "response.output_item.done":
                items.append(event.item.model_dump())
                if event.item.type == "function_call":
                    calls.append((event.item.call_id, event.item.name, event.item.arguments))
        return "".join(texts), calls, items
    with client.messages.stream(model="policy", max_tokens=9, messages=QUESTION) as stream:
        message = stream.get_final_message()
    blocks = [block for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [(block.id, block.name, json.dumps(block.input, ensure_ascii=False)) for block in blocks]
    return text, calls, [message.to_dict()]


def whole(dialect, turn):
    """The history that a client would send next after the answer to a request without a stream."""
    reply = json.loads(json.dumps(dialect.reply(turn)))
    if dialect is CHAT:
        return [reply["choices"][0]["message"]]
    return reply["output"] if dialect is RESPONSES else [reply]


def asked_next(dialect, history):
    """The assistant's message of a request that goes on after this history."""
    field = "input" if dialect is RESPONSES else "messages"
    messages = dialect.ask({field: [*QUESTION, *history, *QUESTION]}).messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    return messages[1]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=6), values, max_size=3)),
    max_size=3,
).map(lambda pairs: tuple(ToolCall(name, arguments, f"call_{n}") for n, (name, arguments) in enumerate(pairs)))
turns = st.builds(turn_of, st.text(max_size=30), calls, st.sampled_from([None, "length"]))


@EVERY
@settings(max_examples=25, deadline=None)
@given(turn=turns)
def test_an_answer_comes_back_as_the_turn_it_was_whole_and_streamed(dialect, turn):
    expected = Message("assistant", turn.text, turn.tool_calls)
    assert asked_next(dialect, whole(dialect, turn)) == expected
    text, _, history = streamed(dialect, turn)
    assert text == turn.text
    assert asked_next(dialect, history) == expected


@EVERY
@pytest.mark.parametrize(("text", "called"), [("", ()), ("Let me see: \u2028 ünïcode\r\n\n", CALLS)])
def test_text_and_calls_of_a_stream_are_those_of_the_turn(dialect, text, called):
    expected = [(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in called]
    assert streamed(dialect, turn_of(text, called))[:2] == (text, expected)


@EVERY
@given(
    text=st.text(min_size=1, max_size=12),
    told=st.lists(st.integers(1, 12), max_size=4),
    called=st.sampled_from([(), CALLS]),
)
@settings(max_examples=30, deadline=None)
def test_a_streamed_turn_equals_the_whole_turn_for_a_client(dialect, text, told, called):
    turn = turn_of(text, called)
    at_once, in_pieces = streamed(dialect, turn), streamed(dialect, turn, told)
    assert in_pieces[:2] == at_once[:2] and asked_next(dialect, in_pieces[2]) == asked_next(dialect, at_once[2])


@pytest.mark.parametrize(
    ("text", "called", "finish"), [("", (), None), ("", CALLS, None), ("hi", CALLS, None), ("hi", (), "length")]
)
def test_answers_and_events_have_the_types_of_the_vendors(text, called, finish):
    from anthropic.types import Message as AnthropicMessage, RawMessageStreamEvent
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    turn = turn_of(text, called, finish)
    ChatCompletion.model_validate(CHAT.reply(turn), strict=True)
    Response.model_validate(RESPONSES.reply(turn))
    AnthropicMessage.model_validate(MESSAGES.reply(turn), strict=True)
    types = {CHAT: ChatCompletionChunk, RESPONSES: ResponseStreamEvent, MESSAGES: RawMessageStreamEvent}
    for (dialect, kind), told in product(types.items(), ((), (1, 2))):
        adapter = TypeAdapter(kind)
        for event in events_of(dialect, turn, {"stream_options": {"include_usage": True}}, told):
            if event == dialect.heartbeat:
                continue
            assert event.endswith("\n\n") and event.isascii()
            *name, data = event.strip().split("\n")
            if data == "data: [DONE]":
                continue
            fields = json.loads(data.removeprefix("data: "))
            assert name == ([] if dialect is CHAT else [f"event: {fields['type']}"])
            adapter.validate_python(fields)


def test_the_finish_reason_uses_each_vendors_words():
    for finish, stop_reason, status in (
        ("stop", "end_turn", "completed"),
        ("length", "max_tokens", "incomplete"),
        ("tool_calls", "tool_use", "completed"),
    ):
        turn = turn_of("a", CALLS if finish == "tool_calls" else (), finish)
        assert CHAT.reply(turn)["choices"][0]["finish_reason"] == finish
        assert MESSAGES.reply(turn)["stop_reason"] == stop_reason
        response = RESPONSES.reply(turn)
        assert response["status"] == status
        assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if finish == "length" else None)


def test_an_answer_of_calls_alone_has_no_text_and_an_empty_answer_an_empty_one():
    assert CHAT.reply(turn_of("", CALLS))["choices"][0]["message"]["content"] is None
    assert [block["type"] for block in MESSAGES.reply(turn_of("", CALLS))["content"]] == ["tool_use", "tool_use"]
    assert [item["type"] for item in RESPONSES.reply(turn_of("", CALLS))["output"]] == ["function_call"] * 2
    assert CHAT.reply(turn_of())["choices"][0]["message"]["content"] == ""
    assert MESSAGES.reply(turn_of())["content"] == [{"type": "text", "text": ""}]
    assert RESPONSES.reply(turn_of())["output"][0]["content"][0]["text"] == ""


def test_clients_without_a_stream_read_text_calls_and_usage():
    turn = turn_of("hi", CALLS)
    completion = serve(CHAT, turn).chat.completions.create(model="policy", messages=QUESTION)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 3, 10)
    assert json.loads(completion.choices[0].message.tool_calls[0].function.arguments) == CALLS[0].arguments
    response = serve(RESPONSES, turn).responses.create(model="policy", input="hi")
    assert (response.output_text, response.usage.total_tokens, response.output[1].call_id) == ("hi", 10, "call_1")
    message = serve(MESSAGES, turn).messages.create(model="policy", max_tokens=9, messages=QUESTION)
    assert (message.content[0].text, message.content[1].input) == ("hi", CALLS[0].arguments)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)


def test_a_chat_stream_contains_usage_only_on_request():
    client = serve(CHAT, turn_of("hi"))
    asked = {"model": "policy", "messages": QUESTION, "stream": True}
    assert not any(chunk.usage for chunk in client.chat.completions.create(**asked))
    *chunks, last = client.chat.completions.create(**asked, stream_options={"include_usage": True})
    assert (last.choices, last.usage.total_tokens) == ([], 10)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_stream_of_responses_counts_its_events_and_ends_with_the_whole_answer():
    turn = turn_of("hi", CALLS)
    with serve(RESPONSES, turn).responses.stream(model="policy", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events[:9]] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    assert final.output_text == "hi" and [item.type for item in final.output[1:]] == ["function_call"] * 2
    cut = list(RESPONSES.events(turn_of("hi", finish="length"), {}, Sent()))
    assert cut[-1].startswith("event: response.incomplete\n")


def test_an_anthropic_stream_ends_with_usage_and_the_stop_reason():
    with serve(MESSAGES, turn_of("hi", CALLS)).messages.stream(
        model="policy", max_tokens=9, messages=QUESTION
    ) as stream:
        assert "".join(stream.text_stream) == "hi"
        final = stream.get_final_message()
    assert (final.usage.input_tokens, final.usage.output_tokens, final.stop_reason) == (7, 3, "tool_use")


def test_errors_are_raised_by_the_clients_with_their_message():
    import anthropic
    import openai

    def failing(dialect, status, kind):
        answer = lambda request: httpx2.Response(status, json=dialect.failed("messages: is no list", kind, "messages"))  # noqa: E731
        return httpx2.Client(transport=httpx2.MockTransport(answer))

    client = openai.OpenAI(
        api_key="k", base_url="http://relax/v1", http_client=failing(CHAT, 400, "invalid_request_error")
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="policy", input="hi")
    assert (refused.value.param, refused.value.type) == ("messages", "invalid_request_error")
    http_client = failing(MESSAGES, 401, "authentication_error")
    client = anthropic.Anthropic(api_key="k", base_url="http://relax", http_client=http_client)
    with pytest.raises(anthropic.AuthenticationError, match="messages: is no list"):
        client.messages.create(model="policy", max_tokens=9, messages=QUESTION)
