"""Refusals of what vLLM does that keys and values of another engine do not go with: at start, and by request."""

from __future__ import annotations

from typing import Any

LENGTH_DEPENDENT = {"longrope", "dynamic"}
"""Kinds of RoPE whose angles depend on the text's length; vLLM chooses LongRoPE's factors by `max_model_len`."""
EXACT_CACHES = ("auto", "float32", "float16", "bfloat16")
WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")
"""Kinds of speculation whose drafts come from the text, with no keys and values."""


def refuse(what: str) -> ValueError:
    return ValueError(f"runahead: {what} cannot take K,V of another engine; start vLLM without this connector")


def check_config(config: Any, kinds_of_caches: list[str], *, trust_weights: bool) -> None:
    """Refuse what would give wrong answers.

    Args:
        config: vLLM's.
        kinds_of_caches: names of the classes of the KV cache groups' specs.
        trust_weights: the user says that both sides have the same model.

    Raises: ValueError: in one sentence.
    """
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"runahead: kv_load_failure_policy={transfer.kv_load_failure_policy} ends a request whose file is "
            "damaged; set it to recompute in --kv-transfer-config"
        )
    if transfer.kv_role != "kv_consumer":
        raise ValueError(
            f"runahead: kv_role={transfer.kv_role}: this connector loads and hands nothing over; set it to "
            "kv_consumer in --kv-transfer-config"
        )
    if any(kind not in ("FullAttentionSpec", "SlidingWindowSpec") for kind in kinds_of_caches):
        raise refuse("MLA, Mamba, chunked or other caches")
    if rope_kinds(config.model_config.hf_text_config) & LENGTH_DEPENDENT:
        raise refuse("RoPE that depends on the text's length")
    parallel = config.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise refuse("context parallelism")
    if parallel.pipeline_parallel_size > 1:
        raise refuse("pipeline parallelism")
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in WITHOUT_CACHE:
        raise refuse("speculation with a draft model's cache")
    if config.cache_config.cache_dtype not in EXACT_CACHES:
        raise refuse(f"a KV cache in {config.cache_config.cache_dtype}")
    if config.model_config.quantization is not None:
        raise refuse(f"weights quantised by {config.model_config.quantization}")
    model = config.model_config
    for option, value, none in (
        ("--hf-overrides", model.hf_overrides, {}),
        ("--hf-config-path", model.hf_config_path, model.model),
    ):
        if value and value != none and not trust_weights:
            raise ValueError(
                f"runahead: {option} {value} gives vLLM another config than the checkpoint's, of which RoPE and shapes "
                "alone are compared with the server's; leave it out, or, if the server has the same values, set "
                "trust_weights to true in kv_connector_extra_config"
            )
    if config.load_config.load_format == "dummy":
        raise refuse("load_format=dummy")


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse attention layers that cannot be written to. Raises: ValueError."""
    for name, layer in layers.items():
        if layer.kv_sharing_target_layer_name is not None:
            raise refuse(f"layer {name} reads the keys and values of another layer, and")
        if layer.attn_backend.forward_includes_kv_cache_update or not hasattr(layer.impl, "do_kv_cache_update"):
            raise refuse(f"attention backend {layer.attn_backend.get_name()} writes its cache in its forward, and")


def rope_kinds(config: Any) -> set[str]:
    """Kinds of RoPE of all layers; `rope_parameters` is one dict, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in parameters.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", "default")) for each in by_kind or [parameters]}


def why_alone(request: Any) -> str:
    """Why a request is vLLM's own, or "": its K,V depend on more than the token ids, or it wants all logits."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "it has prompt embeddings"
    if request.mm_features:
        return "it has images or sound"
    if request.lora_request is not None:
        return "it has a LoRA adapter"
    if request.cache_salt:
        return "it has a cache_salt"
    if request.pooling_params is not None:
        return "it is for pooling"
    if request.resumable:
        return "its prompt goes on while it is answered"
    if request.skip_reading_prefix_cache:
        return "it wants all of the prompt computed, as for prompt_logprobs"
    return ""
