"""Prefixes of one model's texts: what prompts reuse of earlier prompts and answers, and what is kept of them.

A prompt's last token is always computed, since its logits are needed. Keys and values stay where they were computed,
as views.
"""

# Legend: B batch, T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runahead.model.model import Model
from runahead.reuse.prefix_tree import PrefixNode, PrefixTree
from runahead.reuse.reuse import check_reuse
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.reuse.store import model_key


class RowPrefix:
    """What one row reuses, and holds in the tree of its text so far, until it is released.

    Attributes:
        num_tokens: number of tokens that it reuses.
    """

    def __init__(self, tree: PrefixTree, key: str, ids: Sequence[int]) -> None:
        self._tree, self._key = tree, key
        self._hit = tree.match(ids, key)
        self.num_tokens = self._hit.num_tokens

    @property
    def nodes(self) -> list[PrefixNode]:
        """The nodes that it holds, in the order of the text."""
        return self._hit.nodes

    def store(self, ids: Sequence[int], layers_TKX: Sequence[Tensor] | None) -> None:
        """Store the row's text so far.

        Args:
            ids: the whole text.
            layers_TKX: keys and values of the tokens that the row did not reuse, as views; None: not all are there.
        """
        if layers_TKX is not None:
            before, self._hit = self._hit, self._tree.insert(ids, layers_TKX, self._key, start=self.num_tokens)
            before.release()

    def release(self) -> None:
        """Let the tree drop what the row held."""
        self._hit.release()


class Prefixes:
    """A tree with the texts of one model, on a rank that decodes.

    Args:
        tree: may have texts of other models, too.

    Raises:
        ValueError: keys and values of this model cannot be reused.

    Attributes:
        key: of the model's texts.
    """

    def __init__(self, model: Model, tree: PrefixTree) -> None:
        check_reuse(model, remedy="leave the tree out (serve.prefix_cache_bytes=0)")
        self.tree = tree
        self.key = f"{model_key(model)} at original positions"

    def of(self, prompts: Sequence[Sequence[int]], *, reuse: bool = True) -> list[RowPrefix]:
        """Find the prefix of each prompt, held for its row.

        Args:
            reuse: False lets no prompt reuse anything, but be stored.
        """
        return [RowPrefix(self.tree, self.key, ids[:-1] if reuse else ()) for ids in prompts]


def reused_kv(prompts: Sequence[Sequence[int]], prefixes: Sequence[RowPrefix]) -> ReusedKV | None:
    """Keys and values that the rows of a batch reuse, each node once for all rows that do; None if none reuses any."""
    if not any(prefix.num_tokens for prefix in prefixes):
        return None
    rows: dict[PrefixNode, list[int]] = {}
    starts: dict[PrefixNode, int] = {}
    for row, prefix in enumerate(prefixes):
        start = 0
        for node in prefix.nodes:
            rows.setdefault(node, []).append(row)
            starts[node] = start
            start += len(node.ids)
    parts = [
        ReusedPart(
            layers_TKX=list(node.layers_TKX),
            positions_T=torch.arange(starts[node], starts[node] + len(node.ids)),
            rows=tuple(users),
        )
        for node, users in rows.items()
    ]
    ends = [len(ids) for ids in prompts]
    num_new = max(end - prefix.num_tokens for end, prefix in zip(ends, prefixes, strict=True))
    positions = [
        [0] * (num_new - (end - prefix.num_tokens)) + list(range(prefix.num_tokens, end))
        for end, prefix in zip(ends, prefixes, strict=True)
    ]
    return ReusedKV(parts=parts, positions_BS=torch.tensor(positions), ends=ends)
