"""LCKV models (Wu and Tu, ACL 2024, arXiv 2405.10637): Llamas whose layers read the keys and values of others.

Most layers have no keys and values, and read those of a layer near the top. There a token's are known only once it has
gone through all layers before, so such a layer sees earlier tokens alone, never its own. Layers that do so and those up
to the one that they read run in several passes over a prompt: each starts from the same hidden states, and reads what
the pass before has stored, the first one zeros. So a pass is exact for one more token; as many passes as there are
tokens are the model itself, as it decodes. Layers that read earlier ones, as in CLA (arXiv 2405.12981), take one pass.

Facts of its config (whyNLP/LCKV, and whynlp/tinyllama-lckv-w2-100b, -w10-100b): `layer_types` is a string such as
"0_2_2_3", the layer that each one reads; `forward_passes` m and `backward_passes` b, of which a prompt takes m + b;
`force_nodiag`, by which no layer sees the token itself; `use_sequential`, by which tokens go one by one. Layers that
nobody reads have no weights for keys and values.
"""

# Legend: B batch, C new tokens, D model dim, N query heads, K kv heads, H head dim.

from __future__ import annotations

import re
import sys
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

MODEL_TYPE = "lckv-llama"


class LCKVConfig(LlamaConfig):
    """A Llama's config that says whose keys and values each layer reads.

    Raises:
        ValueError: `layer_types` is of another form, or what it says of layers contradicts itself.
    """

    model_type = MODEL_TYPE

    kv_sources: list[int] | tuple[int, ...] = ()
    forward_passes: int = 7
    backward_passes: int = 2
    force_nodiag: bool = False

    def __post_init__(self, **others: Any) -> None:
        types = others.pop("layer_types", None)
        others.pop("sliding_window", None)  # of layers with an "s" alone
        if others.pop("use_sequential", False):
            self.forward_passes = sys.maxsize - self.backward_passes
        if isinstance(types, str):
            layers = types.split("_")
            if any(re.fullmatch(r"\d+", layer) is None for layer in layers):
                raise ValueError(f"layer_types {types[:60]!r} has windows or is no list of layers, such as 0_2_2_3")
            self.kv_sources = [int(layer) for layer in layers]
        elif not self.kv_sources:
            self.kv_sources = list(range(self.num_hidden_layers))
        self.require_sources()
        sources, passes = self.kv_sources, (self.forward_passes, self.backward_passes)
        if others_read := sorted({each for each in sources if sources[each] != each}):
            raise ValueError(f"layers read layer {others_read[0]}, which reads layer {sources[others_read[0]]} itself")
        if min(passes) < 0 or sum(passes) < 1:
            raise ValueError(f"{passes[0]} forward_passes and {passes[1]} backward_passes must be at least 1")
        super().__post_init__(**others)

    def require_sources(self) -> None:
        """Check that each layer has one that it reads. Raises: ValueError."""
        sources, num = self.kv_sources, self.num_hidden_layers
        if len(sources) != num or not all(0 <= each < num for each in sources):
            raise ValueError(f"kv_sources {sources} must be a layer for each of {num}")

    @property
    def numbers(self) -> list[int]:
        """Number of each layer in stores and attention: those that store keys and values come first."""
        sources = self.kv_sources
        order = sorted(range(len(sources)), key=lambda layer: (sources[layer] != layer, layer))
        return [order.index(layer) for layer in range(len(order))]

    @property
    def reads_kv_of(self) -> dict[int, int]:
        """Number of each layer that reads another one -> that of the other."""
        numbers = self.numbers
        return {numbers[layer]: numbers[of] for layer, of in enumerate(self.kv_sources) if of != layer}

    @property
    def runs_in_passes(self) -> bool:
        """Whether some layers see earlier tokens alone: of a later layer, or in all layers."""
        return self.force_nodiag or any(source > layer for layer, source in enumerate(self.kv_sources))


class LCKVAttention(LlamaAttention):
    """Attention to the keys and values of one layer. There are weights for these if the layer is this one."""

    def __init__(self, config: LCKVConfig, layer: int) -> None:
        super().__init__(config, config.numbers[layer])
        source = config.kv_sources[layer]
        self.source, self.sees_own = config.numbers[source], source <= layer and not config.force_nodiag
        if source != layer:
            del self.k_proj, self.v_proj

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        stored: MutableMapping[int, tuple[Tensor, Tensor]],
        past_key_values: Any = None,
        **keywords: Any,
    ) -> tuple[Tensor, Any]:
        """As of Llama's, with the keys and values (B, K, C, H) that layers have `stored` last, by number."""
        lead = hidden_states.shape[:-1]

        def heads(project: nn.Module) -> Tensor:
            return project(hidden_states).view(*lead, -1, self.head_dim).transpose(1, 2)

        q_BNCH = heads(self.q_proj)
        if self.source == self.layer_idx:
            q_BNCH, k_BKCH = apply_rotary_pos_emb(q_BNCH, heads(self.k_proj), *position_embeddings)
            kv = k_BKCH, heads(self.v_proj)
            stored[self.source] = kv if past_key_values is None else past_key_values.update(*kv, self.layer_idx)
        else:
            q_BNCH, _ = apply_rotary_pos_emb(q_BNCH, q_BNCH, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        terms = {"scaling": self.scaling, "sees_own": self.sees_own}
        out_BCNH, weights = attend(self, q_BNCH, *stored[self.source], attention_mask, **terms, **keywords)
        return self.o_proj(out_BCNH.reshape(*lead, -1)), weights


class LCKVLayer(LlamaDecoderLayer):
    """A layer that may run in passes with others, which the first of them runs.

    Attributes:
        group: the layers that this one runs: itself and those in passes with it, or none if an earlier one runs it.
    """

    self_attn: LCKVAttention
    group: tuple[LCKVLayer, ...] = ()

    def __init__(self, config: LCKVConfig, layer: int) -> None:
        super(LlamaDecoderLayer, self).__init__()  # not its own, which makes attention of Llama's
        self.self_attn, self.mlp = LCKVAttention(config, layer), LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        for _ in self._passes(hidden_states, **keywords):
            x_BCD = hidden_states
            for layer in self.group:
                x_BCD = super(LCKVLayer, layer).forward(x_BCD, **keywords)
        return x_BCD

    def _passes(self, x_BCD: Tensor, *, stored: Any, past_key_values: Any, **_: Any) -> Iterator[None]:
        """Passes of the group: as many as the config says, or as there are tokens, since more change nothing."""
        if len(self.group) < 2:
            return iter([None])
        config, (batch, num_new) = self.self_attn.config, x_BCD.shape[:2]
        zeros_BKCH = x_BCD.new_zeros(batch, config.num_key_value_heads, num_new, config.head_dim)
        own = [each.layer_idx for each in (layer.self_attn for layer in self.group) if each.source == each.layer_idx]
        zeros = dict.fromkeys(own, (zeros_BKCH, zeros_BKCH))
        stored.update(zeros)
        number = min(config.forward_passes + config.backward_passes, num_new)
        return past_key_values.passes(number, zeros if num_new > 1 else {})


class LCKVModel(LlamaModel):
    """A Llama of these layers, which pass on what they have stored."""

    def __init__(self, config: LCKVConfig) -> None:
        super(LlamaModel, self).__init__(config)  # not its own, which makes all layers of Llama's
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = [LCKVLayer(config, layer) for layer in range(config.num_hidden_layers)]
        ends = [layer + 1 for layer, last in enumerate(accumulate(config.kv_sources, max)) if last <= layer]
        for first, end in pairwise((0, *ends)):
            layers[first].group = tuple(layers[first:end])
        self.layers, self.norm = nn.ModuleList(layers), LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return super().forward(*args, stored=UserDict(), **keywords)  # a dict would be cut into blocks of rows


class LCKVForCausalLM(LlamaForCausalLM):
    """The same with an output layer."""

    config_class = LCKVConfig

    def __init__(self, config: LCKVConfig) -> None:
        config.require_sources()  # again: model.layers changes the number of layers
        super(LlamaForCausalLM, self).__init__(config)
        self.model = LCKVModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Register the form with transformers. May be called again."""
    AutoConfig.register(MODEL_TYPE, LCKVConfig, exist_ok=True)
    AutoModelForCausalLM.register(LCKVConfig, LCKVForCausalLM, exist_ok=True)
