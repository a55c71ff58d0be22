r"""Tokens to text as they come: never half a character, and nothing that may turn out to begin a stop text.

tokens      "The"   " \xe2\x82"   "\xac"   " EN"   "D of"        stop = "END"
pieces      "The"   ""            " €"     " "     ""  -> stopped, "EN" was held back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

__all__ = ["Piece", "StopFinder", "StopTexts", "TextStream", "token_text", "whole_text"]

CONTEXT = 8
"""Tokens of the prompt that the decoder sees: whether a word begins with a space depends on what came before."""

HALF = "\ufffd"


class Piece(NamedTuple):
    """What can be shown, and whether a stop text has come."""

    text: str
    stopped: bool


@final
class TextStream:
    """The text of one growing output. Without a tokenizer it is empty."""

    __slots__ = ("_ids", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream: Any = None
        self._ids: list[int] = list(prompt[-CONTEXT:])
        if tokenizer is None:
            return
        if getattr(tokenizer, "is_fast", False):
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(ids=self._ids, skip_special_tokens=True)
        else:
            self._shown = len(self._decoded())

    def step(self, token: int) -> str:
        """The text that `token` completes."""
        if self._tokenizer is None:
            return ""
        if self._stream is not None:
            return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._ids.append(token)
        text = self._decoded()
        if text.endswith(HALF):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


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
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        longest = max((len(stop.encode()) for stop in stops), default=0)
        self._count = CONTEXT + longest  # a token is a byte at least

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Whether one has come by now."""
        if not self._stops or self._tokenizer is None:
            return False
        text = self._tokenizer.decode(list(tokens[-self._count :]), skip_special_tokens=True)
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
