"""Refusals of prefill.speculative, and of prefill.wire_bits."""

from __future__ import annotations

from runahead.features.refused.row import CHAIN, MARKED, NO_SHARES, NOT_ITSELF, OTHERS_KV, Refused

ALL_TOKENS = "use prefill.speculative=none"

ROWS = (
    Refused(
        ("prefill.speculative", "states"),
        "{1} hold states of all tokens before, and {0} computes some of a prompt's tokens alone",
        "use prefill.speculative=none",
    ),
    Refused(("prefill.speculative", "marks"), MARKED, ALL_TOKENS),
    Refused(("prefill.speculative", "passes"), NOT_ITSELF, ALL_TOKENS),
    Refused(
        ("prefill.speculative", "prefill=tsp or zigzag"),
        "{0} gives the tokens that are computed positions with gaps, which {1} does not know",
        CHAIN,
    ),
    *(
        Refused(
            ("prefill.speculative", fact),
            f"{{0}} gives the tokens that are computed positions with gaps, and {{1}} {what}",
            ALL_TOKENS,
        )
        for fact, what in (
            ("own positions", "counts positions on its own"),
            ("angles by length", "rotates by angles that depend on the length of the text"),
        )
    ),
    Refused(
        ("prefill.speculative=layers", "no list of layers"),
        "{0}: {1} has no list of layers",
        "use prefill.speculative=model",
    ),
    Refused(("prefill.speculative=layers", "shared KV layers"), OTHERS_KV, "use prefill.speculative=model"),
    Refused(
        ("prefill.speculative=layers", "model.weights=int8"),
        "{0} makes a model of the first layers' weights, which {1} has in 8 bits",
        "use prefill.speculative=model or model.weights=full",
    ),
    Refused(("prefill.speculative", "ranks.tensor"), "{0} has the whole draft on each rank, not with {1}", NO_SHARES),
    Refused(("prefill.speculative", "prefill=tensor"), "{0} has the whole draft on each rank, not with {1}", NO_SHARES),
    Refused(
        ("prefill.speculative", "policy=prompt_cache"),
        "{0} chooses among the tokens of a prompt, of which {1} has some computed already",
        "leave one of them out",
    ),
    Refused(
        ("prefill.speculative", "a policy that drops tokens"),
        "{1} may drop tokens, which are counted by their places, and with {0} there are gaps between these",
        "use one of them, or a policy that retrieves, such as quest",
    ),
    *(
        Refused(
            ("prefill.speculative", "a retrieving policy", fact),
            f"policy {{1}} does not go with {{2}}, which {what}, and {{0}}, which leaves gaps between positions",
            "use policy=full",
        )
        for fact, what in (
            ("windows", "has layers with windows"),
            ("ALiBi", "adds a bias to its attention by distance (ALiBi)"),
        )
    ),
    Refused(
        ("prefill.speculative", "policy.clamped=true"),
        "{1} counts distances to the tokens that are kept, and {0} leaves gaps between these",
        "use policy.clamped=false",
    ),
    Refused(
        ("prefill.speculative", "policy.positions=reencoded"),
        "{1} numbers tokens without gaps, and {0} keeps them at their positions",
        "use policy.positions=original",
    ),
    Refused(
        ("prefill.speculative", "decode=sharded", "cache policies or cache.bits"),
        "decode=sharded with {2} lets each rank choose among its own tokens, and with {0} there are gaps between these",
        "use decode=last",
    ),
    Refused(
        ("prefill.speculative", "generation.speculate", "decode=sharded"),
        "{1} does not go with {0} and decode=sharded, where ranks have parts of a draft at positions with gaps",
        "use decode=last",
    ),
    Refused(
        ("prefill.speculative", "generation.speculate=policy"),
        "{1} chooses among all tokens of a prompt, of which {0} computes some alone",
        "use generation.speculate=lookup",
    ),
    Refused(
        ("prefill.speculative=model", "a server"),
        "{0} is for launch/infer.py, as a server has no draft.model",
        "use prefill.speculative=layers",
    ),
    # prefill.wire_bits
    Refused(
        ("prefill.wire_bits", "prefill=tsp or zigzag"),
        "{0} is for the keys and values of a chain, and with {1} all ranks exchange theirs",
        CHAIN,
    ),
)
