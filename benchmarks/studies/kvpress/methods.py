"""Methods that kvpress and Runahead both have, with options that make their definitions equal as far as options can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Options = dict[str, Any]

STAY = 4096
"""`evict_every` of policies that would drop tokens while they answer, as kvpress does not: answers are shorter."""
WINDOW, KERNEL, SINKS, CHUNK = 64, 5, 4, 2048
"""kvpress's defaults. It pools by the mean over neighbours, which commutes with the mean over a group's query heads."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method under both names.

    Attributes:
        ours: an entry of policies= of launch/evaluate.py, without a budget.
        press: name of kvpress's method, as `presses.py` has it.
        options: of the press; `scorer` is another press, {"press": name, "options": {...}}.
    """

    ours: Options
    press: str
    options: Options

    def asked(self, budget: int) -> Options:
        """kvpress's side of it, for a number of tokens per KV head, as `presses.press_of` takes it."""
        return {"press": self.press, "options": self.options, "budget": budget}


def snapkv(**ours: Any) -> Method:
    """SnapKV, with options of ours that differ from kvpress's."""
    alike = {"window": WINDOW, "kernel": KERNEL, "pooling": "avg"}
    theirs = {"window_size": WINDOW, "kernel_size": KERNEL}
    return Method(ours={"name": "snapkv"} | alike | ours, press="snapkv", options=theirs)


def expected_attention(**both: Any) -> Method:
    """Expected Attention, whose defaults are the same on both sides: 512 next positions, 4 sinks, covariances."""
    return Method(
        ours={"name": "expected_attention", "evict_every": STAY} | both, press="expected_attention", options=both
    )


def adakv(scorer: Method, alpha: float) -> Method:
    """AdaKV over another method. Only with alpha 0 is the rule the same: the best tokens of all heads together."""
    scores = {"press": scorer.press, "options": scorer.options}
    return Method(
        ours={"name": "adakv", "alpha": alpha, "scorer": scorer.ours},
        press="adakv",
        options={"alpha_safeguard": alpha, "scorer": scores},
    )


METHODS = {
    "kvzip": Method(
        ours={"name": "kvzip", "sinks": SINKS, "chunk_tokens": CHUNK},
        press="kvzip",
        options={"n_sink": SINKS, "chunk_size": CHUNK},
    ),
    "adakv over expected_attention": adakv(expected_attention(epsilon=0.01), 0.2),
    "keydiff": Method(ours={"name": "keydiff", "evict_every": STAY}, press="keydiff", options={}),
    "expected_attention": expected_attention(),
    "adakv over snapkv": adakv(snapkv(), 0.0),
    "snapkv": snapkv(),
    "streaming_llm": Method(
        ours={"name": "streaming_llm", "sinks": SINKS, "evict_every": STAY},
        press="streaming_llm",
        options={"n_sink": SINKS},
    ),
}
"""By name, in the order of NVIDIA's scores on RULER with 25% kept (docs/studies/kvpress.md)."""
