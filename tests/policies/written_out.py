"""A Llama written out, one row, over keys that are not rotated: a token's position in a layer is its place there."""

# Legend: C new tokens, n tokens of a layer, N query heads, K kv heads, H head dim, F = H / 2, D model dim.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class WrittenOut:
    """Logits of tokens that follow on what each layer holds, for a `LlamaForCausalLM` in float64."""

    def __init__(self, module: Any) -> None:
        self.module, config = module, module.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        theta = config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.inv_freq_F = (1.0 / theta**exponents).double()
        num_layers = config.num_hidden_layers
        self.k_KnH = [torch.empty(self.kv_heads, 0, self.head_dim, dtype=torch.float64) for _ in range(num_layers)]
        self.v_KnH = [k.clone() for k in self.k_KnH]
        self.tokens_Kn = [torch.empty(self.kv_heads, 0, dtype=torch.long) for _ in range(num_layers)]
        """Numbers of the tokens in the text; -1 in the first places of a head that holds fewer than others."""
        self.seen = 0

    def feed(self, ids: list[int], left: list[Tensor] | None = None) -> Tensor:
        """Logits (V) behind these tokens. `left` are those of the text that each layer computes, if not all."""
        x_CD = self.module.model.embed_tokens(torch.tensor(ids))
        text_C = torch.arange(self.seen, self.seen + len(ids))
        self.seen += len(ids)
        for i, layer in enumerate(self.module.model.layers):
            if left is not None:
                chosen = torch.isin(text_C, left[i])
                x_CD, text_C = x_CD[chosen], text_C[chosen]
            normed_CD = _rms_norm(x_CD, layer.input_layernorm)
            q_NCH, k_KCH, v_KCH = (
                projection(normed_CD).unflatten(1, (-1, self.head_dim)).transpose(0, 1)
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            )
            self.k_KnH[i] = torch.cat([self.k_KnH[i], k_KCH], dim=1)
            self.v_KnH[i] = torch.cat([self.v_KnH[i], v_KCH], dim=1)
            self.tokens_Kn[i] = torch.cat([self.tokens_Kn[i], text_C.expand(self.kv_heads, -1)], dim=1)
            out_CD = torch.cat([self._attended(i, head, q_CH) for head, q_CH in enumerate(q_NCH)], dim=1)
            x_CD = x_CD + layer.self_attn.o_proj(out_CD)
            x_CD = x_CD + layer.mlp(_rms_norm(x_CD, layer.post_attention_layernorm))
        return self.module.lm_head(_rms_norm(x_CD[-1:], self.module.model.norm))[0]

    def _attended(self, layer: int, head: int, q_CH: Tensor) -> Tensor:
        """Output (C, H) of a query head for the newest tokens."""
        own = head * self.kv_heads // self.heads
        held_n = self.tokens_Kn[layer][own] >= 0
        k_nH, v_nH = self.k_KnH[layer][own, held_n], self.v_KnH[layer][own, held_n]
        places_n = self.places(len(k_nH))
        places_C = places_n[len(k_nH) - len(q_CH) :]
        scores_Cn = self.rotated(q_CH, places_C) @ self.rotated(k_nH, places_n).T / math.sqrt(self.head_dim)
        return scores_Cn.masked_fill(places_n > places_C[:, None], -math.inf).softmax(dim=-1) @ v_nH

    def keep(self, layer: int, tokens_Km: Tensor) -> None:
        """Keep these tokens of the text in each KV head (or in all, (1, m)), in their order; -1 is none."""
        tokens_Km = tokens_Km.expand(self.kv_heads, -1)
        places = [
            [row.index(token) if token >= 0 else 0 for token in wanted]
            for row, wanted in zip(self.tokens_Kn[layer].tolist(), tokens_Km.tolist(), strict=True)
        ]
        places_Km1 = torch.tensor(places)[:, :, None]
        self.k_KnH[layer] = self.k_KnH[layer].take_along_dim(places_Km1, dim=1)
        self.v_KnH[layer] = self.v_KnH[layer].take_along_dim(places_Km1, dim=1)
        self.tokens_Kn[layer] = tokens_Km

    def places(self, num_tokens: int) -> Tensor:
        """Positions of a layer's tokens, of which the newest have just come."""
        return torch.arange(num_tokens)

    def rotated(self, x_NnH: Tensor, places_n: Tensor) -> Tensor:
        """Vectors (..., n, H) at these positions."""
        angles_nF = places_n[:, None] * self.inv_freq_F
        a, b = x_NnH.chunk(2, dim=-1)
        cos, sin = angles_nF.cos(), angles_nF.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _rms_norm(x_CD: Tensor, norm: Any) -> Tensor:
    return norm.weight * x_CD / (x_CD.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt()
