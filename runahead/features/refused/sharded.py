"""Refusals of decode=sharded."""

from __future__ import annotations

from runahead.features.refused.row import MARKED, Refused

ROWS = (
    Refused(
        ("decode=sharded", "prefill=tsp or zigzag"),
        "decode=sharded needs prefill=kv_runahead: {1} collects all keys and values on the last rank",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.positions=reencoded"),
        "decode=sharded keeps tokens of a text on several ranks, and policy.positions=reencoded counts all that are "
        "kept",
        "use policy.positions=original or decode=last",
    ),
    Refused(
        ("decode=sharded", "a policy that needs the whole prompt"),
        "decode=sharded leaves each rank the tokens of its own chunk, and this policy has to see those of all chunks "
        "at once",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.clamped=true"),
        "decode=sharded keeps tokens of a text on several ranks, and policy.clamped=true counts the slots of one",
        "use policy.clamped=false or decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.events.by=surprise"),
        "decode=sharded keeps tokens of a text on several ranks, and the events of {1} may reach over two of these",
        "use policy.events.by=size or decode=last",
    ),
    Refused(
        ("decode=sharded", "policy=prompt_cache", "cache policies or cache.bits"),
        "decode=sharded with {2} lets each rank choose among its own tokens, and reused segments are tokens of no rank",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "several stages", "reuse of prefixes", "cache policies or cache.bits"),
        "decode=sharded with {3} lets each rank choose among the tokens that it computes, and those of a stored prefix "
        "are computed by none",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.recompute"),
        "decode=sharded keeps what a rank computes, and with policy.recompute layers compute fewer tokens one by one",
        "use decode=last or policy.link_tokens",
    ),
    Refused(("decode=sharded", "marks"), MARKED, "use decode=last"),
    Refused(
        ("decode=sharded", "states"),
        "decode=sharded has all ranks that keep tokens compute the new ones, and only the last one has the states of "
        "{1}",
        "use decode=last",
    ),
)
