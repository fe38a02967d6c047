"""Stored prefixes of a batch on their way along a chain, from the stages that have them to all others.

The last stage has the keys and values of stored texts, or with sharded decoding each stage has a part of them; and
every stage needs all, layer by layer. They travel in the slabs of the new tokens, before token 0, those of a stage side
by side. A slab has a place per token and row of the batch, so S of its places have room for S B tokens of one row each:
what rows share is there, and is sent, once.
"""

# Legend: B batch, T tokens, S tokens of a slab, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.schedule import stored_slots
from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.prefixes import reused_prefixes
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """Tokens of what some rows of a batch begin with.

    Attributes:
        positions: of the tokens, ascending.
        rows: that share them.
        stage: that has them.
    """

    positions: Sequence[int]
    rows: tuple[int, ...]
    stage: int


@dataclass(frozen=True, kw_only=True)
class StoredPrefix:
    """Tokens of stored texts that the prompts of a batch reuse. Every stage derives the same from prompts and lengths.

    Attributes:
        prompts: token ids.
        num_reused: tokens that each prompt reuses.
        runs: these tokens, each once for all rows that share it; those of a stage lie side by side in this order.
    """

    prompts: Sequence[Sequence[int]]
    num_reused: Sequence[int]
    runs: tuple[SharedRun, ...]

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Sequence[int]], owners: Sequence[Sequence[int]], salts: Sequence[str] = ()
    ) -> StoredPrefix:
        """Find what the prompts share of the tokens that they reuse.

        Args:
            owners: the stage that has each of these tokens.
            salts: of the prompts, which share with those of the same; by default they have none. A text that is stored
                once per salt may lie on other stages for each.
        """
        keys = list(salts) or [""] * len(prompts)
        num_reused = list(map(len, owners))
        begins, texts = [ids[:num] for ids, num in zip(prompts, num_reused, strict=True)], PrefixTree(math.inf)
        for ids, key in zip(begins, keys, strict=True):
            texts.insert(ids, [], key).release()
        rows: dict[PrefixNode, list[int]] = {}
        for row, (ids, key) in enumerate(zip(begins, keys, strict=True)):
            for node in texts.match(ids, key).nodes:
                rows.setdefault(node, []).append(row)
        runs = []
        for node, users in rows.items():
            end = sum(len(each.ids) for each in node.path)
            begin = end - len(node.ids)
            of_node = owners[users[0]][begin:end]
            assert all(owners[row][begin:end] == of_node for row in users), (users, begin, end)
            for stage in sorted(set(of_node)):
                positions: Sequence[int] = range(begin, end)
                if of_node.count(stage) < len(of_node):
                    positions = [at for at, owner in enumerate(of_node, begin) if owner == stage]
                runs.append(SharedRun(positions=positions, rows=tuple(users), stage=stage))
        return cls(prompts=prompts, num_reused=num_reused, runs=tuple(runs))

    def num_slots(self, batch: int) -> Mapping[int, int]:
        """Tokens of a slab of so many rows that have room for what each stage has."""
        num_tokens: dict[int, int] = {}
        for run in self.runs:
            num_tokens[run.stage] = num_tokens.get(run.stage, 0) + len(run.positions)
        return {stage: -(-num // batch) for stage, num in num_tokens.items()}

    def gather(self, reused: ReusedKV, layer: int, slots_SBKX: Tensor, stage: int) -> None:
        """Copy keys and values of a layer to where they are sent from.

        Args:
            reused: what this rank's stage has of these tokens.
            stage: this one.
        """
        tokens_TKX = slots_SBKX.flatten(0, 1)
        for run, at in self._places(stage):
            for part in reused.parts:
                if run.rows[0] not in part.rows:
                    continue
                begin, end = bisect_left(run.positions, part.at[0]), bisect_right(run.positions, part.at[-1])
                if begin < end:
                    first = bisect_left(part.at, run.positions[begin])
                    tokens_TKX[at + begin : at + end].copy_(part.layers_TKX[layer][first : first + end - begin])

    def seen(self, cache: KVCache, reused: ReusedKV | None, stage: int, *, is_last: bool) -> ReusedKV:
        """All of these tokens as this rank reads them: in its slabs, as soon as each layer has arrived there.

        Args:
            reused: what this rank's stage has of them, which the last stage reads where it is.
            stage: this one.
        """
        parts = list(reused.parts) if is_last and reused is not None else []
        slots_of = stored_slots(self.num_slots(len(self.prompts)))
        if is_last:
            slots_of.pop(stage, None)
        for each, slots in slots_of.items():
            # What only the last stage has, nobody needs in the last layer.
            slabs = [cache.layer(layer) for layer in range(cache.num_layers)]
            layers = [slab.tokens(slots.start, slots.stop).flatten(0, 1) for slab in slabs if slab.first <= slots.start]
            parts += [
                ReusedPart(
                    layers_TKX=[tokens_TKX[at : at + len(run.positions)] for tokens_TKX in layers],
                    positions_T=torch.tensor(run.positions),
                    rows=run.rows,
                )
                for run, at in self._places(each)
            ]
        return reused_prefixes(self.prompts, self.num_reused, parts, arrives=bool(slots_of))

    def _places(self, stage: int) -> Iterator[tuple[SharedRun, int]]:
        """Runs that a stage has, each with the token of its slots at which it begins."""
        at = 0
        for run in self.runs:
            if run.stage == stage:
                yield run, at
                at += len(run.positions)
