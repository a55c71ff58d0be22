"""The server with a real engine and a tiny random model: answers, bounds, hostile input, leaving clients, stopping."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

import serving
from kvcache import Finished, Request, SamplingParams
from kvcache.server import Server, Settings
from kvcache.server.engine_thread import EngineThread, Ticket, Unavailable, _Add
from kvcache.server.instruments import Instruments
from serving import NAME, TEMPLATE, Served, events, eventually

PROMPT = "The quick brown fox jumps over the lazy dog"
BEGIN = ord("^") - 32
LONG = 400
"""Tokens of an answer that takes a while: about a second."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving.serving() as made:
        yield made
        eventually(made.is_idle)
        assert made.client.get("/health").json() == {"status": "ok"}
        assert made.logged == []


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The same model with no server and no prefix cache: what must come out."""
    with serving.engine(prefix_cache=False) as engine:
        yield lambda prompt, **options: engine.generate([prompt], **options)[0]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_completions_are_what_the_engine_generates(served: Served, alone: Any) -> None:
    reply = served.complete(PROMPT, max_tokens=20)
    expected = alone(PROMPT, max_tokens=20)
    assert reply["choices"] == [{"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}]
    assert (reply["object"], reply["model"]) == ("text_completion", NAME)
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    assert reply["usage"]["completion_tokens"] == 20


def test_the_second_request_reuses_the_first(served: Served) -> None:
    prompt = "a prefix that nobody else sends " * 3
    assert served.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    again = served.complete(prompt, max_tokens=1)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
    salted = served.complete(prompt, max_tokens=1, cache_salt="tenant")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_token_ids_are_a_prompt(served: Served) -> None:
    ids = [ord(c) - 32 for c in PROMPT]
    assert served.text(ids, max_tokens=9) == served.text(PROMPT, max_tokens=9)
    many = served.complete([ids, ids[:5]], max_tokens=4)["choices"]
    assert [choice["text"] for choice in many] == [
        served.text(PROMPT, max_tokens=4),
        served.text(PROMPT[:5], max_tokens=4),
    ]


def test_a_stream_says_the_same(served: Served) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True}
    with served.client.stream(
        "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(answer))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == 20
    pieces = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert "".join(piece["text"] for piece in pieces) == served.text(PROMPT, max_tokens=20)
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stop_text_ends_the_answer_before_it(served: Served) -> None:
    whole = served.text(PROMPT, max_tokens=30)
    stop = whole[7:10]
    reply = served.complete(PROMPT, max_tokens=30, stop=[stop, "never said"])["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True, "stop": stop}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = [chunk["choices"][0]["text"] for chunk in events(answer) if chunk != "[DONE]"]
    assert "".join(pieces) == reply["text"]


def test_several_choices_with_a_seed_are_repeatable_and_differ(served: Served) -> None:
    first = served.complete(PROMPT, max_tokens=16, n=3, temperature=1, seed=7)
    again = served.complete(PROMPT, max_tokens=16, n=3, temperature=1, seed=7)
    assert first["choices"] == again["choices"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in first["choices"]}) > 1
    assert first["usage"]["prompt_tokens"] == len(PROMPT)
    assert first["usage"]["completion_tokens"] == 48


def test_best_of_chooses_the_likelier(served: Served) -> None:
    def likelihood(choice: Any) -> float:
        return float(sum(choice["logprobs"]["token_logprobs"]))

    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1, "seed": 3, "logprobs": 0}
    all_three = served.complete(PROMPT, n=3, **options)["choices"]
    best = served.complete(PROMPT, n=1, best_of=3, **options)["choices"]
    assert len(best) == 1
    assert likelihood(best[0]) == pytest.approx(max(map(likelihood, all_three)), abs=1e-3)


def test_a_bias_forbids_a_token_and_one_beyond_the_vocabulary_is_refused(served: Served) -> None:
    plain = served.text(PROMPT, max_tokens=4)
    biased = served.text(PROMPT, max_tokens=4, logit_bias={str(ord(plain[0]) - 32): -100})
    assert biased and biased[0] != plain[0]
    error = served.post("/v1/completions", prompt=PROMPT, logit_bias={"99": 1}).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "logit_bias")
    assert error["message"] == "logit_bias: token id 99 is not in the vocabulary of 99"


def test_beams_are_the_engines(served: Served) -> None:
    answer = served.complete(PROMPT, max_tokens=6, n=2, best_of=3, use_beam_search=True)
    with serving.engine() as alone:
        alone.add(Request("it", PROMPT, SamplingParams(max_tokens=6, n=2, num_beams=3)))
        happened = [event for _ in range(8) for event in alone.step()]
    texts = [event.completion.text for event in happened if isinstance(event, Finished)]
    assert [choice["text"] for choice in answer["choices"]] == texts and len(texts) == 2
    assert answer["usage"]["completion_tokens"] == 12
    many = served.post("/v1/completions", prompt="x", n=5, use_beam_search=True)
    assert (many.status_code, "5 outputs" in many.text) == (400, True)


def test_logprobs_and_echo(served: Served) -> None:
    found = served.complete(PROMPT, max_tokens=5, logprobs=3)["choices"][0]["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5] * 4
    for logprob, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert logprob == max(top.values()) <= 0  # greedy
    assert served.text(PROMPT, max_tokens=5, echo=True) == PROMPT + served.text(PROMPT, max_tokens=5)


def test_chats_without_a_template_continue_the_text(served: Served) -> None:
    said = [{"role": "user", "content": "The quick "}, {"role": "assistant", "content": "brown fox"}]
    reply = served.post("/v1/chat/completions", messages=said, max_tokens=12, temperature=0).json()
    assert reply["choices"][0]["message"]["content"] == served.text("The quick brown fox", max_tokens=12)
    ollama = served.post("/api/chat", messages=said, stream=False, options={"num_predict": 12, "temperature": 0}).json()
    assert ollama["message"] == {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def test_chats_go_through_the_template() -> None:
    said = [{"role": "developer", "content": "be "}, {"role": "user", "content": "hi"}]
    system = [{"role": "system", "content": "be "}, {"role": "user", "content": "hi"}]
    options = {"num_predict": 8, "temperature": 0}
    with serving.serving(template=TEMPLATE) as served:
        expected = served.text("<system>be <user>hi<assistant>", max_tokens=8)
        chat = served.post("/v1/chat/completions", messages=said, max_tokens=8, temperature=0).json()
        assert chat["choices"][0]["message"]["content"] == expected
        assert chat["usage"]["prompt_tokens"] == 30
        assert (
            served.post("/api/chat", messages=system, stream=False, options=options).json()["message"]["content"]
            == expected
        )
        templated = served.post("/api/generate", prompt="hi", system="be ", stream=False, options=options).json()
        assert templated["response"] == expected
        plain = served.post("/api/generate", prompt="hi", raw=True, stream=False, options=options).json()
        assert plain["response"] == served.text("hi", max_tokens=8)
        assert served.post("/api/show").json()["template"] == TEMPLATE


def test_generate_streams_lines_and_goes_on_from_a_context(served: Served) -> None:
    options = {"num_predict": 6, "temperature": 0}
    answer = served.post("/api/generate", prompt=PROMPT, options=options)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == served.text(PROMPT, max_tokens=6)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("length", len(PROMPT), 6)
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"] > 0
    more = served.post("/api/generate", prompt="!", context=last["context"], stream=False, options=options).json()
    assert more["prompt_eval_count"] == len(PROMPT) + 6 + 1
    assert more["response"] == served.text([*last["context"], ord("!") - 32], max_tokens=6)


def test_a_context_is_not_followed_by_the_beginning_of_a_text() -> None:
    options = {"num_predict": 4, "temperature": 0}
    template = "{{ bos_token }}" + TEMPLATE
    with serving.serving(template=template) as served:
        first = served.post("/api/generate", prompt="hi", stream=False, options=options).json()
        assert first["context"].count(BEGIN) == 1
        more = served.post("/api/generate", prompt="so", context=first["context"], stream=False, options=options).json()
        begin = len(first["context"])
        assert more["context"][:begin] == first["context"]
        assert BEGIN not in more["context"][begin : more["prompt_eval_count"]]


def test_a_generate_without_a_prompt_only_loads(served: Served) -> None:
    assert served.post("/api/generate").json()["done_reason"] == "load"
    assert served.post("/api/chat", messages=[]).json()["done_reason"] == "load"
    assert served.post("/api/chat", messages=[], keep_alive=0).json()["done_reason"] == "unload"


def test_models(served: Served) -> None:
    get = served.client.get
    assert [model["id"] for model in get("/v1/models").json()["data"]] == [NAME]
    assert get(f"/v1/models/{NAME}").json()["object"] == "model"
    assert get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    tag = get("/api/tags").json()["models"][0]
    assert tag["name"] == NAME
    assert (len(tag["digest"]), tag["details"]["family"]) == (64, "llama")
    assert get("/api/ps").json()["models"][0]["context_length"] == 512
    assert served.post("/api/show").json()["model_info"]["llama.context_length"] == 512
    assert get("/").status_code == get("/api/version").status_code == 200


def test_many_at_once_are_each_as_alone(served: Served, alone: Any) -> None:
    """More than run at a time, streamed and whole, with shared and with own beginnings: nothing is mixed."""
    prompts = [(PROMPT if i % 2 else "") + f" number {i} " + "xyz"[i % 3] * i for i in range(24)]

    def ask(i: int) -> str:
        if i % 3:
            return served.text(prompts[i], max_tokens=10 + i)
        body = {
            "model": NAME,
            "prompt": prompts[i],
            "stream": True,
            "options": {"num_predict": 10 + i, "temperature": 0},
        }
        with served.client.stream("POST", "/api/generate", json=body) as answer:
            return "".join(json.loads(line)["response"] for line in answer.iter_lines())

    with ThreadPoolExecutor(max_workers=24) as pool:
        answers = list(pool.map(ask, range(24)))
    assert answers == [alone(prompt, max_tokens=10 + i).text for i, prompt in enumerate(prompts)]


def test_metrics_count_what_happened(served: Served) -> None:
    before = served.metrics()
    prompt = "metrics of a prompt of some length, sent twice"
    for _ in range(2):
        served.complete(prompt, max_tokens=5)
    served.client.get("/nowhere")
    eventually(served.is_idle)
    after = served.metrics()
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    assert change["kvcache_requests_total"] == 2
    assert change["kvcache_prompt_tokens_total"] == 2 * len(prompt)
    assert change["kvcache_cached_tokens_total"] >= len(prompt) - 1
    assert change["kvcache_generated_tokens_total"] == change["kvcache_computed_tokens_total"] - 2 * len(prompt) + (
        change["kvcache_cached_tokens_total"] + 2
    )
    assert change["kvcache_prefix_hits_total"] + sum(v for k, v in change.items() if "misses_total" in k) == 2
    assert change["kvcache_time_to_first_token_seconds_count"] == 2
    assert change["kvcache_time_between_tokens_seconds_count"] == 2 * 4
    assert change["kvcache_outputs_total{reason=length}"] == 2
    assert change["kvcache_http_answers_total{status=404}"] == 1
    assert after["kvcache_up"] == 1
    states = [after[f"kvcache_blocks{{member=Full(),state={state}}}"] for state in ("free", "held", "cached")]
    assert states[1] == 0 < states[2]
    for name in ("preemptions_total", "evicted_blocks_total"):
        assert f"kvcache_{name}" in after


# --- clients that go away ---------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_a_stream_frees_its_blocks(served: Served) -> None:
    before = served.metrics()
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": LONG, "n": 4, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        begun = events(answer)
        next(begun)
        assert served.metrics()["kvcache_blocks{member=Full(),state=held}"] > 0
    eventually(served.is_idle)
    after = served.metrics()
    assert after["kvcache_outputs_total{reason=abort}"] == before.get("kvcache_outputs_total{reason=abort}", 0) + 4
    assert after["kvcache_generated_tokens_total"] - before["kvcache_generated_tokens_total"] < 4 * LONG


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_who_does_not_wait_for_a_whole_answer_frees_its_blocks(served: Served, path: str) -> None:
    before = served.metrics()
    options = {"options": {"num_predict": LONG}} if path.startswith("/api") else {"max_tokens": LONG}
    body = json.dumps({"model": NAME, "prompt": PROMPT, "stream": False, **options}).encode()
    with served.connect() as connection:
        connection.sendall(head("POST", path, len(body)) + body)
        eventually(lambda: served.metrics()["kvcache_sequences{state=running}"] == 1)
    eventually(served.is_idle)
    aborted = "kvcache_outputs_total{reason=abort}"
    assert served.metrics()[aborted] == before.get(aborted, 0) + 1


def test_nothing_is_kept_of_requests_that_are_over(served: Served) -> None:
    """Memory that the server's own code has allocated, after many that hung up and after many more."""

    def hang_up() -> None:
        body = {"model": NAME, "prompt": "x", "max_tokens": LONG, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            next(events(answer))

    def allocated() -> int:
        eventually(served.is_idle)
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/kvcache/server/*")])
        return sum(trace.size for trace in ours.traces)

    hang_up()
    tracemalloc.start()
    try:
        before = allocated()
        for _ in range(50):
            hang_up()
        assert allocated() - before < 50 * 100
    finally:
        tracemalloc.stop()


# --- bounds -----------------------------------------------------------------------------------------------------------


def head(method: str, path: str, length: int, **more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {length}"]
    return "\r\n".join([*lines, *(f"{key}: {value}" for key, value in more.items()), "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_prompts_beyond_the_context_are_refused(served: Served) -> None:
    for prompt in ("x" * 512, "x" * 200_000, [5] * 512):
        error = served.post("/v1/completions", prompt=prompt).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "512" in error["message"]
    answer = served.post("/api/chat", messages=[{"role": "user", "content": "x" * 600}])
    assert answer.status_code == 400
    assert "600" in answer.json()["error"]
    assert len(served.text("x" * 500, max_tokens=100)) <= 12  # up to the end of the context


def test_a_cache_smaller_than_the_context_is_told_and_bounds_prompts() -> None:
    with serving.serving(kv_bytes=40_000) as served:
        most = served.client.get("/api/ps").json()["models"][0]["context_length"]
        assert most == served.engine.capacity < 400
        assert served.post("/api/show").json()["model_info"]["llama.context_length"] == 512
        said = [{"role": "user", "content": "x" * 400}]
        for path, body in (("/v1/completions", {"prompt": "x" * 400}), ("/v1/chat/completions", {"messages": said})):
            answer = served.post(path, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", *body)
            assert f"{most} tokens" in error["message"] and "--kv-bytes" in error["message"]
        whole = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "abc"}], ignore_eos=True)
        assert whole.json()["usage"]["total_tokens"] == most


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"n": 5, "use_beam_search": True}, "n"),
        ({"n": 2, "best_of": 6, "use_beam_search": True}, "best_of"),
        ({"n": 3, "prompt": ["x"] * 128}, "prompt"),
    ],
)
def test_more_choices_than_can_be_computed_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/completions", **{"prompt": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    option = "--max-open" if param == "prompt" else "--max-sequences"
    assert option in error["message"] and "cmpl-" not in error["message"]


def test_a_prompt_beyond_what_beams_have_each_is_refused_without_the_engines_name_for_it() -> None:
    with serving.serving(kv_bytes=100_000) as served:
        error = served.post("/v1/completions", prompt="x" * 64, n=4, use_beam_search=True).json()["error"]
        assert served.metrics()["kvcache_outputs_total{reason=refused}"] == 4
        assert error["code"] == "context_length_exceeded"
        assert "divided among 4 beams" in error["message"] and "cmpl-" not in error["message"]


def test_token_ids_outside_the_vocabulary_are_refused(served: Served) -> None:
    answer = served.post("/v1/completions", prompt=[5, 99])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    for prompt in ("x", ""):
        answer = served.post("/api/generate", prompt=prompt, context=[10_000])
        assert (answer.status_code, answer.json()["error"]) == (
            400,
            "context: token id 10000 is not in the vocabulary of 99",
        )


def test_if_one_prompt_of_several_is_refused_none_stays(served: Served) -> None:
    assert served.post("/v1/completions", prompt=["fine", "x" * 600]).status_code == 400
    eventually(served.is_idle)


def test_a_body_too_large_is_told_so() -> None:
    with serving.serving(Settings(port=0, max_body_bytes=2**20)) as served:
        for path in ("/v1/completions", "/api/generate"):
            answer = served.post(path, prompt="x" * 2 * 2**20)
            assert answer.status_code == 413
            assert str(2**20) in answer.text
        chunks = iter([b" " * 2**16] * 40)  # without a content-length
        assert served.client.post("/v1/completions", content=chunks).status_code == 413
        with served.connect() as connection:  # far beyond: cut, not read to the end
            connection.sendall(head("POST", "/v1/completions", 2**28))
            with pytest.raises(ConnectionError):
                connection.sendall(bytes(2**28))
        assert served.text("abc", max_tokens=2)


def test_a_prompt_of_ten_megabytes(served: Served) -> None:
    answer = served.post("/v1/completions", prompt="x" * 10_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_half_a_body_and_silence_end() -> None:
    with serving.serving(Settings(port=0, body_seconds=0.3, idle_seconds=0.6)) as served:
        with served.connect() as connection:
            connection.sendall(head("POST", "/v1/completions", 100) + b'{"model": ')
            answer = read_all(connection)
            assert b"408" in answer.split(b"\r\n")[0]
            assert b"body_timeout" in answer
        with served.connect() as connection:
            connection.sendall(head("POST", "/v1/completions", 100) + b'{"model": ')  # and goes away
        for beginning in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"):
            with served.connect() as connection:
                connection.sendall(beginning)
                assert read_all(connection) == b""  # closed by the server
        assert served.text("abc", max_tokens=2)
        assert served.logged == []


def test_when_too_many_are_under_way_others_are_told_to_wait() -> None:
    with serving.serving(Settings(port=0, max_open=4)) as served:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": LONG, "n": 4, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as stream:
            begun = events(stream)
            next(begun)
            answer = served.post("/v1/completions", prompt="x")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "overloaded"
        eventually(lambda: served.post("/v1/completions", prompt="x").status_code == 200)
        never = served.post("/v1/completions", prompt=["x", "y"], n=3)
        assert (never.status_code, never.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "6 completions are asked for, and at most 4" in never.json()["error"]["message"]


def test_beyond_the_bound_of_connections_the_answer_is_json_of_the_right_wire() -> None:
    with serving.serving(Settings(port=0, max_connections=3)) as served:
        held = [served.connect() for _ in range(3)]
        try:
            eventually(lambda: served.post("/v1/completions", prompt="x").status_code == 503)
            answer = served.post("/v1/completions", prompt="x")
            assert answer.headers["content-type"] == "application/json"
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
            assert answer.json()["error"]["code"] == "overloaded"
            ollama = served.post("/api/generate", prompt="x")
            assert (ollama.status_code, list(ollama.json())) == (503, ["error"])
            assert served.client.get("/health").status_code == 200
            assert served.metrics()["kvcache_http_answers_total{status=503}"] >= 3
        finally:
            for connection in held:
                connection.close()
        eventually(lambda: served.post("/v1/completions", prompt="x").status_code == 200)


def test_time_is_bounded() -> None:
    with serving.serving(Settings(port=0, request_seconds=0.5)) as served:
        answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=450, n=4)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        body = {"model": NAME, "prompt": PROMPT, "options": {"num_predict": 460}}
        lines = [json.loads(line) for line in served.client.post("/api/generate", json=body).text.splitlines()]
        if "error" not in lines[-1]:
            assert lines[-1]["done"]  # a machine fast enough
        stream = served.post("/v1/completions", prompt=PROMPT, max_tokens=450, n=4, stream=True)
        chunks = list(events(stream))
        assert chunks[-1]["error"]["code"] == "timeout"
        assert "0.5 seconds" in chunks[-1]["error"]["message"]
        eventually(served.is_idle)


def test_five_hundred_open_sockets(served: Served) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    sockets = []
    try:
        for i in range(500):
            sockets.append(served.connect())
            if i % 2:
                sockets[-1].sendall(head("POST", "/v1/completions", 1000) + b'{"model"')
        assert served.text("abc", max_tokens=5)
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert served.text("abc", max_tokens=5)


# --- hostile input ----------------------------------------------------------------------------------------------------

MALFORMED = {
    "nothing": b"",
    "half": b'{"model": "tiny", "prompt": "x',
    "list": b"[]",
    "latin 1": '{"model": "tiny", "prompt": "é"}'.encode("latin-1"),
    "zeros": b"\x00" * 1000,
    "lone surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "deep": b"[" * 1_000_000,
    "deep field": b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
    "infinite": b'{"model": "tiny", "prompt": "x", "max_tokens": 1e999}',
    "not a number": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "long integer": b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "negative": b'{"model": "tiny", "prompt": "x", "max_tokens": -1}',
    "unknown field": b'{"model": "tiny", "prompt": "x", "maximum_tokens": 1}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/generate", "/api/chat", "/api/show"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_bodies_get_a_typed_answer(served: Served, path: str, kind: str) -> None:
    answer = served.client.post(path, content=MALFORMED[kind])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert isinstance(message, str)
    assert 5 < len(message) < 500
    if path.startswith("/v1/"):
        assert error["type"] == "invalid_request_error"
        assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 5e-324, "logprobs": 20, "n": 4},
        {"repetition_penalty": 1e-300, "min_p": 1},
        {"repetition_penalty": 0.01, "temperature": 2, "top_p": 0.5},
        {"repetition_penalty": 100, "frequency_penalty": -2, "presence_penalty": -2},
        {"logit_bias": {str(token): -100 for token in range(99)}},
        {"use_beam_search": True, "n": 4, "length_penalty": -10, "repetition_penalty": 0.01, "early_stopping": "never"},
    ],
    ids=str,
)
def test_extreme_numbers_end_nothing_but_their_own_request(served: Served, fields: dict[str, Any]) -> None:
    answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=8, **fields)
    assert answer.status_code in (200, 400), answer.text
    assert served.text("abc", max_tokens=2)


def test_unknown_paths_methods_and_models(served: Served) -> None:
    unknown = served.client.post("/v1/embeddings", json={}).json()["error"]
    assert unknown["code"] == "not_found"
    assert unknown["message"].startswith("there is no endpoint POST /v1/embeddings; GET /openapi.json lists")
    assert "no endpoint GET /api/nope" in served.client.get("/api/nope").json()["error"]
    wrong = served.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"].endswith("no endpoint GET /v1/completions; this path takes POST")
    assert served.client.delete("/api/chat").status_code == 405
    assert served.client.post("/v1/completions", json={"model": "gpt", "prompt": "x"}).status_code == 404
    assert "not found" in served.client.post("/api/chat", json={"model": "gpt", "messages": []}).json()["error"]
    assert served.client.post("/api/show", json={"model": f"{NAME}:latest"}).status_code == 200


def test_the_description_is_of_everything_that_is_served(served: Served) -> None:
    description = served.client.get("/openapi.json").json()
    paths, bodies = description["paths"], description["components"]["schemas"]
    assert {"/", "/health", "/metrics", "/openapi.json", "/v1/completions", "/api/chat"} < paths.keys()
    assert len(paths) == len(served.server.app.routes)
    assert all({"405", "500"} < each["responses"].keys() for path in paths.values() for each in path.values())
    assert bodies["CompletionBody"]["properties"]["model"]["enum"] == [NAME, f"{NAME}:latest"]
    assert [bodies["CompletionBody"]["properties"][name]["anyOf"][0]["maximum"] for name in ("n", "best_of")] == [4, 4]
    biases = bodies["CompletionBody"]["properties"]["logit_bias"]["anyOf"][0]
    assert biases["patternProperties"].keys() == {"^(0|[1-9][0-9]{0,8})$"}
    assert biases["additionalProperties"] is False
    for path in ("/", "/health", "/metrics", "/openapi.json"):
        call = schemathesis.openapi.from_dict(description)[path]["GET"].Case()
        call.call_and_validate(
            base_url=served.server.url, checks=[status_code_conformance, response_schema_conformance], timeout=20
        )


def test_broken_http_does_not_hurt(served: Served) -> None:
    for raw in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"A" * 200_000):
        with served.connect() as connection:
            try:
                connection.sendall(raw + b"\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                answer = read_all(connection)
            except OSError as error:
                if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                    raise
                continue  # the server was faster than we were: it had closed the connection already
            assert answer == b"" or answer.split(b" ")[1] in (b"400", b"405")
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/generate", "/api/chat", "/api/show"])
def test_schemathesis(served: Served, path: str, mode: GenerationMode) -> None:
    """Bodies that fit the description, and bodies that do not: never a 5xx, and every answer as described."""
    description = schemathesis.openapi.from_url(f"{served.server.url}/openapi.json")

    @hypothesis_settings(max_examples=25)
    @given(case=description[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance], timeout=20
        )
        if mode is GenerationMode.NEGATIVE:
            assert answer.status_code in (400, 404)

    ask()


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for() -> None:
    with serving.serving(Settings(port=0, api_key="secret")) as served:
        get = served.client.get
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer secret2"},
        ):
            answer = get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert served.client.post("/api/chat", json={}).status_code == 401
        assert get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert get("/metrics").status_code == 401
        assert get("/health").status_code == 200
        # with a key any name will do: whoever has it may ask
        assert get("/health", headers={"host": "example.org"}).status_code == 200


def test_pages_that_call_this_machine_by_another_name_are_refused(served: Served) -> None:
    for host, status in [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("10.0.0.1", 403),
    ]:
        assert served.client.get("/health", headers={"host": host}).status_code == status


def test_pages_of_other_sites_have_nothing_computed(served: Served) -> None:
    """As a simple request, which a browser sends to any address without asking first."""
    for origin, status in [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://[::1]:80", 200),
        ("http://evil.example", 403),
        ("http://localhost.evil.example:8000", 403),
        ("null", 403),
    ]:
        body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 1})
        headers = {"origin": origin, "content-type": "text/plain"}
        answer = served.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status, origin
        assert status == 200 or answer.json()["error"]["code"] == "forbidden_origin"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_others_are_not_let_in_without_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        Settings(host=host)
    assert Settings(host=host, api_key="k").host == host
    assert Settings(host=host, insecure=True).host == host


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_open": 0},
        {"request_seconds": 0},
        {"grace_seconds": -1},
        {"grace_seconds": float("inf")},
        {"idle_seconds": float("inf")},
        {"api_key": ""},
        {"api_key": " key"},
        {"api_key": "key\n"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Settings(**wrong)


def test_an_address_that_is_taken_is_told(served: Served) -> None:
    with serving.engine() as engine, pytest.raises(ValueError, match="choose another"):
        Server(engine, Settings(port=served.server.address[1]))


# --- the end ----------------------------------------------------------------------------------------------------------


def stopped_while_streaming(served: Served, num_tokens: int) -> list[Any]:
    """The events of a stream during which the server was told to stop."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        stream = events(answer)
        found = [next(stream)]
        stopping = threading.Thread(target=served.server.stop)
        stopping.start()
        found += stream
    stopping.join(timeout=30)
    assert not stopping.is_alive()
    return found


def test_stopping_lets_what_runs_finish_and_accepts_nothing_new() -> None:
    with serving.serving(Settings(port=0, grace_seconds=30)) as served:
        expected = served.text(PROMPT, max_tokens=200)
        found = stopped_while_streaming(served, 200)
        assert found[-1] == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == expected
        with pytest.raises(httpx.TransportError):
            served.client.get("/health")
        served.engine.check()
        assert served.engine.is_idle


def test_stopping_without_grace_tells_those_who_wait() -> None:
    with serving.serving(Settings(port=0, grace_seconds=0)) as served:
        found = stopped_while_streaming(served, 450)
        assert found[-1]["error"]["code"] == "stopping"
        served.engine.check()
        assert not served.engine.usage().sequences


def test_a_broken_cache_found_when_idle_stops_the_service() -> None:
    """A block that somebody took and nobody owns, as a bug would leave it."""
    with serving.serving() as served:
        served.text(PROMPT, max_tokens=3)
        served.engine._core.members[0].tables.pool.allocate(1)
        eventually(lambda: served.post("/v1/completions", prompt="x").status_code == 503)
        health = served.client.get("/health").json()
        assert health["status"] == "engine_failed"
        assert "CorruptState" in health["report"]
        answer = served.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert served.post("/api/generate", prompt="x").status_code == 503
        assert served.metrics()["kvcache_up"] == 0
        assert len(served.logged) == 1
        assert "Traceback" in served.logged[0]


class Failing:
    """An engine that accepts everything, and fails at the first thing that it is to do."""

    def add(self, request: Request) -> str:
        return request.id

    def check(self) -> None:
        pass

    def fail(self) -> Any:
        raise RuntimeError("out of memory, say")

    step = metrics = fail


def test_everybody_is_told_of_a_failure_even_where_the_operator_cannot_be() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError("stderr is gone")

    async def ask(work: Callable[[EngineThread], Awaitable[Any]]) -> None:
        thread = EngineThread(Failing(), Instruments(), max_open=4, log=broken)  # type: ignore[arg-type]
        thread.start()
        with pytest.raises(Unavailable, match="out of memory, say"):
            await asyncio.wait_for(work(thread), 20)
        with pytest.raises(Unavailable, match="out of memory, say"):  # whoever comes later
            await asyncio.wait_for(thread.metrics(), 20)
        thread.stop()
        with pytest.raises(Unavailable, match="has stopped"):
            await asyncio.wait_for(thread.metrics(), 20)

    async def first_event(thread: EngineThread) -> None:
        gone = asyncio.new_event_loop()
        gone.close()
        thread._inbox.put(_Add(Ticket([Request("other", [1])], gone)))  # a loop that closed meanwhile
        with thread.opened([Request("it", [1])]) as ticket:
            await anext(ticket)

    asyncio.run(ask(first_event))
    asyncio.run(ask(lambda thread: thread.metrics()))


def test_an_addition_that_fails_beyond_refusal_is_told_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving.serving() as served:

        def broken(*_: object) -> Any:
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(served.engine._core.scheduler, "add", broken)
        answer = served.post("/v1/completions", prompt=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


def test_a_step_that_raises_fails_everybody_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving.serving() as served:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": LONG, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            stream = events(answer)
            next(stream)

            def broken(*_: object) -> Any:
                raise RuntimeError("out of memory, say")

            monkeypatch.setattr(served.engine._core.runner, "forward", broken)
            last = list(stream)[-1]
        assert last["error"]["code"] == "engine_failed"
        assert "out of memory, say" in last["error"]["message"]
        assert served.client.get("/health").status_code == 503
