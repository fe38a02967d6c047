"""Exact top-k: retrieve the tokens with the highest scores, computed from all keys.

It reads every key in every step, so it is an upper bound on the quality of retrieval, not a fast method.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.options import Budget
from policies.retriever import Retriever


@dataclass(kw_only=True)
class ExactTopK(Retriever, name="exact_topk"):
    """Retrieve `fetch` slots for every KV head, by the layer's own query."""

    fetch: Budget | None = 0.1
