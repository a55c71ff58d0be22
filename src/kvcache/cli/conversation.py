"""A conversation on one cache: branches of tokens, each a sequence, so that forking and rewinding cost no computation.

A turn makes the text so far into tokens, keeps the part of the cache that begins the same way, computes the rest and
generates:

    cached     <bos> Once upon a time there was a fox
    wanted     <bos> Once upon a time there was a king who
    kept       |<------------------------------->|        remove(sequence, kept)
    computed                                      |<--->|  at least one token
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from kvcache.engine.build import stop_tokens
from kvcache.engine.sampler import greedy
from kvcache.engine.text import TextStream
from kvcache.errors import NotSupported
from kvcache.hf.runner import Runner, Work
from kvcache.prefix.chain import common_length

if TYPE_CHECKING:
    from kvcache.hf.loading import Loaded

__all__ = ["Branch", "Conversation", "Turn"]

CHUNK = 512
"""Tokens of a prompt computed in one pass: enough to keep the matrix units busy, small enough to stop between."""


@dataclass(slots=True)
class Branch:
    """One line of the conversation.

    sequence: its number in the cache. said: the tokens of the whole text. cached: those computed so far; the last
    token of an answer is said, and computed only when something follows it. messages: the same text as a chat. turns:
    how many tokens and messages there were before each turn.
    """

    sequence: int
    said: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    """What a turn cost. `seconds_to_first` counts from the prompt to the first token, `seconds` the rest."""

    num_reused: int
    num_computed: int
    num_generated: int = 0
    seconds_to_first: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token belongs to the prompt's time."""
        return (self.num_generated - 1) / self.seconds if self.num_generated > 1 and self.seconds else 0.0


@final
class Conversation:
    """Branches of one conversation with a model; `name` is the active branch's.

    capacity: tokens that a branch may hold.
    """

    def __init__(self, loaded: Loaded, runner: Runner, capacity: int) -> None:
        if loaded.tokenizer is None:
            raise ValueError(
                f"{loaded.name} has no tokenizer; expected a folder with tokenizer.json, or a file with one"
            )
        self._tokenizer: Any = loaded.tokenizer
        self._runner = runner
        self.cache = runner.cache
        self._capacity = capacity
        self._branches = {"main": Branch(0)}
        self._next_sequence = 1
        self._stop_tokens = stop_tokens(loaded.model, loaded.tokenizer)
        self.name = "main"
        self.last: Turn | None = None

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer can format a chat; without, the text so far is simply continued."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def branch(self) -> Branch:
        """The active branch."""
        return self._branches[self.name]

    @property
    def names(self) -> list[str]:
        """The names of all branches."""
        return list(self._branches)

    def say(self, text: str, max_tokens: int) -> Generator[str]:
        """Add `text` to the active branch and yield the answer as it comes; `last` tells the cost afterwards.

        An answer that is left early (`close`) is said as far as it came. Raises `ValueError`, and nothing was said,
        for text that does not fit or that the chat template refuses.
        """
        branch = self.branch
        message = {"role": "user", "content": text}
        if self.has_template:
            wanted = self._templated([*branch.messages, message])
        else:
            wanted = [*branch.said, *self._tokenizer(text, add_special_tokens=not branch.said)["input_ids"]]
        self._check_fits(wanted)
        branch.turns.append((len(branch.said), len(branch.messages)))
        answer = []
        try:
            for piece in self._complete(wanted, max_tokens):
                answer.append(piece)
                yield piece
        finally:
            if self.has_template:
                branch.messages += [message, {"role": "assistant", "content": "".join(answer)}]

    def complete(self, prompt: str, max_tokens: int) -> Generator[str]:
        """Replace the active branch by `prompt`, keeping what it has in common with it; the completion.

        Raises `ValueError` at once when it does not fit.
        """
        wanted = list(self._tokenizer(prompt)["input_ids"])
        self._check_fits(wanted)
        self.branch.turns.clear()
        self.branch.messages.clear()
        return self._complete(wanted, max_tokens)

    def undo(self) -> int:
        """Take the last turn back; the number of tokens it had. Raises `ValueError` when there is none."""
        branch = self.branch
        if not branch.turns:
            raise ValueError("nothing to undo; no turn was taken on this branch")
        begin, num_messages = branch.turns.pop()
        removed = len(branch.said) - begin
        if begin < len(branch.cached):
            kept, _ = self._rewind(branch, begin)
            del branch.cached[kept:]
        del branch.said[begin:], branch.messages[num_messages:]
        return removed

    def fork(self, name: str) -> None:
        """A new branch that goes on from here, sharing every block, and make it active."""
        if not name or name in self._branches:
            raise ValueError(f"{name!r} is {'taken' if name else 'no name'}; expected a new branch name")
        here = self.branch
        copy = replace(
            here,
            sequence=self._next_sequence,
            said=[*here.said],
            cached=[*here.cached],
            messages=[*here.messages],
            turns=[*here.turns],
        )
        self.cache.copy_prefix(here.sequence, copy.sequence, len(here.cached))
        self._branches[name] = copy
        self._next_sequence += 1
        self.name = name

    def switch(self, name: str) -> None:
        """Make another branch active."""
        if name not in self._branches:
            raise ValueError(f"{name!r} is no branch; expected one of {', '.join(self._branches)}")
        self.name = name

    def _templated(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            made = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses this: {error}") from None
        return list(made["input_ids"])

    def _check_fits(self, wanted: Sequence[int]) -> None:
        if len(wanted) >= self._capacity:
            raise ValueError(
                f"the text has {len(wanted)} tokens; expected fewer than the capacity of {self._capacity}, which "
                f"--capacity sets; /undo takes a turn back"
            )

    def _complete(self, wanted: list[int], max_tokens: int) -> Generator[str]:
        branch, begin = self.branch, time.perf_counter()
        shared = min(common_length(branch.cached, wanted), len(wanted) - 1)
        kept, note = self._rewind(branch, shared)
        turn = self.last = Turn(kept, len(wanted) - kept, note=note)
        branch.said, branch.cached = wanted, wanted[:kept]
        token = self._prefill(branch, wanted[kept:])
        turn.seconds_to_first = time.perf_counter() - begin
        begin = time.perf_counter()
        stream = TextStream(self._tokenizer, wanted)
        room = min(max_tokens, self._capacity - len(wanted))
        while turn.num_generated < room and token not in self._stop_tokens:
            turn.num_generated += 1
            branch.said.append(token)
            piece = stream.step(token)
            turn.seconds = time.perf_counter() - begin
            if piece:
                yield piece
            if turn.num_generated < room:
                token = self._prefill(branch, [token])
        if turn.num_generated == room < max_tokens:
            full = f"the capacity of {self._capacity} tokens is full; --capacity gives more"
            turn.note = f"{turn.note}; {full}" if turn.note else full

    def _prefill(self, branch: Branch, tokens: Sequence[int]) -> int:
        """Compute tokens at the end of the branch; the most likely token after them."""
        begin = 0
        while begin < len(tokens):
            step = CHUNK if branch.cached else max(CHUNK, self._runner.layout.beginning)
            chunk = tokens[begin : begin + step]
            begin += len(chunk)
            is_last = begin == len(tokens)
            logits = self._runner.forward([Work(branch.sequence, len(branch.cached), chunk, num_logits=int(is_last))])
            branch.cached.extend(chunk)
        return greedy(logits[-1:])[0]

    def _rewind(self, branch: Branch, position: int) -> tuple[int, str]:
        """Cut the cache to `position`, or as far below as its members require; what is kept, and why no more."""
        point = self.cache.resume_point(branch.sequence, position)
        note = "" if point == position else f"{position - point} of the common prefix were forgotten"
        try:
            self.cache.remove(branch.sequence, point)
        except NotSupported as error:
            self.cache.remove(branch.sequence, 0)
            return 0, str(error)
        return point, note
