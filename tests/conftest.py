"""What every test shares: no network, a fixed number of threads, fixed seeds, a deterministic hypothesis.

Environment variables are set before any test module is imported, because torch, tokenizers and the hub client read
them once.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two threads everywhere: sums are split the same way on every machine, and CI has two cores.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["MKL_NUM_THREADS"] = "2"
# Threads that wait sleep: on a machine that is busy with something else, spinning ones make each small operation wait.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton reads it when a kernel is defined. Without a GPU its kernels run through its interpreter, and only where a test
# asks for them. torch.compile, the other user of Triton, writes C++ on the CPU and was seen not to mind.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SEED = 20_240_229

# The same examples in every run, and no deadline: speed is measured by `kvcache bench`, never by a test.
settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# For a developer who hunts: HYPOTHESIS_PROFILE=search finds new examples each time.
settings.register_profile("search", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same state of each global generator; torch and mlx only where already imported."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002  transformers and others draw from the global state
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)
    if (mlx := sys.modules.get("mlx.core")) is not None:
        mlx.random.seed(SEED)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of this test's own, seeded."""
    return np.random.default_rng(SEED)


@pytest.fixture(params=["native", "turned", "avx512", "avx2", "scalar"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path of the C++ that this machine can run; `turned`: without AMX where there is one, and with it elsewhere,
    where plain loops stand for the unit."""
    torch = pytest.importorskip("torch")
    from kvcache import NotSupported
    from kvcache.kernels import cpu_build

    name = str(request.param)
    if name == "avx2" and not torch.cpu._is_avx512_supported():
        pytest.skip("without AVX-512 it is the code of native")
    monkeypatch.setenv("KVCACHE_ISA", "" if name in ("native", "turned") else name)
    monkeypatch.setattr(cpu_build, "_loaded", [])  # and in the end as it was
    try:
        found = cpu_build.build().isa
    except NotSupported as error:
        if "could not be compiled" in str(error):
            raise
        pytest.skip(str(error))
    assert name not in ("avx512", "avx2", "scalar") or found == name
    operators = cpu_build.operators()
    before = operators.uses_amx()
    operators.set_amx(before != (name == "turned"))
    if name == "turned" and operators.uses_amx() == before:
        pytest.skip("needs bf16 products in this CPU")
    yield name
    operators.set_amx(before)
