"""Tiny random models of many families, and transformers' own answers for them.

Weights are wide (standard deviation 0.3), so that attention is far from uniform and a key too many, a key too few or a
wrong position shows in the logits. Windows and chunks are 16 tokens: far shorter than the prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from runahead.model.adapters import know

VOCAB_SIZE = 97
WINDOW = 16
EOS = 2
ROPE_THRESHOLD = 40
"""Length at which the LongRoPE and the dynamic NTK model change their rotary tables."""

PRODUCTS = {"aten::linear", "mkldnn::_linear_pointwise"}
"""Operators of which one computes the product of a linear layer on a CPU, by dtype and processor."""

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 0, 1],
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "attn_temperature_tuning": False,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one, and which of transformers' attention implementations is its oracle."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    oracle: str = "sdpa"
    """"eager" where transformers has no other; it then runs under `Float64`."""


FAMILIES: dict[str, Family] = {
    # the attention interface, rotary positions
    "llama": Family(model_type="llama"),
    "llama_deep": Family(model_type="llama", config={"num_hidden_layers": 12}),
    "llama_dynamic_ntk": Family(
        model_type="llama",
        config={
            "max_position_embeddings": ROPE_THRESHOLD,
            "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2": Family(model_type="qwen2"),
    "qwen3": Family(model_type="qwen3", config={"head_dim": 8}),
    "phi": Family(model_type="phi"),
    "phi3": Family(model_type="phi3"),
    "phi3_longrope": Family(
        model_type="phi3",
        config={
            "original_max_position_embeddings": ROPE_THRESHOLD,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": ROPE_THRESHOLD,
            },
        },
    ),
    "gemma": Family(model_type="gemma", config={"head_dim": 8}),
    "olmo2": Family(model_type="olmo2"),
    "granite": Family(model_type="granite", config={"attention_multiplier": 0.5, "residual_multiplier": 0.7}),
    "stablelm": Family(model_type="stablelm"),
    "nemotron": Family(model_type="nemotron"),
    "gpt_neox": Family(model_type="gpt_neox"),
    "exaone4": Family(
        model_type="exaone4",
        config={"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_types": MIXED_LAYERS},
    ),
    # windows, soft caps, chunks, sinks
    "mistral": Family(model_type="mistral", config={"sliding_window": WINDOW}),
    "starcoder2": Family(model_type="starcoder2", config={"sliding_window": WINDOW}),
    "gemma2": Family(
        model_type="gemma2",
        config={
            "head_dim": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED_LAYERS,
        },
        oracle="eager",
    ),
    "gemma3_text": Family(
        model_type="gemma3_text", config={"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS}
    ),
    "gemma3_text_deep": Family(
        model_type="gemma3_text",
        config={
            "num_hidden_layers": 12,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        },
    ),
    "cohere": Family(model_type="cohere", config={"use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": Family(
        model_type="cohere2",
        config={"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "logit_scale": 1.0},
    ),
    "llama4_text": Family(model_type="llama4_text", config=LLAMA4),
    "llama4_text_tempered": Family(
        model_type="llama4_text",
        config=LLAMA4
        | {
            "attn_temperature_tuning": True,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "no_rope_layers": [1, 1, 0],  # the last one scales queries by their positions, as in Llama 4
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
    "gpt_oss": Family(
        model_type="gpt_oss",
        config={
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": MIXED_LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        oracle="eager",
    ),
    # experts, latent attention (keys and values of different width)
    "mixtral": Family(model_type="mixtral", config={"num_local_experts": 4}),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        config={"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "deepseek_v3": Family(
        model_type="deepseek_v3",
        config={
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "jetmoe": Family(model_type="jetmoe", config={"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # learned positions, one kv head for all query heads
    "bart": Family(
        model_type="bart",
        config={
            "d_model": 32,
            "num_hidden_layers": 4,  # of the encoder, which is not built
            "decoder_layers": 3,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "forced_eos_token_id": None,
        },
    ),
    "opt": Family(model_type="opt", config={"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": Family(model_type="gpt2"),
    "gpt_bigcode": Family(model_type="gpt_bigcode", config={"multi_query": True}),
    # outside the attention interface: an adapter each
    "falcon": Family(model_type="falcon", config={"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": Family(model_type="falcon", config={"multi_query": True}),
    "falcon_alibi": Family(
        model_type="falcon",
        config={"alibi": True, "multi_query": False, "new_decoder_architecture": False, "bias": True},
    ),
    "bloom": Family(model_type="bloom", oracle="eager"),
    "bloom_6_heads": Family(model_type="bloom", config={"hidden_size": 48, "num_attention_heads": 6}, oracle="eager"),
    "mpt": Family(model_type="mpt", config={"max_seq_len": 512}, oracle="eager"),
    "mpt_6_heads": Family(
        model_type="mpt",
        config={"hidden_size": 48, "num_attention_heads": 6, "max_seq_len": 512, "attn_config": {"clip_qkv": 3.0}},
        oracle="eager",
    ),
    "gptj": Family(
        model_type="gptj", config={"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}, oracle="eager"
    ),
    "codegen": Family(
        model_type="codegen", config={"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}, oracle="eager"
    ),
}

PATTERN = ["sliding_attention", "full_attention"] * 3
SHARING: dict[str, Family] = {  # of six layers the last three read layers 1 and 2
    "gemma3n_text": Family(
        model_type="gemma3n_text",
        config={
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": PATTERN,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4_text": Family(
        model_type="gemma4_text",
        config={
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": PATTERN,
            "head_dim": 8,
            "global_head_dim": 16,  # of the layers without windows
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "use_double_wide_mlp": True,
        },
    ),
}
"""Families in which layers read the keys and values of others, as far as the installed transformers has them."""
SHARING = {name: family for name, family in SHARING.items() if family.model_type in CONFIG_MAPPING}

LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
GATED_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": LINEAR_AND_FULL,
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LEAST_STEP = 1e-30
"""transformers limits time steps to this in its rule for several tokens, and not for single ones."""

HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        model_type="qwen3_next", config={**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_text": Family(model_type="qwen3_5_text", config=GATED_DELTA),
    "qwen3_5_moe_text": Family(
        model_type="qwen3_5_moe_text", config={**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "olmo_hybrid": Family(model_type="olmo_hybrid", config=GATED_DELTA),
    "kimi_linear": Family(
        model_type="kimi_linear",
        config={
            **LATENT,
            "num_hidden_layers": 4,
            "layer_types": LINEAR_AND_FULL,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "bailing_hybrid": Family(
        model_type="bailing_hybrid",
        config={
            **LATENT,
            "num_hidden_layers": 4,
            "layer_types": LINEAR_AND_FULL,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bamba": Family(model_type="bamba", config={**MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "granitemoehybrid": Family(
        model_type="granitemoehybrid",
        config={**MAMBA2, "num_hidden_layers": 4, "layer_types": LINEAR_AND_FULL, "num_local_experts": 4},
    ),
    "falcon_h1": Family(model_type="falcon_h1", config={**MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": Family(
        model_type="nemotron_h",
        config={
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 2,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_min": LEAST_STEP,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba2": Family(
        model_type="zamba2",
        config={
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "time_step_min": LEAST_STEP,
            "num_key_value_heads": 4,
        },
    ),
    "mamba2": Family(  # states alone
        model_type="mamba2",
        config={
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
        oracle="eager",
    ),
    "mamba": Family(  # states alone, which take tokens one by one
        model_type="mamba", config={"state_size": 8, "time_step_rank": 4}, oracle="eager"
    ),
    "jamba": Family(  # the same, beside attention
        model_type="jamba",
        config={
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
        },
        oracle="eager",
    ),
    "lfm2": Family(model_type="lfm2", config={"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": Family(
        model_type="lfm2_moe",
        config={**EXPERTS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "lfm3": Family(
        model_type="lfm3",
        config={
            "num_hidden_layers": 6,
            "layer_types": ["conv", "full_attention", "sliding_attention"] * 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
        },
    ),
    "zaya": Family(
        model_type="zaya", config={**EXPERTS, "num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 16}
    ),
}
"""Families of which layers hold states, each kind of layer at least twice."""
HYBRIDS = {name: family for name, family in HYBRIDS.items() if family.model_type in CONFIG_MAPPING}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
"""RoPE whose tables have a factor, 1.14, at each position."""
MARKS: dict[str, Any] = {"dms_window_size": 8, "dms_alpha_scale": 1.0, "dms_initial_alpha_offset": 0.0}
MARKING: dict[str, Family] = {
    "qwen3_dms": Family(model_type="qwen3", config={"head_dim": 8, **MARKS}),
    "llama_dms": Family(model_type="llama", config=MARKS),
}
"""Families whose tokens mark others, about half of them, as in DMS checkpoints."""
JOINS: dict[str, Any] = {"dmc_window_size": 5, "dmc_init_val": 0.0}
AVERAGING: dict[str, Family] = {
    "llama_dmc": Family(model_type="llama", config=JOINS),
    "llama_dmc_any": Family(model_type="llama", config={**JOINS, "dmc_window_size": 0}),
    "qwen3_dmc": Family(model_type="qwen3", config={"head_dim": 8, "rope_parameters": YARN, **JOINS}),
}
"""Families whose tokens join the one before, about half of them, as in DMC checkpoints."""
READING: dict[str, Family] = {
    "lckv": Family(
        model_type="lckv-llama",
        config={
            "num_hidden_layers": 4,
            "layer_types": "0_2_2_3",
            "forward_passes": 3,
            "backward_passes": 2,
            "force_nodiag": True,
        },
    ),
    # Two groups that run in passes, layers that read an earlier one inside and outside of these, and own tokens.
    "lckv_mixed": Family(
        model_type="lckv-llama",
        config={
            "num_hidden_layers": 8,
            "layer_types": "0_0_4_0_4_4_7_7",
            "forward_passes": 2,
            "backward_passes": 1,
        },
    ),
    "cla": Family(model_type="lckv-llama", config={"num_hidden_layers": 6, "layer_types": "0_1_2_0_2_5"}),
}
"""Families whose layers read the keys and values of others: of later ones as in LCKV checkpoints, or earlier ones."""

REFUSED: dict[str, Family] = {
    "bert": Family(model_type="bert"),  # attends to later tokens
    "xlstm": Family(model_type="xlstm", oracle="eager"),  # has a cache of its own
    "diffllama": Family(model_type="diffllama"),  # attends twice per layer
    "deepseek_v32": Family(model_type="deepseek_v32"),  # chooses keys by an index
    "openai-gpt": Family(model_type="openai-gpt"),  # computes attention itself
    "xglm": Family(model_type="xglm"),  # computes with the mask itself
}
"""Families that the runtime must refuse, since it would not compute them right."""


class Float64:
    """While it is open, code of this thread that asks for float32 gets float64.

    transformers takes norms, rotary tables and eager softmaxes in float32 whatever the model's dtype. Rounding to
    float32 in between makes 1e-6 of a difference of 1e-16, so that tests in float64 could not tell much. Both sides
    of a comparison run like this: the oracle, and our model in `tests.ranks.tasks`.

    It replaces the functions that cast, and no others as a `TorchFunctionMode` would: a tiny model would take nearly
    twice as long.
    """

    _lock, _num_open = threading.Lock(), 0
    _here = threading.local()
    """How many are open in this thread."""

    def __enter__(self) -> None:
        Float64._here.num_open = getattr(Float64._here, "num_open", 0) + 1
        with Float64._lock:
            Float64._num_open += 1
            if Float64._num_open == 1:
                for (place, name), cast in CASTS.items():
                    setattr(place, name, cast)

    def __exit__(self, *_: object) -> None:
        Float64._here.num_open -= 1
        with Float64._lock:
            Float64._num_open -= 1
            if Float64._num_open == 0:
                for (place, name), cast in CASTS.items():
                    if place is torch.Tensor:
                        delattr(place, name)  # its base class has it
                    else:
                        setattr(place, name, unwrap(cast))

    @classmethod
    @contextmanager
    def suspended(cls) -> Iterator[None]:
        """Context manager in which float32 is float32 for this thread, whatever is open around it."""
        before, cls._here.num_open = getattr(cls._here, "num_open", 0), 0
        try:
            yield
        finally:
            cls._here.num_open = before

    @classmethod
    def casting(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that takes a dtype, in whose place it is given float64 for float32."""

        @wraps(function)
        def cast(*args: Any, **kwargs: Any) -> Any:
            if getattr(cls._here, "num_open", 0):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs["dtype"] = torch.float64
            return function(*args, **kwargs)

        return cast


def _float(tensor: Tensor, **more: Any) -> Tensor:
    return tensor.to(torch.float32, **more)


CASTS = {
    (torch.Tensor, "float"): _float,
    (torch.Tensor, "to"): Float64.casting(torch.Tensor.to),
    (torch.Tensor, "type"): Float64.casting(torch.Tensor.type),
    (torch.Tensor, "softmax"): Float64.casting(torch.Tensor.softmax),  # that of torch.nn.functional calls it
    (torch, "softmax"): Float64.casting(torch.softmax),
}
"""Attributes that a `Float64` replaces while it is open, and their values."""


def throughout(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Keeps a float64 model in float64; leaves others alone."""
    return Float64() if dtype == torch.float64 else nullcontext()


def keeping(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A forward that computes under `throughout(dtype)` in whatever thread it runs."""

    @wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with throughout(dtype):
            return forward(*args, **kwargs)

    return kept


def build(
    name: str | Family, *, dtype: torch.dtype = torch.float64, attention: str | None = None, **config: Any
) -> PreTrainedModel:
    """A new model of a family, with the same weights in every process; `config` overrides the family's.

    float64 makes transformers run its experts one by one, since its grouped kernels know no float64. Rotary frequencies
    are of float32 as transformers has them, unless `throughout` is open.
    """
    family = (
        name
        if isinstance(name, Family)
        else {**FAMILIES, **SHARING, **HYBRIDS, **MARKING, **AVERAGING, **READING, **REFUSED}[name]
    )
    know(family.model_type)
    settings = {**SHARED, **family.config, **config}
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family.model_type, **settings),
            attn_implementation=attention or family.oracle,
            **experts,
        )
        with torch.no_grad():
            for parameter_name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.3)
                elif "sinks" in parameter_name:
                    parameter.normal_()
                else:  # biases and the weights of norms
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype).eval().requires_grad_(False)


def rounded(name: str | Family, **how: Any) -> PreTrainedModel:
    """A model of `build` with rotary frequencies of float32, whether or not `throughout` is open around the call."""
    with Float64.suspended():
        return build(name, **how)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@cache
def oracle_logits(name: str, ids: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits (V) behind the last token, by transformers alone. The model is new: nothing earlier leaks into it."""
    module = rounded(name, dtype=dtype)
    with torch.inference_mode(), throughout(dtype):
        return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@cache
def oracle_tokens(name: str, ids: tuple[int, ...], num_new: int, **options: Any) -> list[int]:
    """New token ids of `transformers.generate`; greedy, and not ended by any token, unless the options say so."""
    module = rounded(name)
    settings = {"do_sample": False, "eos_token_id": None, **options}
    module.generation_config.eos_token_id = settings.pop("eos_token_id")
    ids_1S = torch.tensor([ids])
    with throughout(module.dtype):
        out_1S = module.generate(
            ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=num_new, pad_token_id=0, **settings
        )
    return out_1S[0, len(ids) :].tolist()


def largest_difference(ours: Sequence[float] | Tensor, theirs: Tensor) -> float:
    return (torch.as_tensor(ours, dtype=torch.float64) - theirs.double()).abs().max().item()


def tiny_llama(tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any) -> LlamaConfig:
    """A Llama of four small layers, for the tokenizer's ids or 97; `sizes` are others of its config."""
    small = {
        "vocab_size": 97 if tokenizer is None else len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**small | sizes)


def save_tiny_config(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any) -> Path:
    """Save `tiny_llama` and its tokenizer into a folder, and return the folder, for `model=random model.config=`."""
    tiny_llama(tokenizer, **sizes).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_tiny_llama(folder: Path, tokenizer: PreTrainedTokenizerBase, **sizes: Any) -> str:
    """Save a random Llama and its tokenizer into a folder, and return the folder, for `model.path=`."""
    torch.manual_seed(0)
    config = tiny_llama(tokenizer, eos_token_id=tokenizer.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
