"""ChunkKV (Liu et al., NeurIPS 2025, arXiv 2502.00299): keep or drop runs of neighbouring tokens as a whole.

What a passage says is lost with some of its tokens. So the votes of the prompt's last `window` queries are averaged
over chunks of `chunk` tokens, and those with the highest mean stay. Generated tokens are all kept. The paper also lets
neighbouring layers keep the same chunks, to save the choice; here every layer chooses.

It votes as SnapKV, without pooling. Chunks are counted in each row from its first token, and kept by their mean vote in
each KV head. Published code keeps a whole number of chunks, and those of a batch's first row in all rows (kvpress);
here the budget is used up, so the last chunk that fits in part is cut short.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.layer_view import LayerView
from policies.options import require_least
from policies.snapkv import SnapKV


@dataclass(kw_only=True)
class ChunkKV(SnapKV, name="chunkkv"):
    """Score: mean vote of the token's chunk. The window itself is kept; the budget may cut the last chunk short.

    Attributes:
        chunk: tokens of a chunk, counted from the first token of a row.
    """

    kernel: int = 1
    chunk: int = 10

    def __post_init__(self) -> None:
        require_least(self, chunk=1)
        super().__post_init__()

    def score(self, view: LayerView) -> Tensor:
        votes_BKn, before = super().score(view), max(0, view.num_slots - self.window)
        for row, heads, pad in view.heads_by_pad():
            whole = max(0, before - pad) // self.chunk
            end = pad + whole * self.chunk
            chunks_KPc = votes_BKn[row, heads, pad:end].unflatten(1, (whole, self.chunk))
            chunks_KPc[:] = chunks_KPc.mean(dim=-1, keepdim=True)
            if end < before:
                votes_BKn[row, heads, end:before] = votes_BKn[row, heads, end:before].mean(dim=-1, keepdim=True)
        return votes_BKn
