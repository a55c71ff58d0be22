"""The one model that a server serves: its names, and what `/api/show` and its like tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from kvcache.engine import Engine
from kvcache.hf.loading import fingerprint

__all__ = ["ServedModel", "served_model"]


@final
@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is told of the model and its engine.

    num_bytes: of its weights; capacity: tokens of the longest request, None: no bound; max_sequences: that run at once.
    """

    name: str
    family: str
    num_parameters: int
    num_bytes: int
    dtype: str
    digest: str
    vocabulary: int
    capacity: int | None
    max_sequences: int
    info: Mapping[str, str | int | float | bool]

    @property
    def names(self) -> tuple[str, str]:
        """What clients may call it. Ollama's add `:latest`."""
        name = self.name.removesuffix(":latest")
        return name, f"{name}:latest"

    def is_called(self, name: str) -> bool:
        """Whether a client means this model."""
        return name in self.names

    @property
    def parameter_size(self) -> str:
        """As people say it: 268.10M."""
        for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self.num_parameters >= factor:
                return f"{self.num_parameters / factor:.2f}{unit}"
        return str(self.num_parameters)


def served_model(engine: Engine, name: str | None = None) -> ServedModel:
    """What an engine serves. name: what clients call it; None: what it was loaded as. Cost: one read of the weights."""
    model = engine.model
    config = model.config.get_text_config(decoder=True)
    family = str(config.model_type)
    weights: Any = model.get_output_embeddings()
    return ServedModel(
        name=name or engine.model_name,
        family=family,
        num_parameters=int(model.num_parameters()),
        num_bytes=sum(each.numel() * each.element_size() for each in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch.").upper(),
        digest=fingerprint(model),
        vocabulary=int(weights.weight.shape[0]),
        capacity=engine.capacity,
        max_sequences=engine.max_sequences,
        info={
            "general.architecture": family,
            "general.parameter_count": int(model.num_parameters()),
            **{
                f"{family}.{name}": value
                for name, attribute in (
                    ("context_length", "max_position_embeddings"),
                    ("embedding_length", "hidden_size"),
                    ("block_count", "num_hidden_layers"),
                    ("attention.head_count", "num_attention_heads"),
                    ("attention.head_count_kv", "num_key_value_heads"),
                )
                if isinstance(value := getattr(config, attribute, None), int | float | str)
            },
        },
    )
