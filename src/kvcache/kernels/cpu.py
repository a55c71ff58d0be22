"""Attention over paged storage on the CPU, in C++ compiled for this very machine.

What is compiled is `cpu.cpp` and the headers in `cpp/`; read `cpp/attend.h` first. It is built on first use by
`torch.utils.cpp_extension` (about 10 s), or ahead of time by `build`, and kept in

    $KVCACHE_HOME, else $XDG_CACHE_HOME/kvcache, else ~/.cache/kvcache
        kernels/cpu-<isa>-<digest of the sources, flags, versions and CPU>/*.so

| KVCACHE_ISA | built with                                       | for                                                     |
|-------------|--------------------------------------------------|---------------------------------------------------------|
| (unset)     | -march=native                                    | the best of this machine                                |
| `avx512`    | the same, refused where the CPU has none         | AVX-512; bf16 products where it has BF16 and VBMI       |
| `avx2`      | -march=native -mno-avx512f                       | AVX2, FMA, F16C                                         |
| `scalar`    | -march=native -DKVCACHE_PORTABLE                 | vector types that any compiler turns into what it has   |

Arithmetic follows the queries: f32 and f16 queries are computed in f32 throughout; bf16 queries use bf16 products with
f32 sums where the CPU has them and the format is exact in bf16 (bf16, fp8_e4m3, and the integers of q8_0 and q4_0).
Without a compiler one warning is logged, and the kernel refuses.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.formats import GROUP_SIZE, Stored
from kvcache.kernels import AttentionBatch, Kernel, queries_per_head
from kvcache.spec import Array

__all__ = ["ISAS", "CpuKernel", "build"]

ISAS = ("avx512", "avx2", "scalar")
TILE = 64
"""Slots that the C++ decodes at a time: positions are padded to whole tiles for it. The same number is in `cpp/pack.h`."""
MAX_DIM = 1024

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-w",
)
_ISA_FLAGS = {"native": (), "avx512": (), "avx2": ("-mno-avx512f",), "scalar": ("-DKVCACHE_PORTABLE",)}
_FORMATS = {"f32": 0, "f16": 1, "bf16": 2, "fp8_e4m3": 3, "q8_0": 4, "q4_0": 5}
_VALUES_PER_UNIT = {"f32": 1, "f16": 2, "bf16": 2, "fp8_e4m3": 4, "q8_0": GROUP_SIZE, "q4_0": GROUP_SIZE}
_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger("kvcache")


# --- building ---------------------------------------------------------------------------------------------------------


class Built(NamedTuple):
    """A compiled kernel: where it lies, its instruction set, and the seconds that compiling took (0: it was there)."""

    path: Path
    isa: str
    seconds: float


_loaded: dict[str, Any] = {}  # by KVCACHE_ISA: torch.ops namespace, or why there is none (str)


def build(*, isa: str | None = None, verbose: bool = False) -> Built:
    """Compiles the kernel for this machine, unless it is there already, and loads it.

    isa: one of `ISAS`; `None`: what `KVCACHE_ISA` names, else the best. verbose: show the compiler's output.
    Raises `ValueError` for an unknown isa and `RuntimeError` when it cannot be compiled, with the compiler's words.
    """
    name = _isa_name(isa)
    folder = _folder(name)
    path = folder / f"{_namespace(folder)}.so"
    started = time.perf_counter()
    exists = path.exists()
    if exists:
        torch.ops.load_library(str(path))
    else:
        _compile(name, path, verbose)
    operators = getattr(torch.ops, _namespace(folder))
    found = operators.isa()
    if name == "avx512" and not found.startswith("avx512"):
        raise RuntimeError(f"KVCACHE_ISA is 'avx512' and this CPU ({_cpu()}) has no AVX-512; unset it, or name avx2")
    _loaded[name] = operators
    _log.info("CPU kernel: %s, %s", found, path)
    return Built(path, found, 0.0 if exists else time.perf_counter() - started)


def _isa_name(isa: str | None) -> str:
    isa = isa or os.environ.get("KVCACHE_ISA") or "native"
    if isa not in _ISA_FLAGS:
        raise ValueError(f"KVCACHE_ISA is {isa!r}; expected one of {', '.join(ISAS)}, or leave it unset")
    return isa


def _flags(isa: str) -> tuple[str, ...]:
    """Compiler flags; `KVCACHE_CFLAGS` adds to them (`make sanitize` does)."""
    native = (
        _FLAGS if platform.machine() in ("x86_64", "AMD64") else tuple(f for f in _FLAGS if "vector-width" not in f)
    )
    return (*native, *_ISA_FLAGS[isa], *os.environ.get("KVCACHE_CFLAGS", "").split())


def _sources() -> list[Path]:
    return [_FOLDER / "cpu.cpp", *sorted((_FOLDER / "cpp").glob("*.h"))]


def _cpu() -> str:
    """What decides the code that -march=native gives: the CPU's name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "; ".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder(isa: str) -> Path:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*_flags(isa), torch.__version__, _cpu(), os.environ.get("CXX", "c++")):
        digest.update(part.encode() + b"\0")
    if home := os.environ.get("KVCACHE_HOME"):
        root = Path(home)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"
    return root / "kernels" / f"cpu-{isa}-{digest.hexdigest()[:16]}"


def _namespace(folder: Path) -> str:
    return "kvcache_" + folder.name.replace("-", "_")


def _compile(isa: str, target: Path, verbose: bool) -> None:
    """Compiles and loads, in a folder of its own, and renames that, so that processes that build at once do not meet."""
    folder = target.parent
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"there is no C++ compiler ({compiler!r} is not on the PATH; apt install g++, or set CXX)")
    from torch.utils import cpp_extension

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    if sys.stderr.isatty():
        sys.stderr.write("kvcache: compiling the CPU kernel for this machine (once, about 10 s)\n")
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
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RuntimeError(f"the CPU kernel could not be compiled: {error}") from error
    finally:
        os.environ["PATH"] = path
    if folder.exists() and not target.exists():
        shutil.rmtree(folder)
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster; what this one has loaded stays loaded
        shutil.rmtree(scratch, ignore_errors=True)


def _operators() -> Any:
    """The loaded operators, or why there are none (str), found out once."""
    name = os.environ.get("KVCACHE_ISA") or "native"
    found = _loaded.get(name)
    if found is None:
        try:
            build()
        except RuntimeError as error:
            _log.warning("%s; PyTorch's operators are used instead, which are slower", error)
            _loaded[name] = str(error)
        found = _loaded[name]
    return found


# --- the kernel -------------------------------------------------------------------------------------------------------


@final
class CpuKernel(Kernel):
    """Attention in C++ over blocks in place; CPU tensors of PyTorch, every format, queries f32, f16 or bf16."""

    name = "cpu"

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[AttentionBatch, list[Tensor]] = WeakKeyDictionary()

    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """Why these arrays cannot be read. The first call that finds nothing else to object compiles the kernel."""
        if not isinstance(queries, Tensor) or queries.dtype not in _QUERY_DTYPES:
            return "it takes queries of f32, f16 or bf16"
        for what, stored in (("keys", keys), ("values", values)):
            array, unit = stored.array, _VALUES_PER_UNIT[stored.format.name]
            if not isinstance(array, Tensor) or not array.is_cpu:
                return f"it reads torch tensors on the CPU and the {what} are elsewhere"
            if stored.head_dim % unit or stored.head_dim > MAX_DIM or array.stride(3) != 1:
                return (
                    f"it reads rows of at most {MAX_DIM} adjacent values, a multiple of {unit} in {stored.format.name}, "
                    f"and the {what} have {stored.head_dim}"
                )
        found = _operators()
        return found if isinstance(found, str) else None

    def attend(
        self,
        queries: Array,
        keys: Stored,
        values: Stored,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """See `Kernel.attend`. Cost: one pass over the visible rows, at the speed of memory when queries are few."""
        queries_per_head(queries, keys, values)
        plan = self._plans.get(batch)
        if plan is None:
            plan = self._plans[batch] = _plan(batch)
        rows: Tensor = queries if queries.is_cpu else queries.cpu()
        out = _operators().attend(
            rows if rows.stride(2) == 1 else rows.contiguous(),
            keys.array,
            values.array,
            _FORMATS[keys.format.name],
            _FORMATS[values.format.name],
            values.head_dim,
            plan,
            batch.block_size,
            scale,
            softcap or 0.0,
            None if sinks is None else sinks.to(device="cpu", dtype=torch.float32).contiguous(),
        )
        return out if queries.is_cpu else out.to(queries.device)


def _plan(batch: AttentionBatch) -> list[Tensor]:
    """The batch as `cpu.cpp` takes it: one row per segment, and flat int32 arrays into which the rows point."""
    table: list[list[int]] = []
    blocks, rows, positions, bounds = ([] for _ in range(4))  # type: list[list[NDArray[np.int32]]]
    num_blocks = num_rows = num_padded = 0
    for segment in batch.segments:
        irregular = segment.positions is not None
        table.append(
            [
                num_blocks,
                segment.num_slots,
                segment.first_position,
                num_padded if irregular else -1,
                num_rows,
                len(segment.rows),
            ]
        )
        blocks.append(segment.block_table)
        num_blocks += len(segment.block_table)
        rows.append(_ordered(segment.rows, batch))
        num_rows += len(segment.rows)
        if segment.positions is not None:
            padded = np.full(-(-segment.num_slots // TILE) * TILE, -1, np.int32)
            padded[: segment.num_slots] = segment.positions[: segment.num_slots]
            tiles = padded.reshape(-1, TILE)
            lowest = np.where(tiles < 0, np.iinfo(np.int32).max, tiles).min(1)
            positions.append(padded)
            bounds.append(np.stack([lowest, tiles.max(1)], 1).astype(np.int32).reshape(-1))
            num_padded += len(padded)
    flat = (_joined(parts) for parts in (blocks, rows, positions, bounds))
    return [torch.tensor(table), *flat, _joined([batch.query_begins]), _joined([batch.query_ends])]


def _ordered(rows: NDArray[np.int64], batch: AttentionBatch) -> NDArray[np.int32]:
    """Rows by what they see, so that neighbours see the same tiles."""
    ends = batch.query_ends[rows]
    if len(rows) > 1 and (ends[1:] < ends[:-1]).any():
        rows = rows[np.lexsort((batch.query_begins[rows], ends))]
    return rows.astype(np.int32)


def _joined(parts: list[NDArray[np.int32]]) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.int32)
    joined = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
    return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.int32))
