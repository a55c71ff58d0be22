"""A tiny engine behind a real server on loopback, for the tests of the server and of its clients."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import transformers as tf
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from families import FAMILIES
from kvcache.engine import Engine
from kvcache.server import Server, Settings

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = None) -> Any:
    """Single characters of ASCII: id = code - 32. The ids 95 to 98 of the models have no text. Texts begin with ^."""
    made = Tokenizer(models.BPE({chr(c): c - 32 for c in range(32, 127)}, [], unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, bos_token="^")


def engine(family: str = "llama", template: str | None = None, **options: Any) -> Engine:
    """An engine with a context of 512 tokens and room for four sequences that long."""
    sizes: dict[str, Any] = {"kv_bytes": "2MiB", "dtype": "f32", "max_sequences": 4, "max_batch_tokens": 64}
    return Engine(FAMILIES[family].build(), tokenizer=tokenizer(template), **{**sizes, **options})


@contextmanager
def serving(
    settings: Settings | None = None, *, family: str = "llama", template: str | None = None, **options: Any
) -> Iterator[Served]:
    """A server with an engine of its own; both are stopped at the end, and the engine must hold nothing then."""
    with engine(family, template, **options) as own:
        logged: list[str] = []
        with Server(own, settings, name=NAME, log=logged.append) as server, httpx.Client(base_url=server.url) as client:
            yield Served(server, own, client, logged)


class Served:
    """A server under test. engine: not to be touched while it serves. logged: what it told its operator."""

    def __init__(self, server: Server, engine: Engine, client: httpx.Client, logged: list[str]) -> None:
        self.server = server
        self.engine = engine
        self.client = client
        self.logged = logged

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": NAME, **body})

    def complete(self, prompt: Any, **body: Any) -> Any:
        answer = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt: Any, **body: Any) -> str:
        return str(self.complete(prompt, **body)["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        return metrics(self.client)

    def is_idle(self) -> bool:
        return is_idle(self.client)

    def connect(self) -> socket.socket:
        """A bare connection, for what no client sends."""
        made = socket.create_connection(self.server.address)
        made.settimeout(20)
        return made


def metrics(client: httpx.Client) -> dict[str, float]:
    """Samples by name, and by name{label=value,...}."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def is_idle(client: httpx.Client) -> bool:
    """Whether nothing runs, waits, or holds a block."""
    now = metrics(client)
    held = sum(value for name, value in now.items() if name.startswith("kvcache_blocks") and "held" in name)
    busy = ("kvcache_sequences{state=running}", "kvcache_sequences{state=waiting}", "kvcache_open_outputs")
    return held == 0 and not any(now[name] for name in busy)


@contextmanager
def command(*arguments: str, seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvcache serve ARGUMENTS` on a free port, and its URL; it is killed at the end, or after so many seconds."""
    words = [sys.executable, "-m", "kvcache", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"kvcache serves \w+ at (http://127\.0\.0\.1:\d+) ", line)
            assert found, line
            yield process, found[1]
        finally:
            watchdog.cancel()
            process.kill()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Ask until it holds; each question is a request, which takes its time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never held"


def events(answer: httpx.Response) -> Iterator[Any]:
    """The objects of a stream of server-sent events; the last of a complete one is "[DONE]"."""
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
