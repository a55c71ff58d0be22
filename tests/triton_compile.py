"""Compiles the Triton kernel's launches for a GPU that is not here: `python triton_compile.py CAPABILITY [CASE...]`.

Without cases: all of `MATRIX`, which takes some minutes and is what the claims in `triton_kernel.py` are made from.

A process of its own, because Triton is either interpreted or compiled for the whole of a process. The launches are
those that `launch`, `put` and `shift` make, with their own arguments; only the last step, loading the program onto
a GPU, is left out. Prints one JSON line for each program: its shared memory, registers, stack, and what its PTX has.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from kernel_cases import Shape, array, decode, make_world, prefill, stored
from kvcache.kernels import Rotation, triton_jit, triton_kernel

MATRIX = [
    f"{dtype},{name},{name},{dim},{dim},{group},16,{kind}"
    for dtype in ("bf16", "f16", "f32")
    for name in ("f32", "f16", "bf16", "fp8_e4m3", "q8_0", "q4_0")
    for dim, group in ((64, 1), (128, 4), (256, 8), (512, 4))
    for kind in ("decode", "prefill", "put")
    if name not in {"bf16": ("f32", "f16"), "f16": ("f32", "bf16"), "f32": ("f16", "bf16")}[dtype]
] + [
    f"bf16,{name},{name},{dim},{dim},{group},{block_size},{kind}"
    for name in ("bf16", "fp8_e4m3", "q8_0", "q4_0")
    for dim, group, block_size in ((64, 64, 128), (128, 4, 128), (128, 71, 16), (256, 32, 128), (512, 32, 128))
    for kind in ("decode", "prefill")
]
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands where a jitted function stands: compiles instead of launching, and reports."""

    def __init__(self, function: triton.JITFunction, about: str) -> None:
        self._function = function
        self._about = about

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiled":
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        kernel = self._function.warmup(*arguments, grid=(1, 1), **options)
        usage = resources(kernel.asm["cubin"])
        ptx = kernel.asm["ptx"]
        counts = {name: len(re.findall(name, ptx)) for name in ("wgmma.mma", "mma.sync", "cp.async.c")}
        name = f"{self._about} {self._function.__name__}"
        sys.stdout.write(json.dumps({"name": name, "shared": kernel.metadata.shared, **usage, **counts}) + "\n")


def resources(cubin: bytes) -> dict[str, int]:
    path = Path("program.cubin")
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[-1]
    return {"registers": int(registers), "stack": int(stack)}


def compile_case(case: str) -> None:
    """`dtype,key format,value format,D,Dv,group,block size,decode|prefill|put`."""
    dtype, key_format, value_format, *numbers, kind = case.split(",")
    D, Dv, group, block_size = map(int, numbers)
    sequence = prefill(300, 100) if kind == "prefill" else decode(1100)
    world = make_world(Shape(2, group, D, Dv, block_size), [sequence], seed=1)
    queries = array("torch", world.queries, dtype)
    keys = stored("torch", world.keys, key_format, world.seen_slots)
    values = stored("torch", world.values, value_format, world.seen_slots)
    kernel = triton_kernel.TritonKernel()
    for name in ("attend_items", "merge_items", "put_rows", "shift_rows"):
        setattr(LIBRARY, name, Compiled(getattr(triton_jit, name), case))
    if kind == "put":
        new_keys, new_values = (torch.zeros(3, 2, dim, dtype=queries.dtype) for dim in (D, Dv))
        kernel.put(keys, values, np.arange(3), new_keys, new_values)
        kernel.shift(keys, np.arange(3), np.array([1, 0, 2]), Rotation(np.ones(D // 2), False, 0))
        return
    plan = kernel.plan(world.batch, queries.device, triton_kernel.geometry_of(queries, keys, values))
    out = torch.empty(*queries.shape[:2], Dv, dtype=queries.dtype)
    sinks = torch.zeros(queries.shape[1])
    triton_kernel.launch(plan, queries, keys, values, out, scale=0.1, softcap=5.0, sinks=sinks)


LIBRARY = SimpleNamespace(tl=triton_jit.tl)

if __name__ == "__main__":
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(Driver(capability))
    triton_kernel._device_code = lambda: LIBRARY
    triton_kernel._shared_memory = lambda _device: SHARED_MEMORY[capability]
    triton_kernel._native_fp8 = lambda _device: capability >= 89
    triton_kernel._refusal_of = lambda *_: None
    for case in sys.argv[2:] or MATRIX:
        compile_case(case)
