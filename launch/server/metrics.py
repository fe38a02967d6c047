"""Metrics of the server in Prometheus' text format, under the names that vLLM gave them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from itertools import accumulate

from launch.server.page.recent import MOST_RECENT, EndedRequest
from runahead.serving.items import Part

LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of buckets, in seconds."""


class Histogram:
    """Counts of values up to each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        totals = list(accumulate(self._counts))
        buckets = [f'{name}_bucket{{le="{bound}"}} {total}' for bound, total in zip(bounds, totals, strict=True)]
        return [*buckets, f"{name}_sum {self._sum:.6f}", f"{name}_count {totals[-1]}"]


class Metrics:
    """Counters and histograms of a server. All calls come from the thread of its event loop.

    Attributes:
        recent: the last requests that have ended, which the page shows.
    """

    HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
        "time_to_first_token_seconds": ("From arrival to the first token.", LONG_S),
        "request_queue_time_seconds": ("From arrival to the beginning of the prefill.", LONG_S),
        "inter_token_latency_seconds": ("Between two tokens of a row.", SHORT_S),
        "e2e_request_latency_seconds": ("From arrival to the last token.", LONG_S),
    }
    COUNTERS: Mapping[str, str] = {
        "prompt_tokens_total": "Tokens of prompts whose prefill is done.",
        "generation_tokens_total": "New tokens.",
        "prefix_cache_queries_total": "Tokens of prompts, of requests that have ended after their first token.",
        "prefix_cache_hits_total": "Of these, tokens that were not computed, as their keys and values were stored.",
        "handover_files_total": "Prompts that were handed over to other engines.",
        "handover_found_total": "Requests for prompts whose file was there already.",
        "handover_bytes_total": "Bytes of their files, of those that were not there before.",
        "handover_failures_total": "Prompts that were computed or begun, and could not be handed over.",
        "wrong_keys_total": "Requests that came without a right key.",
        "unrouted_requests_total": "Requests for a path or method that the server does not have.",
    }
    OF_KEYS: Mapping[str, str] = {
        "key_requests_total": "Requests that have ended, by their key's name.",
        "key_prompt_tokens_total": "Tokens of their prompts, of those that had a first token.",
        "key_generation_tokens_total": "Their new tokens.",
    }
    """Counters with the name of a key, of which there are as many as the server's owner has written."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in self.HISTOGRAMS.items()}
        self.counters = dict.fromkeys(self.COUNTERS, 0)
        self.recent = deque[EndedRequest](maxlen=MOST_RECENT)
        self._ended = Counter[str]()
        self._of_keys = defaultdict[str, Counter[str]](Counter)

    def ended(self, how: str, key: str, *, prompt_tokens: int = 0, new_tokens: int = 0) -> None:
        """Count a request that has ended.

        Args:
            how: "stop", "length", "cancelled", "failed" or its status.
            key: the name of its key; "" if it has none.
        """
        self._ended[how] += 1
        if key:
            for name, number in zip(self.OF_KEYS, (1, prompt_tokens, new_tokens), strict=True):
                self._of_keys[name][key] += number

    def text(self, gauges: Mapping[str, tuple[str, float]], busy_s: Mapping[tuple[int, str], float]) -> str:
        """All metrics: those counted here, gauges with their help and value, and seconds by rank and what it did."""
        lines: list[str] = []

        def head(name: str, about: str, kind: str) -> str:
            lines.extend((f"# HELP runahead:{name} {about}", f"# TYPE runahead:{name} {kind}"))
            return f"runahead:{name}"

        for name, (about, value) in gauges.items():
            lines.append(f"{head(name, about, 'gauge')} {value if isinstance(value, int) else f'{value:g}'}")
        for name, about in self.COUNTERS.items():
            lines.append(f"{head(name, about, 'counter')} {self.counters[name]}")
        name = head("requests_total", "Requests by how they ended.", "counter")
        lines.extend(f'{name}{{ended="{how}"}} {count}' for how, count in sorted(self._ended.items()))
        for name, of_key in self._of_keys.items():
            told = head(name, self.OF_KEYS[name], "counter")
            lines.extend(f'{told}{{key="{key}"}} {count}' for key, count in sorted(of_key.items()))
        name = head("rank_seconds_total", "Seconds of each rank by what it did.", "counter")
        lines.extend(f'{name}{{rank="{rank}",doing="{doing}"}} {s:.3f}' for (rank, doing), s in sorted(busy_s.items()))
        for name, (about, _) in self.HISTOGRAMS.items():
            lines.extend(self.histograms[name].lines(head(name, about, "histogram")))
        return "\n".join(lines) + "\n"


def prefix_lines(part: Part | None) -> str:
    """Metrics of the prefixes that a rank keeps, by tier, as its last report of a prefill says."""
    lines: list[str] = []
    if part is not None and part.prefix_bytes:
        for name, kind, about, values in (
            ("prefix_cache_tier_bytes", "gauge", "Prefixes that are kept, by tier.", part.prefix_bytes),
            ("prefix_cache_found_tokens_total", "counter", "Tokens found, by where.", part.prefix_found_tokens),
        ):
            lines += [f"# HELP runahead:{name} {about}", f"# TYPE runahead:{name} {kind}"]
            lines += [f'runahead:{name}{{tier="{tier}"}} {value}' for tier, value in values.items()]
    return "".join(f"{line}\n" for line in lines)
