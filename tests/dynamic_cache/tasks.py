"""Tasks of ranks that compute prompts for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runahead import ContextPartition, Engine, PrefillOptions, Ranks
from runahead.dynamic_cache.checked import CheckedCache
from tests.families import rounded, throughout
from tests.ranks.tasks import tiny_model

Answer = tuple[list[list[int]], Tensor]
"""Ids of the prompts and answers, and logits (steps, rows, vocabulary)."""


@cache
def reference(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """transformers' own model, with its own attention."""
    module = rounded(family, dtype=dtype)
    module.set_attn_implementation("eager")
    return module


def padded(prompts: Sequence[Sequence[int]], pad: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and attention mask (B, S) of prompts, padded on the left."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate`, whose answers have 10 tokens, with the logits of all steps."""
    return {
        "max_new_tokens": 10,
        "eos_token_id": None,
        "pad_token_id": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
        **options,
    }


def answered(output: Any) -> Answer:
    return output.sequences[:, -10:].tolist(), torch.stack(output.logits)


def engine(ranks: Ranks, family: str, boundaries: tuple[int, ...], prefill: PrefillOptions | None = None) -> Engine:
    return Engine(
        tiny_model(family), ranks, prefill=prefill, partition=lambda *_: ContextPartition(boundaries=boundaries)
    )


def generate_with(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    each: list[dict[str, Any]],
    prefill: PrefillOptions | None = None,
    *,
    is_own: bool = False,
) -> list[Answer | None]:
    """Answers of transformers by each of these options, with this seed, after prompts that all ranks compute.

    Args:
        is_own: let the engine's model answer, rather than another one.
    """
    with throughout(torch.float64):
        made, module = engine(ranks, family, boundaries, prefill), None if is_own else reference(family)
        answers = list[Answer | None]()
        for options in each:
            torch.manual_seed(7)
            output = made.generate_with(module, prompts, **asked(options))
            answers.append(None if output is None else answered(output))
        return answers


def lengths(
    ranks: Ranks, family: str, prompts: list[list[int]], boundaries: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Tokens that each layer counts, and that it holds."""
    with throughout(torch.float64):
        found: CheckedCache | None = engine(ranks, family, boundaries).to_cache(prompts)
    return None if found is None else [(layer.get_seq_length(), layer.keys.shape[2]) for layer in found.layers]
