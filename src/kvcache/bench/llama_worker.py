"""llama.cpp's attention, on the other end of a pipe: run by the python of llama-cpp-python's own environment.

Not a module of kvcache and imports nothing of it: `outside.py` starts it there under `worker.py`, writes one request a
line (JSON) to its standard input and reads one answer a line. llama-cpp-python brings ggml's libraries along; a graph
of one node, `ggml_flash_attn_ext`, is what llama.cpp computes in each layer, over a cache laid out as its own: [S,H,D]
of each sequence, f16 or quantised, queries in f32. The graph is planned before and that is not timed. `load` and
`complete` run whole requests from a .gguf file, with the weights as they are stored there and one request after the
other, which is what the Python package does; the prefix that a prompt has in common with the one before is kept.

    {"do": "hello"}                                                             {"version": "0.3.36", "threads": 2}
    {"do": "attention", "name": "a", "format": "f16", "sequences": 8, ...}      {"ok": true}
    {"do": "visit", "name": "a", "calls": 3}                                    {"seconds": [...]}
    {"do": "drop", "name": "a"}                                                 {"ok": true}
    {"do": "load", "file": "/tmp/model.gguf", "num_tokens": 4608, ...}          {"seconds": 0.8}
    {"do": "complete", "prompts": [[1, 2], [1, 3]], "num_out": 64}              {"seconds": 7.1}
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""`enum ggml_type`."""
ROW_BYTES = {"f32": 4.0, "f16": 2.0, "q4_0": 18 / 32, "q8_0": 34 / 32}
OVERHEAD = 4 * 2**20
"""Bytes of a context beside its tensors' values: their descriptions and the graph."""


class InitParams(Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(Structure):
    """`struct ggml_cplan`, with room for fields of later versions."""

    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("rest", c_void_p * 16),
    ]


class Library:
    """The few functions of ggml that this takes."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ImportError("No module named 'llama_cpp'")
        folder = Path(spec.origin).parent / "lib"
        base = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(next(folder.glob("libggml-cpu.*"))))
        pointer, floats = c_void_p, (c_float, c_float, c_float)
        self.init = typed(base.ggml_init, pointer, InitParams)
        self.free = typed(base.ggml_free, None, pointer)
        self.tensor = typed(base.ggml_new_tensor_4d, pointer, pointer, c_int, c_int64, c_int64, c_int64, c_int64)
        self.permute = typed(base.ggml_permute, pointer, pointer, pointer, c_int, c_int, c_int, c_int)
        self.data = typed(base.ggml_get_data, pointer, pointer)
        self.attention = typed(base.ggml_flash_attn_ext, pointer, *[pointer] * 5, *floats)
        self.graph = typed(base.ggml_new_graph, pointer, pointer)
        self.expand = typed(base.ggml_build_forward_expand, None, pointer, pointer)
        self.quantize = typed(
            base.ggml_quantize_chunk, c_size_t, c_int, pointer, pointer, c_int64, c_int64, c_int64, pointer
        )
        self.plan = typed(cpu.ggml_graph_plan, Plan, pointer, c_int, pointer)
        self.compute = typed(cpu.ggml_graph_compute, c_int, pointer, POINTER(Plan))
        typed(cpu.ggml_cpu_init, None)()


def typed(function: Any, result: Any, *arguments: Any) -> Any:
    """The C function with its types, which ctypes does not know."""
    function.restype, function.argtypes = result, arguments
    return function


class Graph(NamedTuple):
    """One call's worth: the graph, its plan, the work space that the plan points to, and the tensors."""

    graph: int
    plan: Plan
    work: Any
    tensors: dict[str, int]


class Worker:
    """Answers requests; keeps the cases that were set up."""

    def __init__(self) -> None:
        self.ggml = Library()
        self.threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        self.calls: dict[str, Callable[[], object]] = {}
        self.contexts: dict[str, int] = {}

    def hello(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"version": version("llama-cpp-python"), "threads": self.threads}

    def attention(self, name: str, **case: Any) -> dict[str, Any]:
        """Sets up a case; its calls take turns over `copies` caches."""
        context, graphs = self.prepare(**case)
        turn = cycle(graphs)

        def call() -> None:
            made = next(turn)
            self.ggml.compute(made.graph, byref(made.plan))

        self.calls[name], self.contexts[name] = call, context
        return {"ok": True}

    def prepare(
        self, format: str, heads: list[int], sequences: int, tokens: int, queries: int, copies: int
    ) -> tuple[int, list[Graph]]:
        """A context with `copies` graphs over caches of their own."""
        import numpy as np

        ggml, (query_heads, num_heads, dim) = self.ggml, heads
        rng = np.random.default_rng(0)
        rows = sequences * tokens * num_heads
        size = int(2 * copies * rows * dim * ROW_BYTES[format])
        size += copies * (3 * sequences * queries * query_heads * dim * 4 + 2 * tokens * (queries + 64))
        context = ggml.init(InitParams(size + OVERHEAD, None, False))
        if not context:
            raise MemoryError(f"ggml gives no context of {size} bytes")
        graphs = []
        for _ in range(copies):
            kv = [ggml.tensor(context, TYPES[format], dim, num_heads, tokens, sequences) for _ in range(2)]
            for tensor in kv:
                self.fill(tensor, format, rows, dim, rng)
            query = ggml.tensor(context, TYPES["f32"], dim, query_heads, queries, sequences)
            self.fill(query, "f32", sequences * queries * query_heads, dim, rng)
            mask = self.mask(context, tokens, queries) if queries > 1 else None
            parts = [ggml.permute(context, tensor, 0, 2, 1, 3) for tensor in (query, *kv)]
            out = ggml.attention(context, *parts, mask, dim**-0.5, 0.0, 0.0)
            graph = ggml.graph(context)
            ggml.expand(graph, out)
            plan = ggml.plan(graph, self.threads, None)
            work = (ctypes.c_uint8 * (plan.work_size + 64))()
            plan.work_data = ctypes.addressof(work)
            graphs.append(Graph(graph, plan, work, {"query": query, "keys": kv[0], "values": kv[1], "out": out}))
        return context, graphs

    def fill(self, tensor: int, format: str, rows: int, dim: int, rng: Any) -> None:
        """Random rows, in pieces."""
        import numpy as np

        target, width = self.ggml.data(tensor), int(dim * ROW_BYTES[format])
        for begin in range(0, rows, 2**16):
            count = min(2**16, rows - begin)
            piece = rng.standard_normal((count, dim), np.float32)
            if format in ("f32", "f16"):
                piece = piece.astype({"f32": np.float32, "f16": np.float16}[format])
                ctypes.memmove(target + begin * width, piece.ctypes.data, piece.nbytes)
            else:
                self.ggml.quantize(TYPES[format], piece.ctypes.data, target + begin * width, 0, count, dim, None)

    def mask(self, context: int, tokens: int, queries: int) -> int:
        """Causal, f16, in as many rows as some versions want: a multiple of 64."""
        import numpy as np

        rows = -(-queries // 64) * 64
        tensor: int = self.ggml.tensor(context, TYPES["f16"], tokens, rows, 1, 1)
        seen = np.arange(tokens)[None] <= np.arange(tokens - queries, tokens - queries + rows)[:, None]
        values = np.where(seen, np.float16(0), np.float16(-np.inf))
        ctypes.memmove(self.ggml.data(tensor), values.ctypes.data, values.nbytes)
        return tensor

    def check(self, heads: list[int], tokens: int, queries: int) -> dict[str, Any]:
        """Largest difference to attention in f64 over the same rows: that it is called as it should be."""
        import numpy as np

        query_heads, num_heads, dim = heads
        context, (made,) = self.prepare("f16", heads, 1, tokens, queries, 1)
        self.ggml.compute(made.graph, byref(made.plan))

        def read(name: str, kind: Any, *shape: int) -> Any:
            raw = ctypes.string_at(self.ggml.data(made.tensors[name]), np.dtype(kind).itemsize * int(np.prod(shape)))
            return np.frombuffer(raw, kind).reshape(shape).astype(np.float64)

        q, out = (read(name, np.float32, queries, query_heads, dim) for name in ("query", "out"))
        k, v = (read(name, np.float16, tokens, num_heads, dim) for name in ("keys", "values"))
        k, v = (np.repeat(part, query_heads // num_heads, axis=1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
        seen = np.arange(tokens)[None] <= np.arange(tokens - queries, tokens)[:, None]
        weights = np.exp(scores) * seen
        expected = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
        self.ggml.free(context)
        return {"difference": float(np.abs(expected - out).max())}

    def drop(self, name: str) -> dict[str, Any]:
        """Frees a case."""
        del self.calls[name]
        self.ggml.free(self.contexts.pop(name))
        return {"ok": True}

    def visit(self, name: str, calls: int) -> dict[str, Any]:
        seconds, call = [], self.calls[name]
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    # --- whole models ---

    def load(self, file: str, num_tokens: int, max_batch: int) -> dict[str, Any]:
        """Opens the file."""
        began = time.perf_counter()
        self.llm = importlib.import_module("llama_cpp").Llama(
            file,
            n_ctx=num_tokens,
            n_batch=max_batch,
            n_ubatch=max_batch,
            n_threads=self.threads,
            n_threads_batch=self.threads,
            verbose=False,
        )
        return {"seconds": time.perf_counter() - began}

    def complete(self, prompts: list[list[int]], num_out: int) -> dict[str, Any]:
        """One prompt after the other, greedily, to exactly `num_out` tokens each."""
        began = time.perf_counter()
        for prompt in prompts:
            for count, _ in enumerate(self.llm.generate(prompt, temp=0.0, repeat_penalty=1.0), 1):
                if count == num_out:
                    break
        return {"seconds": time.perf_counter() - began}
