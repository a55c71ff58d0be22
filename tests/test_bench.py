"""`kvcache bench` on sizes too small to mean anything: shapes of tables, JSON, the picture, absent peers. No times."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvcache import backends, formats, kernels
from kvcache.bench import attention, bookkeeping, peers, put, report, shift
from kvcache.bench.machine import cache_bytes, describe, machine
from kvcache.bench.outside import Pipe, find_python
from kvcache.bench.paged import Case, Heads, Paged, Pool, make_batch, paged_visit
from kvcache.bench.plot import plot
from kvcache.bench.stream import Stream, read_bandwidth
from kvcache.bench.table import Table
from kvcache.bench.timing import Effort, alternate, timed
from kvcache.cli.app import app
from kvcache.cli.bench import shown
from kvcache.formats import Stored
from kvcache.kernels.reference import ReferenceKernel

HEADS = Heads(4, 2, 32)
EFFORT = Effort(rounds=2, visit_seconds=1e-4, max_seconds=1e-3)
BYTES = 2**16
TINY = attention.Sizes(
    heads=HEADS,
    block_size=16,
    large_block=32,
    decode=(Case(2, 64), Case(1, 128), Case(2, 32, is_resident=True)),
    format_case=Case(2, 64),
    prefill=(Case(1, 64, 64), Case(1, 128, 16)),
    block_case=Case(2, 128),
    block_sizes=(16, 128),
    contexts=(64, 128, 256),
    batches=(1, 2),
    batch_tokens=128,
    window=16,
    window_tokens=(64, 256),
    matmul=16,
    stream_bytes=BYTES,
    effort=EFFORT,
)
TORCH_PEERS = ("SDPA transformers", "SDPA repeat_kv", "SDPA best")


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return list(attention.tables(TINY, TORCH_PEERS))


def check_shape(table: Table) -> None:
    assert table.title
    assert table.rows
    assert len(set(table.columns)) == len(table.columns)
    for row in table.rows:
        assert len(row) == len(table.columns)
        numbers = [cell for cell in row if isinstance(cell, float)]
        assert np.isfinite(numbers).all() and min(numbers, default=0) >= 0


def column(table: Table, name: str) -> list[Any]:
    return [row[table.columns.index(name)] for row in table.rows]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_attention_has_a_table_for_each_question(tables: list[Table]) -> None:
    for table in tables:
        check_shape(table)
    assert [table.title.split(",")[0].split()[0] for table in tables] == [
        *("Limits", "Decode", "Formats", "Prefill", "Block", "Scaling", "Scaling", "A")
    ]


def test_decode_says_who_was_measured_and_what_moved(tables: list[Table]) -> None:
    decode = tables[1]
    assert column(decode, "contender")[:6] == ["kvcache", "kvcache, large blocks", *TORCH_PEERS, "stream"]
    # 2 x 64 tokens of 2 heads of 32, keys and values; and 2 rows of 4 heads of 32, read and written. Two bytes each.
    assert column(decode, "moved MB")[0] * 1e6 == 2 * 64 * 2 * 32 * 2 * 2 + 2 * 2 * 4 * 32 * 2
    assert column(decode, "kvcache is × as fast")[0] is None
    assert all(ratio > 0 for ratio in column(decode, "kvcache is × as fast")[1:5])


def test_formats_order_their_bytes_and_their_errors(tables: list[Table]) -> None:
    formats = tables[2]
    moved = dict(zip(column(formats, "format"), column(formats, "moved MB"), strict=True))
    assert moved["bf16"] > moved["q8_0"] > moved["fp8_e4m3"] > moved["q4_0"]
    errors = dict(zip(column(formats, "format"), column(formats, "error, relative"), strict=True))
    assert 0 < errors["bf16"] < errors["q8_0"] < errors["fp8_e4m3"] < errors["q4_0"] < 0.5


def test_absent_peers_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_VLLM_PYTHON", str(tmp_path / "none"))
    assert find_python("vllm") is None
    made = list(attention.tables(TINY._replace(prefill=TINY.prefill[:1], decode=TINY.decode[:1]), ("vLLM",)))
    (row,) = [row for row in made[1].rows if row[1] == "vLLM"]
    assert row[2:] == (None,) * 6
    assert any("vLLM is absent" in note and "benchmarks/peers.sh vllm" in note for note in made[1].notes)
    (table,) = put.tables(TINY_PUT)
    assert any("vLLM is absent" in note for note in table.notes)


def test_a_peer_whose_python_has_no_vllm_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_VLLM_PYTHON", sys.executable)
    (table,) = put.tables(TINY_PUT)
    assert any("vLLM is absent" in note and "No module named" in note for note in table.notes)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="nobody tells that a process was stopped")
def test_a_peer_is_stopped_while_nobody_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_VLLM_PYTHON", sys.executable)
    with contextlib.ExitStack() as stack:
        with pytest.raises(RuntimeError, match="No module named"):
            Pipe("vllm", 1, stack)
        child = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)
        assert child is not None
        assert child.si_code == os.CLD_STOPPED
    with pytest.raises(ChildProcessError):  # it has ended, and somebody has waited for it
        os.waitpid(child.si_pid, 0)


@pytest.mark.parametrize(("peer", "environment"), [("vLLM", "vllm"), ("llama.cpp", "llama")])
def test_peers_of_other_environments_take_part(peer: str, environment: str) -> None:
    """Their results are checked against the definition before they are measured, or they would be absent."""
    if find_python(environment) is None:
        pytest.skip(f"there is no environment; benchmarks/peers.sh {environment} makes it")
    sizes = TINY._replace(decode=(Case(2, 128), Case(1, 256)), prefill=(Case(1, 128, 16),), batches=(1, 2))
    made = list(attention.tables(sizes._replace(contexts=(128, 256), window_tokens=(128, 256)), (peer,)))
    for table in made:
        check_shape(table)
        assert not any("is absent" in note for note in table.notes)
    assert all(None not in row[:7] for row in (*made[1].rows, *made[3].rows) if row[1] == peer)


def test_a_peer_that_does_not_compile_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("no such template\nand much more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    made = list(attention.tables(TINY._replace(prefill=(), decode=TINY.decode[:1]), ("flex_attention",)))
    assert any("flex_attention is absent" in note and "no such template" in note for note in made[1].notes)


def test_unknown_peers_raise() -> None:
    with pytest.raises(ValueError, match=r"peers are \['flash'\]; expected some of SDPA"):
        attention.tables(TINY, ("flash",))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "device is 'tpu'; expected one of these, which are here: cpu"),
        ("cpu:0", "device is 'cpu:0'; expected one of these, which are here: cpu"),
        ("cuda:99", "device is 'cuda:99'; expected one of these, which are here: cpu"),
    ],
)
def test_devices_that_are_not_here_raise(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.tables(TINY, (), device)


def test_only_attention_is_measured_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="put is measured on the CPU, and the device is 'cuda'; attention takes one"):
        report.measure("put", "cuda")


class FakeEvent:
    """An event of a device that does what it is told at once."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0.0 if enable_timing else None

    def record(self) -> None:
        self.at = FakeEvent.clock

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


def test_calls_on_a_gpu_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, which compiles, is not among them: it would look like a slow contender's."""
    calls = []

    def call() -> None:
        calls.append(None)
        FakeEvent.clock += 100.0 if len(calls) == 1 else 0.25

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: zeros(4, dtype=torch.int32))
    visit = timed(call, torch.device("cuda"))
    assert visit(3) == [0.25] * 3
    assert len(calls) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_attention_on_a_gpu() -> None:
    made = list(attention.tables(TINY, (*TORCH_PEERS, "vLLM"), "cuda"))
    for table in made:
        check_shape(table)
    assert "kvcache: the triton kernel" in made[0].notes
    assert any("vLLM is absent: it is measured on the CPU only" in note for note in made[1].notes)
    errors = dict(zip(column(made[2], "format"), column(made[2], "error, relative"), strict=True))
    assert 0 < errors["bf16"] < errors["q8_0"] < errors["fp8_e4m3"] < errors["q4_0"] < 0.5


TINY_PUT = put.Sizes(HEADS, 2, 32, 2, ("bf16", "q8_0"), (1, 16, 64), 16, BYTES, EFFORT)


def test_put() -> None:
    (table,) = put.tables(TINY_PUT, ())
    check_shape(table)
    assert {row[:3] for row in table.rows} == {
        (*case, contender)
        for case in [("bf16", 16), ("q8_0", 16), ("bf16", 1), ("bf16", 64)]
        for contender in ("kernel op", "cache.put")
    }


def test_shift() -> None:
    (table,) = shift.tables(shift.Sizes(HEADS, 64, 2, 16, ("bf16", "q4_0"), BYTES, EFFORT))
    check_shape(table)
    assert [row[:2] for row in table.rows] == [
        (name, contender) for name in ("bf16", "q4_0") for contender in ("kernel op", "cache.remove")
    ]
    assert column(table, "moved MB")[0] * 1e6 == 2 * 64 * 2 * 32 * 2


def test_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "LENGTHS", (1024, 2048))
    monkeypatch.setattr(bookkeeping, "ROUNDS", 2)
    (table,) = bookkeeping.tables()
    check_shape(table)
    assert column(table, "tokens each") == [1024, 2048] * 9
    assert column(table, table.columns[-1])[::2] == [1.0] * 9


# --- what is measured is what is meant --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [Case(2, 64), Case(1, 64, 64), Case(2, 128, 16), Case(1, 128, 1, 32), Case(1, 64, 64, 16)]
)
def test_a_case_counts_what_its_batch_shows(case: Case) -> None:
    batch = make_batch(case, 16, np.arange(case.num_slots // 16, dtype=np.int32))
    sizes = np.minimum(batch.query_ends, case.num_tokens) - batch.query_begins
    assert case.num_pairs == sizes.sum()
    seen = {
        (i, position)
        for i, segment in enumerate(batch.segments)
        for row in segment.rows
        for position in range(batch.query_begins[row], batch.query_ends[row])
    }
    assert case.num_read == len(seen)


@pytest.mark.parametrize("case", [Case(2, 64), Case(1, 64, 64), Case(2, 128, 16)])
def test_everyone_computes_the_same(case: Case) -> None:
    """What the peers get is a pool with one block per sequence: their results and our reference's are the same."""
    pool = Pool(HEADS, 256)
    queries, form = pool.queries(case), formats.create("bf16", backends.create("torch"))
    paged = Paged(*(Stored(part, form, HEADS.head_dim) for part in pool.contiguous(case)[0]))
    batch = make_batch(case, case.num_tokens, np.arange(case.num_sequences, dtype=np.int32))
    expected = ReferenceKernel().attend(queries, paged.keys, paged.values, batch, scale=HEADS.head_dim**-0.5).float()
    given = peers.inputs(case, pool, queries)
    for name in TORCH_PEERS:
        out = peers.PEERS[name](given)(*given.copies[0])
        assert out.shape == (case.num_sequences, HEADS.num_query_heads, case.num_queries, HEADS.head_dim)
        assert (out.transpose(1, 2).reshape(expected.shape).float() - expected).abs().max() < 2e-2
    ours = kernels.choose(queries, paged.keys, paged.values).attend(
        queries, paged.keys, paged.values, batch, scale=HEADS.head_dim**-0.5
    )
    assert (ours.float() - expected).abs().max() < 2e-2


def test_calls_take_turns_over_parts_of_a_pool_larger_than_the_cache() -> None:
    pool = Pool(Heads(8, 8, 128), 8192)
    assert pool.num_slots * pool.stored(16).bytes_per_token >= 4 * cache_bytes()
    case = Case(1, 1024)
    copies = pool.num_copies(case)
    assert copies * case.num_read * 4 * 1024 >= 4 * cache_bytes()
    assert pool.num_copies(case._replace(is_resident=True)) == 1
    assert len({keys.data_ptr() for keys, _ in pool.contiguous(case)}) == copies
    paged_visit(case, pool.stored(16), pool.queries(case), block_size=16, copies=copies)(2)


def test_contenders_alternate_and_slow_ones_come_less_often() -> None:
    order: list[str] = []
    contenders = {name: timed(lambda name=name: order.append(name)) for name in ("a", "b")}
    contenders["slow"] = lambda count: [order.append("slow") or 10.0] * count
    seconds = alternate(contenders, Effort(rounds=5, visit_seconds=0.0, max_seconds=1.0))
    assert seconds["slow"] == 10.0
    warm = 2 + 2 + 1  # the slow one is not called a second time
    assert "".join(name[0] for name in order[warm:]) == "abs" * 3 + "ab" * 2


def test_stream_reads_all_it_says() -> None:
    stream = Stream(2**20)
    assert stream.num_bytes == 2**20
    assert stream.bandwidth(0.5) == 2**21
    assert len(stream.visit(3)) == 3
    assert read_bandwidth() > 1e8


def test_the_machine_is_described() -> None:
    described = describe()
    assert described["name"] == machine()
    assert described["torch"] == torch.__version__
    assert isinstance(described["cores"], int) and described["cores"] >= 1
    assert 2**16 <= cache_bytes() <= 2**33


# --- JSON and picture -------------------------------------------------------------------------------------------------


def test_json_goes_round(tables: list[Table]) -> None:
    text = json.dumps(report.as_json({"attention": tables}, "a note"))
    made = json.loads(text)
    assert made["note"] == "a note" and made["load_before"] is None
    assert made["machine"]["name"] == machine()
    back = report.from_json(made)["attention"]
    assert [table.title for table in back] == [table.title for table in tables]
    for left, right in zip(back, tables, strict=True):
        assert (left.columns, left.notes) == (right.columns, right.notes)
        for a, b in zip(left.rows, right.rows, strict=True):
            assert a == tuple(pytest.approx(cell, rel=1e-5) if isinstance(cell, float) else cell for cell in b)


def test_the_picture_is_well_formed_and_shows_each_case(tables: list[Table]) -> None:
    root = ET.fromstring(plot(tables, machine="A & B <1 core>"))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert "Attention over the cache: A & B <1 core>" in texts
    assert {
        "Roofline, GFLOP/s",
        "Scaling with context, GB/s",
        "Scaling with batch, GB/s",
        "kvcache",
        "SDPA best",
    } <= set(texts)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    circles = list(root.iter(f"{svg}circle"))
    # Decode and prefill of four contenders and ours in large blocks, contexts and batches of ours, and the legend.
    assert len(circles) == 5 * 4 + 3 + 3 + 2 + 5
    assert all(0 < float(c.attrib["cx"]) < width and 0 < float(c.attrib["cy"]) < height for c in circles)


@pytest.mark.parametrize("limit", [0.075, 5.0, 75.0, 86.0, 720.0, 7500.0])
def test_the_picture_has_an_axis_for_every_speed(tables: list[Table], limit: float) -> None:
    limits = tables[0]._replace(rows=[("memory", limit, None, ""), ("products", None, 100.0 * limit, "")])
    row = (64, "kvcache", 1.0, 1.0, limit / 2, 0.5, 1.0)
    others = [t._replace(rows=[row]) if t.title.startswith("Scaling") else t for t in tables[1:]]
    root = ET.fromstring(plot([limits, *others], machine="here"))
    assert any(text.text == f"stream limit: {limit:.1f} GB/s" for text in root.iter() if text.tag.endswith("text"))


def test_a_picture_needs_the_tables_of_attention() -> None:
    with pytest.raises(ValueError, match="no table begins with 'Limits'"):
        plot([Table("Other", ("a",), [(1,)])], machine="here")


# --- the command ------------------------------------------------------------------------------------------------------


def use_tiny(monkeypatch: pytest.MonkeyPatch, tables: list[Table]) -> None:
    monkeypatch.setattr(attention, "tables", lambda: tables)
    monkeypatch.setattr(put, "tables", lambda: [Table("Puts", ("format", "µs"), [("bf16", 12.5), ("f32", None)])])
    for module in (shift, bookkeeping):
        monkeypatch.setattr(module, "tables", lambda: [Table("Others", ("n",), [(1,)])])

    def missing() -> list[Table]:
        raise ImportError("it needs a package that is not here")

    monkeypatch.setitem(sys.modules, "kvcache.bench.serving", type(sys)("kvcache.bench.serving"))
    monkeypatch.setattr(sys.modules["kvcache.bench.serving"], "tables", missing, raising=False)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_without_a_name_the_names_are_listed() -> None:
    done = invoke()
    assert done.exit_code == 0
    assert all(name in done.stdout for name in (*report.NAMES, "all"))


def test_a_table_is_printed_with_the_machine(monkeypatch: pytest.MonkeyPatch, tables: list[Table]) -> None:
    use_tiny(monkeypatch, tables)
    done = invoke("put")
    assert machine() in done.stdout
    assert "Puts" in done.stdout and "12.5" in done.stdout
    (absent,) = [line for line in done.stdout.splitlines() if "f32" in line]
    assert " - " in absent


def test_json_to_standard_output_or_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tables: list[Table], tmp_path: Path
) -> None:
    use_tiny(monkeypatch, tables)
    for arguments in (("put", "--json"), ("put", "--json", "-")):
        assert json.loads(invoke(*arguments).stdout)["tables"]["put"][0]["rows"] == [["bf16", 12.5], ["f32", None]]
    made = tmp_path / "made.json"
    for arguments in (("put", "--json", str(made)), ("--json", str(made), "put", "--note", "loud")):
        assert "Puts" in invoke(*arguments).stdout
    assert json.loads(made.read_text())["note"] == "loud"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvcache.cli.bench.measure", pytest.fail)
    for option in ("--json", "--plot"):
        with pytest.raises(FileNotFoundError):
            invoke("attention", option, str(tmp_path / "no" / "folder"))


def test_a_device_that_will_not_do_leaves_no_file(tmp_path: Path) -> None:
    for name, message in (("put", "put is measured on the CPU"), ("attention", "device is 'tpu'; expected one of")):
        with pytest.raises(ValueError, match=message):
            invoke(name, "--device", "tpu", "--json", str(tmp_path / "made.json"))
    assert not list(tmp_path.iterdir())


def test_a_busy_machine_is_warned_about(monkeypatch: pytest.MonkeyPatch, tables: list[Table]) -> None:
    use_tiny(monkeypatch, tables)
    for load, is_busy in ((3.5, True), (0.1, False)):
        monkeypatch.setattr("kvcache.cli.bench.load_average", lambda load=load: load)
        done = invoke("put", "--json")
        assert json.loads(done.stdout)["load_before"] == load
        assert ("others use these cores" in done.stderr) is is_busy


def test_all_leaves_out_what_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, tables: list[Table], tmp_path: Path
) -> None:
    use_tiny(monkeypatch, tables)
    picture = tmp_path / "made.svg"
    done = invoke("all", "--json", "--plot", str(picture))
    assert [*json.loads(done.stdout)["tables"]] == ["attention", "put", "shift", "bookkeeping"]
    assert "serving is left out: it needs a package" in done.stderr
    ET.parse(picture)
    with pytest.raises(ImportError, match="a package that is not here"):
        invoke("serving")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "there is no measurement 'speed'; expected one of attention, put"),
        (["put", "shift"], "bench got put shift; expected one of"),
        (["--json"], "bench got no name"),
        (["put", "--json", "a", "b"], "after --json at most one file"),
        (["put", "--plot", "a.svg"], "--plot draws attention, and put was asked for"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    if arguments == ["--json"]:
        assert "Name one of" in invoke(*arguments).stdout
        return
    with pytest.raises(ValueError, match=message):
        invoke(*arguments)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "-"),
        (7, "7"),
        ("a", "a"),
        (1234.5, "1234"),
        (33.333, "33.3"),
        (1.5, "1.50"),
        (0.25, "0.250"),
        (0.0, "0.000"),
        (2e-5, "2.00e-05"),
    ],
)
def test_cells_show_three_digits(cell: Any, text: str) -> None:
    assert shown(cell) == text
