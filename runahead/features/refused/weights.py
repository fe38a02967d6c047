"""Refusals of weights in 8 bits, and of models that ranks cannot share."""

from __future__ import annotations

from runahead.features.refused.row import NO_SHARES, Refused

ROWS = (
    # weights in 8 bits
    Refused(
        ("model.weights=int8", "a GPU"),
        "{0} has kernels for CPUs alone",
        "use model.weights=full, or ranks.device=cpu",
    ),
    Refused(
        ("model.weights=int8", "ranks.tensor"),
        "{0} rounds whole weights in blocks, of which transformers' tensor-parallel plans cut no shares",
        "use model.weights=full, or leave ranks.tensor out and use another prefill than tensor",
    ),
    # ranks.tensor and a model
    Refused(
        ("ranks.tensor", "marks"),
        "{1} marks tokens that it evicts (DMS, DMC), and ranks cannot share such a model",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "shared KV layers"),
        "{1} read keys and values of other layers, and ranks cannot share such a model",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "states"),
        "{1} hold states, and transformers' tensor-parallel plans do not say which heads of them a rank has",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "norms by head"),
        "{1} gives each head a norm of its own, which transformers' tensor-parallel plan does not share out",
        NO_SHARES,
    ),
)
