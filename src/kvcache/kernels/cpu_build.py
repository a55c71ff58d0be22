"""The build of the CPU kernel: C++ compiled for this very machine, once.

`torch.utils.cpp_extension` compiles `cpu.cpp` and the headers in `cpp/`, on first use (about half a minute) or ahead of
time by `kvcache build`. The library is kept in

    $KVCACHE_HOME, else $XDG_CACHE_HOME/kvcache, else ~/.cache/kvcache
        kernels/cpu-<isa>-<digest of the sources, flags, versions and CPU>/*.so

| KVCACHE_ISA | built with                       | for                                                   |
|-------------|----------------------------------|-------------------------------------------------------|
| (unset)     | -march=native                    | the best of this machine: bf16 products, AMX          |
| `avx512`    | -march=native -mno-avx512bf16    | AVX-512 as Skylake to Ice Lake have it                |
| `avx2`      | -march=native -mno-avx512f       | AVX2, FMA, F16C                                       |
| `scalar`    | -march=native -DKVCACHE_PORTABLE | vector types that any compiler turns into what it has |

A Zen 4 gets -DKVCACHE_FETCH_SECOND: lines are asked for into its second-level cache (`cpp/ahead.h`).

Without a compiler one warning is logged. `make sanitize` runs the kernel's tests under address and undefined-behaviour
sanitizers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcache.errors import NotSupported
from kvcache.home import cache_home

__all__ = ["ISAS", "Built", "build", "is_loaded", "isa_name", "operators"]

ISAS = ("avx512", "avx2", "scalar")

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",  # several builds may be loaded at once, and none may use another's functions
    "-fno-gnu-unique",  # nor its statics
    "-w",  # PyTorch's headers warn
)
_X86_FLAGS = ("-mprefer-vector-width=512",)
_ISA_FLAGS = {
    "native": (),
    "avx512": ("-mno-avx512bf16",),
    "avx2": ("-mno-avx512f",),
    "scalar": ("-DKVCACHE_PORTABLE",),
}

_log = logging.getLogger("kvcache")


class Built(NamedTuple):
    """A compiled kernel: where it lies, its instruction set, and the seconds that compiling took (0: it was there)."""

    path: Path
    isa: str
    seconds: float


_loaded: list[Any] = []  # one at most: torch.ops namespace, or why there is none (str)
# Namespaces whose operators this process has, and where they lie. PyTorch aborts when another file brings them again:
# one from another KVCACHE_HOME, or the first one's where two processes compiled at once and this one was second.
_registered: dict[str, Path] = {}
_lock = threading.RLock()  # for both of them, and for the PATH while it is another


def build(*, isa: str | None = None, verbose: bool = False) -> Built:
    """Compiles the kernel for this machine, unless it is there already, and loads it: `operators` gives it from now on.

    isa: one of `ISAS`; `None`: what `KVCACHE_ISA` names, else the best. verbose: show the compiler's output.
    Raises `ValueError` for an unknown isa, and `NotSupported` for one that this CPU has not, when it cannot be
    compiled, with the compiler's words, and when what was compiled before cannot be loaded.
    """
    name = isa_name(isa)
    if name == "avx512" and not torch.cpu._is_avx512_supported():
        raise NotSupported("KVCACHE_ISA is 'avx512' and this CPU has no AVX-512; unset it, or name avx2 or scalar")
    with _lock:
        return _built(name, verbose)


def isa_name(isa: str | None = None) -> str:
    """What to build, if not `isa` then what `KVCACHE_ISA` names. Raises `ValueError` where there is no such build."""
    isa = isa or os.environ.get("KVCACHE_ISA") or "native"
    if isa not in _ISA_FLAGS:
        raise ValueError(f"KVCACHE_ISA is {isa!r}; expected one of {', '.join(ISAS)}, or leave it unset")
    return isa


def _flags(isa: str) -> tuple[str, ...]:
    """Compiler flags; `KVCACHE_CFLAGS` adds to them (`make sanitize` does)."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    common = [flag for flag in _FLAGS if is_x86 or flag not in _X86_FLAGS]
    tuning = ("-DKVCACHE_FETCH_SECOND",) if _is_zen4(_cpu()) else ()
    return (*common, *tuning, *_ISA_FLAGS[isa], *os.environ.get("KVCACHE_CFLAGS", "").split())


def _is_zen4(cpu: str) -> bool:
    """By family and features: compilers of 2022 take it for a Zen 3, and no other kind was measured to gain."""
    return "AuthenticAMD" in cpu and bool(re.search(r"\bcpu family\s*: 25;", cpu)) and "avx512f" in cpu


def _sources() -> list[Path]:
    return [_FOLDER / "cpu.cpp", *sorted((_FOLDER / "cpp").glob("*.h"))]


def _cpu() -> str:
    """What decides the code that is compiled: the CPU's maker, family, name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model name", "flags", "Features", "CPU part")
    return "; ".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder(isa: str) -> Path:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*_flags(isa), torch.__version__, _cpu(), os.environ.get("CXX", "c++")):
        digest.update(part.encode() + b"\0")
    return cache_home() / "kernels" / f"cpu-{isa}-{digest.hexdigest()[:16]}"


def _built(name: str, verbose: bool) -> Built:
    folder = _folder(name)
    namespace = _namespace(folder)
    seconds = 0.0
    if namespace not in _registered:
        path = folder / f"{namespace}.so"
        if path.exists():
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise NotSupported(
                    f"the CPU kernel that lies in {folder} cannot be loaded: {error.__cause__ or error}; remove that "
                    f"folder, and it is built again"
                ) from error
        else:
            started = time.perf_counter()
            _compile(name, path, verbose)
            seconds = time.perf_counter() - started
        _registered[namespace] = path
    library = getattr(torch.ops, namespace)
    found = library.isa()
    if name == "avx512" and not found.startswith("avx512"):
        raise NotSupported(f"KVCACHE_ISA is 'avx512' and what was compiled is {found}; look at KVCACHE_CFLAGS and CXX")
    if library.has_amx() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        library.set_amx(True)
    if library.uses_amx():
        found += "+amx"
    _loaded[:] = [library]
    _log.info("CPU kernel: %s, %s", found, _registered[namespace])
    return Built(_registered[namespace], found, seconds)


def _namespace(folder: Path) -> str:
    return "kvcache_" + folder.name.replace("-", "_")


def _compile(isa: str, target: Path, verbose: bool) -> None:
    """Compiles and loads in a folder of its own, then renames it: processes that build at once do not meet."""
    folder = target.parent
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise NotSupported(f"there is no C++ compiler ({compiler!r} is not on the PATH; apt install g++, or set CXX)")
    from torch.utils import cpp_extension

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise NotSupported(f"the CPU kernel cannot be put into {folder.parent}: {error}; set KVCACHE_HOME") from error
    if sys.stderr.isatty():
        sys.stderr.write("kvcache: compiling the CPU kernel for this machine, once; it takes about half a minute\n")
    path = os.environ.get("PATH", "")
    try:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"  # where pip puts ninja
        cpp_extension.load(
            _namespace(folder),
            [str(_FOLDER / "cpu.cpp")],
            extra_cflags=[*_flags(isa), f"-DKVCACHE_NAMESPACE={_namespace(folder)}"],
            extra_ldflags=["-fopenmp", *(f for f in _flags(isa) if f.startswith("-fsanitize"))],
            build_directory=str(scratch),
            verbose=verbose,
            is_python_module=False,
        )
        for library in scratch.glob("*.so"):  # PyTorch names that of a second attempt in one process otherwise
            library.rename(scratch / target.name)
    except BaseException as error:  # Ctrl-C, too, leaves nothing
        shutil.rmtree(scratch, ignore_errors=True)
        if not isinstance(error, (OSError, RuntimeError, subprocess.SubprocessError)):
            raise
        raise NotSupported(
            f"the CPU kernel could not be compiled: {error}; `kvcache build --verbose` shows what {compiler!r} says, "
            f"and CXX names another"
        ) from error
    finally:
        os.environ["PATH"] = path
    if folder.exists() and not target.exists():
        shutil.rmtree(folder)
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster; what this one has loaded stays loaded
        shutil.rmtree(scratch, ignore_errors=True)


def is_loaded() -> bool:
    """Whether `operators` would answer at once, with operators."""
    return bool(_loaded) and not isinstance(_loaded[0], str)


def operators() -> Any:
    """The operators that were loaded last, or why there are none (str). `KVCACHE_ISA` says which when none were."""
    if not _loaded:
        with _lock:  # whoever waited finds what the first one got
            if not _loaded:
                try:
                    build()
                except (OSError, NotSupported) as error:
                    _log.warning("%s; PyTorch's operators are used instead, which are slower", error)
                    _loaded[:] = [str(error)]
    return _loaded[0]
