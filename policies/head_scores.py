"""Scores of heads: how much each looks for earlier copies of a token (RazorAttention, arXiv 2407.15891, Sec. 3.2).

In a text that is the same random tokens several times, a head may attend to earlier copies of its own token (echo), or
to the tokens that follow them (induction). Attention to other tokens of such a text means nothing.
"""

# Legend: N query heads, K kv heads.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import ModelFacts
from policies.model_file import ModelFiles, PathLike

FILES = ModelFiles(kind="runahead head scores 1", option="policy.heads", program="policies.retrieval_heads")


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """Mean attention probabilities of the query heads of each layer, over all queries that have copies before them.

    Attributes:
        induction: of tokens that follow copies (N) in float32, by layer; 0 in layers with windows.
        echo: of the copies themselves.
    """

    induction: list[Tensor]
    echo: list[Tensor]

    def packed(self, fingerprint: str) -> bytes:
        """Content of a file for the model with this fingerprint."""
        by_layer = zip(self.induction, self.echo, strict=True)
        return FILES.packed({f"layer.{layer}": torch.stack(each) for layer, each in enumerate(by_layer)}, fingerprint)

    @classmethod
    def load(cls, path: PathLike, fingerprint: str | None = None) -> HeadScores:
        """Read a file that `packed` made, for any model or for the one with this fingerprint.

        Raises:
            ValueError: as `ModelFiles.read`.
        """
        found, _ = FILES.read(path, fingerprint)
        layers = [f"layer.{layer}" for layer in range(len(found))]
        if not found or set(layers) != found.keys() or not all(map(_is_sound, found.values())):
            raise FILES.damaged(path)
        return cls(induction=[found[layer][0] for layer in layers], echo=[found[layer][1] for layer in layers])

    def by_kv_head(self, model: ModelFacts) -> tuple[list[Tensor], list[Tensor]]:
        """Largest induction and echo scores (K) by layer over the query heads that share a KV head, of all shares.

        Raises:
            ValueError: they are of other numbers of heads.
        """
        heads = model.heads_of_all
        found = [len(scores_N) for scores_N in self.induction]
        if len(found) != len(heads) or any(num % num_kv for num, num_kv in zip(found, heads, strict=True)):
            raise ValueError(
                f"policy.heads has scores of {found} query heads by layer, and model {model.name} has {heads} KV "
                f"heads; make it again with {FILES.remedy('<file>')}"
            )
        induction, echo = (
            [scores_N.view(num_kv, -1).amax(dim=1) for scores_N, num_kv in zip(of_all, heads, strict=True)]
            for of_all in (self.induction, self.echo)
        )
        return induction, echo


def _is_sound(scores_2N: Tensor) -> bool:
    shaped = scores_2N.ndim == 2 and len(scores_2N) == 2 and scores_2N.dtype == torch.float32 and scores_2N.numel() > 0
    return shaped and bool(((scores_2N >= 0) & (scores_2N <= 1)).all())
