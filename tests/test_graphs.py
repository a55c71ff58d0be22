"""Decode steps captured and replayed. Without a GPU, a tape of operators and launches does what a CUDA graph does."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not (IS_INTERPRETED or torch.cuda.is_available()), reason="there is no GPU, and Triton's interpreter is off"
)

from families import FAMILIES  # noqa: E402  after the skips
from kvcache import Engine, Request, SamplingParams  # noqa: E402
from kvcache.hf import graphs  # noqa: E402
from kvcache.hf.graphs import DecodeGraphs  # noqa: E402
from kvcache.hf.runner import Runner, Work  # noqa: E402
from kvcache.kernels import triton_kernel  # noqa: E402

FORBIDDEN = ("aten.item", "aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh", "aten.is_nonzero")
"""They wait for the device, or copy from memory of the host: CUDA refuses to capture them."""


class Tape(TorchDispatchMode):
    """What a CUDA graph keeps: operators and launches with their tensors, no Python. `library`: launches go here."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = _Launches(library, self)
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(FORBIDDEN):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}\nand more")
        out = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **(kwargs or {}))), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self.calls:
                call()


class _Launches:
    """The device code, whose launches are made and noted; with a tape kept and not made, as while one is captured.

    What a launch is compiled for (its name and options) must have been launched before: loading code is refused by CUDA
    while a graph is captured.
    """

    def __init__(self, library: Any, tape: Tape | None = None) -> None:
        self._library = library
        self._tape = tape
        self.loaded: set[Any] = set() if tape is None else library.loaded

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if not name.endswith(("_items", "_rows")):
            return function
        tape, loaded = self._tape, self.loaded

        def launch(grid: tuple[int, ...], given: Any, options: dict[str, Any]) -> None:
            code = (name, *sorted((key, str(value)) for key, value in options.items()))
            if tape is None:
                loaded.add(code)
                function[grid](*given, **options)
            elif code not in loaded:
                raise RuntimeError(f"operation not permitted when stream is capturing: {name} is not loaded")
            else:
                tape.calls.append(lambda: function[grid](*given, **options))

        class Launcher:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *given, **options: launch(grid, given, options)

        return Launcher()


Call = Callable[[], Any]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The graphs that are made: CUDA's where there is a GPU, else tapes on the CPU, in Triton's interpreter."""
    made: list[Call] = []
    real = graphs.CAPTURES["cuda"]
    if IS_INTERPRETED:
        library = _Launches(triton_kernel._device_code())
        monkeypatch.setattr(triton_kernel, "_device_code", lambda: library)

    def taped(call: Call) -> Call:
        call()  # loads what is launched
        tape = Tape(triton_kernel._device_code())
        with monkeypatch.context() as patch, tape:
            patch.setattr(triton_kernel, "_device_code", lambda: tape.library)
            logits = call()
        logits.fill_(float("nan"))  # nothing has been computed by a capture
        return tape.replay

    def captures(device: torch.device) -> Callable[[Call], Call]:
        own = taped if IS_INTERPRETED else real(device)

        def capture(call: Call) -> Call:
            made.append(own(call))
            return made[-1]

        return capture

    monkeypatch.setenv("KVCACHE_KERNEL", "triton")
    monkeypatch.setitem(graphs.CAPTURES, DEVICE, captures)
    monkeypatch.setattr(graphs, "MIN_SLOTS", 16)
    return made


def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts rows of the steps that go through graphs from now on."""
    counted: list[int] = []
    own = DecodeGraphs.run

    def run(self: DecodeGraphs, batch: Any, tokens: Any) -> Tensor:
        counted.append(len(tokens))
        return own(self, batch, tokens)

    monkeypatch.setattr(DecodeGraphs, "run", run)
    return counted


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "qwen3"])
def test_an_engines_tokens_are_those_without_graphs(
    family: str, made: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and leave, contexts outgrow their graph, spans forget, a prefix is shared."""
    model = FAMILIES[family].build().to(DEVICE)
    prompts = [[*range(1, 13)], [5, 6, 7], [*range(1, 10), 40], [8]]

    def tokens() -> list[Any]:
        with Engine(model, kv_bytes="1MiB", dtype="f32", kv_dtype="f32", max_batch_tokens=16, block_size=4) as engine:
            found: dict[str, list[int]] = {}
            for i, prompt in enumerate(prompts):
                engine.add(Request(f"{i}", prompt, SamplingParams(max_tokens=4 + 2 * i, ignore_eos=True)))
                for event in engine.step():
                    found.setdefault(event.request_id, []).append(getattr(event, "token_id", -1))
            while any(found.get(f"{i}", [0])[-1] != -1 for i in range(len(prompts))):
                for event in engine.step():
                    found.setdefault(event.request_id, []).append(getattr(event, "token_id", -1))
            engine.check()
            return sorted(found.items())

    counted = replays(monkeypatch)
    captured = tokens()
    assert len(made) > 1 and len(counted) > 2 * len(made)
    monkeypatch.setattr("kvcache.hf.runner_call.CAPTURES", {})
    assert captured == tokens()
    assert all(len(found) == 5 + 2 * int(name) for name, found in captured)


def test_one_graph_serves_steps_of_fewer_sequences_and_longer_contexts(made: list[Call]) -> None:
    model = FAMILIES["llama"].build().to(DEVICE)
    with Runner(model, capacity=256, max_sequences=4, dtype="f32") as runner, torch.inference_mode():
        runner.forward([Work(i, 0, [3 + i, 7, 9]) for i in range(4)])
        for position, count in ((3, 4), (4, 3), (5, 3), (20, 1)):
            works = [Work(i, position, [11 + i]) for i in range(count)]
            kept = runner.forward(works).clone()
            for i in range(count):
                runner.cache.remove(i, position)
            runner._model._graphs, own = None, runner._model._graphs
            torch.testing.assert_close(kept, runner.forward(works), rtol=1e-5, atol=1e-5)
            runner._model._graphs = own
        assert own is not None and len(own) == len(made) == 2  # 4 rows in order; 1 row with a gap


def test_a_model_that_waits_for_the_device_runs_as_before(made: list[Call], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvcache")
    model = FAMILIES["llama"].build().to(DEVICE)
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x) * float(x.sum().item() * 0 + 1)
    with Runner(model, capacity=64, dtype="f32") as runner:
        runner.forward([Work(0, 0, [3, 1])])
        first = runner.forward([Work(0, 2, [4])])
        runner.cache.remove(0, 2)
        again = runner.forward([Work(0, 2, [4])])
    assert torch.equal(first, again) and not made
    assert "decode steps are not captured in CUDA graphs: " in caplog.text
    assert "and more" not in caplog.text  # one line is enough


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "cuda", "cublas"],
)
def test_a_size_without_memory_runs_as_before_and_others_are_captured(
    failure: RuntimeError, made: list[Call], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = graphs.CAPTURES[DEVICE](torch.device(DEVICE))
    failures = [failure]

    def short_of_memory(call: Call) -> Call:
        if failures:
            raise failures.pop()
        return capture(call)

    monkeypatch.setitem(graphs.CAPTURES, DEVICE, lambda _: short_of_memory)
    with Runner(FAMILIES["llama"].build().to(DEVICE), capacity=64, max_sequences=2, dtype="f32") as runner:
        for sequence in range(2):
            runner.forward([Work(sequence, 0, [3, 1])])
        first = runner.forward([Work(0, 2, [4])])
        runner.cache.remove(0, 2)
        assert torch.equal(first, runner.forward([Work(0, 2, [4])])) and not made
        runner.forward([Work(0, 3, [4]), Work(1, 2, [4])])
    assert len(made) == 1
    assert "no memory to capture decode steps of" in caplog.text


def test_sequences_out_of_order_have_graphs_of_their_own(made: list[Call]) -> None:
    with Runner(FAMILIES["llama"].build().to(DEVICE), capacity=64, max_sequences=2, dtype="f32") as runner:
        for sequence in range(2):
            runner.forward([Work(sequence, 0, [3, 1, 4, 1, 5])])
        runner.forward([Work(0, 5, [9])])
        runner.cache.remove(0, 1, 2)  # leaves a hole
        first = runner.forward([Work(0, 5, [7])])
        assert len(made) == 2
        runner.cache.remove(0, 5)
        assert torch.equal(first, runner.forward([Work(0, 5, [7])]))  # replayed
        runner.forward([Work(1, 5, [9])])
        assert len(made) == 2


def test_members_out_of_order_one_after_the_other(made: list[Call]) -> None:
    """Layers that see all lose an early token, which those with a window have forgotten; then both lose a late one."""
    with Runner(
        FAMILIES["gemma3"].build().to(DEVICE), capacity=64, max_sequences=1, dtype="f32", block_size=4
    ) as runner:
        runner.forward([Work(0, 0, list(range(3, 25)))])
        for number, (begin, end) in enumerate(((1, 2), (18, 19))):
            runner.cache.remove(0, begin, end)
            first = runner.forward([Work(0, 21, [9])])
            dense = [member.tables.sequences[0].is_dense for member in runner.members]
            assert dense == ([True, False], [False, False])[number]
            assert len(made) == number + 1
            runner.cache.remove(0, 21)
            assert torch.equal(first, runner.forward([Work(0, 21, [9])]))  # replayed
        assert len(made) == 2


def test_graphs_go_with_their_runner(made: list[Call]) -> None:
    runner = Runner(FAMILIES["llama"].build().to(DEVICE), capacity=64, dtype="f32")
    runner.forward([Work(0, 0, [3, 1])])
    runner.forward([Work(0, 2, [4])])
    assert runner._model._graphs is not None
    (step,) = map(weakref.ref, runner._model._graphs._steps.values())
    runner.close()
    assert step() is None


def test_why_a_capture_failed_is_told_and_its_stream_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a capture that has failed with an error of its own, and PyTorch then stays on the capture's stream."""
    streams = ["own"]

    class Graph:
        def replay(self) -> None: ...
        def capture_begin(self, *_: Any, **__: Any) -> None: ...
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextlib.contextmanager
    def stream(name: str) -> Iterator[None]:
        before = list(streams)
        streams.append(name)
        try:
            yield
        finally:
            streams[:] = before

    fakes = {"CUDAGraph": Graph, "Stream": str, "stream": stream, "graph_pool_handle": tuple}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "_rehearse", lambda _: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def fails() -> None:
        assert streams[-1] == "cuda:1"
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphs._CudaCapture(torch.device("cuda:1"))(fails)
    assert streams == ["own"]
    with pytest.raises(RuntimeError, match="due to a previous error"):
        graphs._CudaCapture(torch.device("cuda:1"))(lambda: None)


def test_a_call_that_waits_is_refused_before_its_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch warns on the thread that waits; what other threads do meanwhile, and other warnings, do not count."""
    modes: list[int | str] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    calls: list[str] = []

    def wait() -> None:
        calls.append("waits")
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)

    def elsewhere() -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert modes[-1] == "warn"

    with pytest.warns(UserWarning, match="another"):
        graphs._rehearse(lambda: (elsewhere(), warnings.warn("another", UserWarning, stacklevel=1)))
    with pytest.raises(RuntimeError, match=r"the model waits for the device, at .*test_graphs\.py:\d+"):
        graphs._CudaCapture.__call__(object.__new__(graphs._CudaCapture), wait)
    assert calls == ["waits"] * 2 and modes == [0, "warn", 0, "warn", 0]


def test_other_kernels_are_left_alone(made: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "reference")
    with Runner(FAMILIES["llama"].build().to(DEVICE), capacity=64, dtype="f32") as runner:
        runner.forward([Work(0, 0, [3, 1])])
        runner.forward([Work(0, 2, [4])])
        runner.forward([Work(0, 3, [4])])
        assert runner._model._graphs is not None and not len(runner._model._graphs)
    assert not made
