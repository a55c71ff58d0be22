"""`kvcache bench serving` on a tiny model and tiny requests: shapes of tables and what contenders do. No times."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from families import FAMILIES
from kvcache import Engine
from kvcache.bench import serving
from kvcache.bench.outside import LLAMA, VLLM
from kvcache.bench.serving import EngineContender, GenerateContender, Workload
from kvcache.bench.table import Table

WORKLOADS = (Workload("one", 1, 0, 9, 3), Workload("three that share", 3, 16, 5, 4))


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return list(
        serving.tables(
            FAMILIES["gemma3"].build(),
            workloads=WORKLOADS,
            prefix=Workload("prefix", 1, 64, 3, 1),
            strangers=Workload("strangers", 2, 0, 8, 3),
            rounds=2,
            pairs=2,
            everyone=False,
        )
    )


def test_each_question_has_a_table_of_numbers(tables: list[Table]) -> None:
    speed, prefix, anatomy, overhead = tables
    assert [row[0] for row in speed.rows] == ["one", "three that share"]
    assert speed.columns == (
        "requests",
        "kvcache [s]",
        "transformers [s]",
        "kvcache [tok/s]",
        "transformers / kvcache",
    )
    assert [row[0] for row in anatomy.rows] == [1, 8]
    for table in tables:
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert all(isinstance(cell, str) or cell > 0 for cell in row)
    assert "64 + 3" in prefix.title and "strangers" in overhead.title
    for row in speed.rows:
        assert row[4] == pytest.approx(row[2] / row[1])


def test_contenders_make_the_same_tokens() -> None:
    """What is compared is the same work: greedy, and all tokens although the model would stop."""
    model = FAMILIES["llama"].build()
    made: list[list[int]] = []
    generate = type(model).generate

    def noted(self: torch.nn.Module, ids: torch.Tensor, **options: object) -> torch.Tensor:
        out: torch.Tensor = generate(self, ids, **options)
        made.extend(row[ids.shape[1] :].tolist() for row in out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "generate", noted)
        timing = GenerateContender(model).complete([[5, 6, 7], [5, 6, 8]], 7)
    assert timing.first is not None and 0 < timing.first <= timing.total
    with Engine(model, kv_bytes="1MiB") as engine:
        ours = EngineContender(engine)
        assert ours.complete([[5, 6, 7]], 2).first
        done = engine.generate([[5, 6, 7], [5, 6, 8]], max_tokens=7, ignore_eos=True)
    assert [list(one.token_ids) for one in done] == made


def test_peers_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCACHE_VLLM_PYTHON", raising=False)
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho no module named llama_cpp >&2\nexit 3\n")
    fails.chmod(fails.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KVCACHE_LLAMA_PYTHON", str(fails))
    with ExitStack() as stack:
        peers, notes = serving._peers(serving._Prompts(FAMILIES["llama"].build()), stack)
    assert peers == []
    assert f"{VLLM} is absent: it has no environment here; make it with `benchmarks/peers.sh vllm`" in notes[0]
    assert f"{LLAMA} is absent: its process ended: no module named llama_cpp" in notes[1]


def test_a_peer_without_its_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers run, as the peers' own pythons would run them, and say what is missing."""
    monkeypatch.setenv("KVCACHE_VLLM_PYTHON", os.path.realpath(sys.executable))
    monkeypatch.setenv("KVCACHE_LLAMA_PYTHON", os.path.realpath(sys.executable))
    with ExitStack() as stack:
        _, notes = serving._peers(serving._Prompts(FAMILIES["llama"].build()), stack)
    assert "refuses 'hello': " in notes[0]
    assert "refuses 'hello': ImportError: No module named 'llama_cpp'" in notes[1]


def test_a_peer_that_dies_is_lost_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCACHE_VLLM_PYTHON", raising=False)
    dies = tmp_path / "python"
    answers = ('{"version": "0.3"}', '{"seconds": 0.1}', '{"seconds": 0.1}')
    lines = "".join(f"read line\necho '{answer}'\n" for answer in answers)
    dies.write_text(f"#!/bin/sh\n{lines}read line\necho illegal instruction >&2\nexit 4\n")
    dies.chmod(dies.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KVCACHE_LLAMA_PYTHON", str(dies))
    prompts = serving._Prompts(FAMILIES["llama"].build())
    with ExitStack() as stack:
        peers, _ = serving._peers(prompts, stack)
        ours = EngineContender(stack.enter_context(prompts.engine()))
        table = serving._speed((ours, *peers), WORKLOADS, prompts, 2, ())
    assert [row[2] for row in table.rows] == [None, None] and [row[4] for row in table.rows] == [None, None]
    assert all(isinstance(row[1], float) for row in table.rows)
    assert table.notes == (f"{LLAMA} was lost among one: its process ended: illegal instruction",)
