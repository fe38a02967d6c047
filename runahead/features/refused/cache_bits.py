"""Refusals of cache.bits."""

from __future__ import annotations

from runahead.features.refused.row import MARKED, Refused

ROWS = (
    Refused(
        ("cache.bits", "prefill=tsp or zigzag"),
        "{0} needs prefill=kv_runahead or prefill=single",
        "{1} stores keys and values as they are",
    ),
    Refused(
        ("cache.bits", "policy.pool.bytes"),
        "{0} does not go with {1}, since in a full pool single tokens are replaced",
        "leave one of them out",
    ),
    Refused(
        ("cache.bits", "a policy that merges layers"),
        "{0} does not go with policy {1}, whose layers share what they store",
        "use cache.bits=null or another policy, such as snapkv",
    ),
    Refused(
        ("cache.bits", "a conversation", "a retrieving policy", "a sequence"),
        "{0} with policy {2} keeps keys in groups of tokens, of which policies before it in a sequence would drop "
        "some after a later turn",
        "use one policy",
    ),
    Refused(("cache.bits", "marks"), MARKED, "use cache.bits=null"),
)
