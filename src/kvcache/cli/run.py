"""`kvcache run`: complete prompts, or a conversation, in the terminal. What is cached is told after each turn."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator
from contextlib import closing, suppress

from rich.console import Console
from rich.table import Table

from kvcache.caches import HybridCache
from kvcache.cli.conversation import CHUNK, Conversation, Turn
from kvcache.errors import KVCacheError
from kvcache.hf.loading import Loaded, load
from kvcache.hf.runner import Runner
from kvcache.hf.trial import tried_layout
from kvcache.spans import Sliding

__all__ = ["run"]

MAX_BRANCHES = 4
CHECKPOINT_INTERVAL = 64
"""Tokens between the states that recurrent layers keep for rewinding."""
HELP = """/help          this
/cache         tokens, blocks and bytes of each member of the cache
/undo          take the last turn back
/fork NAME     go on in a new branch that shares everything so far
/switch NAME   go on in another branch
/quit          leave (or Ctrl-D); Ctrl-C stops an answer"""


def run(
    model: str,
    *,
    prompts: list[str],
    max_tokens: int,
    kv_dtype: str | None,
    capacity: int,
    kernel: str | None,
    device: str,
) -> None:
    """Complete each of `prompts` in turn on one cache and stop; without any, talk until end of input."""
    if kernel is not None:
        os.environ["KVCACHE_KERNEL"] = kernel
    loaded = load(model, device=device)
    with _runner(loaded, kv_dtype, capacity, max_tokens) as runner:
        conversation = Conversation(loaded, runner, capacity)
        runner.warm()  # the time to the first token is the model's, not a compiler's
        console = Console(stderr=True, highlight=False, markup=False)  # names and errors may hold [brackets]
        for given in prompts:
            prompt = given.encode(errors="surrogateescape").decode(errors="replace")  # as in _talk
            pieces = conversation.complete(prompt, max_tokens)
            sys.stdout.write(prompt)
            _answer(conversation, pieces, console)
        if not prompts:
            _talk(conversation, max_tokens, console)


def _runner(loaded: Loaded, kv_dtype: str | None, capacity: int, max_tokens: int) -> Runner:
    # Sliding members keep two turns more than their window, so that /undo need not recompute them.
    layout = tried_layout(loaded.model)
    windows = [span.window for span in layout.spans if isinstance(span, Sliding)]
    return Runner(
        loaded.model,
        layout=layout,
        capacity=capacity,
        dtype=kv_dtype or "auto",
        max_sequences=MAX_BRANCHES,
        max_batch=min(max(CHUNK, layout.beginning), capacity),
        memory=max(windows) + 2 * max_tokens if windows else None,
        checkpoints=CHECKPOINT_INTERVAL,
    )


def _talk(conversation: Conversation, max_tokens: int, console: Console) -> None:
    """Read lines and answer them until end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() its editing keys
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that make no character become U+FFFD, as those of an answer do; to a tokenizer they would be no text.
        sys.stdin.reconfigure(errors="replace")
    how = "chat template" if conversation.has_template else "plain continuation: the model completes the text so far"
    console.print(f"{how}; /help for commands", style="dim")
    while True:
        try:
            line = input(f"{conversation.name}> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            console.print("/quit or Ctrl-D leaves", style="dim")
            continue
        except EOFError:
            sys.stdout.write("\n")
            return
        if line.split()[:1] == ["/quit"]:
            return
        try:
            if line.startswith("/"):
                _command(conversation, line, console)
            elif line.strip():
                _answer(conversation, conversation.say(line, max_tokens), console)
        except (ValueError, KVCacheError) as error:
            console.print(str(error), style="red")


def _command(conversation: Conversation, line: str, console: Console) -> None:
    command, _, argument = line.strip().partition(" ")
    match command:
        case "/help":
            console.print(HELP)
        case "/cache":
            console.print(_usage(conversation))
        case "/undo":
            console.print(f"took back {conversation.undo()} tokens", style="dim")
        case "/fork":
            conversation.fork(argument.strip())
            console.print(f"on branch {conversation.name}", style="dim")
        case "/switch":
            conversation.switch(argument.strip())
            console.print(f"on branch {conversation.name}", style="dim")
        case _:
            raise ValueError(f"{command} is no command; /help lists them")


def _answer(conversation: Conversation, pieces: Generator[str], console: Console) -> None:
    """Print an answer as it comes, then what it cost. Ctrl-C ends the answer, not the conversation."""
    with suppress(KeyboardInterrupt), closing(pieces):
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if conversation.last:
        cost = _cost(conversation.last, conversation.cache.usage().num_bytes)
        console.print(cost, style="dim", soft_wrap=True)


def _cost(turn: Turn, num_bytes: int) -> str:
    line = (
        f"[{turn.num_reused} tokens reused, {turn.num_computed} computed, first token after "
        f"{turn.seconds_to_first * 1e3:.0f} ms, {turn.tokens_per_second:.1f} tokens/s, "
        f"cache of {num_bytes / 2**20:.1f} MiB]"
    )
    return f"{line} {turn.note}" if turn.note else line


def _usage(conversation: Conversation) -> Table:
    cache = conversation.cache
    members = cache.members if isinstance(cache, HybridCache) else (cache,)
    table = Table("member", "tokens", "blocks", "of", "MiB", title=f"branches: {', '.join(conversation.names)}")
    for member in members:
        used = member.usage()
        name = str(getattr(member, "span", type(member).__name__))
        held = used.num_blocks - used.num_free_blocks
        table.add_row(name, f"{used.num_tokens}", f"{held}", f"{used.num_blocks}", f"{used.num_bytes / 2**20:.1f}")
    return table
