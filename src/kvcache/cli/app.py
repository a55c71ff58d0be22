"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

import typer

from kvcache.errors import needing

__all__ = ["app"]

app = typer.Typer(
    name="kvcache",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Dtype = Literal["f32", "f16", "bf16", "fp8_e4m3", "q8_0", "q4_0"]
Kernel = Literal["triton", "cpu", "sdpa", "reference"]


def _located(model: str) -> str:
    """`model` as it is given. A path that leads nowhere is told before PyTorch is imported, which takes seconds."""
    from kvcache.hf.model_files import locate

    locate(model)
    return model


Model = Annotated[str, typer.Argument(callback=_located, help='"demo", a hub id, a folder, or a .gguf file.')]
Device = Annotated[str, typer.Option(help='Where the model computes, as "cuda".')]


def _tell_version(is_asked: bool) -> None:
    if not is_asked:
        return
    try:
        typer.echo(f"kvcache {version('kvcache')}")
    except PackageNotFoundError:
        typer.echo("kvcache, not installed: run from its sources")
    raise typer.Exit


@app.callback()
def kvcache(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version and stop.")
    ] = False,
) -> None:
    """The KV cache of LLM inference."""


@app.command()
def run(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Complete this and stop; give it again for more prompts on the same cache.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, each turn.")] = 128,
    kv_dtype: Annotated[Dtype | None, typer.Option(help="Format of keys and values [default: the model's]")] = None,
    capacity: Annotated[int, typer.Option(min=16, help="Tokens that a conversation may hold.")] = 8192,
    kernel: Annotated[Kernel | None, typer.Option(help="Attention kernel [default: the fastest present]")] = None,
    device: Device = "cpu",
) -> None:
    """Complete prompts, or talk to a model in the terminal."""
    with needing("cli,demo", "kvcache run"):
        from kvcache.cli.run import run as start

    start(
        model,
        prompts=prompt or [],
        max_tokens=max_tokens,
        kv_dtype=kv_dtype,
        capacity=capacity,
        kernel=kernel,
        device=device,
    )


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVCACHE_API_KEY", help="What clients must send as a bearer token.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let others use it without a key.")] = False,
    name: Annotated[str | None, typer.Option(help="What clients call the model [default: its own name]")] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(help='For keys and values, as "4GiB" [default: a quarter of what is free]')
    ] = None,
    dtype: Annotated[Literal["auto", "f32", "f16", "bf16"], typer.Option(help="Type of the weights.")] = "bf16",
    device: Device = "cpu",
    kv_dtype: Annotated[Dtype | None, typer.Option(help="Format of keys and values [default: the model's]")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block [default: the engine's]")] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Completions that run at a time.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 512,
    prefix_cache: Annotated[bool, typer.Option(help="Compute no prefix twice.")] = True,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model: a minute later, and faster on some CPUs.")
    ] = False,
    max_open: Annotated[int, typer.Option(min=1, help="Completions under way or waiting; beyond that, 503.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request; beyond that, 413.")] = 8 * 2**20,
    request_seconds: Annotated[float, typer.Option(min=0.1, help="A request takes at most; then 503.")] = 600.0,
    grace_seconds: Annotated[float, typer.Option(min=0.0, help="When stopping, what runs may go on for.")] = 30.0,
) -> None:
    """Serve a model over HTTP to the clients of OpenAI and Ollama."""
    from kvcache.server import Settings

    settings = Settings(
        host=host,
        port=port,
        api_key=api_key,
        insecure=insecure,
        max_open=max_open,
        max_body_bytes=max_body_bytes,
        request_seconds=request_seconds,
        grace_seconds=grace_seconds,
    )
    with needing("demo,serve", "kvcache serve"):
        from kvcache.cli.serve import serve as start  # brings PyTorch: what is wrong above is told before

    start(
        model,
        settings,
        name=name,
        kv_bytes=kv_bytes,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        compile=compile,
    )


@app.command()
def build(
    isa: Annotated[
        Literal["avx512", "avx2", "scalar"] | None, typer.Option(help="Instruction set [default: the best here]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the compiler says.")] = False,
) -> None:
    """Compile the CPU kernel now, not when it is first needed."""
    with needing("torch", "kvcache build"):
        from kvcache.kernels.cpu_build import build as compiled

    found = compiled(isa=isa, verbose=verbose)
    print(f"{found.isa}, {f'compiled in {found.seconds:.0f} s' if found.seconds else 'there already'}: {found.path}")


@app.command()
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME [FILE]",
            help="attention, put, shift, bookkeeping, serving, or all; and the file that --json writes.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, to FILE or to standard output.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Draw attention: roofline and scaling.")] = None,
    note: Annotated[str | None, typer.Option(help="What a reader of the JSON should know about the run.")] = None,
    device: Annotated[str, typer.Option(help="Where attention is measured: cpu, or cuda for a GPU.")] = "cpu",
) -> None:
    """Measure, and print tables with the machine's name. Without a name: what there is to measure."""
    with needing("cli", "kvcache bench"):
        from kvcache.cli.bench import asked, names_with_help
        from kvcache.cli.bench import bench as start

    if not arguments:
        typer.echo(names_with_help())
        return
    start(asked(arguments, as_json=as_json, plot=plot, note=note, device=device))
