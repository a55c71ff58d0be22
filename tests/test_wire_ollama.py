"""Ollama's JSON: what bodies become, what is refused by name, and lines that the `ollama` package's models accept."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import ollama
import pytest

from kvcache.request import Completion, Logprob, SamplingParams, Token, TokenLogprobs
from kvcache.wire import Invalid
from kvcache.wire_ollama import final_reply, loaded_reply, parse_chat, parse_generate, parse_show, token_reply

ROOM = 1000
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEFAULTS: dict[str, Any] = {"max_tokens": ROOM, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "keep": 4}


def generate_body(**fields: Any) -> Any:
    return parse_generate(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"num_predict": 7}, {"max_tokens": 7}),
        ({"num_predict": -1}, {}),
        ({"num_predict": 0}, {}),
        (
            {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.5},
            {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.5},
        ),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"temperature": None, "top_k": None, "top_p": None, "num_keep": None}, {}),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"num_keep": 9}, {"keep": 9}),
        ({"num_predict": 7.0, "num_ctx": 8192.0, "seed": 5.0}, {"max_tokens": 7, "seed": 5}),  # JSON has one kind
        ({"penalize_newline": True}, {}),
        ({"num_ctx": 4096, "num_thread": 8, "num_gpu": -1, "use_mmap": True, "mirostat": 0, "typical_p": 1.0}, {}),
    ],
)
def test_options_become_sampling_parameters(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert generate_body(options=options).params(ROOM) == SamplingParams(**{**DEFAULTS, **expected})


def test_fields_of_the_body_become_sampling_parameters() -> None:
    params = generate_body(logprobs=True, top_logprobs=2, shift=True, options=None).params(ROOM)
    assert params == SamplingParams(**DEFAULTS, logprobs=2, context_shift=True)
    assert generate_body(logprobs=True).params(ROOM).logprobs == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"format": "json"}, "format"),
        ({"format": {"type": "object"}}, "format"),
        ({"think": True}, "think"),
        ({"think": "high"}, "think"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "x"}, "suffix"),
        ({"images": ["aGk="]}, "images"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(Invalid, match=name) as caught:
        generate_body(**fields)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "", "think": False, "template": "", "suffix": "", "images": [], "keep_alive": "5m"},
        {"keep_alive": 0, "truncate": False, "context": [], "system": ""},
        {"keep_alive": "-1h30.5m", "truncate": True},
    ],
)
def test_fields_that_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    assert generate_body(**fields).params(ROOM) == SamplingParams(**DEFAULTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"promt": "x"},
        {"options": {"temprature": 1}},
        {"options": {"temperature": -1}},
        {"options": {"num_predict": 2**40}},
        {"options": {"num_predict": "5"}},
        {"options": {"num_predict": 5.5}},
        {"options": {"stop": [""]}},
        {"context": [-1]},
        {"stream": "yes"},
        {"raw": True, "system": "x"},
        {"top_logprobs": 3},
        {"keep_alive": "abc"},
        {"keep_alive": "5"},
        {"model": ""},
    ],
)
def test_a_wrong_field_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        generate_body(**fields)


def test_messages() -> None:
    raw = {"model": "m", "messages": [{"role": "user", "content": "a", "images": None}, {"role": "assistant"}]}
    body = parse_chat(json.dumps(raw).encode())
    assert body.messages is not None
    assert [(message.role, message.text) for message in body.messages] == [("user", "a"), ("assistant", "")]
    for wrong in ({"role": "tool", "content": "x"}, {"role": "user", "content": "x", "images": ["aGk="]}):
        with pytest.raises(Invalid):
            parse_chat(json.dumps({"model": "m", "messages": [wrong]}).encode())


def test_show_takes_both_names() -> None:
    assert parse_show(b'{"model": "m"}') == "m"
    assert parse_show(b'{"name": "m", "verbose": true}') == "m"
    with pytest.raises(Invalid, match="model"):
        parse_show(b"{}")


LIKELY = (
    TokenLogprobs(
        Logprob(1, "H", float("-inf")), (Logprob(2, "\ufffd", -0.5), Logprob(3, "\ufffd", -0.75, b"\xf0\x9f"))
    ),
)
DONE = Completion("Hey", (5, 6), "stop", 7, 4, 0.25, 1.5, logprobs=LIKELY)


def test_a_whole_answer_of_generate() -> None:
    line: Any = final_reply(False, "m", DONE, NOW, context=[1, 2])
    answer = ollama.GenerateResponse.model_validate(line)
    assert (answer.response, answer.done, answer.done_reason) == ("Hey", True, "stop")
    assert (answer.total_duration, answer.load_duration) == (1_500_000_000, 0)
    assert (answer.prompt_eval_count, answer.prompt_eval_duration) == (7, 250_000_000)
    assert (answer.eval_count, answer.eval_duration) == (2, 1_250_000_000)
    assert answer.context == [1, 2, 5, 6]
    assert answer.created_at == "2026-01-02T03:04:05Z"
    top = [{"token": "\ufffd", "logprob": -0.5}, {"token": "\ufffd", "logprob": -0.75, "bytes": [0xF0, 0x9F]}]
    assert line["logprobs"] == [{"token": "H", "logprob": -9999.0, "bytes": [72], "top_logprobs": top}]


def test_lines_of_a_chat() -> None:
    lines: list[Any] = [
        token_reply(True, "m", Token(5, "He", logprobs=LIKELY[0]), NOW),
        final_reply(True, "m", DONE, NOW, num_told=2, context=[1]),
    ]
    parsed = [ollama.ChatResponse.model_validate(line) for line in lines]
    assert [(line.message.content, line.done) for line in parsed] == [("He", False), ("y", True)]
    assert lines[0]["logprobs"][0]["token"] == "H"
    assert "logprobs" not in lines[1]  # they were told with their tokens
    assert "context" not in lines[1]


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0m0s", "unload")]
)
def test_a_body_without_a_prompt_only_loads(keep_alive: Any, reason: str) -> None:
    unloads = generate_body(keep_alive=keep_alive).unloads
    answer = ollama.GenerateResponse.model_validate(loaded_reply(False, "m", NOW, unloads=unloads))
    assert (answer.response, answer.done, answer.done_reason) == ("", True, reason)
