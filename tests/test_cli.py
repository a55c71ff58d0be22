"""The command line on a tiny model: a folder with random weights and a tokenizer of single characters."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from engines import fallback_tokenizer
from families import FAMILIES
from kvcache import formats, kernels
from kvcache.cli import main
from kvcache.cli.app import app
from kvcache.cli.conversation import Conversation
from kvcache.hf.loading import Loaded, load
from kvcache.hf.runner import Runner

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save(folder: Path, family: str, template: str | None = None) -> Path:
    """A model of the family and a tokenizer of single characters, as `from_pretrained` reads them."""
    alphabet = [chr(c) for c in range(32, 127)]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], fuse_unk=False, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(folder)
    FAMILIES[family].build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture
def conversation(folder: Path) -> Iterator[Conversation]:
    loaded = load(folder, progress=False)
    with Runner(loaded.model, capacity=200, max_sequences=4, max_batch=64, memory=100) as runner:
        yield Conversation(loaded, runner, 200)
        runner.cache.check()


def said(conversation: Conversation, text: str, max_tokens: int = 6) -> str:
    return "".join(conversation.say(text, max_tokens))


def test_a_turn_computes_only_what_is_new(conversation: Conversation) -> None:
    said(conversation, "abc")
    assert conversation.last is not None
    assert (conversation.last.num_reused, conversation.last.num_computed) == (0, 3)
    said(conversation, "de")
    # 3 + 6 tokens were said; the last of the answer was never computed.
    assert (conversation.last.num_reused, conversation.last.num_computed) == (8, 3)
    assert len(conversation.branch.said) == 3 + 6 + 2 + 6


def test_answers_do_not_depend_on_what_was_cached(conversation: Conversation) -> None:
    first = "".join(conversation.complete("abcdefghijklmnopqrst", 8))
    "".join(conversation.complete("abcdefghijXYZ", 8))
    assert conversation.last is not None
    assert conversation.last.num_reused == 10
    assert "".join(conversation.complete("abcdefghijklmnopqrst", 8)) == first


def test_undo_and_say_again(conversation: Conversation) -> None:
    said(conversation, "abc")
    first = said(conversation, "def")
    assert conversation.undo() == 9
    assert said(conversation, "def") == first
    conversation.undo()
    conversation.undo()
    assert conversation.branch.said == []
    with pytest.raises(ValueError, match="nothing to undo"):
        conversation.undo()


def test_branches_go_their_own_ways_from_shared_blocks(conversation: Conversation) -> None:
    said(conversation, "abcdefghijklmnopqrstuvwxyz")
    before = conversation.cache.usage()
    conversation.fork("other")
    assert conversation.cache.usage().num_free_blocks == before.num_free_blocks  # by reference
    there = said(conversation, "1")
    conversation.switch("main")
    here = said(conversation, "2")
    conversation.undo()
    assert said(conversation, "1") == there
    conversation.undo()
    assert said(conversation, "2") == here
    with pytest.raises(ValueError, match="expected one of main, other"):
        conversation.switch("nowhere")
    with pytest.raises(ValueError, match="expected a new branch name"):
        conversation.fork("other")


def test_chat_template_keeps_what_was_said(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, "llama", TEMPLATE), progress=False)
    with Runner(loaded.model, capacity=300, max_sequences=4, max_batch=64) as runner:
        conversation = Conversation(loaded, runner, 300)
        said(conversation, "hello")
        said(conversation, "again")
        assert conversation.last is not None
        assert conversation.last.num_reused > len("<user>hello<assistant>")
        assert [m["role"] for m in conversation.branch.messages] == ["user", "assistant"] * 2


def test_a_turn_that_fails_or_is_left_keeps_the_chat_in_order(tmp_path: Path) -> None:
    strict = TEMPLATE.replace("{% for", "{% if 'bad' in messages[-1]['content'] %}{{ 1 | no }}{% endif %}{% for", 1)
    strict = strict.replace("{{ 1 | no }}", "{{ raise_exception('not that') }}")
    loaded = load(save(tmp_path, "llama", strict), progress=False)
    with Runner(loaded.model, capacity=120, max_sequences=4, max_batch=64) as runner:
        conversation = Conversation(loaded, runner, 120)
        for text, message in (("x" * 200, "capacity of 120"), ("bad", "template refuses this: not that")):
            with pytest.raises(ValueError, match=message):
                said(conversation, text)
            assert (conversation.branch.messages, conversation.branch.turns) == ([], [])
        pieces = conversation.say("hello", 20)
        first = next(pieces)
        pieces.close()  # as Ctrl-C does
        assert conversation.branch.messages == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first},
        ]
        said(conversation, "again")
        assert [m["role"] for m in conversation.branch.messages] == ["user", "assistant"] * 2


def test_bytes_that_make_no_character_do_not_end_the_conversation() -> None:
    tokenizer = fallback_tokenizer()
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    loaded = Loaded(tf.LlamaForCausalLM(config).eval(), tokenizer, "bytes", "a model object")
    with Runner(loaded.model, capacity=120, max_sequences=1, max_batch=64) as runner:
        texts = [said(Conversation(loaded, runner, 120), text, 60) for text in ("the", "a猫")]
    assert all(texts)
    assert "\ufffd" in "".join(texts)


def test_text_longer_than_the_capacity_is_refused(conversation: Conversation) -> None:
    said(conversation, "abc")
    with pytest.raises(ValueError, match="capacity of 200"):
        said(conversation, "x" * 300)
    assert conversation.branch.said[:3] == conversation.branch.cached[:3]


def test_run_completes_each_prompt_and_tells_the_cost(folder: Path) -> None:
    arguments = ["run", str(folder), "--prompt", "hello", "--prompt", "hello world", "--max-tokens", "5"]
    done = CliRunner().invoke(app, [*arguments, "--capacity", "64", "--kv-dtype", "f32"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("hello")
    costs = re.findall(
        r"\[(\d+) tokens reused, (\d+) computed, first token after \d+ ms, [\d.]+ tokens/s, cache", done.stderr
    )
    assert costs == [("0", "5"), ("5", "6")]


def test_a_prompt_that_does_not_fit_is_not_printed(folder: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(folder), "--prompt", "x" * 20, "--capacity", "16"])
    assert "fewer than the capacity of 16" in str(done.exception)
    assert done.stdout == ""


def test_an_answer_that_fills_the_capacity_says_so(folder: Path) -> None:
    arguments = ["run", str(folder), "--prompt", "hello", "--capacity", "16"]
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "12"], catch_exceptions=False)
    assert done.stderr.rstrip().endswith("] the capacity of 16 tokens is full; --capacity gives more")
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "11"], catch_exceptions=False)
    assert "full" not in done.stderr


def test_the_version_is_the_packages() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"kvcache {version('kvcache')}\n")


def test_bytes_that_make_no_character_are_replaced_in_what_is_said(folder: Path) -> None:
    arguments = ["run", str(folder), "--max-tokens", "3", "--capacity", "64"]
    done = CliRunner().invoke(app, arguments, input=b"hello\xff\xfe there\nab\n", catch_exceptions=False)
    assert done.exit_code == 0
    computed = re.findall(r"reused, (\d+) computed", done.stderr)
    assert computed == [str(len("hello?? there")), str(1 + len("ab"))]  # the last token of an answer is computed later
    done = CliRunner().invoke(app, [*arguments, "--prompt", os.fsdecode(b"a\xffb")], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("a\ufffdb")


def test_conversation_in_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["/help", "hi", "/cache", "/fork b", "there", "/undo", "/switch main", "/nonsense", "/switch x", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = CliRunner().invoke(
        app,
        ["run", str(folder), "--max-tokens", "4", "--capacity", "100"],
        input="\n".join(lines),
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "plain continuation" in done.stderr
    assert "Sliding(window=8" in done.stderr
    assert "took back" in done.stderr
    assert "/nonsense is no command" in done.stderr
    assert "'x' is no branch; expected one of main, b" in done.stderr


def test_brackets_in_names_and_errors_are_shown_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    lines = "\n".join(["/fork [red]b[/red]", "/cache", "/switch [/x]", "/[/y]", ""])
    done = CliRunner().invoke(app, ["run", str(folder), "--capacity", "100"], input=lines, catch_exceptions=False)
    assert "on branch [red]b[/red]" in done.stderr
    assert "branches: main, [red]b[/red]" in done.stderr
    assert "'[/x]' is no branch" in done.stderr
    assert "/[/y] is no command" in done.stderr


def test_closed_streams_end_the_conversation_without_a_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
    monkeypatch.setattr("sys.argv", ["kvcache", "run", str(folder), "--capacity", "100"])
    with pytest.raises(SystemExit) as stopped:
        main()
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()  # the process's end would
    assert stopped.value.code == 0


def test_ctrl_c_at_the_prompt_says_how_to_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | type[BaseException]] = [KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError]

    def read(prompt: str) -> str:
        if isinstance(line := given.pop(0), str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    arguments = ["run", str(folder), "--max-tokens", "4", "--capacity", "100"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stderr.count("/quit or Ctrl-D leaves") == 2
    assert "2 computed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "./no/such/folder"], "no/such/folder"),
        (["run", "demo", "--device", "cuda:99"], "device is 'cuda:99'; expected a device that"),
        (["serve", "no/such/file.gguf"], "file.gguf does not exist"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcache.cli import main

    monkeypatch.setattr("sys.argv", ["kvcache", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "known"), [(["--kv-dtype", "q3"], formats.FORMATS), (["--kernel", "warp"], kernels.KERNELS)]
)
def test_unknown_names_are_refused_with_the_known_ones(arguments: list[str], known: Sequence[str]) -> None:
    done = CliRunner().invoke(app, ["run", "demo", *arguments])
    assert done.exit_code == 2
    assert re.findall("'(.*?)'", done.stderr.partition("is not one of")[2]) == list(known)


def test_a_path_that_leads_nowhere_is_told_before_pytorch_is_imported() -> None:
    code = "import sys; from kvcache.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "run", "./nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kvcache: ")
    assert "nothing does not exist" in done.stderr


def test_bench_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.bench.bookkeeping.LENGTHS", (1024, 2048))
    monkeypatch.setattr("kvcache.bench.bookkeeping.ROUNDS", 2)
    done = CliRunner().invoke(app, ["bench", "bookkeeping", "--json"], catch_exceptions=False)
    report = json.loads(done.stdout)
    (table,) = report["tables"]["bookkeeping"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert {row["tokens each"] for row in rows} == {1024, 2048}
    assert all(row["ms"] > 0 for row in rows)
    assert report["machine"]["name"]


def test_build_says_what_it_made_and_where() -> None:
    for _ in range(2):
        done = CliRunner().invoke(app, ["build"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "there already: " in done.stdout
    assert Path(done.stdout.strip().rpartition(" ")[2]).is_file()


def test_build_without_a_compiler_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["kvcache", "build"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "'no-such-compiler' is not on the PATH" in capsys.readouterr().err
