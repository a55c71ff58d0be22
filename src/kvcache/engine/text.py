r"""Tokens to text as they come: never half a character, and nothing that may turn out to begin a stop text.

tokens      "The"   " \xe2\x82"   "\xac"   " EN"   "D of"        stop = "END"
pieces      "The"   ""            " €"     " "     ""  -> stopped, "EN" was held back
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

__all__ = ["Piece", "StopFinder", "StopTexts", "TextStream", "token_text", "whole_text"]

CONTEXT = 8
"""Tokens before an output that the decoder sees: whether a word begins with a space depends on what came before."""

WINDOW = 16
"""Tokens that are decoded at a time: beyond, those at the front are let go."""

LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of one character at most."""

HALF = "\ufffd"


class Piece(NamedTuple):
    """What can be shown, and whether a stop text has come."""

    text: str
    stopped: bool


@final
class TextStream:
    """The text of one growing output. Without a tokenizer it is empty.

    The last tokens are decoded again with each new one. What was shown stays, also where the decoder changes its mind:
    those that fall back to bytes (Gemma's, Llama's) turn a whole run of them to U+FFFD if one does not fit, and text
    that was shown before cannot be taken back. (tokenizers' own `DecodeStream` raises there, and shows the end of a
    prompt whose last character was made of bytes.) Bytes that can no longer become a character are U+FFFD.
    """

    __slots__ = ("_decode", "_ids", "_num_pending", "_shown")

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._decode = _decoder(tokenizer)
        self._num_pending = 0
        self._ids: list[int] = []
        self._shown = ""
        if self._decode is not None:
            self._begin(list(prompt[-CONTEXT - LONGEST_CHARACTER :]))

    def step(self, token: int) -> str:
        """The text that `token` completes. O(1)."""
        if self._decode is None:
            return ""
        self._ids.append(token)
        self._num_pending += 1
        text = self._decode(self._ids)
        if not text.endswith(HALF):
            piece = self._piece(text, self._num_pending)
            self._num_pending = 0
            if len(self._ids) > WINDOW:
                self._begin(self._ids[-CONTEXT - LONGEST_CHARACTER :])
            return piece
        if self._num_pending <= 4 * LONGEST_CHARACTER:
            return ""
        pending = self._ids[-self._num_pending :]  # so many tokens are no character any more
        self._ids, self._shown, self._num_pending = pending[-LONGEST_CHARACTER:], "", LONGEST_CHARACTER
        return self._decode(pending[:-LONGEST_CHARACTER])

    def _begin(self, ids: list[int]) -> None:
        """What comes is decoded after `ids`, less those at the front whose text would begin inside a character.

        The last ones may be the beginning of a character, which is then not shown yet.
        """
        assert self._decode is not None
        for num_held in range(min(LONGEST_CHARACTER, len(ids) + 1)):
            for count in range(min(CONTEXT, len(ids)), len(ids) + 1):
                self._ids = ids[len(ids) - count :]
                self._shown = self._decode(self._ids[: count - num_held])
                if not self._shown.startswith(HALF) and not self._shown.endswith(HALF):
                    return
        self._ids = ids[-CONTEXT:]  # bytes that are no characters, on both sides
        self._shown = self._decode(self._ids).rstrip(HALF)

    def _piece(self, text: str, num_pending: int) -> str:
        """What the last `num_pending` tokens add to what is shown."""
        assert self._decode is not None
        if text.startswith(self._shown):
            piece = text[len(self._shown) :]
        else:
            piece = self._decode(self._ids[len(self._ids) - num_pending :])
        self._shown = text
        return piece


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """Tokens to text without special ones: the fast tokenizer itself, where there is one."""
    if tokenizer is None:
        return None
    backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else tokenizer
    decode: Callable[[Sequence[int]], str] = functools.partial(backend.decode, skip_special_tokens=True)
    return decode


@final
class StopTexts:
    """Finds stop texts across the borders of pieces."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> Piece:
        """What can be shown after `piece`: up to the first stop text, without what may be the beginning of one."""
        if not self._stops:
            return Piece(piece, False)
        text = self._held + piece
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self._held = ""
            return Piece(text[:found], True)
        longest = max(map(len, self._stops)) - 1
        keep = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
        self._held = text[len(text) - keep :]
        return Piece(text[: len(text) - keep], False)

    def flush(self) -> str:
        """What was held back: no stop text will come any more."""
        held, self._held = self._held, ""
        return held


@final
class StopFinder:
    """Whether a stop text is in an output whose shorter beginnings had none: its last tokens tell."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._decode = _decoder(tokenizer)
        self._stops = tuple(stops)
        longest = max((len(stop.encode()) for stop in stops), default=0)
        self._count = CONTEXT + longest  # a token is a byte at least

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Whether one has come by now."""
        if not self._stops or self._decode is None:
            return False
        text = self._decode(tokens[-self._count :])
        return any(stop in text for stop in self._stops)


def whole_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str]) -> str:
    """The text of a whole output after its prompt, up to the first stop text."""
    stream, finder, text = TextStream(tokenizer, prompt), StopTexts(stops), ""
    for token in tokens:
        piece = finder.feed(stream.step(token))
        text += piece.text
        if piece.stopped:
            return text
    return text + finder.flush()


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, as tables of log-probabilities show it."""
    return "" if tokenizer is None else str(tokenizer.decode([token]))
