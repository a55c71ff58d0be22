"""The package as a whole: what it exports, what importing it costs, what it requires.

Import tests run in a fresh interpreter, since this one has long imported everything. Their seconds are not asserted
(no test is timed): `python -X importtime -c "import kvcache"` shows them, and `docs/index.md` says how to read it.
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import kvcache
import kvcache.hf

# Section 3 of the design, as far as it exists without an engine.
PUBLIC = [
    # spans
    "Full",
    "Sliding",
    "Chunked",
    # what goes in and comes out
    "Batch",
    "Media",
    "History",
    "CacheConfig",
    "Usage",
    "SequenceUsage",
    "Match",
    "Device",
    # caches
    "Cache",
    "CausalCache",
    "EncoderCache",
    "RecurrentCache",
    "HybridCache",
    # one sequence
    "SequenceView",
    "Appended",
    "View",
    "PackedView",
    "ContiguousKV",
]
ERRORS = ["KVCacheError", "CacheFull", "NotSupported", "CorruptState", "CorruptEntry"]
OPTIONAL = ["torch", "mlx", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "typer", "rich"]
PURE = ["errors", "spans", "sequences", "spec"]


def fresh(program: str) -> str:
    """Run a program in a new interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_exported(name: str) -> None:
    assert name in kvcache.__all__
    assert getattr(kvcache, name).__name__ == name


@pytest.mark.parametrize("name", ERRORS)
def test_errors_live_in_one_module_under_one_root(name: str) -> None:
    errors = import_module("kvcache.errors")
    assert issubclass(getattr(errors, name), errors.KVCacheError)


def test_every_exported_name_is_listed_by_dir() -> None:
    assert set(kvcache.__all__) <= set(dir(kvcache))
    assert set(kvcache.hf.__all__) <= set(dir(kvcache.hf))
    assert len(kvcache.__all__) == len(set(kvcache.__all__))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Pagoda"):
        _ = kvcache.Pagoda


def test_import_takes_numpy_alone() -> None:
    """Nothing but the standard library, NumPy and ourselves is loaded by `import kvcache`."""
    program = """
import sys, numpy
before = set(sys.modules)
import kvcache
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(n for n in new - set(sys.stdlib_module_names) - {"numpy", "kvcache"} if not n.startswith("_cython")))
"""
    assert fresh(program).split() == []


def test_public_names_work_with_numpy_alone() -> None:
    """As on a machine where no extra is installed: every name of the core resolves, none asks for an extra."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))   # None in sys.modules: importing it raises ImportError
import kvcache
for name in {PUBLIC}:
    getattr(kvcache, name)
from kvcache.hf.loading import load
try:
    load("demo")
except ImportError as error:
    print(error)
"""
    assert "kvcache.hf.load needs torch, which is not installed; pip install 'kvcache[hf]'" in fresh(program)


@pytest.mark.parametrize("module", PURE)
def test_pure_module_loads_no_tensor_library(module: str) -> None:
    program = f"import sys, kvcache.{module}; print(*(name for name in {OPTIONAL} if name in sys.modules))"
    assert fresh(program).split() == []


def test_typed_and_installed_as_such() -> None:
    assert (Path(kvcache.__file__).parent / "py.typed").is_file()
    assert kvcache.__version__ == importlib.metadata.version("kvcache")


def test_numpy_is_the_only_requirement() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert [requirement.split(">")[0] for requirement in project["dependencies"]] == ["numpy"]
