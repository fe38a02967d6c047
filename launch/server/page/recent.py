"""The last requests that have ended, for the page: lengths and times, and nothing that they say."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RECENT = 40
"""Requests that are remembered."""


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """A request that was queued and has ended.

    Attributes:
        ended_s: seconds of the clock, as `time.time`.
        prompt_tokens: of its different prompts.
        cached_tokens: of these, those that were not computed.
        new_tokens: of all its answers.
        ttft_s: from its arrival to its first token; None if there is none.
        tokens_per_s: of all its answers together, after the first token; None if there are no others.
        how: "stop", "length", "tool_calls", "cancelled" or "failed".
    """

    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    how: str
