"""Latent attention (MLA) over the latents themselves, for unmodified models of the DeepSeek kind.

Such a model hands `update` one latent c [L] and one rotary key r [R] per token, and expands what comes back into keys
and values of all heads, W_uk c and W_uv c, over the whole history in every step. Attention does not need that
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2):

    q_nope . (W_uk c) + q_rot . r  =  (W_uk^T q_nope, q_rot) . (c, r)          one shared key head of L + R values
    sum_t p_t (W_uv c_t)           =  W_uv (sum_t p_t c_t)                     one shared value head of L values

So (c, r) is stored as the key and c as the value, and queries and outputs pass through W_uk and W_uv: nothing is
expanded over the history. While a `Latents` is open, `expand_kv` of the model's attention modules lets tagged latents
through and expands all others as ever. Whether a model is of this kind is not read off its name: its `expand_kv` is run
on random latents and must give what the formula gives.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from kvcache.caches import Cache
from kvcache.errors import NotSupported
from kvcache.hf.attention import Call, Gathered, Reader, reader_of, tag

__all__ = ["LatentReader", "Latents"]

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@final
class LatentReader(Reader):
    """Stores and reads the latents of one layer for whatever pass is under way in its member."""

    __slots__ = ("_layer", "_member", "_nope_dim", "_up_keys", "_up_values")

    window = None

    def __init__(self, module: Any, member: Cache, layer: int) -> None:
        self._member = member
        self._layer = layer
        self._nope_dim = module.qk_nope_head_dim
        weight = module.kv_b_proj.weight.detach()
        heads = weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))  # views: [Hq, nope + Dv, L]
        self._up_keys = heads[:, : module.qk_nope_head_dim]
        self._up_values = heads[:, module.qk_nope_head_dim :].transpose(1, 2)

    def store(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Put latents [B,1,n,L] and rotary keys [B,1,n,R] as the rows of the pass; they come back tagged."""
        values = latents.transpose(1, 2).flatten(0, 1)
        keys = torch.cat((values, rotary.transpose(1, 2).flatten(0, 1)), dim=-1)
        self._member.set_layer(self._layer)
        self._member.put(keys, values)
        return tag(latents, self), rotary

    def attend(self, call: Call) -> Tensor | None:
        if not call.is_plain:
            return None
        B, Hq, n, _ = call.queries.shape
        heads = call.queries.transpose(0, 1).flatten(1, 2)  # [Hq,T,nope + R]
        nope, rotary = heads[..., : self._nope_dim], heads[..., self._nope_dim :]
        rows = torch.cat((torch.bmm(nope, self._up_keys), rotary), dim=-1).transpose(0, 1)
        scale = heads.shape[-1] ** -0.5 if call.scale is None else call.scale
        self._member.set_layer(self._layer)
        out = self._member.attend(rows, scale=scale, softcap=call.softcap, sinks=call.sinks)  # [T,Hq,L]
        return torch.bmm(out.transpose(0, 1), self._up_values).transpose(0, 1).view(B, n, Hq, -1)

    def gather(self) -> Gathered:
        raise NotSupported(
            "the model asks for latent attention under a mask of its own, which packed rows do not support"
        )

    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        return True


@final
class Latents:
    """The latent-attention modules of a model by layer; empty for other models. `close` gives their methods back."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[int, Any] = {}
        module: Any
        for module in model.modules():
            if callable(getattr(module, "expand_kv", None)):
                _check(module)
                self.modules[int(module.layer_idx)] = module
        for module in self.modules.values():
            module.expand_kv = _expansion(module.expand_kv)

    def close(self) -> None:
        """Take the detour out again. Repeating it changes nothing."""
        for module in self.modules.values():
            module.__dict__.pop("expand_kv", None)


def _expansion(original: Any) -> Any:
    def expand_kv(kv_nope: Tensor, k_rot: Tensor, *args: Any, **kwargs: Any) -> Any:
        if reader_of(kv_nope) is not None:
            return kv_nope, kv_nope  # the reader that it carries does not look at them
        return original(kv_nope, k_rot, *args, **kwargs)

    return expand_kv


@torch.no_grad()
def _check(module: Any) -> None:
    """Raise `NotSupported` unless the module expands latents as the formula says."""
    if "expand_kv" in module.__dict__:
        raise ValueError("the model's latent attention is in use by another Runner; close that one first")
    try:
        weight = module.kv_b_proj.weight
        nope_dim, value_dim = module.qk_nope_head_dim, module.v_head_dim
        heads = weight.unflatten(0, (-1, nope_dim + value_dim))
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn((1, 1, 3, module.kv_lora_rank), generator=generator).to(weight)
        rotary = torch.randn((1, 1, 3, module.qk_rope_head_dim), generator=generator).to(weight)
        keys, values = module.expand_kv(latents, rotary)
        expanded = torch.einsum("hdl,btl->bhtd", heads, latents[:, 0])
        expected_keys = torch.cat((expanded[..., :nope_dim], rotary.expand(-1, len(heads), -1, -1)), dim=-1)
        tolerance = _TOLERANCE.get(weight.dtype, 1e-4)
        for seen, expected in ((keys, expected_keys), (values, expanded[..., nope_dim:])):
            torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)
    except (AttributeError, RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotSupported(
            f"{type(module).__name__} has a latent attention unlike DeepSeek's (keys W_uk c and r, values W_uv c): "
            f"{reason}"
        ) from error
