"""`Engine`: generates from prompts: split into chunks, prefill on all stages, decode, share the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from policies.base import GivenPrompt, ReusingPrompt, ids_of
from runahead.attention.op import nothing
from runahead.config import (
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    PrefillOptions,
    Speculate,
)
from runahead.context import ContextPartition, LearningPartitioner, Partitioner, decide, even
from runahead.decoding.forward import fastest_form, forward_over
from runahead.decoding.gathered_result import gathered_result
from runahead.decoding.lanes import Lanes
from runahead.decoding.placement import Placement
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.rows import Decoded, Rows, choose_alone
from runahead.decoding.sampling import check_options
from runahead.decoding.speculative.speculator import Draft, Speculator
from runahead.decoding.together import choose_together
from runahead.decoding.token_stream import OnTokens, TokenStream
from runahead.features.facts import SEGMENTS, Setup
from runahead.features.refused import check
from runahead.features.slower import Way, slower, takes
from runahead.kv_transfer.gathering import Gathering
from runahead.model.fingerprint import model_fingerprint
from runahead.model.model import Model
from runahead.model.shares import check_arrangement
from runahead.prefill import PREFILLS, Meanwhile, Prefilled, PrefillJob, PrefillPlan, PromptBatch
from runahead.prefill.base import ToItsEnd
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.ranks.agreement import fact, option_facts, secret
from runahead.ranks.ranks import Ranks
from runahead.report import GenerationBatch, ReuseReport
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.prefixes import Prefixes, RowPrefix, reused_kv, store_prompts
from runahead.reuse.reuse import Reuse
from runahead.reuse.reused_kv import ReusedKV
from runahead.reuse.store import SegmentStore
from runahead.reuse.stored_prefix import StoredPrefix
from runahead.thinning.rank_policies import RankPolicies


class Engine:
    """Generates from long prompts on one or several ranks. Every rank creates one and makes the same calls.

    Args:
        model: this rank's copy of the model, or its share where a stage has several ranks (`Ranks.arrange`).
        ranks: the ranks of the job; `Ranks.start(RanksOptions())` without a launcher is one rank.
        prefill: the prefill strategy and its options.
        partition: function (number of tokens, number of stages) -> chunks: `even`, `from_ratios([...])`, a lookup
            table. Strategies with a split of their own ignore it. A `LearningPartitioner` is told the times of every
            prompt.
        policies: cache policies, and how what they keep is stored; by default all keys and values, as they are.
        decode: where keys and values are while decoding.
        store: store of segments that prompts reuse; by default in host memory and, on a GPU, device memory.
        draft: for speculation by a smaller model, this rank's copy of it; for that by a policy, the policies that
            choose what the model drafts from; a `Draft` where another one drafts for these.
        tree: earlier prompts and answers, of which later prompts reuse what they begin with; None reuses none. It is
            used by one thread, and may be that of several engines. All ranks have one, and that of the last stage is
            used; what it has not stored, since another stage decoded, is computed.

    Raises:
        ValueError: the prefill strategy or a policy does not support this model on these ranks.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        prefill: PrefillOptions | None = None,
        partition: Partitioner = even,
        policies: RankPolicies | None = None,
        decode: DecodeOptions | None = None,
        store: SegmentStore | None = None,
        tree: PrefixTree | None = None,
        draft: Model | RankPolicies | Draft | None = None,
    ) -> None:
        self.model, self.ranks = model, ranks
        self.policies = policies or RankPolicies()
        self.prefill_options = prefill or PrefillOptions()
        self.partition = partition
        self._strategy = PREFILLS[self.prefill_options.name]
        check_arrangement(model, ranks)
        self.decode = decode or DecodeOptions()
        self._setup = Setup(
            prefill=self.prefill_options,
            decode=self.decode,
            cache=self.policies.storage,
            policies=self.policies,
            model=model,
            num_stages=ranks.num_stages,
            num_shares=ranks.num_shares,
            prefixes="" if tree is None else "reuse of prefixes",
            device=ranks.device.type,
            backend=ranks.backend,
        )
        check(self._setup)
        self._placement = Placement(
            model, ranks, self.decode, by_share=bool(self.policies), is_timed=takes(self._setup, Way.timed)
        )
        self._taken: dict[Way, bool] = {}
        self._check_pools(1)
        self.policies.read_files(model)
        self.store = store
        self._speculator = Speculator(model, draft, on_layer=ranks.progress)
        self.prefixes: Prefixes | None = None
        if tree is not None:
            self.prefixes = Prefixes(model, tree, least_new=max(1, self.policies.num_observed))
        self._num_calls = 0
        self._weights: str | None = None

    def generate(
        self,
        prompts: Sequence[GivenPrompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        on_tokens: OnTokens | None = None,
        record_timeline: bool = False,
        first_index: int = 0,
        cancellable: bool = False,
    ) -> GenerationBatch:
        """Generate from all prompts at once, as one batch.

        Args:
            prompts: token ids, or prompts that reuse segments; the same on every rank.
            options: generation options; greedy by default. One for all prompts, whose seeds count up from its seed, or
                one per prompt, with the prompt's seed.
            on_tokens: called on rank 0 with every step's new ids, None for rows that have ended. With speculation the
                tokens of a verified draft come one by one, and None is also for rows that have none at that place.
            record_timeline: fill the result's spans.
            first_index: index of the first prompt among all of a run, which seeds its sampling.
            cancellable: `on_tokens` may return rows to cancel, which end after the next step.

        Returns:
            the same result on every rank.

        Raises:
            ValueError: a prompt is empty, holds an unknown id, or is too long for the model; the partition does not
                fit; the KV cache does not fit in memory, or its sink and recent tokens in the pool of a policy; or
                drafts cannot be verified.
            PeerFailure: another rank is gone or silent.
        """
        assert self.ranks.mesh.num_shares == self.model.num_shards, "the ranks were arranged anew"
        rows = _row_options(options or GenerationOptions(), len(prompts), first_index)
        check_options([each for each, _ in rows], self.model.tokenizer, self.model.vocab_size, self.model.json_schemas)
        self.check(prompts, [each for each, _ in rows])
        self._agree(prompts, options or GenerationOptions())  # before anything else that all ranks do together
        reuses, found = any(isinstance(each, ReusingPrompt) for each in prompts), list[RowPrefix]()
        blends = any(isinstance(each, ReusingPrompt) and each.blended for each in prompts)
        asked = _asked(replace(self._setup, blends=blends), [each for each, _ in rows], reuses=reuses)
        try:
            if self.prefixes is not None and not reuses and self.ranks.stage == self.ranks.num_stages - 1:
                found += self._found([ids_of(prompt) for prompt in prompts])
            plan = self._plan(prompts, rows, found, asked, reuses=reuses, record=record_timeline)
            result = self._generate(plan, rows, found, on_tokens=on_tokens, cancellable=cancellable)
        finally:
            for prefix in found:
                prefix.release()
        result.slower = list(slower(*asked).values())
        self._num_calls += 1
        return result

    def _plan(
        self,
        prompts: Sequence[GivenPrompt],
        rows: Sequence[tuple[GenerationOptions, int]],
        found: Sequence[RowPrefix],
        asked: Sequence[Setup],
        *,
        reuses: bool,
        record: bool,
    ) -> PrefillPlan:
        """Agree with all ranks on a prefill: its chunks, what it reuses of prefixes, and where its tokens are stored.

        Args:
            found: prefix of each row on the last stage, if this engine reuses any.
            asked: what is known of the run, and what the batch asks for; see `_asked`.
            reuses: prompts reuse segments.
        """
        stored, last = [0] * len(prompts), self.ranks.num_stages - 1
        if self.prefixes is not None and not reuses:
            nums = [prefix.num_tokens for prefix in found]
            stored = self.ranks.broadcast(nums, self.ranks.mesh.rank(last, 0), "the stored prefixes")
        partition = self._split([len(each) - num for each, num in zip(prompts, stored, strict=True)])
        if any(stored) and partition.chain[-1] != last:  # it has no new token, so another stage decodes
            for prefix in found:
                prefix.reuse_nothing()
            stored = [0] * len(prompts)
            partition = self._split(list(map(len, prompts)))
        for each in asked:
            check(replace(each, num_chunks=len(partition.chain)))
        self._require_same({"the context partition": fact(list(partition.boundaries))})
        num_new, shards = max(each.max_new_tokens for each, _ in rows), None
        if all(takes(each, Way.sharded) for each in asked):
            with self.ranks.announcing_failure():
                shards = self._placement.shards(partition, batch=len(prompts), num_new=num_new - 1)
        return PrefillPlan(
            prompts=prompts,
            partition=partition,
            num_new=num_new,
            reuses=True,
            stored=stored,
            shards=shards,
            record=record,
        )

    def _generate(
        self,
        plan: PrefillPlan,
        rows: list[tuple[GenerationOptions, int]],
        found: list[RowPrefix],
        *,
        on_tokens: OnTokens | None,
        cancellable: bool,
    ) -> GenerationBatch:
        """Prefill and decode; all ranks begin at once. `found` is as of `_plan`."""
        mesh, partition, ids = self.ranks.mesh, plan.partition, [ids_of(prompt) for prompt in plan.prompts]
        gather, recording = None, None
        with self.ranks.announcing_failure(), ExitStack() as profiled:
            stage = self._strategy.first_token_stage(partition, mesh.num_stages)
            source = mesh.rank(stage, 0)
            if plan.shards is not None:
                num_queries = 1 + max(each.speculate_tokens if _drafts(each) else 0 for each, _ in rows)
                gather = self._placement.gathering(list(plan.shards), len(ids) * num_queries)
            stages = [stage] if plan.shards is None else list(plan.shards)
            stream = TokenStream(
                self.ranks,
                source=0 if 0 in stages else source,  # rank 0 needs no messages of tokens that it decodes itself
                num_logprobs=[each.logprobs for each, _ in rows],
                on_tokens=on_tokens,
                decoders=[rank for each in stages for rank in mesh.members(each)],
                cancellable=cancellable,
            )
            ready = self._ready(plan, found=found)
            job, reuse = ready.job, ready.reuse
            if reuse is not None:
                with self.ranks.busy():
                    reuse.encode_missing()
            offset_s = self.ranks.clock_offset_s() if plan.record else 0.0
            if plan.record:
                with self.ranks.busy():
                    recording = profiled.enter_context(self.model.ranges.recording(self.ranks.device))
            self.ranks.barrier("all ranks to hold the prompt")
            began_s = time.perf_counter()
            prefilled = self._run(ready)
            prefixes = prefilled.prefixes
            if prefilled.given is not None:
                assert prefilled.logits_BV is not None
                store_prompts(prefixes, ids, prefilled.given, prefilled.logits_BV)
                prefilled.given = None
            # Under policies the cache has what is reused, too, as one text with what was computed.
            whole = PromptBatch.of(ids, self.ranks.device) if self.policies else job.batch
            decoded = self._decode(ids, rows, prefilled, whole, stream, gather, job.own_policies)
            stream.relay()
            if decoded is not None and prefixes:
                self._store(prefixes, decoded, prefilled, job.batch)
            prefilled.cache = None
            with self.ranks.busy():
                profiled.close()
            chunk_tokens = prefilled.report.chunk_tokens
            prefilled.report.memory = self.model.memory_after(
                kv_bytes=max(prefilled.report.kv_peak_bytes, self._placement.timed_bytes),
                num_tokens=len(ids) * min(chunk_tokens, job.chunk_tokens or chunk_tokens),
            )
            result = gathered_result(
                self.ranks,
                prefilled,
                decoded,
                boundaries=partition.boundaries,
                began_s=began_s,
                offset_s=offset_s,
                source=source,
                is_warm=self._num_calls > 0,
                recording=recording,
            )
            result.decode = "last" if plan.shards is None else "sharded"
            if reuse is not None:
                reuse.report.recomputed_tokens = prefilled.recomputed_tokens
                reuse.add_to(result)
            num = len(result.generations)
            if not any(plan.stored):  # the times of a rest say nothing of whole prompts
                self.learn(partition, {each.rank: (each.prefill_s / num, each.wait_s / num) for each in result.ranks})
        return result

    def _check_pools(self, batch: int) -> None:
        keep_parts = self.ranks.num_stages > 1 and self.decode.name is DecodeName.sharded
        self.policies.check_pools(self.model, batch=batch, keep_parts=keep_parts)

    def _split(self, lengths: Sequence[int]) -> ContextPartition:
        return self._strategy.split(max(lengths), self.ranks.num_stages, self.partition)

    def takes(self, way: Way) -> bool:
        """Whether a faster way is taken in a server, by the table of `runahead/features/slower.py`."""
        if way not in self._taken:
            self._taken[way] = takes(self._serving, way)
        return self._taken[way]

    def slower(
        self,
        options: Sequence[GenerationOptions],
        *,
        reuses: bool,
        serves: bool = False,
    ) -> list[str]:
        """Tell in a sentence each which faster ways are not taken, and why.

        Args:
            options: of a batch.
            reuses: prompts reuse segments.
            serves: a server answers.
        """
        setup = self._serving if serves else self._setup
        return list(slower(*_asked(setup, options, reuses=reuses)).values())

    @property
    def _serving(self) -> Setup:
        return replace(self._setup, options={"a server": True})

    @property
    def may_shard(self) -> bool:
        """Whether stages may decode together."""
        return not self.takes(Way.side_by_side)

    @property
    def takes_stage_alone(self) -> bool:
        """Whether the last stage can compute a prompt alone."""
        return self.ranks.num_stages == 1 or self._strategy.can_run_alone

    @property
    def prompt_limits(self) -> PromptLimits:
        """Which prompts can be generated from."""
        return PromptLimits.of_model(self.model, self.policies, self.prefill_options, self.ranks.num_stages)

    def split(self, num_tokens: int) -> ContextPartition:
        """The chunks of a prompt, one per stage. Asked for on rank 0 alone."""
        return self._strategy.split(num_tokens, self.ranks.num_stages, partial(decide, self.partition))

    def prefill(self, plan: PrefillPlan, meanwhile: Meanwhile | None = None) -> Prefilled:
        """Run this rank's part of a prefill that all ranks were told, for a server.

        In contrast to `generate` nothing is compared, and no rank waits for another one but for its keys and values:
        one that has no chunk, or has computed it, may go on to other prompts. All ranks run the same prefills in the
        same order; those of one stage alone may change places with others. Each stage that has a chunk of prompts
        that reuse segments encodes what its store lacks. The caller stores and releases the prefixes of the result.

        Args:
            meanwhile: what this rank does besides.
        """
        check(replace(self._setup, num_chunks=len(plan.partition.chain)))
        ready = self._ready(plan, meanwhile=meanwhile)
        reuse = ready.reuse
        if reuse is not None and ready.job.partition.chunk(self.ranks.stage):
            reuse.encode_missing(in_stage=True)
        prefilled = self._run(ready)
        if reuse is not None:
            prefilled.encoded = reuse.encoded
            prefilled.report.prefill_s += reuse.report.encode_s + reuse.report.cluster_s
        return prefilled

    def _ready(
        self, plan: PrefillPlan, *, meanwhile: Meanwhile | None = None, found: list[RowPrefix] | None = None
    ) -> _Ready:
        """Make ready what a prefill needs before its clock starts. All ranks call it.

        Args:
            found: prefix of each row, where they were looked up on the last stage.
        """
        reuse = self._reuse(plan.prompts, nothing if meanwhile is None else meanwhile.after_segment_layer)
        ids, stored = [ids_of(each) for each in plan.prompts], list(plan.stored) or [0] * len(plan.prompts)
        partition, is_alone = plan.partition, plan.partition.chain == [self.ranks.stage]
        prefixes, computed_anew_s = list[RowPrefix](), 0.0
        if plan.reuses and reuse is None and self.prefixes is not None and self.ranks.stage == partition.chain[-1]:
            prefixes = self._found(ids, None if is_alone else stored) if found is None else found
            if prefixes and is_alone:
                stored = [prefix.num_tokens for prefix in prefixes]
            elif prefixes:
                computed_anew_s = self._complete(ids, prefixes, stored, meanwhile)
        computed = [each[num:] for each, num in zip(ids, stored, strict=True)]
        if reuse is not None:
            computed = [list(prompt.new_ids) for prompt in reuse.prompts]
        if is_alone:
            longest = max(map(len, computed))
            partition = ContextPartition(boundaries=tuple(longest if end else 0 for end in partition.boundaries))
        job = self._job(
            PromptBatch.of(computed, self.ranks.device),
            partition,
            plan.num_new,
            meanwhile=meanwhile,
            shards=plan.shards,
            stored=StoredPrefix.of(ids, stored) if any(stored) and len(partition.chain) > 1 else None,
            gives_new=bool(prefixes),
            texts=PromptBatch.of(ids, self.ranks.device) if prefixes and self.policies.deciding else None,
            record=plan.record,
        )
        with self.ranks.busy():
            self._strategy.connect(self.ranks, partition, self.prefill_options, has_stored=job.stored is not None)
        return _Ready(ids=ids, job=job, reuse=reuse, prefixes=prefixes, computed_anew_s=computed_anew_s)

    def _run(self, ready: _Ready) -> Prefilled:
        """Run this rank's part of a prefill whose segments, if it reuses any, are encoded."""
        job, reuse = ready.job, ready.reuse
        job.reused = reused_kv(ready.ids, ready.prefixes, partial(self._computed_anew, meanwhile=job.meanwhile))
        if reuse is not None and job.partition.chunk(self.ranks.stage):
            is_last = job.partition.chain[-1] == self.ranks.stage
            job.reused = reuse.fetch(self.policies.retriever if is_last else None)  # whose indices are made there
        prefilled = self._strategy.run(job)
        job.reused = None  # frees reused segments, of which decoding may have its own copies
        prefilled.report.prefill_s += ready.computed_anew_s
        prefilled.prefixes = ready.prefixes
        return prefilled

    def _found(self, ids: Sequence[Sequence[int]], most: Sequence[int] | None = None) -> list[RowPrefix]:
        """The prefix of each row on this stage, held: as long on all of its ranks, which share the heads.

        Args:
            most: as of `Prefixes.of`.
        """
        assert self.prefixes is not None
        found = self.prefixes.of(ids, most)
        if self.ranks.num_shares == 1:
            return found
        # They could not compute together what only one of them finds lost later.
        by_share = self.ranks.gather_in_stage([prefix.num_whole() for prefix in found], "the stored prefixes")
        agreed = self.prefixes.of(ids, [min(nums) for nums in zip(*by_share, strict=True)])
        for prefix in found:
            prefix.release()
        return agreed

    def _complete(
        self,
        ids: Sequence[Sequence[int]],
        prefixes: Sequence[RowPrefix],
        num_reused: Sequence[int],
        meanwhile: Meanwhile | None,
    ) -> float:
        """Let each prefix have so many tokens: compute on this stage what was dropped. Returns the seconds of it."""
        began_s, compute = time.perf_counter(), partial(self._computed_anew, meanwhile=meanwhile)
        for text, prefix, num in zip(ids, prefixes, num_reused, strict=True):
            if prefix.num_tokens < num:
                reused = reused_kv([text[:num]], [prefix], compute)
                prefix.extend(text[:num], compute(text[prefix.num_tokens : num], reused))
        return time.perf_counter() - began_s

    def _computed_anew(
        self, ids: Sequence[int], reused: ReusedKV | None, *, meanwhile: Meanwhile | None = None
    ) -> list[torch.Tensor]:
        """Keys and values of tokens that a stage with a tree computes alone, to the end, after what they reuse.

        It may be called inside a layer of a prefill: other stages then wait.
        """
        batch = PromptBatch.of([list(ids)], self.ranks.device)
        alone = ContextPartition(boundaries=(0,) * self.ranks.num_stages + (len(ids),))
        others = None if meanwhile is None else ToItsEnd(meanwhile)
        job = self._job(batch, alone, num_new=1, meanwhile=others, reused=reused, policies=RankPolicies())
        done = self._strategy.run(job)
        layers = None if done.cache is None else done.cache.row_kv(0, 0, len(ids))
        assert layers is not None, "all keys and values of a prompt are on the stage that computes it alone"
        return layers

    def check(self, prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions]) -> None:
        """Check that prompts can be generated from at once, as `generate` does. Raises: PromptTooLong, ValueError."""
        check_prompts(prompts, self.prompt_limits, num_new=[each.max_new_tokens for each in options])
        self._check_pools(len(prompts))
        reusing = [each for each in prompts if isinstance(each, ReusingPrompt)]
        if reusing:
            self.check_reuse(blends=any(each.blended for each in reusing))
        self.check_speculation(options, prompts)

    def check_speculation(self, options: Sequence[GenerationOptions], prompts: Sequence[GivenPrompt]) -> None:
        """Check that drafts can be made and verified as the options of these prompts ask. Raises: ValueError."""
        reuses = any(isinstance(each, ReusingPrompt) for each in prompts)
        setup = replace(self._setup, segments=SEGMENTS if reuses else "")
        self._speculator.check(options, [len(ids_of(each)) for each in prompts], setup)

    def check_reuse(self, *, blends: bool = False) -> None:
        """Check that prompts may reuse segments, and with `blends` that some of their tokens may be computed again.

        Raises:
            ValueError: prefill, policies or model refuse it.
        """
        check(replace(self._setup, segments=SEGMENTS, blends=blends))

    def _job(self, batch: PromptBatch, partition: ContextPartition, num_new: int, **more: Any) -> PrefillJob:
        given: dict[str, Any] = {
            "model": self.model,
            "ranks": self.ranks,
            "batch": batch,
            "partition": partition,
            "capacity": batch.num_tokens + num_new - 1,
            "options": self.prefill_options,
            "policies": self.policies,
            "chunk_tokens": self.prompt_limits.chunk_tokens(batch.num_tokens),
        }
        return PrefillJob(**(given | more))

    def learn(self, partition: ContextPartition, seconds: Mapping[int, tuple[float, float]]) -> None:
        """Tell a partitioner that learns how long each stage computed and waited.

        A rank that waits for keys and values holds up the other shares of its stage, for which that is compute. So the
        times of the share that waited longest are those of the stage.

        Args:
            seconds: of a prefill, and of waiting in it, by rank and per row.
        """
        if isinstance(self.partition, LearningPartitioner) and self.prefill_options.takes_partition:
            mesh = self.ranks.mesh
            stages = [
                max((seconds[rank] for rank in mesh.members(stage)), key=lambda times: times[1])
                for stage in range(mesh.num_stages)
            ]
            self.partition.learn(partition, [prefill - wait for prefill, wait in stages], [wait for _, wait in stages])

    def _agree(self, prompts: Sequence[GivenPrompt], options: GenerationOptions | Sequence[GenerationOptions]) -> None:
        """Check that all ranks make the same call, since ranks with different work would wait forever."""
        if self.ranks.size == 1:
            return
        if self._weights is None:
            self._weights = model_fingerprint(self.model.module)
            if self.ranks.num_shares > 1:  # which differ, and each is to equal that of the other stages
                shares = self.ranks.gather(self._weights, "the weights")
                self._weights = " ".join(shares[rank] for rank in self.ranks.mesh.members(self.ranks.stage))
        facts = {
            "the prompts": secret(prompts),
            "the policies": secret(self.policies),
            "the model": fact(self.model.name),
            "its dtype": fact(self.model.dtype),
            "its weights": secret(self._weights),
            "its config's overrides": fact(self.model.overrides),
            "whether there is a prefix tree": "no" if self.prefixes is None else "yes",
        }
        if isinstance(options, GenerationOptions):
            facts |= option_facts({"generation": options})
        else:
            facts["the generation options"] = secret(options)
        facts |= option_facts({"prefill": self.prefill_options, "decode": self.decode})
        self._require_same(facts)

    def _require_same(self, facts: dict[str, str]) -> None:
        if self.ranks.size > 1:
            self.ranks.require_same(facts, "every rank must make the same call with the same model")

    def _reuse(self, prompts: Sequence[GivenPrompt], after_layer: Callable[[], None] = nothing) -> Reuse | None:
        """The segments that the prompts reuse; None if no prompt reuses any.

        Args:
            after_layer: called after each layer of a segment that is encoded or clustered.
        """
        if not any(isinstance(prompt, ReusingPrompt) for prompt in prompts):
            return None
        self.store = self.store or SegmentStore(self.model)
        return Reuse(prompts, self.store, self.model, self.ranks, after_layer)

    def _store(self, prefixes: Sequence[RowPrefix], decoded: Decoded, prefilled: Prefilled, batch: PromptBatch) -> None:
        """Store prompts and answers, but for the last token of each, which no forward has seen; or prompts alone."""
        assert prefilled.cache is not None and self.prefixes is not None
        rows = zip(prefixes, decoded.rows, batch.pads, strict=True) if self.takes(Way.stored_answers) else ()
        for row, (prefix, each, pad) in enumerate(rows):
            text = each.prompt + each.new_ids[:-1]
            prefix.store(text, prefilled.cache.row_kv(row, pad, len(text) - prefix.num_tokens))
        report = prefilled.report
        report.reuse = ReuseReport(
            cached_tokens=sum(prefix.num_cached for prefix in prefixes),
            computed_tokens=batch.num_tokens,
            stored_bytes=self.prefixes.tree.bytes_by_tier,
        )

    def _decode(
        self,
        prompts: list[list[int]],
        options: list[tuple[GenerationOptions, int]],
        prefilled: Prefilled,
        batch: PromptBatch,
        stream: TokenStream,
        gather: Gathering | None,
        policies: RankPolicies,
    ) -> Decoded | None:
        """Generate all tokens, on the ranks that have a KV cache; None on the others.

        Args:
            gather: between the ranks that decode together, if there are several.
            policies: of this rank.
        """
        if prefilled.cache is None:
            return None
        rows = [Row(self.model, prompt, each, seed=seed) for prompt, (each, seed) in zip(prompts, options, strict=True)]
        pads, num_tokens, report, may_draft = batch.pads, batch.num_tokens, prefilled.report, _speculates(options)
        if policies.while_decoding:
            cache = prefilled.cache.for_decoding()
        else:
            cache = fastest_form(prefilled.cache, self.model, pads=pads, num_tokens=num_tokens, apart=may_draft)
        if gather is not None:
            cache = cache.over_ranks(gather)
        prefilled.cache, is_told = cache, gather is not None and not gather.is_last
        forward = forward_over(
            self.model,
            cache,
            policies.while_decoding,
            pads=pads,
            prompt_tokens=num_tokens,
            is_told=is_told,
            part=policies.part,
        )
        drafts, ids = None, batch_ids(len(rows))
        lanes = Lanes.holding(
            self.model,
            ids,
            cache,
            forward,
            pads=pads,
            num_tokens=num_tokens,
            deciding=policies.while_decoding,
            is_told=is_told,
        )
        if may_draft:
            token_s = report.prefill_s / max(1, report.chunk_tokens * len(rows))
            drafts = self._speculator.drafts(rows, lanes, token_s=token_s, gather=gather)
        choose = choose_alone if gather is None else choose_together(gather)
        decoded = Rows(lanes, choose=choose, drafts=drafts).decode(rows, prefilled.logits_BV, stream.send)
        cache.describe_decoding(report)
        if drafts is not None:
            report.speculation = drafts.report
            report.kv_peak_bytes = max(report.kv_peak_bytes, lanes.num_bytes)  # rows may have grown apart
            report.kv_peak_bytes += drafts.drafter.num_bytes
        return decoded


@dataclass(kw_only=True)
class _Ready:
    """A prefill on this rank whose part can begin.

    Attributes:
        ids: of the prompts.
        job: without keys and values that are reused.
        prefixes: of each row, where they are reused on this rank.
        computed_anew_s: seconds in which lost parts of these were computed.
    """

    ids: list[list[int]]
    job: PrefillJob
    reuse: Reuse | None
    prefixes: list[RowPrefix]
    computed_anew_s: float


def _asked(setup: Setup, options: Sequence[GenerationOptions], *, reuses: bool) -> list[Setup]:
    """The setups of a run, with what a batch of prompts asks for: one for each kind of drafts, or for none."""
    kinds = {each.speculate: each for each in options if _drafts(each)} or {Speculate.none: options[0]}
    return [replace(setup, generation=each, segments=SEGMENTS if reuses else "") for each in kinds.values()]


def _drafts(options: GenerationOptions) -> bool:
    return options.speculate is not Speculate.none


def _speculates(rows: Sequence[tuple[GenerationOptions, int]]) -> bool:
    """Whether tokens of any row are drafted."""
    return any(_drafts(options) for options, _ in rows)


def _row_options(
    options: GenerationOptions | Sequence[GenerationOptions], num_rows: int, first_index: int
) -> list[tuple[GenerationOptions, int]]:
    """Options and seed of every row. Raises: ValueError: there are not as many options as rows."""
    if isinstance(options, GenerationOptions):
        return [(options, options.seed + first_index + index) for index in range(num_rows)]
    if len(options) != num_rows:
        raise ValueError(f"{num_rows} prompts were given with {len(options)} generation options; give one for each")
    return [(each, each.seed) for each in options]
