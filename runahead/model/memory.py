"""Memory that calls of a model take: an estimate of the activations, beside the measured peak of the process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from runahead.model.loading.memory import PeakMemory, host_bytes
from runahead.report import MemoryReport

FIRST_RUN_BYTES = 32 * 10**6
"""Memory that libraries take when they first compute and send: code that is read in, and buffers (fitted, on a CPU)."""

ROWS_SHARE = 1 / 64
"""Part of a rank's memory that activations may take before a layer computes its tokens in blocks."""
LEAST_ROW_TOKENS = 2048
"""Tokens of a block below which it would be slower."""


def activation_bytes(config: Any, dtype: torch.dtype, num_shares: int = 1) -> int:
    """Estimate of a forward's activations per token in bytes: 11 of the hidden size, and 4 of a share's MLP.

    The factors were fitted to the resident memory of a Llama on a CPU (docs/loading.md). They hold the residual, norms,
    queries while they are rotated, and gate, up and their product; and what the allocator keeps between layers.
    """
    width = int(config.hidden_size)
    return (11 * width + 4 * mlp_dim(config) // num_shares) * dtype.itemsize


def mlp_dim(config: Any) -> int:
    """Width of the widest MLP."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(inner) if isinstance(inner, list) else inner)  # Gemma 3n has one for each layer


def token_bytes(model: Any) -> int:
    """Bytes that a token of a prompt takes on a rank that computes all of it: keys, values and activations.

    Args:
        model: a `Model`, whose module uses this one.
    """
    kv_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    return kv_bytes + activation_bytes(model.config, model.dtype, model.num_shards)


@cache
def _memory_bytes(device: torch.device, ranks_on_host: int) -> float:
    """Memory of a rank's device, or its part of the host's."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes() / ranks_on_host


def memory_for_blocks(model: Any, ranks_on_host: int) -> float | None:
    """Bytes of memory of which activations of a layer may take a small part: the least of ranks that share a model.

    These add up each block's outputs, so their blocks are alike. All of them call this at the same time.

    Args:
        model: as of `token_bytes`.

    Returns:
        None if the model computes a chunk at once, however long.
    """
    return model.of_tightest_share(_memory_bytes(model.device, ranks_on_host)) if model.computes_blocks else None


def row_tokens(model: Any, batch: int, memory_bytes: float) -> int:
    """Tokens of each row for which a layer's activations take no more than a small part of the memory.

    Args:
        model: as of `token_bytes`.
        batch: number of rows.
        memory_bytes: of the rank.
    """
    return row_tokens_in(memory_bytes, batch * activation_bytes(model.config, model.dtype, model.num_shards))


def row_tokens_in(memory_bytes: float, token_bytes: float) -> int:
    """`row_tokens` of a rank with so much memory, if activations take so many bytes for a token of each row."""
    return max(LEAST_ROW_TOKENS, int(memory_bytes * ROWS_SHARE / token_bytes))


def row_state_bytes(model: Any, *, in_chain: bool = False, drafts: bool = False, stores: bool = False) -> int:
    """Bytes that the states of a row take on a rank.

    Args:
        model: as of `token_bytes`.
        in_chain: until its prompt is computed each is there twice: also as it arrived.
        drafts: afterwards each is there twice: also as it was before the draft.
        stores: there is one more, that after the prompt, until a tree has it.
    """
    state_bytes = sum(shape.num_bytes for shape in model.state_shapes)
    return state_bytes * ((2 if drafts or in_chain else 1) + stores)


def memory_after_call(
    loaded: MemoryReport, peak: PeakMemory, device: torch.device, *, kv_bytes: int, activations: int, kernel_bytes: int
) -> MemoryReport:
    """The memory of a rank that loaded a model, with the measured and the predicted peak of a call.

    Args:
        loaded: memory while the weights were loaded.
        peak: of the process, from then until now.
        device: where the model is.
        kv_bytes: peak of the call's KV cache.
        activations: most bytes of its activations at a time, as estimated.
        kernel_bytes: that its threads keep for kernels.
    """
    first_run = FIRST_RUN_BYTES if device.type == "cpu" else 0
    call_bytes = loaded.base_bytes + loaded.weights_bytes + kv_bytes + activations + kernel_bytes + first_run
    return replace(
        loaded,
        peak_bytes=peak.peak_bytes(),
        predicted_peak_bytes=max(loaded.predicted_load_peak_bytes, call_bytes),
    )
