"""OpenAI's JSON: what bodies become, what is refused by name, and replies that the `openai` package's models accept."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvcache.request import Completion, Logprob, SamplingParams, Token, TokenLogprobs
from kvcache.wire import Invalid
from kvcache.wire_openai import Numbered, parse_chat, parse_completion, replies_to

ROOM = 1000


def completion_body(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat_body(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def done(text: str, tokens: int, index: int = 0, reason: str = "length", **more: Any) -> Completion:
    return Completion(text, tuple(range(tokens)), reason, 7, 4, 0.1, 0.2, index=index, **more)


def test_wire_formats_load_no_tensor_library_and_no_http() -> None:
    names = ["torch", "transformers", "starlette", "uvicorn", "httpx", "asyncio"]
    program = (
        "import sys, kvcache.wire_openai, kvcache.wire_ollama; "
        f"print(*(name for name in {names} if name in sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == []


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 16, "temperature": 1.0}),
        ({"max_tokens": None, "temperature": None, "top_p": None, "n": None, "stop": None}, {"max_tokens": 16}),
        ({"temperature": 0, "top_p": 0.5, "seed": -3}, {"temperature": 0.0, "top_p": 0.5, "seed": -3}),
        ({"top_p": 0, "top_k": 5}, {"top_p": 1.0, "top_k": 1}),
        ({"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}, {}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"], "n": 3, "best_of": 5}, {"stop": ("a", "b"), "n": 3, "best_of": 5}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"max_tokens": 5.0, "n": 2.0, "logprobs": 1.0}, {"max_tokens": 5, "n": 2, "logprobs": 1}),
        ({"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.2}),
        ({"presence_penalty": -1, "frequency_penalty": 2}, {"presence_penalty": -1.0, "frequency_penalty": 2.0}),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {"ignore_eos": True, "stop_token_ids": (5,)}),
        ({"context_shift": True, "keep": 5}, {"context_shift": True, "keep": 5}),
        ({"logit_bias": {"50256": -100, "7": 2.5}}, {"logit_bias": {50256: -100.0, 7: 2.5}}),
        ({"use_beam_search": True, "n": 3}, {"temperature": 0.0, "n": 3, "num_beams": 3}),
        (
            {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "early_stopping": "never"},
            {"temperature": 0.0, "num_beams": 4, "length_penalty": 0.5, "early_stopping": "never"},
        ),
    ],
)
def test_a_completion_body_becomes_sampling_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    defaults = {"max_tokens": 16, "temperature": 1.0}
    assert completion_body(**fields).params(ROOM) == SamplingParams(**{**defaults, **expected})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": ROOM}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"logprobs": True}, {"max_tokens": ROOM, "logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"max_tokens": ROOM, "logprobs": 3}),
        ({"logprobs": False}, {"max_tokens": ROOM}),
        ({"logit_bias": {"5": 10}}, {"max_tokens": ROOM, "logit_bias": {5: 10.0}}),
    ],
)
def test_a_chat_body_becomes_sampling_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat_body(**fields).params(ROOM) == SamplingParams(temperature=1.0, **expected)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_apart(prompt: Any, expected: Any) -> None:
    assert completion_body(prompt=prompt).prompts == expected


def test_the_content_of_a_message_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat_body(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert [(message.role, message.text) for message in body.messages] == [("developer", "x"), ("user", "ab")]


UNSERVED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {"a": 1},
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(Invalid, match=name) as caught:
        chat_body(**{name: UNSERVED[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(UNSERVED),
        {"tools": [], "logit_bias": {}, "tool_choice": "none", "response_format": {"type": "text"}},
        {"modalities": ["text"], "verbosity": "medium", "tool_choice": "auto"},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"},
    ],
)
def test_fields_that_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    assert chat_body(**fields).params(ROOM) == SamplingParams(max_tokens=ROOM, temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream_options": {"include_usag": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": ""}, "model"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": -100, "05": 100}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "context_shift": True}, "context_shift"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as caught:
        completion_body(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "m", "prompt": ' + b"[" * 100_000,
        b'"text"',
        b"[]",
        b"null",
        b'{"model": "m", "prompt": "p", "max_tokens": 1e999}',
        b'{"model": "m", "prompt": "p", "temperature": NaN}',
        b'{"model": "m", "prompt": "p", "max_tokens": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_body_is_invalid(raw: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        parse_completion(raw)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "x", "weight": 1},
    ],
)
def test_messages_that_cannot_be_said_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        chat_body(messages=[message])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["top-k", "a[b]", "str"])
def test_a_field_that_nobody_knows_is_named_whatever_its_name(name: str) -> None:
    with pytest.raises(Invalid, match=rf"supplied: {re.escape(name)}$"):
        completion_body(prompt="x", **{name: 5})
    with pytest.raises(Invalid, match=rf"supplied: messages\.0\.{re.escape(name)}$"):
        chat_body(messages=[{"role": "user", "content": "x", name: 5}])


def test_the_part_of_a_message_that_does_not_fit_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(Invalid, match=r"^messages\.0\.content\.1: this server supports no parts but") as caught:
        chat_body(messages=[{"role": "user", "content": parts}])
    assert caught.value.code == "unsupported_parameter"
    for part, what in (({"type": "text"}, ".text: missing"), ({"type": "text", "text": 5}, ".text: Input should be a")):
        with pytest.raises(Invalid, match=rf"^messages\.0\.content\.1{what}"):
            chat_body(messages=[{"role": "user", "content": [parts[0], part]}])
    with pytest.raises(Invalid, match=r"^messages\.0\.content: Input should be a valid string; or: "):
        chat_body(messages=[{"role": "user", "content": None}])


# --- replies ----------------------------------------------------------------------------------------------------------

LIKELY = (
    TokenLogprobs(Logprob(1, "He", -0.5), (Logprob(1, "He", -0.5), Logprob(2, "\ufffd", float("-inf")))),
    TokenLogprobs(Logprob(3, "y", -1.5), (Logprob(4, "z", -0.25), Logprob(3, "y", -1.5))),
)


def test_choices_are_numbered_by_prompt_and_completion() -> None:
    replies = replies_to(completion_body(prompt=["a", "b"], n=2), "id", "m", 5)
    finished = [Numbered(p, done(f"{p}{i}", 2 + i, i)) for p, i in [(1, 1), (0, 1), (1, 0), (0, 0)]]
    reply = OpenAICompletion.model_validate(replies.whole(finished), strict=True)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    # each prompt once, every generated token
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (14, 10, 24)
    assert reply.usage.prompt_tokens_details.cached_tokens == 8


def test_logprobs_of_completions() -> None:
    replies = replies_to(completion_body(logprobs=2), "id", "m", 5)
    whole: Any = replies.whole([Numbered(0, done("Hey", 2, logprobs=LIKELY))])
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["He", "y"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"He": -0.5, "\ufffd": -9999.0}, {"z": -0.25, "y": -1.5}],
        "text_offset": [0, 2],
    }
    json.dumps(whole, allow_nan=False)


PARTS = (
    TokenLogprobs(Logprob(5, "a", -2.0, b"a"), ()),  # chosen, and not among the likeliest
    TokenLogprobs(
        Logprob(9, "\ufffd", -3.0, b" \xf0\x9f"),
        (Logprob(6, "\ufffd", -0.5, b"\xf0\x9f"), Logprob(7, "\ufffd", -1.0, b"\x98\x80")),
    ),
    TokenLogprobs(Logprob(7, "\ufffd", -0.25, b"\x98\x80"), (Logprob(7, "\ufffd", -0.25, b"\x98\x80"),)),
    # two of equal text: the likelier stays
    TokenLogprobs(Logprob(1, "b", -0.5, b"b"), (Logprob(1, "b", -0.5, b"b"), Logprob(8, "b", -4.0, b"b"))),
    TokenLogprobs(Logprob(2, "END", -0.5, b"END"), ()),  # of a stop text, which the choice's text has not
    TokenLogprobs(Logprob(3, "!", -0.5, b"!"), ()),
)
"""Of the text "a 😀b": the face is two tokens, the first of which has the space before it."""


def test_parts_of_characters_have_names_and_places_of_their_own() -> None:
    body = completion_body(logprobs=2, stream=True)
    whole: Any = replies_to(body, "id", "m", 5).whole([Numbered(0, done("a 😀b", 6, logprobs=PARTS))])
    found = whole["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", r"bytes: \xf0\x9f", r"bytes:\x98\x80", "b", "END", "!"]
    assert found["top_logprobs"] == [
        {"a": -2.0},
        {r"bytes:\xf0\x9f": -0.5, r"bytes:\x98\x80": -1.0, r"bytes: \xf0\x9f": -3.0},
        {r"bytes:\x98\x80": -0.25},
        {"b": -0.5},
        {"END": -0.5},
        {"!": -0.5},
    ]
    assert found["text_offset"] == [0, 1, 2, 3, 4, 4]
    stream = replies_to(body, "id", "m", 5)
    texts = ["a", "", " 😀", "b", "", ""]
    chunks: list[Any] = [
        chunk
        for text, logprobs in zip(texts, PARTS, strict=True)
        for chunk in stream.token(0, Token(1, text, logprobs=logprobs))
    ]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [part for each in told for part in each[name]] for name in found} == found


def test_logprobs_of_chats() -> None:
    replies = replies_to(chat_body(logprobs=True), "id", "m", 5)
    whole: Any = replies.whole([Numbered(0, done("Hey", 2, logprobs=LIKELY))])
    first, second = ChatCompletion.model_validate(whole, strict=True).choices[0].logprobs.content  # type: ignore[union-attr,misc]
    assert (first.token, first.logprob, first.bytes) == ("He", -0.5, [72, 101])
    # half a character of unknown bytes
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs][1] == ("\ufffd", -9999.0, None)
    assert second.token == "y"
    parts: Any = replies.whole([Numbered(0, done("a 😀b", 6, logprobs=PARTS))])
    content = parts["choices"][0]["logprobs"]["content"]
    assert [(one["token"], bytes(one["bytes"])) for one in content[1:3]] == [
        ("\ufffd", b" \xf0\x9f"),
        ("\ufffd", b"\x98\x80"),
    ]


def test_echo_begins_every_choice() -> None:
    replies = replies_to(completion_body(prompt=["a", "b"], echo=True), "id", "m", 5, ["a", "b"])
    whole: Any = replies.whole([Numbered(0, done("x", 1)), Numbered(1, done("y", 1))])
    assert [choice["text"] for choice in whole["choices"]] == ["ax", "by"]
    chunks: list[Any] = [*replies.token(1, Token(5, "y")), *replies.token(1, Token(6, "z"))]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["by", "z"]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_pieces_of_a_stream_make_the_whole(is_chat: bool, finish: str) -> None:
    """Texts cut at random into tokens, some of which show nothing; the end shows what was held back."""
    random_source = random.Random(3)
    for _ in range(50):
        texts = ["".join(random_source.choices("abé😀 ", k=random_source.randint(0, 12))) for _ in range(2)]
        body = (chat_body if is_chat else completion_body)(n=2, stream=True, stream_options={"include_usage": True})
        replies = replies_to(body, "id", "m", 5)
        chunks: list[Any] = []
        completions = []
        for index, text in enumerate(texts):
            shown = text[: random_source.randint(0, len(text))]
            while shown:
                size = random_source.randint(0, len(shown))
                chunks += replies.token(0, Token(1, shown[:size], index=index))
                shown = shown[size:]
            completions.append(Numbered(0, done(text, 3, index, finish)))
            chunks += replies.finished(0, completions[-1].completion)
        chunks += replies.usage(completions)
        seen = ["", ""]
        reasons: list[tuple[int, str]] = []
        for chunk in chunks[:-1]:
            assert chunk["usage"] is None
            choice = chunk["choices"][0]
            if is_chat:
                ChatCompletionChunk.model_validate(chunk, strict=True)
                seen[choice["index"]] += choice["delta"].get("content", "")
            else:
                seen[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons.append((choice["index"], choice["finish_reason"]))
        assert seen == texts
        assert reasons == [(0, finish), (1, finish)]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        if is_chat:
            roles = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if "role" in chunk["choices"][0]["delta"]]
            assert roles == [0, 1]


def test_usage_is_streamed_only_when_asked_for() -> None:
    replies = replies_to(chat_body(stream=True), "id", "m", 5)
    chunk: Any = replies.token(0, Token(1, "x"))[-1]
    assert "usage" not in chunk
    assert replies.usage([Numbered(0, done("x", 1))]) == []
