"""The machine that a table was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvcache.bench.table import Cell

__all__ = ["cache_bytes", "check_device", "describe", "load_average", "machine"]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PACKAGES = ("kvcache", "torch", "triton", "transformers", "numpy")
DEFAULT_CACHE_BYTES = 32 * 2**20
"""Where the system does not say how large its last cache is."""


def machine(device: str = "cpu") -> str:
    """Processor, cores that this process may use, system, Python, and the GPU if one is measured: one line."""
    gpu = "" if device == "cpu" else f"{_gpu(device)}, "
    return f"{gpu}{_processor()}, {_cores()} cores, {platform.system()}, Python {platform.python_version()}"


def describe(device: str = "cpu") -> dict[str, Cell]:
    """What whoever compares two machines wants to know, for the JSON: names, sizes in bytes, versions."""
    description: dict[str, Cell] = {
        "name": machine(device),
        "processor": _processor(),
        "cores": _cores(),
        "last_level_cache_bytes": cache_bytes(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            description[package] = version(package)
        except PackageNotFoundError:
            description[package] = None
    return description


def check_device(device: str) -> None:
    """Raises `ValueError` when this is neither "cpu" nor a GPU that PyTorch sees, "cuda" or "cuda:1"."""
    if device == "cpu":
        return
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = ["cpu", "cuda", *gpus] if gpus else ["cpu"]
    if device not in here:
        raise ValueError(f"device is {device!r}; expected one of these, which are here: {', '.join(here)}")


def load_average() -> float:
    """Processes that wanted a core in the last minute, on average; 0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def cache_bytes() -> int:
    """Bytes of the last-level cache that core 0 reaches; 32 MiB where the system does not say."""
    sizes = [_size(path.read_text().strip()) for path in CACHES.glob("index*/size")]
    return max(sizes, default=0) or DEFAULT_CACHE_BYTES


def _size(text: str) -> int:
    """Bytes of "32768K"."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def _cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gpu(device: str) -> str:
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.name} ({found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda})"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
