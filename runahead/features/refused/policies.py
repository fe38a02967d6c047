"""Refusals of policies that run together, in a chain or in a sequence."""

from __future__ import annotations

from runahead.features.refused.row import Refused

ROWS = (
    # policies in a chain
    Refused(
        ("a policy that needs attention inputs of each token", "several stages with decode=last"),
        "policy {0} scores tokens by hidden states, which {1} stages do not send each other",
        "use prefill=single or decode=sharded",
    ),
    Refused(
        ("a policy that decides on the whole prompt", "a policy of earlier ranks that narrows"),
        "policy {0} decides on the whole prompt, of which earlier ranks may drop no tokens",
        "use policy.ranks.others=full",
    ),
    *(
        Refused(
            ("a policy that merges layers", others),
            "policy {0} merges layers that store the same tokens, and must be the only one on all ranks",
            "",
        )
        for others in ("a sequence", "a policy of earlier ranks that narrows")
    ),
    # policies in a sequence
    Refused(
        ("unequal heads", "a sequence", "a retrieving policy"),
        "policy {0} leaves heads of different lengths, and an index of policy {2} holds equally many tokens of each",
        "leave out one of the two",
    ),
    Refused(
        ("unequal heads, decided on the whole prompt", "a sequence"),
        "policy {0} decides on the whole prompt, of which others in a sequence drop tokens",
        "it must be the only one",
    ),
    Refused(
        ("unequal heads, compensated", "a sequence"),
        "policy {0} stands in for the tokens that it drops, and not for those that others in a sequence drop",
        "use policy.compensate=false",
    ),
    Refused(
        ("unequal heads", "a sequence", "a share of a model"),
        "policy {0} in a sequence leaves other numbers of tokens on each of the {model.num_shards} ranks that share "
        "the heads, which have to decide alike",
        "use it alone, or ranks.tensor=1",
    ),
    Refused(
        ("unequal heads, compensated", "policy.positions=reencoded"),
        "policy {0} lets the mean of the tokens that it drops stand for them, which has no position",
        "use policy.compensate=false or policy.positions=original",
    ),
    Refused(
        ("unequal heads", "policy.positions=reencoded", "a policy that turns queries"),
        "policy {2} turns queries to the next position of a row, and with policy {0} each head has another one",
        "use policy.positions=original",
    ),
    Refused(
        ("a retrieving policy", "a step after one that retrieves"),
        "policy {0} decides what attention sees of all that is kept, so it must be the only one that does, and the "
        "last step of a sequence",
        "",
    ),
    Refused(
        ("a retrieving policy", "policy.positions=reencoded"),
        "policy {0} keeps all tokens at their positions",
        "use policy.positions=original",
    ),
    Refused(
        ("policy.clamped=true", "policy.recent of all positions"),
        "policy.recent={retriever.recent} is the distance of all tokens before, and model {model.name} has "
        "{model.max_positions} positions",
        "use at most {1}",
    ),
    Refused(
        ("a policy twice",),
        "policy {0} is in a sequence twice with the same options, so the second would decide as the first",
        "leave out one of the two, or give it other options",
    ),
    Refused(
        ("a sequence", "a policy that narrows later"),
        "policy {1} narrows what deeper layers compute, by votes on all new tokens, not after {0} has dropped some",
        "make it the first step of the sequence",
    ),
)
