"""The ways that are compared, by name, and what a prompt is made of."""

from __future__ import annotations

from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from runahead import Model, PrefillOptions
from runahead.config import Speculative
from runahead.thinning.rank_policies import RankPolicies

EXACT, LAYERS = "exact", "layers="
"""A way, and how those begin whose draft is so many of the model's first layers."""


def policies_of(way: str, share: float) -> RankPolicies:
    """The cache policies of a way, which keep this share of a prompt. Raises: ValueError: there is no such way."""
    if way == EXACT or way.startswith(LAYERS):
        return RankPolicies()
    if way == "pyramidinfer":
        pyramid = PyramidInfer(mean_keep=share, recent_ratio=min(0.2, share / 2), min_tokens=1)
        return RankPolicies.everywhere([pyramid])
    if way == "snapkv":
        return RankPolicies.everywhere([SnapKV(budget=share)])
    raise ValueError(f"{way} is no way; use {EXACT}, pyramidinfer, snapkv or {LAYERS}<number>")


def prefill_of(way: str, share: float) -> PrefillOptions:
    """The prefill of a way."""
    if not way.startswith(LAYERS):
        return PrefillOptions()
    number = int(way.removeprefix(LAYERS))
    return PrefillOptions(speculative=Speculative.layers, speculative_layers=number, speculative_share=share)


def text_ids(model: Model, text: str) -> list[int]:
    """The tokens of a text."""
    ids: list[int] = model.tokenizer(text, verbose=False).input_ids
    return ids
