"""GGUF metadata -> a transformers fast tokenizer.

Gemma's vocabulary of 262,144 words is what makes this slow elsewhere: its file stores no merges, so 514,906 of them are
derived from the words (1 s), and a `tokenizer.json` of 33 MB takes longer to parse (1.3 s) than the `tokenizers` model
takes to build from Python lists (0.6 s). So the merges alone are kept in the user's cache, as pairs of word numbers
(4 MB), under the digest of the file's header: another vocabulary has another digest. A cached file that fails its own
digest is ignored and written again.

Other tokenizers are small or bring their merges; transformers' own converter builds them from the same metadata.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.errors import NotSupported
from kvcache.hf.gguf import CorruptFile, GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["build_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # what sentencepiece writes for a space
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(
    file: GGUFFile, cache: Path | None, *, say: Callable[[str], None]
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `file` describes, with its chat template; None where the file has no vocabulary.

    `cache` is a folder for what is slow to derive (None: keep nothing). `say` is told what is going on. Raises
    `CorruptFile` for contradicting metadata and `NotSupported` for an unknown kind, naming it.
    Cost for Gemma's vocabulary: 1.0 s, the first time 2.0 s.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    words = file.strings("tokenizer.ggml.tokens")
    if kind is None or not words:
        return None
    settings = _settings(file, words)
    if kind == "llama" and file.architecture in ("gemma", "gemma2", "gemma3"):
        return _gemma(file, words, settings, cache)
    return _converted(file, words, settings, say)


def _settings(file: GGUFFile, words: list[str]) -> dict[str, Any]:
    """Keyword arguments of the tokenizer: its special tokens, whether BOS and EOS are added, its chat template."""
    settings: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and not 0 <= token < len(words):
            raise CorruptFile(f"{file.path}: the {key} token is {token} and the vocabulary has {len(words)} words")
        settings[name] = None if token is None else words[token]
    for name in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{name}" in file.metadata:
            settings[name] = file.metadata[f"tokenizer.ggml.{name}"]
    if file.metadata["tokenizer.ggml.model"] == "llama":
        settings.setdefault("add_bos_token", True)  # older files say nothing, and llama.cpp adds it
    if "tokenizer.chat_template" in file.metadata:
        settings["chat_template"] = file.metadata["tokenizer.chat_template"]
    return settings


def _gemma(file: GGUFFile, stored: list[str], settings: dict[str, Any], cache: Path | None) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    # Runs of spaces are stored as spaces; the tokenizer sees text whose spaces are already replaced.
    words = [_SPACE * len(word) if word.isspace() and " " in word else word for word in stored]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = _merges(words, vocabulary, None if cache is None else cache / f"{file.header_digest().hex()[:32]}.merges")
    make: Any = GemmaTokenizer  # annotated for a list of strings, made for pairs
    tokenizer = make(vocab=vocabulary, merges=merges, **settings)
    kinds = file.numbers("tokenizer.ggml.token_type")
    backend = tokenizer.backend_tokenizer
    pairs = list(zip(stored, kinds, strict=False))
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word, k in pairs if k == _CONTROL])
    backend.add_tokens(
        [AddedToken(word, normalized=False) for word, k in pairs if k == _USER_DEFINED and word in vocabulary]
    )
    return tokenizer  # type: ignore[no-any-return]


def _merges(words: list[str], vocabulary: dict[str, int], kept: Path | None) -> list[tuple[str, str]]:
    pairs = None if kept is None else _read_pairs(kept, len(words))
    if pairs is not None:
        left, right = pairs.T.tolist()
        return list(zip(map(words.__getitem__, left), map(words.__getitem__, right), strict=True))
    merges = derive_merges(vocabulary)
    if kept is not None:
        _write_pairs(kept, np.array([(vocabulary[a], vocabulary[b]) for a, b in merges], dtype="<i4"))
    return merges


def derive_merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to cut a word into two words, in merge order: by the word's number, then longest left part first.

    Gemma's scores do not follow its merge order; the numbers do. O(total length of the words), 1 s for Gemma's.
    """
    merges = []
    for word in sorted(vocabulary, key=vocabulary.__getitem__):
        for cut in range(len(word) - 1, 0, -1):
            left = word[:cut]
            if left in vocabulary:
                right = word[cut:]
                if right in vocabulary:
                    merges.append((left, right))
    return merges


def _read_pairs(kept: Path, num_words: int) -> np.ndarray | None:
    """Pairs of word numbers `[M, 2]` as written by `_write_pairs`, or None where there are none that can be trusted."""
    try:
        stored = kept.read_bytes()
    except OSError:
        return None
    digest, payload = stored[:32], stored[32:]
    if len(payload) % 8 or sha256(payload).digest() != digest:
        return None
    pairs = np.frombuffer(payload, dtype="<i4").reshape(-1, 2)
    return None if pairs.size and not 0 <= pairs.min() <= pairs.max() < num_words else pairs


def _write_pairs(kept: Path, pairs: np.ndarray) -> None:
    """Digest and pairs, in one step for any reader. A folder that cannot be written costs time, never correctness."""
    payload = pairs.tobytes()
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as handle:
            handle.write(sha256(payload).digest() + payload)
        Path(handle.name).replace(kept)


def _converted(
    file: GGUFFile, words: list[str], settings: dict[str, Any], say: Callable[[str], None]
) -> PreTrainedTokenizerBase:
    """Byte-level BPE (llama 3, qwen), sentencepiece (llama 2), unigram (T5): transformers' converter on our reader."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = file.metadata["tokenizer.ggml.model"]
    try:
        try:
            from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
        except ImportError:  # not a public name: other versions of transformers may have moved it
            say(f"tokenizer ({kind}) by transformers' own reader, which is slow")
            return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        described = {"tokens": words, "tokenizer_type": kind}
        for key in ("pre", "precompiled_charsmap", "add_space_prefix"):
            value = file.metadata.get(f"tokenizer.ggml.{key}")
            if value is not None:
                described[_RENAMED[key]] = value
        for key in ("scores", "token_type"):
            if numbers := file.numbers(f"tokenizer.ggml.{key}"):
                described[key] = numbers
        if merges := file.strings("tokenizer.ggml.merges"):
            described["merges"] = merges
        backend, more = convert_gguf_tokenizer(file.architecture, described)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    except (ValueError, KeyError, TypeError) as error:
        raise NotSupported(
            f"{file.path}: its tokenizer (model {kind!r}, pre {file.metadata.get('tokenizer.ggml.pre')!r}) cannot be "
            f"built: {error}. Pass tokenizer=... of the original model, or False"
        ) from error


_RENAMED = {
    "pre": "pre_tokenizer_type",
    "precompiled_charsmap": "precompiled_charsmap",
    "add_space_prefix": "add_prefix_space",
}
