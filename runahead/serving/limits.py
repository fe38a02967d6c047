"""Limits of a server's queue, and what it aims at while it decodes: a dataclass that needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runahead.config import require


@dataclass(kw_only=True)
class QueueLimits:
    """Limits of the queue and of what is generated at once. The command line names them `serve.<name>`.

    Attributes:
        batch: most rows (answers) that are generated at once.
        batch_tokens: most prompt tokens, padding included, of several requests whose prompts are computed at once.
        max_tokens: most tokens of prompt and answer of all rows that are generated at once; None is no limit.
        max_waiting: most requests that wait.
        max_per_client: most requests of a client, waiting or running.
        max_ttft_s: a request whose predicted TTFT is longer is refused; None: none is.
        itl_s: seconds after which rows are decoded inside a prefill. A prompt that a stage can compute alone in this
            time is short.
        decode_ranks: stages that decode, and compute no more of prompts than their last tokens. With 0 the last stage
            decodes and has chunks as long as its decoding allows.
    """

    batch: int = 8
    batch_tokens: int = 4096
    max_tokens: int | None = None
    max_waiting: int = 64
    max_per_client: int = 32
    max_ttft_s: float | None = None
    itl_s: float = 0.5
    decode_ranks: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "batch_tokens", "max_waiting", "max_per_client"):
            require(getattr(self, name) >= 1, f"serve.{name}", getattr(self, name), "must be at least 1")
        for name in ("max_tokens", "max_ttft_s"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"serve.{name}", value, "must be above 0")
        require(0 < self.itl_s < math.inf, "serve.itl_s", self.itl_s, "must be a number of seconds above 0")
        rule = "must be 0, or 1 for a stage that only decodes"
        require(self.decode_ranks in (0, 1), "serve.decode_ranks", self.decode_ranks, rule)
