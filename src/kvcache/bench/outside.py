"""Contenders that cannot live in our environment: each in its own, as a process that is visited through a pipe.

It is stopped (SIGSTOP) while nobody asks it, and all that it has started with it: vLLM's waits in a loop that takes a
quarter of a core, which the others would be measured beside.

| peer      | environment            | process           | what it runs                                         |
|-----------|------------------------|-------------------|------------------------------------------------------|
| vLLM      | benchmarks/.venv-vllm  | `vllm_worker.py`  | `cpu_attention_with_kv_cache`, and its cache's write |
| llama.cpp | benchmarks/.venv-llama | `llama_worker.py` | `ggml_flash_attn_ext`, in f16 and quantised          |

Both run whole models, too, for `serving.py`.

`benchmarks/peers.sh` makes the environments. They are looked for from the working directory, or where
`KVCACHE_VLLM_PYTHON` and `KVCACHE_LLAMA_PYTHON` point. Who cannot be had raises `RuntimeError` with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, final

from kvcache.bench.paged import Case, Heads
from kvcache.bench.timing import Visit

__all__ = ["LLAMA", "VLLM", "VLLM_BLOCK", "Llama", "Pipe", "Vllm", "find_python"]

VLLM, LLAMA = "vLLM", "llama.cpp"
VLLM_BLOCK = 128
"""Block size of vLLM's operator: the one that the project is compared at."""
TOLERANCE = 1e-2
"""Largest difference of a peer's result to the definition's; checked before it is measured."""


def find_python(peer: str) -> Path | None:
    """The python of the environment of `vllm` or `llama`, if there is one."""
    named = os.environ.get(f"KVCACHE_{peer.upper()}_PYTHON")
    path = Path(named) if named else Path(f"benchmarks/.venv-{peer}/bin/python")
    return path.absolute() if path.exists() else None


@final
class Pipe:
    """A running worker of `vllm` or `llama`, and its answers."""

    def __init__(self, peer: str, num_threads: int, stack: ExitStack) -> None:
        python = find_python(peer)
        if python is None:
            raise RuntimeError(
                f"it has no environment here; make it with `benchmarks/peers.sh {peer}`, or point "
                f"KVCACHE_{peer.upper()}_PYTHON at the python of one"
            )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  the stack closes it
        stack.callback(self._errors.close)
        self._process = subprocess.Popen(
            [str(python), "-P", *(str(Path(__file__).with_name(f)) for f in ("worker.py", f"{peer}_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Its packages are its own, not ours by PYTHONPATH; threads as many as ours.
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(num_threads)},
            process_group=0,  # of its own, to which signals go; the terminal's Ctrl-C does not, see `ask`
        )
        stack.callback(self._process.communicate)  # its input ends, and so does it
        stack.callback(self._signal, signal.SIGCONT)
        self.hello = self.ask(do="hello")

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            with suppress(BrokenPipeError):  # it is gone, and there will be no answer
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except KeyboardInterrupt:
            self._signal(signal.SIGINT)
            raise
        if not line:
            raise RuntimeError(f"its process ended: {self._last_words()}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"it refuses {request['do']!r}: {answer['error']}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """To the process and those that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def visit(self, name: str, num_calls: int) -> list[float]:
        seconds: list[float] = self.ask(do="visit", name=name, calls=num_calls)["seconds"]
        return seconds

    def check(self, **request: Any) -> None:
        difference = self.ask(do="check", **request)["difference"]
        if not difference < TOLERANCE:
            raise RuntimeError(
                f"its result differs by {difference} from the definition's; expected {TOLERANCE} at most"
            )

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.wait()}"


@final
class Vllm:
    """vLLM's operators over a pool of its own, in bf16. The process ends with `stack`."""

    def __init__(self, heads: Heads, num_slots: int, *, num_threads: int, stack: ExitStack) -> None:
        self._pipe = Pipe("vllm", num_threads, stack)
        self._pipe.ask(do="pool", num_slots=num_slots, heads=heads, block_size=VLLM_BLOCK, seed=0)
        self._pipe.check(sequences=1, tokens=VLLM_BLOCK)
        hello = self._pipe.hello
        self.label = f"{hello['version']} ({hello['isa']}, {hello['threads']} threads), blocks of {VLLM_BLOCK}"

    def attention(self, case: Case, copies: int) -> Visit:
        """The visit of a case."""
        name = f"{case} {copies}"
        sizes = {"sequences": case.num_sequences, "tokens": case.num_tokens, "queries": case.num_queries}
        self._pipe.ask(do="attention", name=name, copies=copies, window=case.window, **sizes)
        return partial(self._pipe.visit, name)

    def put(self, *, num_sequences: int, num_layers: int) -> Visit:
        """The visit of writing one token of each sequence, each call elsewhere in the pool."""
        self._pipe.ask(do="put", name="put", sequences=num_sequences, layers=num_layers)
        return partial(self._pipe.visit, "put")


@final
class Llama:
    """llama.cpp's attention over caches of its own. The process ends with `stack`."""

    def __init__(self, heads: Heads, *, num_threads: int, stack: ExitStack) -> None:
        self._pipe, self._heads = Pipe("llama", num_threads, stack), heads
        self._pipe.check(heads=heads, tokens=64, queries=1)
        hello = self._pipe.hello
        self.label = f"llama-cpp-python {hello['version']} ({hello['threads']} threads), f16, queries f32"

    def attention(self, case: Case, copies: int, form: str = "f16") -> Visit:
        """The visit of a case without a window. Its memory is taken until `drop`."""
        name = f"{case} {form}"
        sizes = {"sequences": case.num_sequences, "tokens": case.num_tokens, "queries": case.num_queries}
        self._pipe.ask(do="attention", name=name, format=form, heads=self._heads, copies=copies, **sizes)
        return partial(self._pipe.visit, name)

    def drop(self, case: Case, form: str = "f16") -> None:
        """Frees what a case took."""
        self._pipe.ask(do="drop", name=f"{case} {form}")
