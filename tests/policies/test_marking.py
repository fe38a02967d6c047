"""Models of every family with the options of DMS or DMC: logits of whole matrices, or a sentence that refuses.

The matrices are in transformers' own code: what the last module before RoPE gives is replaced, and so is attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.gptj.modeling_gptj import GPTJAttention

from runahead import Model
from tests.families import (
    FAMILIES,
    HYBRIDS,
    JOINS,
    MARKS,
    READING,
    SHARING,
    Family,
    build,
    largest_difference,
    prompt,
    throughout,
)
from tests.policies.running import ROUNDING, Run

NUM_TOKENS = 30
WINDOWS, CHANGES, FUSED, SCORES = (
    "has windows or chunks",
    "does more than RoPE",
    "has no q_proj and k_proj",
    "caps or biases",
)
FULL = {"layer_types": ["full_attention"] * 3}
CHANGED: dict[str, tuple[str | Family, dict[str, Any], str]] = {
    "mistral without windows": ("mistral", {"sliding_window": None}, ""),
    "gemma2 without windows": ("gemma2", FULL, SCORES),
    "gpt_oss without windows": ("gpt_oss", FULL, "has attention sinks"),
    "heads before tokens (gemma3)": ("gemma3_text", FULL, CHANGES),
    "heads before tokens (exaone4)": ("exaone4", {**FULL, "sliding_window": None}, CHANGES),
    "a norm after RoPE": ("llama4_text", FULL, CHANGES),
    "a norm by another name": ("phi", {"qk_layernorm": True}, CHANGES),
    "norms by head": ("stablelm", {"qk_layernorm": True}, CHANGES),
    "clipping": (Family(model_type="olmo", config={"clip_qkv": 4.0}), {}, CHANGES),
    "latent keys": ("deepseek_v3", {"q_lora_rank": None}, FUSED),
}
REFUSED = {
    **dict.fromkeys(("exaone4", "mistral", "starcoder2", "gemma2", "gemma3_text", "gemma3_text_deep"), WINDOWS),
    **dict.fromkeys(("cohere2", "llama4_text", "llama4_text_tempered", "gpt_oss", *SHARING), WINDOWS),
    **dict.fromkeys(("phi3", "phi3_longrope", "gpt_neox", "deepseek_v3", "jetmoe", "gpt2", "gpt_bigcode"), FUSED),
    **dict.fromkeys(("falcon", "falcon_multi_query", "codegen", "lckv_mixed", "cla"), FUSED),
    **dict.fromkeys(("falcon_alibi", "bloom", "bloom_6_heads", "mpt", "mpt_6_heads"), SCORES),
    **dict.fromkeys(HYBRIDS, "it has .* layers"),
    "lckv": "does not see the token itself",
    "opt": CHANGES,  # scales queries
}
EVERY = {
    **{name: (name, dict[str, Any](), REFUSED.get(name, "")) for name in (*FAMILIES, *SHARING, *HYBRIDS, *READING)},
    **CHANGED,
}


class Replaced(nn.Module):
    """The last module before RoPE, whose output is that of a model that marks. All tokens of a text are given at once.

    The attention module is told whether tokens see keys (K, S, S), and the means that values become (K, S, S).
    """

    def __init__(self, last: nn.Module, attention: Any, name: str) -> None:
        super().__init__()
        self.last, self.name, self.of = last, name, [attention]  # in a list: it is no part of this module

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.last(*args)
        [attention] = self.of
        heads = out.clone().view(NUM_TOKENS, -1, attention.head_dim).transpose(0, 1)
        if hasattr(attention.config, "dmc_window_size"):
            spare, heads = heads[..., -1].clone(), heads * (torch.arange(attention.head_dim) < attention.head_dim - 1)
            if self.name == "q":
                attention.spare_queries = spare
            else:
                heads = self._means(attention, spare) @ heads
        elif self.name == "q":
            spare = heads[:: getattr(attention, "num_key_value_groups", 1), :, -1]
            marks_KS = spare * attention.config.dms_alpha_scale - attention.config.dms_initial_alpha_offset > 0
            spare.zero_()
            attention.sees, attention.means = sees(marks_KS, attention.config.dms_window_size), None
        return heads.transpose(0, 1).reshape(out.shape)

    def _means(self, attention: Any, spare_KS: Tensor) -> Tensor:
        init, most = attention.config.dmc_init_val, attention.config.dmc_window_size
        weights_KS = torch.sigmoid(attention.spare_queries.view(len(spare_KS), -1, NUM_TOKENS).mean(dim=1) + init)
        attention.means = torch.zeros(len(spare_KS), NUM_TOKENS, NUM_TOKENS, dtype=spare_KS.dtype)
        for head, joins_S in enumerate(spare_KS - init > 0):
            for token, slot in enumerate(slots(joins_S, most)):
                attention.means[head, token, slot] = weights_KS[head, slot] / weights_KS[head, slot].sum()
        attention.sees = sees(spare_KS - init > 0, 1)
        return attention.means


def slots(joins_S: Tensor, most: int) -> Iterator[list[int]]:
    """The tokens in the slot of each token so far, the last ones."""
    slot = list[int]()
    for token, joins in enumerate(joins_S.tolist()):
        slot = [*slot, token] if joins else [token]
        yield slot[-most:]


def sees(marks_KS: Tensor, window: int) -> Tensor:
    """Whether queries (K, S, S) see keys that the token after them marks or not."""
    distance = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
    is_marked_KS = nn.functional.pad(marks_KS[:, 1:], (0, 1))
    return (distance >= 0) & ~(is_marked_KS[:, None] & (distance >= window))


def dense(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attention as `Replaced` tells the module, (1, S, N, V)."""
    group = query.shape[1] // key.shape[1]
    value = value if module.means is None else module.means @ value
    query = query.clone()
    query[:, :: group if module.means is None else 1, :, -1] = 0
    key, value, allowed = (x.repeat_interleave(group, dim=1) for x in (key, value, module.sees[None]))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return (scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ value).transpose(1, 2), None


def reference(family: str | Family, ids: list[int], config: dict[str, Any]) -> Tensor:
    """Logits (V) after the text."""
    AttentionInterface.register("dense_marks", dense)
    AttentionMaskInterface.register("dense_marks", lambda *_, **__: None)
    module = build(family, attention="eager", **config)
    module.config._attn_implementation = "dense_marks"
    for attention in list(module.modules()):
        if isinstance(attention, GPTJAttention):
            attention._attn = lambda q, k, v, _, own=attention: (dense(own, q, k, v, None)[0].transpose(1, 2), None)
        for name in "qk" if hasattr(attention, "q_proj") else "":
            last = f"{name}_norm" if getattr(attention, f"{name}_norm", None) is not None else f"{name}_proj"
            setattr(attention, last, Replaced(getattr(attention, last), attention, name))
    with torch.inference_mode(), throughout(torch.float64):
        return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("marks", [MARKS, JOINS], ids=["dms", "dmc"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.sampled(4)
def test_a_family_is_right_or_refused_in_a_sentence(name: str, marks: dict[str, Any]) -> None:
    family, config, says = EVERY[name]
    config = {**config, **marks}
    if says:
        with pytest.raises(ValueError, match=says) as raised:
            Model(build(family, **config))
        model_type = build(family).config.model_type
        assert f"({model_type}) cannot mark tokens (DMS, DMC)" in str(raised.value)
        assert "use a Llama or Qwen 3" in str(raised.value) and "\n" not in str(raised.value)
        return
    ids, module = prompt(NUM_TOKENS), build(family, **config)
    with throughout(torch.float64):
        model = Model(module)
    expected = reference(family, ids, config)
    assert largest_difference(Run(model, [], [ids]).prefill()[0], expected) < ROUNDING
    assert largest_difference(Run(model, [], [ids]).prefill([11, 1, 18])[0], expected) < ROUNDING


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ["bart", "cohere", "gemma", "llama"])
def test_numbers_of_a_model_refuse_none(name: str, zeros: bool) -> None:
    """Numbers of the model in place of the trial's own: refused in float16 by rounding (seen of all but Llama), and
    where the first dim of a head is 0."""
    module = build(name, dtype=torch.float64 if zeros else torch.float16, **MARKS)
    for projection in (getattr(each, "q_proj", None) for each in module.modules()) if zeros else ():
        if projection is not None:
            projection.weight.data[0] = 0
    assert Model(module).marks is not None
