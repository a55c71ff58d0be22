"""What the measurements of attention share: sizes, one pool, one stream, and the peers that are here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, final

import torch

from kvcache import kernels
from kvcache.bench.outside import LLAMA, VLLM, Llama, Vllm
from kvcache.bench.paged import Case, Heads, Paged, Pool, paged_visit
from kvcache.bench.peers import PEERS, inputs, peer
from kvcache.bench.stream import Stream
from kvcache.bench.timing import CPU, Effort, Visit, alternate

__all__ = ["ALL_PEERS", "GPU_SIZES", "OURS", "OURS_LARGE", "STREAM", "Contest", "Sizes"]

OURS, OURS_LARGE, STREAM = "kvcache", "kvcache, large blocks", "stream"
ALL_PEERS = (*PEERS, VLLM, LLAMA)
CONTEXTS = tuple(2**i * 1024 for i in range(8))


class Sizes(NamedTuple):
    """What is measured. Token counts are multiples of the block sizes."""

    heads: Heads = Heads()
    block_size: int = 16
    large_block: int = 128
    """That of vLLM's operator, at which decode is measured, too."""
    decode: tuple[Case, ...] = (Case(8, 8192), Case(1, 65536), Case(8, 1024, is_resident=True))
    format_case: Case = Case(8, 8192)
    formats: tuple[str, ...] = ("bf16", "fp8_e4m3", "q8_0", "q4_0")
    prefill: tuple[Case, ...] = (Case(1, 2048, 2048), Case(1, 4096, 512))
    block_case: Case = Case(8, 8192)
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch_tokens: int = 4096
    window: int = 512
    window_tokens: tuple[int, ...] = (1024, 131072)
    matmul: int = 2048
    stream_bytes: int | None = None
    effort: Effort = Effort()

    @property
    def num_slots(self) -> int:
        """Tokens of the pool."""
        cases = (*self.decode, *self.prefill, self.block_case)
        least = max(case.num_slots for case in cases)
        return max(least, *self.contexts, *self.window_tokens, self.batch_tokens * max(self.batches))


GPU_SIZES = Sizes(
    decode=(Case(8, 8192), Case(1, 65536), Case(8, 1024), Case(64, 4096)),
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    matmul=8192,
)
"""On a GPU: larger batches, and nothing that stays in the caches, which are rewritten between calls."""


@final
class Contest:
    """The pool, the stream and the peers that all tables share, on one device; processes end with `stack`.

    `absent` says why a peer that is wanted cannot be had. A case is measured by `against`.
    """

    def __init__(self, sizes: Sizes, peers: Sequence[str], stack: ExitStack, device: torch.device = CPU) -> None:
        self.sizes, self.peers, self.device = sizes, peers, device
        self.pool = Pool(sizes.heads, sizes.num_slots, device=device)
        self.paged = self.pool.stored(sizes.block_size)
        self.kernel = kernels.choose(self.pool.queries(Case(1, 1)), *self.paged)
        self.stream = Stream(sizes.stream_bytes, device)
        self.absent: dict[str, str] = {}
        self.vllm: Vllm | None = None
        self.llama: Llama | None = None
        threads, slots = torch.get_num_threads(), self.pool.num_slots
        for name in (name for name in (VLLM, LLAMA) if name in peers):
            if device.type != "cpu":
                self.absent[name] = "it is measured on the CPU only"
                continue
            try:
                if name == VLLM:
                    self.vllm = Vllm(sizes.heads, slots, num_threads=threads, stack=stack)
                else:
                    self.llama = Llama(sizes.heads, num_threads=threads, stack=stack)
            except RuntimeError as error:
                self.absent[name] = str(error)

    def ours(self, case: Case, block_size: int | None = None) -> Visit:
        """Our kernel over the pool."""
        size = block_size or self.sizes.block_size
        paged = self.paged if size == self.sizes.block_size else self.pool.stored(size)
        copies = self.pool.num_copies(case)
        return paged_visit(case, paged, self.pool.queries(case), block_size=size, copies=copies)

    def against(self, case: Case, names: Sequence[str]) -> dict[str, float]:
        """Seconds of our kernel, of the stream, and of those of `names` that are wanted and present."""
        contenders: dict[str, Visit] = {OURS: self.ours(case), STREAM: self.stream.visit}
        if OURS_LARGE in names:
            contenders[OURS_LARGE] = self.ours(case, self.sizes.large_block)
        copies = self.pool.num_copies(case)
        wanted = [name for name in names if name in self.peers]
        given = inputs(case, self.pool, self.pool.queries(case)) if set(wanted) & set(PEERS) else None
        for name in wanted:
            try:
                if name in PEERS and given is not None:
                    contenders[name] = peer(name, given)
                elif name == VLLM and self.vllm is not None:
                    contenders[name] = self.vllm.attention(case, copies)
                elif name == LLAMA and self.llama is not None:
                    contenders[name] = self.llama.attention(case, copies)
            except (ImportError, RuntimeError) as error:  # out of memory is one of the latter
                self.absent[name] = str(error)
        times = alternate(contenders, self.sizes.effort)
        if LLAMA in contenders and self.llama is not None:
            self.llama.drop(case)
        return times

    def num_bytes(self, case: Case, paged: Paged | None = None) -> int:
        """Bytes that must move: visible rows, queries and results, each once."""
        heads = self.sizes.heads
        rows = 4 * case.num_sequences * case.num_queries * heads.num_query_heads * heads.head_dim
        return case.num_read * (paged or self.paged).bytes_per_token + rows

    def notes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which versions the outside peers are, and why some are absent."""
        labels = {name: peer.label for name, peer in ((VLLM, self.vllm), (LLAMA, self.llama)) if peer is not None}
        present = [f"{name}: {labels[name]}" for name in names if name in labels]
        return (*present, *(f"{name} is absent: {self.absent[name]}" for name in names if name in self.absent))
