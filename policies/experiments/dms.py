"""DMS (Łańcucki et al., NeurIPS 2025, arXiv 2506.05345): evict the tokens that the model has marked.

For models that were trained to mark tokens: each token marks the one before it or not, in each KV head, and a marked
token is evicted once it leaves a window, whose length is the model's. Attention leaves marked tokens out whether they
are evicted or not, so this policy changes no answer; it frees their memory.

In the published checkpoints (nvidia/Qwen3-8B-DMS-8x, shisa-ai/Llama-3.2-1B-DMS-8x) a dim of a query of each KV head,
before RoPE, times `dms_alpha_scale` minus `dms_initial_alpha_offset` is a logit: above 0 the token marks the one before
it, and a marked token is seen by the queries of `dms_window_size` tokens, its own first. A config with
`dms_window_size` is such a model, of a family that has `q_proj` and the query's norm as modules of their own (Qwen 3,
Llama); an adapter for the logits (`dms_separate_alpha`) is refused. Keys have one more dim for the mark, which is sent
with them, so answers are exact on any number of ranks. Attention is plain PyTorch in blocks, not a fused kernel.

Models trained with DMC (Nawrot et al., ICML 2024, arXiv 2403.09636) mark tokens that have joined the next one, which
holds the mean of both (runahead/model/marking/means.py): what this policy frees of them are means that have grown.

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
