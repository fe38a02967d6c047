"""Stored prefixes of a batch on their way along a chain, from the stage that has them to all others.

The last stage has the keys and values of stored texts, and every other stage needs them, layer by layer. They travel in
the slabs of the new tokens, before token 0. A slab has a place per token and row of the batch, so its places [-S, 0)
have room for S B tokens of one row each: what rows share is there, and is sent, once.
"""

# Legend: B batch, T tokens, S tokens of a slab, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.prefixes import reused_prefixes
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """Consecutive tokens that some rows of a batch begin with.

    Attributes:
        positions: of the tokens.
        rows: that share them.
    """

    positions: range
    rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredPrefix:
    """What the prompts of a batch reuse of stored texts. Every stage derives the same from prompts and lengths.

    Attributes:
        prompts: token ids.
        num_reused: tokens that each prompt reuses.
        runs: these tokens, each once for all rows that share it, in the order in which they lie side by side.
    """

    prompts: Sequence[Sequence[int]]
    num_reused: Sequence[int]
    runs: tuple[SharedRun, ...]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], num_reused: Sequence[int]) -> StoredPrefix:
        """Find what the prompts share of their first tokens."""
        begins, texts = [ids[:num] for ids, num in zip(prompts, num_reused, strict=True)], PrefixTree(math.inf)
        for ids in begins:
            texts.insert(ids, [], "").release()
        rows: dict[PrefixNode, list[int]] = {}
        for row, ids in enumerate(begins):
            for node in texts.match(ids, "").nodes:
                rows.setdefault(node, []).append(row)
        runs = []
        for node, users in rows.items():
            end = sum(len(each.ids) for each in node.path)
            runs.append(SharedRun(positions=range(end - len(node.ids), end), rows=tuple(users)))
        return cls(prompts=prompts, num_reused=num_reused, runs=tuple(runs))

    def num_slots(self, batch: int) -> int:
        """Tokens of a slab of so many rows that have room for all runs: S."""
        return -(-sum(len(run.positions) for run in self.runs) // batch)

    def gather(self, reused: ReusedKV, layer: int, slots_SBKX: Tensor) -> None:
        """Copy keys and values of a layer to where they are sent from.

        Args:
            reused: the same tokens as this rank has them.
        """
        tokens_TKX, at = slots_SBKX.flatten(0, 1), 0
        for run in self.runs:
            for part in reused.parts:
                if run.rows[0] not in part.rows:
                    continue
                first = int(part.positions_T[0])
                begin, end = max(first, run.positions.start), min(first + len(part.positions_T), run.positions.stop)
                if begin < end:
                    into = at + begin - run.positions.start
                    tokens_TKX[into : into + end - begin].copy_(part.layers_TKX[layer][begin - first : end - first])
            at += len(run.positions)

    def arriving(self, cache: KVCache) -> ReusedKV:
        """The same tokens as another rank has them in its slabs, as soon as each layer has arrived there.

        The last layer never does: only the rank with the first token attends in it.
        """
        num_slots, parts, at = self.num_slots(cache.slabs.batch), list[ReusedPart](), 0
        layers = [cache.layer(layer).tokens(-num_slots, 0).flatten(0, 1) for layer in range(cache.num_layers - 1)]
        for run in self.runs:
            end = at + len(run.positions)
            part = ReusedPart(
                layers_TKX=[tokens_TKX[at:end] for tokens_TKX in layers],
                positions_T=torch.tensor(run.positions),
                rows=run.rows,
            )
            parts.append(part)
            at = end
        return reused_prefixes(self.prompts, self.num_reused, parts, arrives=True)
