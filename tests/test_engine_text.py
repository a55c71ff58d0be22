"""Tokens to text as they come: whole characters only, stop texts across borders; byte-level and byte-fallback alike."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import byte_tokenizer, fallback_tokenizer
from kvcache.engine.text import WINDOW, StopFinder, StopTexts, TextStream, token_bytes, token_text, whole_text

PIECES = ["a", " ", " the", "é", "猫", "🐈", "👩\u200d👩\u200d👧", "\n", "x", "\u200d", "ß", "\U00013000"]


def fed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    finder, shown = StopTexts(stops), []
    for piece in pieces:
        text, stopped = finder.feed(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, finder.flush()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        (("END",), ["an ", "E", "N", "D of"], ["an ", "", "", ""], True),
        (("END",), ["an E", "vil"], ["an ", "Evil", ""], False),
        (("END",), ["xEN"], ["x", "EN"], False),
        (("\n\n", "stop"), ["a\n", "b\n", "\nc"], ["a", "\nb", ""], True),
        (("ab", "b"), ["xab"], ["x"], True),
        (("aab",), ["aa", "ab"], ["", "a"], True),
        ((), ["anything"], ["anything", ""], False),
    ],
)
def test_stop_texts_cross_borders(stops: tuple[str, ...], pieces: list[str], shown: list[str], stopped: bool) -> None:
    assert fed(stops, pieces) == (shown, stopped)


@pytest.mark.parametrize("seed", range(20))
def test_stop_texts_as_if_the_text_were_whole(seed: int) -> None:
    chance = random.Random(seed)
    stops = tuple("".join(chance.choices("ab", k=chance.randrange(1, 5))) for _ in range(2))
    pieces = ["".join(chance.choices("abc", k=chance.randrange(4))) for _ in range(12)]
    whole = "".join(pieces)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    shown, stopped = fed(stops, pieces)
    assert stopped is bool(found)
    if not found:
        assert "".join(shown) == whole
    else:
        # a stop text that ends earlier may be seen before one that begins earlier is complete
        assert whole.startswith("".join(shown)) and len("".join(shown)) in [
            at for at in range(len(whole)) if any(whole.startswith(stop, at) for stop in stops)
        ]


# --- characters -------------------------------------------------------------------------------------------------------


def slow_tokenizer() -> Any:
    """One that only decodes, as tokenizers in Python do."""
    fast = byte_tokenizer()

    class Slow:
        is_fast = False

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return str(fast.decode(ids, skip_special_tokens=skip_special_tokens))

    return Slow()


TOKENIZERS = {"bytes": byte_tokenizer, "slow": slow_tokenizer, "fallback": fallback_tokenizer}


def encoder(name: str) -> Any:
    return fallback_tokenizer() if name == "fallback" else byte_tokenizer()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_never_half_a_character_wherever_the_prompt_ends(name: str) -> None:
    """After a prompt comes what its text goes on with, from the character on that the prompt's last bytes begin."""
    tokenizer, words = TOKENIZERS[name](), encoder(name)
    for seed in range(300):
        chance = random.Random(seed)
        text = "".join(chance.choices(PIECES, k=chance.randrange(1, 40)))
        ids = words(text)["input_ids"]
        cut = chance.randrange(len(ids) + 1)
        stream = TextStream(tokenizer, ids[:cut])
        pieces = [stream.step(token) for token in ids[cut:]]
        assert not any("\ufffd" in piece for piece in pieces), (seed, pieces)
        decoded = (words.decode(ids[: cut - held]) for held in range(4))
        assert text == next(before for before in decoded if not before.endswith("\ufffd")) + "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_that_are_no_character_do_no_harm(name: str) -> None:
    """Any tokens in any order: nothing raises, nothing is held for ever, and text around them comes through."""
    tokenizer, words = TOKENIZERS[name](), encoder(name)
    size = len(words)
    for seed in range(200):
        chance = random.Random(seed)
        ids = [chance.randrange(size) for _ in range(chance.randrange(2, 60))]
        cut = chance.randrange(len(ids))
        stream = TextStream(tokenizer, ids[:cut])
        for token in ids[cut:]:
            stream.step(token)
        after = words("the the猫x")["input_ids"]
        assert "".join(stream.step(token) for token in after).endswith("the the猫x")
        held = [stream.step(words("🐈")["input_ids"][-1]) for _ in range(3 * WINDOW)]
        assert len("".join(held)) > WINDOW and len(stream._ids) <= 2 * WINDOW


@pytest.mark.parametrize("name", ["bytes", "fallback"])
@pytest.mark.parametrize("text", ["a\ufffd", "\ufffdthe x", "\ufffd", "猫\ufffd\ufffd猫"])
def test_the_character_that_stands_for_no_character_is_one(name: str, text: str) -> None:
    """U+FFFD in a prompt is not taken for half a character, and a generated one is shown."""
    tokenizer = encoder(name)
    if name == "fallback":
        tokenizer.add_tokens("\ufffd")
    ids, after = tokenizer(text)["input_ids"], tokenizer("the é")["input_ids"]
    stream = TextStream(tokenizer, ids)
    assert "".join(map(stream.step, [*after, *ids])) == "the é" + text


def test_bytes_of_tokens() -> None:
    for tokenizer in (byte_tokenizer(), fallback_tokenizer()):
        for text in PIECES:
            ids = tokenizer(text)["input_ids"]
            parts = [token_bytes(tokenizer, token, token_text(tokenizer, token)) for token in ids]
            assert b"".join(part or b"" for part in parts) == text.encode()
    assert token_bytes(slow_tokenizer(), byte_tokenizer()("é")["input_ids"][0], "\ufffd") is None


def test_a_stop_is_found_in_the_last_tokens_as_in_the_whole_text() -> None:
    tokenizer = byte_tokenizer()
    for seed in range(200):
        chance = random.Random(seed)
        text = "".join(chance.choices(PIECES, k=20))
        begin = chance.randrange(len(text) - 3)
        stop = text[begin : begin + chance.randrange(1, 4)]
        ids = tokenizer(text)["input_ids"]
        finder = StopFinder(tokenizer, [], [stop])
        end = next(i for i in range(1, len(ids) + 1) if finder.is_in(ids[:i]))
        assert whole_text(tokenizer, [], ids[:end], [stop]) == text[: text.index(stop)]
        assert stop not in tokenizer.decode(ids[: end - 1])


def test_a_stop_at_the_beginning_is_found_as_it_is_shown() -> None:
    """As Llama's tokenizer: the first space of a text is left out, and an output is not the beginning of one."""
    from tokenizers import decoders

    tokenizer = fallback_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    prompt, output = tokenizer("a")["input_ids"], tokenizer(" the")["input_ids"]
    assert StopFinder(tokenizer, prompt, [" the"]).is_in(output)
    assert not StopFinder(tokenizer, prompt, ["a the"]).is_in(output)
    assert whole_text(tokenizer, prompt, output, [" the"]) == ""
    begun, rest = tokenizer("猫".join("a🐈"))["input_ids"][:-2], tokenizer("🐈")["input_ids"][-2:]
    assert StopFinder(tokenizer, begun, ["🐈"]).is_in(rest)
