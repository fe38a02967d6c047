"""Tasks of ranks in tests of adapters."""

from __future__ import annotations

from torch import Tensor

from runahead import Engine, GenerationOptions, ModelOptions, Ranks
from runahead.model.shares import load_model
from tests.ranks.tensor_tasks import arranged, note_logits


def last_logits(ranks: Ranks, options: ModelOptions, ids: list[int], num_shares: int) -> list[float]:
    """This rank's last logits of a prompt that goes along the chain."""
    logits: list[Tensor] = []
    with arranged(ranks, num_shares), note_logits(logits):
        model = load_model(options, ranks)
        logits.clear()
        Engine(model, ranks).generate([ids], GenerationOptions(max_new_tokens=1))
    return logits[-1][0].tolist() if logits else []  # of the last stage
