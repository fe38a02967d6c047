"""DMS (Łańcucki et al., NeurIPS 2025, arXiv 2506.05345): evict the tokens that the model has marked.

For models that were trained to mark tokens: each token marks the one before it or not, in each KV head, and a marked
token is evicted once it leaves a window, whose length is the model's. Attention leaves marked tokens out whether they
are evicted or not, so this policy changes no answer; it frees their memory.

A config with `dms_window_size` is such a model (runahead/model/marking/marks.py). With `dmc_window_size` it was trained
with DMC (means.py beside it), and marks tokens that have joined the next one, which holds the mean of both. Keys have
one more dim for the mark, which is sent with them, so answers are exact on any number of ranks. Attention is plain
PyTorch in blocks, not a fused kernel.

What was found: tests compare with whole matrices, with random weights; no checkpoint was run. It is an experiment since
it goes with marked models alone, whose attention is their own.
"""

# Legend: B batch, K kv heads, n stored slots, m kept slots of the longest head.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.base import Policy, marked_slots
from policies.layer_view import LayerView, Phase
from policies.options import require_least


@dataclass(kw_only=True)
class DMS(Policy, name="dms"):
    """Evict what the next query does not see.

    Attributes:
        evict_every: while decoding, number of tokens in a KV head that are evicted at once, since that copies what is
            kept.
    """

    keeps_ragged: ClassVar[bool] = True
    follows_marks: ClassVar[bool] = True

    evict_every: int = 16

    def __post_init__(self) -> None:
        require_least(self, evict_every=1)

    def keep(self, view: LayerView) -> Tensor | None:
        assert view.unseen_BKn is not None, "the model marks tokens"
        least = self.evict_every if view.phase is Phase.decode else 1
        if int(view.unseen_BKn.sum(dim=-1).max()) < least:
            return None
        kept_BKn = view.is_token_BKn() & ~view.unseen_BKn
        return marked_slots(kept_BKn)
