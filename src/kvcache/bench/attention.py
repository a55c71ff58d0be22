"""Attention over paged keys and values: how near to the speed of memory, and beside whom.

    limits      what the machine can do: bytes read and products of bf16 and of f32 per second
    decode      one query per sequence: bytes per second, which is all that counts
    formats     the same tokens in fewer bytes, and what that costs in precision
    prefill     many queries: products per second
    blocks      what small blocks cost
    contexts    one sequence, longer and longer; batches: more and more sequences; windows: a fixed number of tokens

Everything goes through `Kernel.attend`, as the engine's layers do; plans are made before, as a pass makes them once for
all its layers, and vLLM's likewise. Bytes are those that must move: visible rows, queries and results, each once.
Shares of the stream limit compare with the stream that took its turn among the same contenders.

On a GPU it is the same tables: our kernel is the one in Triton, the stream is a copy within the GPU's memory, and a
format's error is what checks the results. A copy reads and writes: decode, which only reads, may pass it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache import backends, formats, kernels
from kvcache.bench.contest import ALL_PEERS, GPU_SIZES, OURS, OURS_LARGE, STREAM, Contest, Sizes
from kvcache.bench.machine import check_device
from kvcache.bench.outside import LLAMA, VLLM
from kvcache.bench.paged import Case, Paged, make_batch, more_than_caches, paged_visit, row_bytes
from kvcache.bench.table import Cell, Table
from kvcache.bench.timing import Visit, alternate, timed
from kvcache.formats import Stored
from kvcache.kernels.reference import ReferenceKernel

__all__ = ["ALL_PEERS", "OURS", "STREAM", "Sizes", "tables"]


def tables(sizes: Sizes | None = None, peers: Sequence[str] = ALL_PEERS, device: str = "cpu") -> Iterator[Table]:
    """All of the above, as they are done.

    peers: who is measured beside us; who cannot be had here is absent with a note.
    device: "cpu", or a GPU as PyTorch names it, "cuda" or "cuda:1". Takes two minutes and a half, of which compiling
    flex_attention is half of one, and 3 GB; on a GPU 5 GB, and twice that for repeated heads. Raises `ValueError` for a
    peer of no known name and for other devices.
    """
    unknown = [name for name in peers if name not in ALL_PEERS]
    if unknown:
        raise ValueError(f"peers are {unknown}; expected some of {', '.join(ALL_PEERS)}")
    check_device(device)
    return _tables(sizes or (Sizes() if device == "cpu" else GPU_SIZES), peers, torch.device(device))


@torch.no_grad()
def _tables(sizes: Sizes, peers: Sequence[str], device: torch.device) -> Iterator[Table]:
    with ExitStack() as stack:
        run = Contest(sizes, peers, stack, device)
        for measure in (_limits, _decode, _formats, _prefill, _block_sizes, _contexts, _batches, _windows):
            yield measure(run)


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = ("contender", "moved MB", "ms", "GB/s", "of stream", "GFLOP/s", "kvcache is × as fast")


def _rows(
    run: Contest, label: str, case: Case, times: Mapping[str, float], names: Sequence[str]
) -> list[tuple[Cell, ...]]:
    """A row for us, for each of `names`, absent peers included, and for the stream."""
    moved, flops = run.num_bytes(case), case.flops(run.sizes.heads)
    stream = run.stream.bandwidth(times[STREAM])
    rows: list[tuple[Cell, ...]] = []
    for name in (OURS, *(n for n in names if n in run.peers or n == OURS_LARGE)):
        seconds = times.get(name)
        if seconds is None:
            rows.append((label, name, *[None] * (len(COLUMNS) - 1)))
            continue
        speed = moved / seconds
        ratio = None if name == OURS else seconds / times[OURS]
        rows.append(
            (label, name, moved / 1e6, seconds * 1e3, speed / 1e9, speed / stream, flops / seconds / 1e9, ratio)
        )
    moved = run.stream.num_bytes
    return [*rows, (label, STREAM, moved / 1e6, times[STREAM] * 1e3, stream / 1e9, 1.0, None, None)]


def _limits(run: Contest) -> Table:
    side, is_cpu = run.sizes.matmul, run.device.type == "cpu"
    visits: dict[str, Visit] = {STREAM: run.stream.visit}
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        pair = (
            torch.randn(side, side, generator=torch.Generator().manual_seed(i)).to(run.device, dtype) for i in (0, 1)
        )
        # As a linear layer multiplies: where there are no products of bf16, PyTorch's others reach 1 GFLOP/s.
        visits[name] = timed(partial(torch.nn.functional.linear, *pair), run.device)
    times = alternate(visits, run.sizes.effort)
    bandwidth = run.stream.bandwidth(times.pop(STREAM))
    return Table(
        f"Limits of this {'machine, as PyTorch reaches them with all its threads' if is_cpu else 'GPU'}",
        ("limit", "GB/s", "GFLOP/s", "how"),
        [
            ("memory", bandwidth / 1e9, None, f"{run.stream.reader} over {run.stream.num_bytes / 1e6:.0f} MB"),
            *(
                (f"products of {name}", None, 2 * side**3 / seconds / 1e9, f"matrices of {side} x {side}")
                for name, seconds in times.items()
            ),
        ],
        (f"{OURS}: the {run.kernel.name} kernel",),
    )


def _decode(run: Contest) -> Table:
    rows: list[tuple[Cell, ...]] = []
    names = (OURS_LARGE, *ALL_PEERS)
    for case in run.sizes.decode:
        label = f"{case.num_sequences} x {case.num_tokens}" + (" again" if case.is_resident else "")
        rows += _rows(run, label, case, run.against(case, names), names)
    heads, is_resident = run.sizes.heads, any(case.is_resident for case in run.sizes.decode)
    again = ['"again": the same tokens each time, which stay in the cache as far as they fit'] if is_resident else []
    return Table(
        f"Decode, bf16, {heads.num_query_heads} query and {heads.num_heads} KV heads of {heads.head_dim}, blocks of "
        f"{run.sizes.block_size} and of {run.sizes.large_block}",
        ("sequences x tokens", *COLUMNS),
        rows,
        (*again, *run.notes(ALL_PEERS)),
    )


def _prefill(run: Contest) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for case in run.sizes.prefill:
        label = f"{case.num_queries} of {case.num_tokens}"
        rows += _rows(run, label, case, run.against(case, ALL_PEERS), ALL_PEERS)
    notes = ("GFLOP/s counts the pairs that causality lets be seen, and no others", *run.notes(ALL_PEERS))
    return Table("Prefill, bf16: the last queries of a prompt", ("queries of tokens", *COLUMNS), rows, notes)


def _block_sizes(run: Contest) -> Table:
    sizes, case = run.sizes.block_sizes, run.sizes.block_case
    visits = {str(size): run.ours(case, size) for size in sizes}
    times = alternate(visits | {STREAM: run.stream.visit}, run.sizes.effort)
    stream, largest = run.stream.bandwidth(times[STREAM]), times[str(max(sizes))]
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        seconds = times[str(size)]
        speed = run.num_bytes(case) / seconds
        rows.append((size, seconds * 1e3, speed / 1e9, speed / stream, seconds / largest))
    columns = ("block size", "ms", "GB/s", "of stream", f"time to that of {max(sizes)}")
    return Table(f"Block sizes, decode {case.num_sequences} x {case.num_tokens}, bf16", columns, rows)


SCALING = ("contender", "moved MB", "ms", "GB/s", "of stream", "ns per token")


def _scaling(run: Contest, title: str, first: str, cases: Mapping[int, Case]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for label, case in cases.items():
        times = run.against(case, (VLLM,))
        stream, moved = run.stream.bandwidth(times[STREAM]), run.num_bytes(case)
        for name, seconds in times.items():
            if name != STREAM:
                speed, each = moved / seconds, seconds / case.num_read
                rows.append((label, name, moved / 1e6, seconds * 1e3, speed / 1e9, speed / stream, each * 1e9))
    return Table(title, (first, *SCALING), rows, run.notes((VLLM,)))


def _contexts(run: Contest) -> Table:
    cases = {tokens: Case(1, tokens) for tokens in run.sizes.contexts}
    return _scaling(run, "Scaling with context: one sequence, bf16", "tokens", cases)


def _batches(run: Contest) -> Table:
    tokens = run.sizes.batch_tokens
    cases = {count: Case(count, tokens) for count in run.sizes.batches}
    return _scaling(run, f"Scaling with batch: sequences of {tokens} tokens, bf16", "sequences", cases)


def _windows(run: Contest) -> Table:
    window, lengths = run.sizes.window, run.sizes.window_tokens
    cases = {tokens: Case(1, tokens, window=window, is_resident=True) for tokens in lengths}
    visits = {str(tokens): run.ours(case) for tokens, case in cases.items()}
    if run.vllm:
        visits |= {f"{VLLM} {tokens}": run.vllm.attention(case, 1) for tokens, case in cases.items()}
    times = alternate(visits, run.sizes.effort)
    rows: list[tuple[Cell, ...]] = []
    for name in (OURS, *((VLLM,) if run.vllm else ())):
        keys = [f"{tokens}" if name == OURS else f"{VLLM} {tokens}" for tokens in lengths]
        rows += [
            (tokens, name, times[key] * 1e6, times[key] / times[keys[0]])
            for tokens, key in zip(lengths, keys, strict=True)
        ]
    columns = ("tokens", "contender", "µs", f"time to that at {lengths[0]}")
    return Table(f"A sliding window of {window}, decode, one sequence, bf16", columns, rows, run.notes((VLLM,)))


# --- formats ----------------------------------------------------------------------------------------------------------

ERRORS = (
    "errors: of the first sequence's results, against float64 attention over the keys and values before they were "
    "encoded; relative: norm of the difference by norm of the result. Random keys see all tokens alike, so that "
    "results nearly cancel: the hardest case for coarse values"
)


def _formats(run: Contest) -> Table:
    sizes, case = run.sizes, run.sizes.format_case
    heads, block_size, queries = sizes.heads, sizes.block_size, run.pool.queries(case)
    shape = (case.num_slots // block_size, heads.num_heads, block_size, heads.head_dim)
    original = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in (5, 6)]
    num_rows = 2 * case.num_read * heads.num_heads
    copies = {name: more_than_caches(num_rows * row_bytes(name, heads.head_dim), run.device) for name in sizes.formats}
    stored = {name: _encoded(name, original, copies[name], run.device) for name in sizes.formats}
    visits = {
        name: paged_visit(case, paged, queries, block_size=block_size, copies=copies[name])
        for name, paged in stored.items()
    }
    theirs = [name for name in sizes.formats if name in ("q8_0", "q4_0")] if run.llama else []
    if run.llama:
        visits |= {f"{name}, {LLAMA}": run.llama.attention(case, 1, name) for name in theirs}
    times = alternate(visits | {STREAM: run.stream.visit}, sizes.effort)
    stream = run.stream.bandwidth(times[STREAM])
    expected = _expected(case, original, queries, block_size)
    rows: list[tuple[Cell, ...]] = []
    for name, paged in stored.items():
        moved, seconds = run.num_bytes(case, paged), times[name]
        error = _first_sequence(case, paged, queries, block_size) - expected
        relative = float(np.linalg.norm(error) / np.linalg.norm(expected))
        ratio = times[sizes.formats[0]] / seconds
        speed = moved / seconds
        measured = (moved / 1e6, seconds * 1e3, speed / 1e9, speed / stream, case.num_sequences / seconds, ratio)
        rows.append((name, *measured, relative, float(np.abs(error).max())))
    for name in theirs:
        assert run.llama is not None
        run.llama.drop(case, name)
        seconds, moved = times[f"{name}, {LLAMA}"], run.num_bytes(case, stored[name])
        speed = moved / seconds
        ratio = times[sizes.formats[0]] / seconds
        measured = (moved / 1e6, seconds * 1e3, speed / 1e9, speed / stream, case.num_sequences / seconds, ratio)
        rows.append((f"{name}, {LLAMA}", *measured, None, None))
    columns = ("format", "moved MB", "ms", "GB/s", "of stream", "tokens/s of a layer", f"to {sizes.formats[0]}")
    return Table(
        f"Formats, decode {case.num_sequences} x {case.num_tokens}, blocks of {block_size}",
        (*columns, "error, relative", "error, largest"),
        rows,
        (ERRORS, *run.notes((LLAMA,))),
    )


def _encoded(name: str, original: Sequence[Tensor], copies: int, device: torch.device) -> Paged:
    """Keys and values in a format, repeated until the pool is larger than the caches even in that format."""
    backend = backends.torch(str(device))
    form = formats.create(name, backend)
    num_blocks, *heads_and_slots, dim = original[0].shape
    shape = (copies * num_blocks, *heads_and_slots, form.row_width(dim))
    arrays = backend.zeros_pair(shape, form.storage_dtype, 0)
    for raw, array in zip(original, arrays, strict=True):
        for begin in range(0, num_blocks, 512):
            encoded = form.encode(raw[begin : begin + 512].to(device))
            array[begin : begin + len(encoded)] = encoded
        for copy in range(1, copies):
            array[copy * num_blocks :][:num_blocks] = array[:num_blocks]
    return Paged(*(Stored(array, form, dim) for array in arrays))


def _first_sequence(case: Case, paged: Paged, queries: Tensor, block_size: int) -> NDArray[np.float64]:
    """Our result for a sequence in the first blocks of the pool, [1,Hq,D]."""
    alone = case._replace(num_sequences=1)
    batch = make_batch(alone, block_size, np.arange(case.num_tokens // block_size, dtype=np.int32))
    kernel = kernels.choose(queries, paged.keys, paged.values)
    out: Tensor = kernel.attend(queries[:1], paged.keys, paged.values, batch, scale=queries.shape[2] ** -0.5)
    return out.double().numpy(force=True)


def _expected(case: Case, original: Sequence[Tensor], queries: Tensor, block_size: int) -> NDArray[np.float64]:
    """The same from the definition, over what was to be stored."""
    alone, count = case._replace(num_sequences=1), case.num_tokens // block_size
    backend = backends.create("numpy")
    form = formats.create("f32", backend)
    keys, values = (Stored(raw[:count].numpy(), form, raw.shape[-1]) for raw in original)
    batch = make_batch(alone, block_size, np.arange(count, dtype=np.int32))
    rows = queries[:1].float().numpy(force=True)
    out = ReferenceKernel().attend(rows, keys, values, batch, scale=rows.shape[2] ** -0.5)
    return np.asarray(out, np.float64)
