"""Norms, GELU and rotary embeddings in one operator each: what modules themselves compute, and modules as they were
afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, LlamaConfig
from transformers.activations import GELUTanh, NewGELUActivation, QuickGELUActivation
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from families import FAMILIES
from kvcache.hf.fused import FusedLayers, rotary_of
from kvcache.hf.replaced import Replaced
from kvcache.hf.runner import Runner, Work
from kvcache.kernels import cpu_build


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(kind: Any, dim: int = 96, eps: float = 1e-6) -> torch.nn.Module:
    norm = kind(dim, eps=eps)
    norm.weight.data = torch.randn(dim, generator=torch.Generator().manual_seed(1))
    return norm.to(torch.bfloat16)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dim", [96, 100, 33])
def test_the_result_is_the_modules_own(kind: Any, dim: int, isa: str) -> None:
    norm = made(kind, dim, eps=1e-5)
    inputs = [
        torch.randn((7, dim)).bfloat16(),
        torch.randn((1, 5, 4, dim)).bfloat16().transpose(1, 2),  # as norms of queries and keys get them
        (torch.randn((600, 2 * dim)) * 1e-3).bfloat16()[:, ::2],
        torch.zeros((2, dim)).bfloat16(),
        torch.empty((0, dim)).bfloat16(),
    ]
    expected = [norm(x) for x in inputs]
    fused = FusedLayers(norm)
    assert len(fused) == 1
    for x, wanted in zip(inputs, expected, strict=True):
        got = norm(x)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0.0)
        assert got.numel() == 0 or (got == wanted).float().mean() > 0.99
    fused.close()
    assert "forward" not in norm.__dict__


def with_weights(activation: torch.nn.Module) -> torch.nn.Module:
    """An activation in a model of bf16."""
    return torch.nn.ModuleList([activation, torch.nn.Linear(1, 1, dtype=torch.bfloat16)])


@pytest.mark.parametrize("kind", [GELUTanh, partial(torch.nn.GELU, approximate="tanh")])
def test_gelu_is_the_modules_own(kind: Any, isa: str) -> None:
    gelu = kind()
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]  # each finite number that there is
    inputs = [every, torch.randn((1, 700, 301)).bfloat16(), torch.randn((64, 64)).bfloat16()[:, ::2], every[:0]]
    expected = [gelu(x) for x in inputs]
    fused = FusedLayers(with_weights(gelu))
    assert len(fused) == 1
    for x, wanted in zip(inputs, expected, strict=True):
        got = gelu(x)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-6)
        assert got.numel() == 0 or ((got == wanted) | (wanted.abs() < 1e-6)).float().mean() > 0.99
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0]).bfloat16()
    assert [str(x) for x in gelu(special).tolist()] == ["nan", "inf", "nan", "3.0"]
    torch.testing.assert_close(gelu(input=inputs[1]), expected[1])
    fused.close()
    assert "forward" not in gelu.__dict__


class LateClippedGELU(torch.nn.Module):
    """What it should not be taken for, up to a thousand."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(input, approximate="tanh").clip(max=1000)


@pytest.mark.parametrize(
    "kind", [torch.nn.GELU, torch.nn.SiLU, NewGELUActivation, QuickGELUActivation, LateClippedGELU]
)
def test_other_activations_are_left_alone(kind: Any) -> None:
    activation = kind()
    assert len(FusedLayers(with_weights(activation))) == 0 and "forward" not in activation.__dict__


def test_gelu_of_a_model_of_another_type_is_left_alone() -> None:
    assert len(FusedLayers(with_weights(GELUTanh()).float())) == 0


def rows_to_turn(batch: int, heads: int, tokens: int, dim: int, turned: int) -> list[torch.Tensor]:
    """Queries, keys, cosines and sines, as attention has them."""
    random = torch.Generator().manual_seed(2)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    return [
        rows(batch, tokens, heads, dim).transpose(1, 2),
        rows(batch, tokens, 1, dim).transpose(1, 2),
        rows(batch, tokens, turned),
        rows(batch, tokens, turned),
    ]


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 3, 5), (1, 8, 700), (1, 1, 0)])
@pytest.mark.parametrize("dim", [256, 80, 64, 6])
def test_rotary_embeddings_are_the_models_own_bit_for_bit(shape: tuple[int, int, int], dim: int, isa: str) -> None:
    inputs = rows_to_turn(*shape, dim, dim)
    inputs[0][:, :1, :1, :1] = float("inf")
    turn = rotary(modeling_gemma3)
    assert turn is not None
    for got, wanted in zip(turn(*inputs), modeling_gemma3.apply_rotary_pos_emb(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0, equal_nan=True)
        assert got.is_contiguous() == wanted.is_contiguous()
    apart = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in inputs]  # rows whose values are not adjacent
    for got, wanted in zip(turn(*apart), turn(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def rotary(module: Any) -> Any:
    return rotary_of(module.apply_rotary_pos_emb, cpu_build.operators())


def test_rotary_embeddings_of_a_part_of_each_row(isa: str) -> None:
    inputs = rows_to_turn(2, 3, 5, 80, 20)
    turn = rotary(modeling_gpt_neox)
    for got, wanted in zip(turn(*inputs), modeling_gpt_neox.apply_rotary_pos_emb(*inputs), strict=True):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    with pytest.raises(RuntimeError, match="must match"):  # as Llama has it
        rotary(modeling_llama)(*inputs)


@pytest.mark.parametrize("module", [modeling_cohere, modeling_glm])
def test_rotary_embeddings_of_pairs_are_left_alone(module: Any) -> None:
    assert rotary(module) is None


def test_rotary_embeddings_asked_for_otherwise_are_the_models_own() -> None:
    turn, own = rotary(modeling_llama), modeling_llama.apply_rotary_pos_emb
    q, k, cos, sin = rows_to_turn(2, 3, 5, 8, 8)
    asked: list[tuple[Any, dict[str, Any]]] = [
        ((q.transpose(1, 2), k.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}),
        ((q.float(), k.float(), cos.float(), sin.float()), {}),
        ((q, k, cos.float(), sin.float()), {}),
        ((q, k, cos[:1], sin[:1]), {}),  # the same for each of the batch
        ((q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0]), {}),
        ((q, k[:1], cos, sin), {}),
        ((q, k, cos, sin[:, :1]), {}),
    ]
    for args, kwargs in asked:
        for got, wanted in zip(turn(*args, **kwargs), own(*args, **kwargs), strict=True):
            assert got.dtype is wanted.dtype and torch.equal(got, wanted)
    with torch.enable_grad():
        assert turn(q.clone().requires_grad_(), k, cos, sin)[0].requires_grad
    for dim in (65, 2048):  # odd, and longer than rows may be
        cosines = rows_to_turn(1, 1, 2, dim + 1, dim + 1)[2][..., :dim]
        for got, wanted in zip(
            *(f(*rows_to_turn(1, 1, 2, dim, dim)[:2], cosines, cosines) for f in (turn, own)), strict=True
        ):
            assert torch.equal(got, wanted)


def one_or_both(q: Any, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
    """As models have it whose indexers turn queries alone."""
    if k is None:
        return q * cos.unsqueeze(unsqueeze_dim)
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def test_rotary_embeddings_of_queries_alone_are_the_models_own() -> None:
    turn: Any = rotary_of(one_or_both, cpu_build.operators())
    q, k, cos, sin = rows_to_turn(2, 3, 5, 64, 64)
    assert torch.equal(turn(q, cos=cos, sin=sin), q * cos.unsqueeze(1))
    assert torch.equal(turn(q, None, cos, sin), q * cos.unsqueeze(1))
    assert torch.equal(turn(q, k, cos, sin)[1], modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_script_modules_are_left_alone() -> None:
    script = torch.jit.script(torch.nn.SiLU())
    model = torch.nn.ModuleList([script, made(LlamaRMSNorm)])
    assert len(FusedLayers(model)) == 1


def test_the_operator_refuses_rows_that_do_not_fit() -> None:
    turn = cpu_build.operators().turn  # type: ignore[union-attr]
    q, k, cos, sin = rows_to_turn(2, 3, 5, 8, 8)
    for wrong in (
        (q, k[:, :, :4], cos, sin),
        (q, k, cos, sin[:1]),
        (q, k, cos.float(), sin),
        (q[..., :4], k[..., :4], cos, sin),
        (q, k, cos[..., :3], sin[..., :3]),
        (q[0], k[0], cos, sin),
    ):
        with pytest.raises(ValueError, match="turn"):
            turn(*wrong, True)
    with pytest.raises(ValueError, match="6 of 8 values"):
        turn(q, k, cos[..., :6], sin[..., :6], False)
    assert [x.shape for x in turn(q[:, :0], k[:, :0], cos, sin, True)] == [(2, 0, 5, 8)] * 2
    with pytest.raises(NotImplementedError, match="turn"):  # nothing lies there
        turn(q.to("meta"), k.to("meta"), cos.to("meta"), sin.to("meta"), True)


def test_attention_with_other_rotary_embeddings_or_a_forward_of_its_own_is_left_alone() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    for kind, config, count in (
        (LlamaAttention, LlamaConfig(**sizes), 1),
        (modeling_cohere.CohereAttention, CohereConfig(**sizes), 0),
    ):
        attention = kind(config, 0).to(torch.bfloat16)
        assert len(FusedLayers(attention)) == count and ("forward" in attention.__dict__) == bool(count)
    hooked = LlamaAttention(LlamaConfig(**sizes), 0).to(torch.bfloat16)
    hooked.__dict__["forward"] = lambda x: x
    assert len(FusedLayers(hooked)) == 0


def test_nan_stays_in_its_row() -> None:
    norm = made(LlamaRMSNorm)
    x = torch.ones((3, 96)).bfloat16()
    x[1, 5] = float("nan")
    FusedLayers(norm)
    assert norm(x).isnan().all(1).tolist() == [False, True, False]


class HalvedRMSNorm(LlamaRMSNorm):
    """Has the name and the parts of a norm, and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(hidden_states) / 2
        return normed


class SometimesRMSNorm(LlamaRMSNorm):
    """Differs where rows are small: eps is elsewhere."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        own, self.variance_epsilon = self.variance_epsilon, 0.0
        normed: torch.Tensor = super().forward(hidden_states)
        self.variance_epsilon = own
        return normed


@pytest.mark.parametrize("kind", [HalvedRMSNorm, SometimesRMSNorm])
def test_a_norm_of_another_formula_is_left_alone(kind: Any) -> None:
    norm = made(kind)
    assert len(FusedLayers(norm)) == 0 and "forward" not in norm.__dict__


class UnhappyRMSNorm(LlamaRMSNorm):
    """Wants more than rows."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise TypeError("not these")


@pytest.mark.parametrize("kind", [partial(MambaRMSNormGated, group_size=96), Qwen3NextRMSNormGated, UnhappyRMSNorm])
def test_a_norm_of_more_than_its_rows_is_left_alone(kind: Any) -> None:
    norm = made(kind)
    assert len(FusedLayers(norm)) == 0 and "forward" not in norm.__dict__


def test_the_last_of_several_gives_the_layers_back() -> None:
    model = FAMILIES["gemma3"].build().to(torch.bfloat16)
    first = FusedLayers(model)
    last = FusedLayers(model)
    assert len(first) == len(last) > 0
    first.close()
    assert sum("forward" in module.__dict__ for module in model.modules()) == len(last)
    last.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_breaks_off_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = torch.nn.ModuleList([made(LlamaRMSNorm), made(LlamaRMSNorm)])
    put = Replaced.put

    def put_first(module: torch.nn.Module, *args: Any) -> Replaced:
        if module is norms[1]:
            raise MemoryError
        return put(module, *args)

    monkeypatch.setattr(Replaced, "put", put_first)
    with pytest.raises(MemoryError):
        FusedLayers(norms)
    assert not any("forward" in norm.__dict__ for norm in norms)


def test_new_weights_are_used_at_once() -> None:
    norm = made(LlamaRMSNorm)
    x = torch.randn((3, 96)).bfloat16()
    fused = FusedLayers(norm)
    norm.weight.mul_(3)
    found = norm(x)
    fused.close()
    torch.testing.assert_close(found, norm(x), rtol=2**-7, atol=0.0)


def test_norms_that_are_not_bf16_or_hooked_are_left_alone() -> None:
    assert len(FusedLayers(LlamaRMSNorm(96))) == 0
    norm = made(LlamaRMSNorm)
    norm.__dict__["forward"] = lambda x: x
    assert len(FusedLayers(norm)) == 0 and "forward" in norm.__dict__
    assert len(FusedLayers(torch.nn.LayerNorm(8))) == 0


def test_with_gradients_and_other_types_the_modules_own_is_used() -> None:
    norm = made(LlamaRMSNorm)
    fused = FusedLayers(norm)
    assert norm(torch.ones((1, 96))).dtype == torch.float32
    with torch.enable_grad():
        assert norm(torch.ones((1, 96)).bfloat16().requires_grad_()).requires_grad
    fused.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "qwen3_next", "mamba2"])
def test_a_runner_answers_as_with_the_modules_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES[family].build().to(torch.bfloat16)
    works = [Work(0, 0, [3, 1, 4, 1, 5])]
    with Runner(model, capacity=64) as runner:
        replaced = [type(m).__name__ for m in model.modules() if isinstance(m.__dict__.get("forward"), Replaced)]
        assert sum("RMSNorm" in name for name in replaced) > 2
        assert ("GELUTanh" in replaced) == (family == "gemma3")
        assert any(name.endswith("Attention") for name in replaced) == (family != "mamba2")
        fused = runner.forward(works)
    assert not any("forward" in module.__dict__ for module in model.modules())
    monkeypatch.setattr("kvcache.hf.runner.FusedLayers", lambda _: FusedLayers(torch.nn.Identity()))
    with Runner(model, capacity=64) as runner:
        own = runner.forward(works)
    torch.testing.assert_close(fused.float(), own.float(), rtol=2e-2, atol=2e-2)


def test_a_copy_of_a_model_in_use_is_a_model_of_its_own(tmp_path: Path) -> None:
    model = FAMILIES["gemma3"].build().to(torch.bfloat16).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with Runner(model, capacity=64):
        copied = deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded):
        torch.testing.assert_close(other(tokens).logits, model(tokens).logits)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(other(tokens).logits, model(tokens).logits)
        with Runner(other, capacity=64) as runner:  # and runs as fast
            names = [type(m).__name__ for m in other.modules() if isinstance(m.__dict__.get("forward"), Replaced)]
            assert {"Gemma3RMSNorm", "GELUTanh", "Gemma3Attention", "Linear"} <= set(names)
            found = runner.forward([Work(0, 0, tokens[0].tolist())])
        torch.testing.assert_close(found.float(), other(tokens).logits[0, -1:].float(), rtol=5e-2, atol=5e-2)
