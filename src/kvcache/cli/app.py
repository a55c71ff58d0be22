"""The commands and their options."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["app"]

app = typer.Typer(
    name="kvcache",
    help="The KV cache of LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Dtype = Literal["f32", "f16", "bf16", "fp8_e4m3", "q8_0", "q4_0"]
_Table = StrEnum("_Table", ["bookkeeping"])


@app.command()
def run(
    model: Annotated[str, typer.Argument(help='"demo", a hub id, a folder, or a .gguf file.')],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Complete this and stop; give it again for more prompts on the same cache.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, each turn.")] = 128,
    kv_dtype: Annotated[Dtype | None, typer.Option(help="Format of keys and values [default: the model's]")] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens that a conversation may hold.")] = 8192,
    kernel: Annotated[str | None, typer.Option(help="Attention kernel [default: the fastest present]")] = None,
) -> None:
    """Complete prompts, or talk to a model in the terminal."""
    from kvcache.cli.run import run as start

    start(model, prompts=prompt or [], max_tokens=max_tokens, kv_dtype=kv_dtype, capacity=capacity, kernel=kernel)


@app.command()
def bench(
    name: Annotated[_Table, typer.Argument(help="What to measure.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure, and print a table with the machine's name."""
    from kvcache.bench.bookkeeping import measure
    from kvcache.bench.machine import machine

    assert name is _Table.bookkeeping  # the only one so far
    rows = measure()
    if as_json:
        print(json.dumps({"machine": machine(), name: [row._asdict() for row in rows]}, indent=1))
        return
    table = Table(title=f"start_forward, one token for each of {rows[0].num_sequences} sequences\n{machine()}")
    for heading in ("cache", "block size", "tokens each", "ms", "ratio to shortest"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        first = next(r for r in rows if (r.cache, r.block_size) == (row.cache, row.block_size))
        ratio = row.seconds / first.seconds
        table.add_row(row.cache, f"{row.block_size}", f"{row.num_tokens}", f"{row.seconds * 1e3:.3f}", f"{ratio:.2f}")
    Console().print(table)
