"""`compile=True`: the same logits from compiled loops, and refusals by name. Compiling is slow, so one model is enough
here.
"""

from __future__ import annotations

import pytest
import torch

from engines import engine_for
from families import FAMILIES
from kvcache import NotSupported
from kvcache.hf.runner import Runner, Work

# PyTorch's compiler uses, inside, what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

PASSES = (
    [Work(0, 0, [5, 6, 7, 8, 9] * 4), Work(1, 0, [7, 8, 9] * 5, num_logits=3)],
    [Work(0, 20, [3]), Work(1, 15, [4])],
    [Work(0, 21, [5])],
    [Work(0, 22, list(range(3, 33))), Work(2, 0, [6] * 17)],
)


def test_compiled_rows_are_those_of_the_model() -> None:
    """Prefill, ragged decodes, a single token; sliding and full layers; and the model is as it was afterwards."""
    model = FAMILIES["gemma3"].build()
    with Runner(model, capacity=128) as runner:
        expected = [runner.forward(works) for works in PASSES]
    with Runner(model, capacity=128, compile=True) as runner:
        for works, logits in zip(PASSES, expected, strict=True):
            assert float((runner.forward(works) - logits).abs().max()) <= 2e-5
        runner.cache.check()
    assert model.get_decoder()._compiled_call_impl is None
    with Runner(model, capacity=128) as runner:
        assert torch.equal(runner.forward(PASSES[0]), expected[0])


@pytest.mark.parametrize("name", ["deepseek_v3", "mamba2", "bloom", "gemma3n"])
def test_models_that_cannot_be_compiled_are_refused_by_name(name: str) -> None:
    model = FAMILIES[name].build()
    before = model.config._attn_implementation
    with pytest.raises(NotSupported, match=rf"{type(model).__name__} cannot be compiled: .*; leave compile off"):
        Runner(model, capacity=128, compile=True)
    assert model.config._attn_implementation == before


def test_an_engine_compiles_before_it_serves() -> None:
    with engine_for("gemma3") as plain:
        expected = plain.generate([[5, 6, 7] * 9, [5, 6, 7] * 9 + [8]], max_tokens=12)
    with engine_for("gemma3", compile=True) as engine:
        assert engine.usage().num_tokens == 0
        done = engine.generate([[5, 6, 7] * 9, [5, 6, 7] * 9 + [8]], max_tokens=12)
        engine.check()
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    assert done[1].cached_tokens == expected[1].cached_tokens
