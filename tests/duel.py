"""A cache and the oracle, driven together: each operation goes to both, and then everything observable is compared.

An operation has *outcomes* that the oracle allows: `ok`, `full` (`CacheFull`), `unsupported` (`NotSupported`), `misuse`
(`ValueError`). Whatever is not `ok` must have changed nothing, which is checked literally: positions, tables, tensors
and every later answer, the history of the pass under way among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arrays import add_offsets, attention, keys_of, open_columns, recognise, to_backend, to_numpy, values_of
from kvcache import Batch, CausalCache
from kvcache.errors import CacheFull, NotSupported
from oracle import Oracle

LAYERS = (0, 3)  # the numbers are the model's, not an index


class Duel:
    """One `CausalCache` against its oracle. `log` holds every operation, to be printed when something fails."""

    def __init__(
        self,
        span: Any,
        *,
        block_size: int,
        capacity: int,
        max_batch: int,
        max_sequences: int = 1,
        can_shift: bool = True,
        backend: str = "numpy",
        dtype: str = "f32",
        layers: tuple[int, ...] = LAYERS,
    ) -> None:
        self.backend, self.layers, self.max_batch, self.block_size = backend, layers, max_batch, block_size
        self.cache = CausalCache(span, shift=add_offsets if can_shift else None, block_size=block_size)
        self.cache.init(backend, dtype, max_sequences=max_sequences, capacity=capacity, max_batch=max_batch)
        self.num_blocks = self.cache.usage().num_blocks
        self.oracle = Oracle(
            span,
            block_size=block_size,
            num_slots=self.num_blocks * block_size,
            max_sequences=max_sequences,
            can_shift=can_shift,
        )
        self.log = [f"{span} block_size={block_size} {capacity=} {max_batch=} {max_sequences=} {can_shift=} {backend}"]
        self.known: set[int] = set()
        self.batch: Batch | None = None  # of the pass under way, as long as nothing else happened
        self.is_quiet = False  # nothing is compared while a path that was compared before is walked again

    # --- operations -------------------------------------------------------------------------------------------------

    def forward(self, positions: Sequence[int], sequences: Sequence[int], excepted: Sequence[int] = ()) -> str:
        """A whole pass: places, both layers put, the history and attention of each row checked."""
        self.known |= set(sequences)
        outcome = self.attempt(
            f"forward({list(positions)}, {list(sequences)})",
            self._forward_outcomes(positions, sequences),
            lambda: self.cache.start_forward(Batch(positions, sequences)),
        )
        if outcome == "ok":
            tokens = self.oracle.forward(positions, sequences)
            uids = [t.uid for t in tokens]
            for layer in self.layers:
                self.cache.set_layer(layer)
                self.cache.put(*self.payload(layer, uids))
            self.batch = Batch(positions, sequences)
            if not self.is_quiet:
                self.check_history()
            if excepted:
                self.log.append(f"set_causal(except_={tuple(excepted)})")
                self.cache.set_causal(except_=tuple(excepted))
                self.check_history(excepted)
        self.observe()
        return outcome

    def _forward_outcomes(self, positions: Sequence[int], sequences: Sequence[int]) -> set[str]:
        if len(positions) > self.max_batch or any(self.oracle.story(s).pending for s in sequences):
            return {"misuse"}
        lowest = {s: min(p for p, q in zip(positions, sequences, strict=True) if q == s) for s in sequences}
        return self._room_outcomes([list(sequences).count(s) for s in set(sequences)], lowest)

    def _room_outcomes(self, counts: list[int], lowest: dict[int, int]) -> set[str]:
        """Whether new tokens fit, `counts` of them in each of some sequences."""
        total, num_free = sum(counts), self.cache.usage().num_free_blocks
        surely, perhaps = self.oracle.needed_after_forgetting(lowest)
        if self.block_size == 1:
            if total <= num_free + surely:
                return {"ok"}
            return {"full"} if total > num_free + perhaps else {"ok", "full"}
        if sum(-(-n // self.block_size) + 1 for n in counts) <= num_free:  # + 1: the shared tail that is copied
            return {"ok"}
        full = len(self.oracle.slots()) - perhaps + total > self.oracle.num_slots
        return {"full"} if full else {"ok", "full"}

    def append(self, sequence: int, count: int) -> str:
        """The other face: new tokens in every layer, not committed."""
        self.known.add(sequence)
        story = self.oracle.story(sequence)
        start, uid = story.end + len(story.pending), self.oracle.num_tokens_ever
        uids = list(range(uid, uid + count))
        view = self.cache.sequence(sequence)
        outcomes = self._room_outcomes([count], {sequence: story.end})
        if story.pending and outcomes == {"full"}:
            outcomes = {"ok", "full"}  # a second append may forget more, for it begins later
        outcome = self.attempt(
            f"append({sequence}, {count})",
            outcomes,
            lambda: self._check_appended(view.append(self.layers[0], *self.payload(self.layers[0], uids)), start, uids),
        )
        if outcome == "ok":
            for layer in self.layers[1:]:
                self._check_appended(view.append(layer, *self.payload(layer, uids)), start, uids, layer)
            assert [t.uid for t in self.oracle.append(sequence, count)] == uids
        self.observe()
        return outcome

    def _check_appended(self, appended: Any, start: int, uids: list[int], layer: int | None = None) -> None:
        layer = self.layers[0] if layer is None else layer
        assert appended.start == start, (appended.start, start)
        rows = [row for view in appended.views for row in recognise(layer, view.keys, view.values)]
        assert rows[-len(uids) :] == [(uid, 0) for uid in uids], (rows, uids)

    def commit(self, sequence: int, count: int) -> str:
        num_pending = len(self.oracle.story(sequence).pending)
        outcome = self.attempt(
            f"commit({sequence}, {count})",
            {"ok"} if count <= num_pending else {"misuse"},
            lambda: self.cache.sequence(sequence).commit(count),
        )
        if outcome == "ok" and num_pending:
            self.oracle.commit(sequence, count)
        self.observe()
        return outcome

    def copy_prefix(self, source: int, target: int, length: int) -> str:
        self.known |= {source, target}
        num_free = self.cache.usage().num_free_blocks
        self.attempt(
            f"copy_prefix({source}, {target}, {length})",
            {"ok"},
            lambda: self.cache.copy_prefix(source, target, length),
        )
        assert self.cache.usage().num_free_blocks >= num_free, "a copy by reference takes no block"
        self._adopt_end(target, self.oracle.copy_prefix(source, target, length))
        self.observe()
        return "ok"

    def remove(self, sequence: int, begin: int, end: int | None = None) -> str:
        return self._remove(
            f"remove({sequence}, {begin}, {end})", sequence, begin, end, lambda: self.cache.remove(sequence, begin, end)
        )

    def truncate(self, sequence: int, length: int) -> str:
        view = self.cache.sequence(sequence)
        return self._remove(f"truncate({sequence}, {length})", sequence, length, None, lambda: view.truncate(length))

    def free(self, sequence: int) -> str:
        view = self.cache.sequence(sequence)
        return self._remove(f"free({sequence})", sequence, 0, None, view.free)

    def _remove(self, text: str, sequence: int, begin: int, end: int | None, operation: Callable[[], None]) -> str:
        self.known.add(sequence)
        removal = self.oracle.plan_removal(sequence, begin, end)
        allowed = set(removal.outcomes)
        if "ok" in allowed:
            allowed |= self._copying_outcomes(sequence, removal.num_moved, begin)
        outcome = self.attempt(text, allowed, operation)
        if outcome == "ok":
            self.oracle.apply_removal(sequence, removal)
            self._adopt_end(sequence, removal.ends)
        self.observe()
        return outcome

    def _copying_outcomes(self, sequence: int, num_moved: int, begin: int) -> set[str]:
        """`full` when moving keys that others share may need more blocks than are free."""
        others = {t for s, o in self.oracle.stories.items() if s != sequence for t in [*o.stored, *o.fading]}
        story = self.oracle.story(sequence)
        shared = [t for t in story.stored if t in others]
        if not num_moved or not shared:
            return set()
        num_free = self.cache.usage().num_free_blocks
        num_copies = sum(t.position >= begin for t in shared)
        if self.block_size > 1:
            num_copies = self.cache.usage().sequences[sequence].num_blocks
        return {"full"} if num_copies > num_free else set()

    def _adopt_end(self, sequence: int, ends: set[int]) -> None:
        end = self.cache.sequence(sequence).seq_len
        assert end in ends, f"sequence {sequence} ends at {end}; expected {ends}"
        if sequence in self.oracle.stories:
            self.oracle.stories[sequence].end = end
            if not end:
                del self.oracle.stories[sequence]

    def misuse(self, text: str, operation: Callable[[], None]) -> None:
        self.attempt(text, {"misuse"}, operation)
        self.observe()

    # --- what may happen --------------------------------------------------------------------------------------------

    def attempt(self, text: str, allowed: set[str], operation: Callable[[], None]) -> str:
        """The outcome of an operation, one of `allowed`; anything but `ok` changed nothing."""
        self.log.append(text)
        before = self.snapshot() if allowed != {"ok"} and not self.is_quiet else None
        outcome, says_why = "ok", True
        try:
            operation()
        except CacheFull as error:
            outcome = "full"
            says_why = 0 <= error.free < error.needed and str(error.needed) in str(error)
        except NotSupported:
            outcome = "unsupported"
        except ValueError as error:
            if "misuse" not in allowed:
                raise
            outcome = "misuse"
            says_why = len(str(error)) > 10
        self.log[-1] += f" -> {outcome}"
        assert says_why, f"{text} failed without a reason"
        assert outcome in allowed, f"{text}: {outcome}, expected {allowed}"
        if outcome == "ok":
            self.batch = None
        elif not self.is_quiet:
            assert self.snapshot() == before, f"{text} failed and changed something"
        return outcome

    def snapshot(self) -> list[Any]:
        """Everything observable, as plain values."""
        state: list[Any] = [repr(self.cache.usage())]
        for sequence in sorted(self.known):
            view = self.cache.sequence(sequence)
            end = view.seq_len
            state += [sequence, end, [self.cache.can_resume(sequence, p) for p in range(end + 2)]]
            for layer in self.layers if end else ():
                for part in view.views(layer):
                    state += [part.start, part.length, to_numpy(part.keys).tobytes(), to_numpy(part.values).tobytes()]
        if self.batch is not None:
            for layer in self.layers:
                self.cache.set_layer(layer)
                history = self.cache.get()
                state += [to_numpy(array).tobytes() for array in history]
        return state

    # --- comparing --------------------------------------------------------------------------------------------------

    def payload(self, layer: int, uids: list[int]) -> tuple[Any, Any]:
        keys, values = keys_of(layer, uids, [0] * len(uids)), values_of(layer, uids)
        return to_backend(self.backend, keys), to_backend(self.backend, values)

    def check_history(self, excepted: Sequence[int] = (), *, with_attention: bool = True) -> None:
        """Each query of the pass sees exactly its tokens, with their very keys and values, and attends to them."""
        assert self.batch is not None
        positions, sequences = self.batch.positions, self.batch.sequences
        expected = [
            sorted(t.shown for t in self.oracle.visible(s, p, is_causal=i not in excepted))
            for i, (p, s) in enumerate(zip(positions, sequences, strict=True))
        ]
        for layer in self.layers:
            self.cache.set_layer(layer)
            history = self.cache.get()
            columns = open_columns(history.mask, len(positions))
            assert history.keys.shape[0] == history.values.shape[0] == history.mask.shape[1]
            used = np.unique(np.concatenate(columns))
            shown = recognise(layer, to_numpy(history.keys)[used], to_numpy(history.values)[used])
            names = dict(zip(used.tolist(), shown, strict=True))
            for row, (seen, wanted) in enumerate(zip(columns, expected, strict=True)):
                assert sorted(names[c] for c in seen.tolist()) == wanted, f"layer {layer}, row {row} of the batch"
            if with_attention:
                self._check_attention(layer, expected)

    def _check_attention(self, layer: int, expected: list[list[tuple[int, int]]]) -> None:
        rng = np.random.default_rng(len(self.log))
        queries = rng.standard_normal((len(expected), 4, 4)).astype(np.float32) / 4
        seen = [([u for u, _ in row], [s for _, s in row]) for row in expected]
        rows = [(keys_of(layer, uids, shifts), values_of(layer, uids)) for uids, shifts in seen]
        result = self.cache.attend(to_backend(self.backend, queries), scale=0.5)
        assert np.abs(to_numpy(result) - attention(queries, rows, 0.5)).max() < 1e-5

    def observe(self) -> None:
        """Everything observable outside a pass, against the oracle; faded tokens are resolved by looking."""
        if self.is_quiet:
            for sequence, story in self.oracle.stories.items():
                if story.fading and not story.pending:
                    parts = self.cache.sequence(sequence).views(self.layers[0])
                    self.oracle.resolve(sequence, {row for part in parts for row in self._rows(self.layers[0], part)})
            return
        self.cache.check()
        usage = self.cache.usage()
        assert usage.num_blocks == self.num_blocks
        for sequence in sorted(self.known):
            self._observe_sequence(sequence, usage.sequences.get(sequence))
        extra = {
            s: u for s, u in usage.sequences.items() if s not in self.oracle.stories and u.num_tokens + u.num_blocks
        }
        assert not extra, f"sequences that nobody made: {extra}"
        assert usage.num_tokens == sum(u.num_tokens for u in usage.sequences.values())
        num_used = usage.num_blocks - usage.num_free_blocks
        if self.block_size == 1:
            low, high = len(self.oracle.slots(with_fading=False)), len(self.oracle.slots())
            assert low <= num_used <= high, f"{num_used} blocks used; expected {low} to {high}"
        assert num_used <= sum(u.num_blocks for u in usage.sequences.values())

    def _observe_sequence(self, sequence: int, used: Any) -> None:
        view, story = self.cache.sequence(sequence), self.oracle.story(sequence)
        assert view.seq_len == story.end, f"sequence {sequence} has length {view.seq_len}; expected {story.end}"
        parts = [
            (part.start, self._rows(layer, part)) for layer in self.layers[:1] if used for part in view.views(layer)
        ]
        shown = [row for _, rows in parts for row in rows]
        assert len(set(shown)) == len(shown), f"sequence {sequence} shows a token twice"
        pending = {t.shown for t in story.pending}
        if not pending:
            self.oracle.resolve(sequence, set(shown))
        expected = {t.shown: t.position for t in story.stored}
        assert {row for row in shown if row not in pending} - {t.shown for t in story.fading} == set(expected)
        if not pending:
            for start, rows in parts:
                assert [expected[row] for row in rows] == list(range(start, start + len(rows))), f"sequence {sequence}"
            self._check_other_views(sequence, shown)
        for position in range(story.end + 2):
            answer = self.oracle.can_resume(sequence, position)
            if answer is not None:
                assert self.cache.can_resume(sequence, position) is answer, f"can_resume({sequence}, {position})"
        if used is not None and not pending:
            assert used.num_tokens == len(shown), f"sequence {sequence} counts {used.num_tokens} and shows {len(shown)}"
            least = -(-len(shown) // self.block_size)
            assert least <= used.num_blocks <= len(shown), f"sequence {sequence}: {used} for {len(shown)} tokens"

    def _rows(self, layer: int, part: Any) -> list[tuple[int, int]]:
        rows = recognise(layer, part.keys, part.values)
        assert part.length == len(rows)
        return rows

    def _check_other_views(self, sequence: int, shown: list[tuple[int, int]]) -> None:
        """Every layer shows the same tokens, and so do packed blocks and the whole as one array, where there is one."""
        view = self.cache.sequence(sequence)
        for layer in self.layers if shown else ():
            if layer != self.layers[0]:
                assert [row for part in view.views(layer) for row in self._rows(layer, part)] == shown
            packed = [
                (to_numpy(part.keys)[:, : part.length], to_numpy(part.values)[:, : part.length])
                for part in view.packed_views(layer)
            ]
            keys, values = (np.concatenate([p[i] for p in packed], axis=1).swapaxes(0, 1) for i in (0, 1))
            assert recognise(layer, keys, values) == shown
            whole = view.contiguous_kv(layer, view.seq_len) if len(shown) == view.seq_len else None
            if whole is not None:
                assert recognise(layer, whole.keys, whole.values) == shown


def told(duel: Duel, error: BaseException, tail: int = 60) -> None:
    """Add the operations that led to a failure."""
    error.add_note("operations:\n  " + "\n  ".join(duel.log[-tail:]))
