"""Prefill of a plan: what its prompts reuse of prefixes and segments is found, and a strategy computes the rest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from policies.reuse import GivenPrompt, ids_of, reuse_segments
from runahead.attention.op import nothing
from runahead.attention.states import States
from runahead.cache.base import KVStore
from runahead.cache.kept_cache import KeptCache
from runahead.cache.shard import Shard
from runahead.config import PrefillOptions
from runahead.context import ContextPartition
from runahead.model.memory import LEAST_ROW_TOKENS, memory_for_blocks, row_tokens
from runahead.model.model import Model
from runahead.prefill.base import (
    InterleavedWork,
    NeverCancelled,
    Prefill,
    Prefilled,
    PrefillJob,
    PrefillPlan,
    PromptBatch,
)
from runahead.prefill.kv_runahead import Single
from runahead.prefill.prompt_check import PromptLimits
from runahead.prefill.scoring import PromptScorer
from runahead.ranks.ranks import Ranks
from runahead.report import ReuseReport
from runahead.reuse.state_rows import state_rows, states_of
from runahead.thinning.rank_policies import RankPolicies

if TYPE_CHECKING:
    from runahead.reuse.handover import Handover
    from runahead.reuse.prefixes import Prefixes, RowPrefix
    from runahead.reuse.reuse import Reuse
    from runahead.reuse.reused_kv import ReusedKV
    from runahead.reuse.store import SegmentStore
    from runahead.reuse.stored_prefix import StoredPrefix


@dataclass(kw_only=True)
class ReadyPrefill:
    """A prefill on this rank whose part can begin.

    Attributes:
        ids: of the prompts.
        job: without keys and values that are reused.
        reuse: of segments, if the prompts reuse any.
        prefixes: of each row, where they are reused on this rank.
        computed_anew_s: seconds in which lost parts of these were computed.
    """

    ids: list[list[int]]
    job: PrefillJob
    reuse: Reuse | None
    prefixes: list[RowPrefix]
    computed_anew_s: float


class ReusingPrefill:
    """Prefills on this rank of what all ranks were told, as `PrefillPlan`s: `ready`, then `run`.

    Args:
        strategy, options: how the stages compute what is not reused.
        policies: cache policies of each rank.
        limits: of prompts, for the tokens that one rank computes at a time.
        prefixes: of earlier prompts; None reuses none.
        store: of segments; by default one is made for the first prompt that reuses any.

    Raises:
        ValueError: layers give other logits in the blocks of rows that `options` ask for.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        strategy: Prefill,
        options: PrefillOptions,
        policies: RankPolicies,
        limits: PromptLimits,
        *,
        prefixes: Prefixes | None = None,
        store: SegmentStore | None = None,
    ) -> None:
        self._model, self._ranks, self._strategy, self._options = model, ranks, strategy, options
        self._policies, self._limits, self._prefixes, self._alone = policies, limits, prefixes, Single()
        if options.row_tokens and (why := model.wrong_in_blocks()):
            raise ValueError(f"{why}; use prefill.row_tokens=0")
        by_memory = options.row_tokens is None and model.boundary is None  # else chunks bound it
        self._memory_bytes = memory_for_blocks(model, ranks.local_size) if by_memory else None
        self.store = store

    def ready(
        self,
        plan: PrefillPlan,
        *,
        meanwhile: InterleavedWork | None = None,
        found: list[RowPrefix] | None = None,
        handovers: Mapping[int, Handover] = MappingProxyType({}),
    ) -> ReadyPrefill:
        """Make ready what a prefill needs before its clock starts. All ranks call it.

        Args:
            meanwhile: what this rank does besides.
            found: prefix of each row on this stage, where they were looked up.
            handovers: as of `PrefillJob`.
        """
        ranks = self._ranks
        reuse = self._reuse(plan.prompts, nothing if meanwhile is None else meanwhile.after_segment_layer)
        ids, stored = [ids_of(each) for each in plan.prompts], list(plan.stored) or [0] * len(plan.prompts)
        partition, is_alone = plan.partition, plan.partition.chain == [ranks.stage]
        prefixes: list[RowPrefix] = []
        computed_anew_s = 0.0
        has_prefixes = bool(found) or ranks.stage == partition.chain[-1]
        if plan.reuses and reuse is None and self._prefixes is not None and has_prefixes:
            prefixes = self.found(ids, None if is_alone else stored, salts=plan.salts) if found is None else found
            if prefixes and is_alone:
                stored = [prefix.num_tokens for prefix in prefixes]
            elif prefixes:
                computed_anew_s = self._complete(ids, prefixes, stored, meanwhile)
        computed = [each[num:] for each, num in zip(ids, stored, strict=True)]
        if reuse is not None:
            assert not any(stored), "prompts that reuse segments go on after no stored prefix"
            computed = [list(prompt.new_ids) for prompt in reuse.prompts]
        if is_alone:
            longest = max(map(len, computed))
            partition = ContextPartition(boundaries=tuple(longest if end else 0 for end in partition.boundaries))
        stops = dict[int, list[int]]()
        if self._prefixes is not None and self._prefixes.state_bytes and plan.reuses and reuse is None:
            tree = self._prefixes.tree
            # Stages of a chain derive the same, though the limit may change on each of them.
            limit_bytes = tree.limit_bytes if is_alone else tree.first_limit_bytes
            stops = _stops(stored, ids, tree.snapshot_tokens, limit_bytes / self._prefixes.state_bytes)
        owners = plan.owners or [[partition.chain[-1]] * num for num in stored]
        batch, scorer = PromptBatch.from_prompts(computed, ranks.device), None
        if plan.scores is not None or self._policies.needs_surprise:
            assert reuse is None and not any(stored), "prompts whose tokens are scored are computed whole"
            between = nothing if meanwhile is None else meanwhile.after_segment_layer
            scorer = PromptScorer(self._model, batch.ids_BS, batch.pads, plan.scores, between)
        job = self._job(
            batch,
            partition,
            plan.num_new,
            scorer=scorer,
            meanwhile=meanwhile,
            shards=plan.shards,
            stored=_stored_prefix(ids, owners, plan.salts) if any(stored) and len(partition.chain) > 1 else None,
            stops=stops,
            gives_new=bool(prefixes),
            texts=PromptBatch.from_prompts(ids, ranks.device) if prefixes and self._policies.deciding else None,
            handovers=handovers,
            hands_over=plan.hands_over,
            record=plan.record,
        )
        with ranks.busy():
            stored_on = [] if job.stored is None else sorted(set().union(*owners))
            self._strategy.connect(ranks, partition, self._options, stored_on=stored_on)
        return ReadyPrefill(ids=ids, job=job, reuse=reuse, prefixes=prefixes, computed_anew_s=computed_anew_s)

    def run(self, ready: ReadyPrefill) -> Prefilled:
        """Run this rank's part of a prefill whose segments, if it reuses any, are encoded."""
        job, reuse = ready.job, ready.reuse
        if ready.prefixes:
            from runahead.reuse.prefixes import reused_kv

            job.reused = reused_kv(ready.ids, ready.prefixes, partial(self._computed_anew, meanwhile=job.meanwhile))
        job.states = self._states_of(ready.prefixes)
        if reuse is not None and job.partition.chunk(self._ranks.stage):
            is_last = job.partition.chain[-1] == self._ranks.stage
            job.reused = reuse.fetch(self._policies.retriever if is_last else None)  # whose indices are made there
        prefilled = self._strategy.run(job)
        self._tell_surprise(job, prefilled)
        if prefilled.cache is not None and prefilled.cache.states is not None:
            prefilled.cache.states.begun = ()  # all rows have
        job.reused = job.states = None  # frees reused segments, of which decoding may have its own copies
        prefilled.report.prefill_s += ready.computed_anew_s
        if job.scorer is not None and not prefilled.is_cancelled:
            prefilled.scores = job.scorer.found()
        prefilled.prefixes = ready.prefixes
        if ready.prefixes:
            self._keep_states(ready, prefilled)
        return prefilled

    def _tell_surprise(self, job: PrefillJob, prefilled: Prefilled) -> None:
        """Let a policy that asks for it know how the prompts have surprised the model, each rank's tokens by that rank.

        All ranks of a chain of several stages call it.
        """
        if job.scorer is None or not self._policies.needs_surprise:
            return
        surprise_BS = job.scorer.surprise(range(job.batch.num_tokens))
        if len(job.partition.chain) > 1:
            for other_BS in self._ranks.gather(surprise_BS, "how the prompts surprise the model"):
                surprise_BS = torch.where(surprise_BS.isnan(), other_BS, surprise_BS)
        if isinstance(prefilled.cache, KeptCache):
            prefilled.cache.see_surprise(surprise_BS, 0)

    def _states_of(self, prefixes: Sequence[RowPrefix]) -> States | None:
        """The states after what the rows reuse; None if no row has any."""
        rows, nothing = [prefix.states for prefix in prefixes], self._model.empty_states()
        if nothing is None or all(row is None for row in rows):
            return None
        return states_of(rows, self._model.state_shapes, nothing, self._ranks.device)

    def _keep_states(self, ready: ReadyPrefill, prefilled: Prefilled) -> None:
        """Let each row that is stored have its states after parts of its prompt, and after all of it."""
        cache, num_tokens = prefilled.cache, ready.job.batch.num_tokens
        for row, prefix in enumerate(prefilled.prefixes if cache is not None and cache.states is not None else []):
            before, text = len(ready.ids[row]) - num_tokens, len(ready.ids[row])
            prefix.snapshots = {at + before: rows for (at, of), rows in prefilled.states.items() if of == row}
            assert cache is not None and cache.states is not None
            prefix.snapshots[text] = state_rows(cache.states.row(row))

    def again(
        self,
        texts: list[list[int]],
        num_new: int,
        partition: ContextPartition,
        *,
        shards: Mapping[int, Shard] | None = None,
        meanwhile: InterleavedWork | None = None,
    ) -> tuple[PrefillJob, Prefilled]:
        """Compute texts as prompts, on the stages of a partition alone, in the middle of their answers.

        Args:
            num_new: most tokens that may still come.
            shards: what each of several stages stores.
            meanwhile: what this rank does besides.
        """
        batch = PromptBatch.from_prompts(texts, self._ranks.device)
        scorer = PromptScorer(self._model, batch.ids_BS, batch.pads, None) if self._policies.needs_surprise else None
        job = self._job(batch, partition, num_new, shards=shards, meanwhile=meanwhile, scorer=scorer)
        prefilled = self._alone.run(job)
        self._tell_surprise(job, prefilled)
        return job, prefilled

    def found(
        self,
        ids: Sequence[Sequence[int]],
        most: Sequence[int] | None = None,
        *,
        in_parts: bool = False,
        salts: Sequence[str] = (),
    ) -> list[RowPrefix]:
        """The prefix of each row on this stage, held: as long on all of its ranks, which share the heads.

        Args:
            most, in_parts, salts: as of `Prefixes.find`.
        """
        assert self._prefixes is not None
        found = self._prefixes.find(ids, most, in_parts=in_parts, salts=salts)
        if self._prefixes.state_bytes:  # tokens in the middle of a text could not be computed anew without states
            while (whole := [each.num_whole() for each in found]) != [each.num_tokens for each in found]:
                before, found = found, self._prefixes.find(ids, whole, salts=salts)
                for prefix in before:
                    prefix.release()
        if self._ranks.num_shares == 1 and not in_parts:
            return found
        # Ranks could not compute together what only one of them finds lost later.
        by_share = self._ranks.gather_in_stage([prefix.num_whole() for prefix in found], "the stored prefixes")
        least = [min(nums) for nums in zip(*by_share, strict=True)]
        agreed = self._prefixes.find(ids, least, in_parts=in_parts, salts=salts)
        for prefix in found:
            prefix.release()
        return agreed

    def owners(self, ids: Sequence[Sequence[int]], found: Sequence[RowPrefix]) -> list[list[int]]:
        """Agree with all ranks on the stage that gives each token of the prompts' stored beginnings.

        Args:
            found: prefix of each row on this stage, if what it has is reused.
        """
        from runahead.reuse.prefixes import owners_of

        ranks = self._ranks
        by_rank = ranks.gather([prefix.here for prefix in found], "the stored prefixes")
        by_stage = [by_rank[ranks.mesh.rank(stage, 0)] for stage in range(ranks.num_stages)]
        owners = [owners_of([here[row] if here else [] for here in by_stage]) for row in range(len(ids))]
        for text, prefix, of_row in zip(ids, found, owners, strict=False):
            prefix.agree(text, of_row, ranks.stage)
        return owners

    def store_prompts(self, ready: ReadyPrefill, prefilled: Prefilled) -> None:
        """Store prompts whose new keys and values are in memory of their own, which is freed."""
        if prefilled.given is not None:
            from runahead.reuse.prefixes import store_prompts

            assert prefilled.logits_BV is not None
            store_prompts(prefilled.prefixes, ready.ids, prefilled.given, prefilled.logits_BV)
            prefilled.given = None

    def store_answers(self, ready: ReadyPrefill, prefilled: Prefilled, texts: Sequence[Sequence[int]]) -> None:
        """Store prompts with their answers.

        Args:
            texts: of the rows, as far as forwards have seen them; none if answers are not stored.
        """
        assert prefilled.cache is not None and self._prefixes is not None
        prefixes, batch, shard = prefilled.prefixes, ready.job.batch, ready.job.shard
        for row, text in enumerate(texts):
            start, pad, own = prefixes[row].num_tokens, batch.pads[row], None
            if shard is not None:
                own = [start + index for index in shard.row(pad).indices() if start + index < len(text)]
            prefixes[row].store(text, prefilled.cache.row_kv(row, pad, len(text) - start), own=own)
        prefilled.report.reuse = ReuseReport(
            cached_tokens=sum(prefix.num_cached for prefix in prefixes),
            computed_tokens=batch.num_tokens,
            stored_bytes=self._prefixes.tree.bytes_by_tier,
        )

    def _complete(
        self,
        ids: Sequence[Sequence[int]],
        prefixes: Sequence[RowPrefix],
        num_reused: Sequence[int],
        meanwhile: InterleavedWork | None,
    ) -> float:
        """Let each prefix have so many tokens: compute on this stage what was dropped. Returns the seconds of it."""
        from runahead.reuse.prefixes import reused_kv

        began_s, compute = time.perf_counter(), partial(self._computed_anew, meanwhile=meanwhile)
        for text, prefix, num in zip(ids, prefixes, num_reused, strict=True):
            if prefix.num_tokens < num:
                reused, states = reused_kv([text[:num]], [prefix], compute), self._states_of([prefix])
                done = self._run_alone(text[prefix.num_tokens : num], reused, states=states, meanwhile=meanwhile)
                after = None if done.states is None else state_rows(done.states)
                prefix.extend(text[:num], _all_kv(done, num - prefix.num_tokens), after)
        return time.perf_counter() - began_s

    def _computed_anew(
        self, ids: Sequence[int], reused: ReusedKV | None, *, meanwhile: InterleavedWork | None = None
    ) -> list[torch.Tensor]:
        """Keys and values of tokens that a stage with a tree computes alone, to the end, after what they reuse.

        It may be called inside a layer of a prefill: other stages then wait.
        """
        return _all_kv(self._run_alone(ids, reused, meanwhile=meanwhile), len(ids))

    def _run_alone(
        self,
        ids: Sequence[int],
        reused: ReusedKV | None,
        *,
        states: States | None = None,
        meanwhile: InterleavedWork | None,
    ) -> KVStore:
        """The cache of tokens that this stage computes alone, as `_computed_anew`.

        Args:
            states: after what is reused.
        """
        batch = PromptBatch.from_prompts([list(ids)], self._ranks.device)
        alone = ContextPartition(boundaries=(0,) * self._ranks.num_stages + (len(ids),))
        others = None if meanwhile is None else NeverCancelled(meanwhile)
        given = {"meanwhile": others, "reused": reused, "states": states, "policies": RankPolicies()}
        cache = self._strategy.run(self._job(batch, alone, num_new=1, **given)).cache
        assert cache is not None, "it is computed to its end"
        return cache

    def _job(self, batch: PromptBatch, partition: ContextPartition, num_new: int, **more: Any) -> PrefillJob:
        given: dict[str, Any] = {
            "model": self._model,
            "ranks": self._ranks,
            "batch": batch,
            "partition": partition,
            "capacity": batch.num_tokens + num_new - 1,
            "options": self._options,
            "policies": self._policies,
            "chunk_tokens": self._limits.chunk_tokens(batch.num_tokens),
            "rows_by_memory": self._rows_by_memory(batch, partition),
        }
        return PrefillJob(**(given | more))

    def _rows_by_memory(self, batch: PromptBatch, partition: ContextPartition) -> int | None:
        """Tokens of each row for which a layer's activations have room. Blocks that are wrong are told once, and left.

        All ranks of a stage call it, before the clock of a prefill starts, as the model's first call computes a text.
        """
        if self._memory_bytes is None or batch.num_tokens <= LEAST_ROW_TOKENS:
            return None
        found = row_tokens(self._model, len(batch.pads), self._memory_bytes)
        if len(partition.chunk(self._ranks.stage)) > found and (why := self._model.wrong_in_blocks()):
            warnings.warn(f"{why}; they compute it at once, for which they need more memory", stacklevel=2)
            self._memory_bytes = None
            return None
        return found

    def _reuse(self, prompts: Sequence[GivenPrompt], after_layer: Callable[[], None]) -> Reuse | None:
        """The segments that the prompts reuse; None if no prompt reuses any.

        Args:
            after_layer: called after each layer of a segment that is encoded or clustered.
        """
        if not reuse_segments(prompts):
            return None
        from runahead.reuse.reuse import Reuse
        from runahead.reuse.store import SegmentStore

        self.store = self.store or SegmentStore(self._model)
        return Reuse(prompts, self.store, self._model, self._ranks, after_layer)


def _stored_prefix(ids: Sequence[Sequence[int]], owners: Sequence[Sequence[int]], salts: Sequence[str]) -> StoredPrefix:
    from runahead.reuse.stored_prefix import StoredPrefix

    return StoredPrefix.from_prompts(ids, owners, salts)


def _all_kv(cache: KVStore, num_tokens: int) -> list[torch.Tensor]:
    """Keys and values of a text of one row in all layers."""
    layers = cache.row_kv(0, 0, num_tokens)
    assert layers is not None, "all keys and values of a prompt are on the stage that computes it alone"
    return layers


def _stops(
    reused: Sequence[int], prompts: Sequence[Sequence[int]], snapshot_tokens: int, most: float
) -> dict[int, list[int]]:
    """Places inside prompts before which states are kept, with their rows, as `PrefillJob.stops`.

    Args:
        reused: first tokens of each prompt that are not computed.
        snapshot_tokens: keep states after every so many tokens of a prompt; 0: nowhere in it.
        most: of all rows together keep at most so many, the last ones: until the prompts are stored, they are beside
            the tree, which could not take more.
    """
    stops, ends = dict[int, list[int]](), list[tuple[int, int]]()
    longest = max(len(ids) - num for ids, num in zip(prompts, reused, strict=True))
    for row, (ids, num) in enumerate(zip(prompts, reused, strict=True)):
        for end in range(snapshot_tokens, len(ids), snapshot_tokens) if snapshot_tokens else ():
            if end > num:
                ends.append((longest - len(ids) + end, row))
    for at, row in sorted(ends)[len(ends) - int(min(len(ends), most)) :]:
        stops.setdefault(at, []).append(row)
    return stops
