"""Refusals of policy=prompt_cache, whose prompts reuse segments."""

from __future__ import annotations

from runahead.features.refused.row import MARKED, OTHERS_KV, Refused

ROWS = (
    *(
        Refused(
            (f"prompt.{name}", "policy=prompt_cache"),
            f"prompt.{name} does not go with policy=prompt_cache",
            "give a prompt in PML as prompt.file",
        )
        for name in ("question", "ids_file", "random_tokens")
    ),
    Refused(
        ("prompt.chat", "policy=prompt_cache"),
        "prompt.chat does not go with policy=prompt_cache",
        "<system>, <user> and <assistant> are messages",
    ),
    Refused(
        ("option policy.positions", "policy=prompt_cache"),
        "{0} does not go with policy=prompt_cache, whose positions are fixed",
        "",
    ),
    Refused(
        ("a server", "policy=prompt_cache", "decode other than last"),
        "policy=prompt_cache needs decode=last in a server, not {2}",
        "",
    ),
    Refused(
        ("policy=prompt_cache", "policy.clamped=true"),
        "{1} needs keys that are not rotated, and {0} stores them rotated to their positions",
        "use policy.clamped=false",
    ),
    Refused(
        ("policy=prompt_cache", "a policy that drops tokens"),
        "{1} may drop tokens, which are counted by their places, and prompts of {0} may have gaps between these",
        "use one that retrieves, such as quest or clusterkv",
    ),
    Refused(("policy=prompt_cache", "marks"), MARKED, "give prompts without schemas"),
    Refused(
        ("policy=prompt_cache", "states"),
        "segments of {0} are encoded apart from each other, and {1} hold states of all tokens before",
        "give prompts without schemas",
    ),
    Refused(
        ("policy=prompt_cache", "angles by length"),
        "{1} rotates by angles that depend on the length of the text, so keys and values cannot be reused in other "
        "prompts",
        "use policy=full",
    ),
    Refused(
        ("policy=prompt_cache", "own positions"),
        "{1} counts positions on its own, so keys and values cannot be reused in other prompts",
        "use policy=full",
    ),
    *(
        Refused(
            ("policy=prompt_cache", "a retrieving policy", fact),
            f"policy {{1}} does not go with segments of {{2}}, which {what}: their prompts may have gaps between "
            "positions",
            "use no cache policy",
        )
        for fact, what in (
            ("windows", "has layers with windows"),
            ("ALiBi", "adds a bias to its attention by distance (ALiBi)"),
        )
    ),
    Refused(
        ("policy.recompute", "prefill.chunk_tokens"),
        "policy.recompute chooses in a layer among the tokens of the whole prompt, of which {1} computes a part",
        "leave one of them out",
    ),
    Refused(("policy.recompute", "shared KV layers"), OTHERS_KV, "use policy.link_tokens"),
    Refused(
        ("policy.recompute", "no list of layers"),
        "policy.recompute: {1} has no list of layers",
        "use policy.link_tokens",
    ),
)
