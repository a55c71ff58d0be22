r"""Tokens to text as they come: never half a character, and nothing that may turn out to begin a stop text.

tokens      "The"   " \xe2\x82"   "\xac"   " EN"   "D of"        stop = "END"
pieces      "The"   ""            " €"     " "     ""  -> stopped, "EN" was held back
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

__all__ = ["Piece", "StopFinder", "StopTexts", "TextStream", "token_bytes", "token_text", "whole_text"]

CONTEXT = 8
"""Tokens before an output that the decoder sees: whether a word begins with a space depends on what came before."""

WINDOW = 16
"""Tokens that are decoded at a time: beyond, those at the front are let go."""

LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of one character at most."""

HALF = "\ufffd"

_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")


def _letters() -> dict[str, int]:
    """Byte-level BPE's letters for bytes: printable ones are their own, the others have those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_LETTERS = _letters()


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
    prompt whose last character was made of bytes.) Bytes that can no longer become a character are U+FFFD, which is a
    token of many vocabularies as well: what is half a character, bytes tell (`token_bytes`).
    """

    __slots__ = ("_decode", "_ids", "_num_pending", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self._num_pending = 0
        self._ids: list[int] = []
        self._shown = ""
        if self._decode is not None:
            self._ids, self._shown = self._begun(list(prompt[-CONTEXT - LONGEST_CHARACTER :]))

    def step(self, token: int) -> str:
        """The text that `token` completes. O(1). A tokenizer that raises changes nothing."""
        if self._decode is None:
            return ""
        ids, num_pending = [*self._ids, token], self._num_pending + 1
        if not self._ends_inside(ids):
            text = self._decode(ids)
            piece = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(ids[-num_pending:])
            if len(ids) > WINDOW:
                ids, text = self._begun(ids[-CONTEXT - LONGEST_CHARACTER :])
            self._ids, self._shown, self._num_pending = ids, text, 0
            return piece
        if num_pending <= 4 * LONGEST_CHARACTER:
            self._ids, self._num_pending = ids, num_pending
            return ""
        pending = ids[-num_pending:]  # so many tokens are no character any more
        piece = self._decode(pending[:-LONGEST_CHARACTER])
        self._ids, self._shown, self._num_pending = pending[-LONGEST_CHARACTER:], "", LONGEST_CHARACTER
        return piece

    def _begun(self, ids: list[int]) -> tuple[list[int], str]:
        """What follows is decoded after `ids`, less those at the front that begin inside a character; their text.

        The last ones may be the beginning of a character, which is then not shown yet.
        """
        assert self._decode is not None
        counts = range(min(CONTEXT, len(ids)), len(ids))
        ids = next((ids[-n:] for n in counts if not self._begins_inside(ids[-n:])), ids)
        ends = range(len(ids), max(len(ids) - LONGEST_CHARACTER, -1), -1)
        end = next((n for n in ends if not self._ends_inside(ids[:n])), len(ids))
        return ids, self._decode(ids[:end])

    def _begins_inside(self, ids: Sequence[int]) -> bool:
        """Whether the first byte of `ids` goes on with a character."""
        assert self._decode is not None
        first = token_bytes(self._tokenizer, ids[0], self._decode(ids[:1]))
        return self._decode(ids).startswith(HALF) if first is None else b"\x80" <= first[:1] < b"\xc0"

    def _ends_inside(self, ids: Sequence[int]) -> bool:
        """Whether the last bytes of `ids` are the beginning of a character."""
        assert self._decode is not None
        last = b""
        for i in range(len(ids) - 1, -1, -1):
            part = token_bytes(self._tokenizer, ids[i], self._decode(ids[i : i + 1]))
            if part is None:
                return self._decode(ids).endswith(HALF)
            last = part + last
            if last and (last[-1] < 0x80 or len(last) >= LONGEST_CHARACTER):
                break
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        reader.decode(last[-LONGEST_CHARACTER:])
        return bool(reader.getstate()[0])


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

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode = _decoder(tokenizer)
        self._prompt = list(prompt[-CONTEXT:])
        self._stops = tuple(stops)
        longest = max((len(stop.encode()) for stop in stops), default=0)
        self._count = CONTEXT + longest  # a token is a byte at least

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Whether one has come by now."""
        if not self._stops or self._decode is None:
            return False
        # After what comes before: many decoders leave out a space at the very beginning; it may end inside a character.
        last, lead = tokens[-self._count :], [*self._prompt, *tokens[-self._count - CONTEXT : -self._count]][-CONTEXT:]
        text, before = self._decode([*lead, *last]), self._decode(lead).rstrip(HALF)
        text = text[len(before) :] if text.startswith(before) else self._decode(last)
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


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes | None:
    """The bytes of a token that is decoded as `text`: its name tells them where they are no whole characters.

    Names of bytes are `<0xE2>`, or letters of byte-level BPE (GPT-2's). None: the tokenizer does not tell.
    """
    if HALF not in text:
        return text.encode()
    is_fast = getattr(tokenizer, "is_fast", False)
    names = tokenizer.backend_tokenizer.id_to_token if is_fast else getattr(tokenizer, "convert_ids_to_tokens", None)
    name = None if names is None else names(token)
    if not isinstance(name, str):
        return name if isinstance(name, bytes) else None
    if found := _BYTE_NAME.fullmatch(name):
        return bytes.fromhex(found[1])
    if all(letter in _BYTES_OF_LETTERS for letter in name):
        return bytes(_BYTES_OF_LETTERS[letter] for letter in name)
    return text.encode() if is_fast else None  # U+FFFD itself
