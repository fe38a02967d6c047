"""`CheckedCache`: keys and values of prompts for transformers' `generate`, which checks what a model makes of them."""

# Legend: B batch, K kv heads, C new tokens, T tokens, S tokens of the padded prompt, H key dim, X = H + V.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from runahead.cache.base import KVStore
from runahead.cache.kv_cache import KVCache
from runahead.dynamic_cache.comparison import is_in_few_bits, kv_differ
from runahead.model.model import Model


class CheckedCache(DynamicCache):
    """A `DynamicCache` of prompts without their last token, which `generate` computes for its logits.

    `generate` is silent if it is given a cache in a wrong way: it goes on with other tokens, at other positions or over
    padding, and its answer is wrong. So the keys of the last token were kept, and those that the model computes in its
    first step are compared with them in every layer. That finds other ids, positions, weights and masks, and attention
    that is not the model's own, such as one without soft caps. Rows that `generate` multiplies, for beams or several
    answers, are multiplied here, too. After the first step this is a `DynamicCache` like any other.

    A cache is for one call of `generate`, or for one copy of it each.

    Args:
        layers_BTKX: keys and values of each layer, of the prompts' last T tokens: all of them, or in layers with a
            window or chunks at least those that the last token and later ones see. Each is copied before the next.
        num_tokens: S, of the padded prompts.
        pads: left padding of each row.
        key_dim: H of each layer.
        config: of the model that will go on.
        in_few_bits: as of `kv_differ`.

    Raises:
        ValueError: as `require_layers`.
    """

    def __init__(
        self,
        layers_BTKX: Iterable[Tensor],
        *,
        num_tokens: int,
        pads: Sequence[int],
        key_dim: Sequence[int],
        config: PreTrainedConfig,
        in_few_bits: bool,
    ) -> None:
        super().__init__(config=config)
        require_layers(config, len(key_dim))
        self._in_few_bits = in_few_bits
        self._last_BK1H: list[Tensor | None] = []
        for layer, given_BTKX, dim in zip(self.layers, layers_BTKX, key_dim, strict=True):
            kv_BKTX = given_BTKX.transpose(1, 2).clone(memory_format=torch.contiguous_format)
            self._last_BK1H.append(kv_BKTX[:, :, -1:, :dim].clone())
            first = num_tokens - kv_BKTX.shape[2]
            for row, pad in enumerate(pads):
                kv_BKTX[row, :, : max(0, pad - first)] = 0  # no number there may be infinite
            fill(layer, kv_BKTX[:, :, :-1, :dim], kv_BKTX[:, :, :-1, dim:], num_tokens - 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, as `DynamicCache.update` does.

        Raises:
            ValueError: the first token that the model is given is not the prompt's last one, or it attends differently.
        """
        expected_BK1H = self._last_BK1H[layer_idx]
        if expected_BK1H is not None:
            self._check(expected_BK1H, key_states, layer_idx)
            layer, repeats = self.layers[layer_idx], len(key_states) // len(expected_BK1H)
            if layer.is_initialized and len(layer.keys) < len(key_states):
                layer.batch_repeat_interleave(repeats)
            self._last_BK1H[layer_idx] = None
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **more)
        return found

    def _check(self, expected_BK1H: Tensor, k_BKCH: Tensor, layer: int) -> None:
        """Compare the key of the first new token with that of the prompt's last one."""
        rows = len(expected_BK1H)
        if k_BKCH.shape[1::2] != expected_BK1H.shape[1::2] or len(k_BKCH) % rows or k_BKCH.dtype != expected_BK1H.dtype:
            raise ValueError(
                f"this cache has {rows} rows, {expected_BK1H.shape[1]} KV heads of {expected_BK1H.shape[3]} dims in "
                f"{expected_BK1H.dtype}, and the model gives {len(k_BKCH)} rows, {k_BKCH.shape[1]} of "
                f"{k_BKCH.shape[3]} in {k_BKCH.dtype} (layer {layer}); load the same "
                "model in the same dtype, and give the same rows"
            )
        given_BK1H = k_BKCH[:, :, :1].to(expected_BK1H.device)
        expected_BK1H = expected_BK1H.repeat_interleave(len(k_BKCH) // rows, dim=0)
        given_B1KH, expected_B1KH = given_BK1H.transpose(1, 2), expected_BK1H.transpose(1, 2)
        off = kv_differ(given_B1KH, expected_B1KH, given_B1KH.shape[-1], in_few_bits=self._in_few_bits)
        if not off:
            return
        if layer == 0:
            raise ValueError(
                "the first token that the model is given with this cache is not the last one of the prompt at its "
                f"place ({off}): give the whole ids of the prompt, or a text that goes on after it; with rows of "
                "different lengths their attention_mask, padded on the left; and a new cache to each call of generate"
            )
        raise ValueError(
            f"layer {layer} of the model computes other keys of the prompt's last token than this cache was made with "
            f"({off}): give the attention_mask of padded rows, take the same weights, and an attention that computes "
            'all of the model, as attn_implementation="eager" does'
        )


LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a `DynamicCache` that hold keys and values of tokens, and nothing else."""


def require_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Check that a cache as transformers makes it for a model holds what this model computes of a prompt.

    Args:
        num_layers: in which the model stores keys and values.

    Raises:
        ValueError: it has other layers, or of another kind.
    """
    layers = DynamicCache(config=config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) not in LAYERS}
    if kinds or len(layers) != num_layers:
        raise ValueError(
            f"a cache of transformers for {config.model_type} has {len(layers)} layers"
            + (f", of them {' and '.join(sorted(kinds))}," if kinds else "")
            + f" and keys and values of {num_layers} are computed; let Runahead answer"
        )


def fill(layer: DynamicLayer, k_BKTH: Tensor, v_BKTV: Tensor, num_tokens: int) -> None:
    """Have an empty layer hold a text, of which the last tokens are given, and nobody sees the others.

    Where transformers keeps some of those, as the tail of a window in which a chunk has begun anew, there are zeros.

    Args:
        num_tokens: of the text.
    """
    given = k_BKTH.shape[2]
    if not num_tokens:
        return
    if given == num_tokens:
        layer.update(k_BKTH, v_BKTV)
        return
    held = min(layer.sliding_window - 1, num_tokens) if layer.is_sliding else num_tokens
    layer.lazy_initialization(k_BKTH, v_BKTV)
    layer.keys, layer.values = (F.pad(each, (0, 0, held - given, 0)) for each in (k_BKTH, v_BKTV))
    if layer.is_sliding:
        layer.cumulative_length = num_tokens


def checked_cache(cache: KVStore, model: Model, *, num_tokens: int, pads: Sequence[int]) -> CheckedCache:
    """The `CheckedCache` of what the rank that decodes has of prompts, of which nothing was reused.

    Args:
        cache: is left empty: each layer's memory is freed once it is copied.
        num_tokens, pads: as of `CheckedCache`.
    """
    assert isinstance(cache, KVCache), "policies are refused"
    assert cache.slab_index.prefix is None, "nothing is reused"
    for layer, slab in enumerate(cache.slabs.by_layer):
        assert slab.first <= model.first_needed(layer, num_tokens - 1, list(pads)), "chains keep what later tokens see"
    return CheckedCache(
        (slab.tokens(slab.first, num_tokens).transpose(0, 1) for slab in cache.slabs.take()),
        num_tokens=num_tokens,
        pads=pads,
        key_dim=[shape.key_dim for shape in model.kv_shapes],
        config=model.module.config,
        in_few_bits=is_in_few_bits(model),
    )
