"""Refusals of reuse of prefixes."""

from __future__ import annotations

from runahead.features.refused.row import CHAIN, MARKED, Refused

ROWS = (
    Refused(("reuse of prefixes", "marks"), MARKED, "use no prefix tree"),
    Refused(
        ("reuse of prefixes", "a policy that narrows"),
        "policy {1} leaves tokens out of deeper layers, so that no prompt is stored whole",
        "use one that only evicts, such as snapkv, or leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "a policy that needs all tokens of a prompt"),
        "policy {1} decides by what is computed of all tokens of a prompt, and those of a stored prefix are not",
        "use one that looks at the last tokens or at keys, such as snapkv, or leave the tree out "
        "(serve.prefix_cache_bytes=0)",
    ),
    *(
        Refused(
            ("reuse of prefixes", option),
            "{1} needs keys that are not rotated, and {0} stores them rotated to their positions",
            remedy,
        )
        for option, remedy in (
            ("policy.positions=reencoded", "use policy.positions=original"),
            ("policy.clamped=true", "use policy.clamped=false"),
        )
    ),
    Refused(
        ("reuse of prefixes", "prefill=tsp or zigzag"),
        "{0} does not go with {1}, which has no stage that stores a prompt while others compute it",
        CHAIN,
    ),
    Refused(
        ("reuse of prefixes", "angles by length"),
        "{1} rotates by angles that depend on the length of the text, so keys and values cannot be reused in other "
        "prompts",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "own positions"),
        "{1} counts positions on its own, so keys and values cannot be reused in other prompts",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "prefill.speculative"),
        "{1} leaves out tokens that the next prompt may need, so that no prompt is stored",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
)
