"""`Engine`: generates from prompts: split into chunks, prefill on all stages, decode, share the result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from policies.reuse import GivenPrompt, ReusingPrompt, ids_of, reuse_segments
from policies.row_values import row_values
from runahead.attention.sparse import flex
from runahead.config import (
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    PrefillName,
    PrefillOptions,
    Speculate,
    Speculative,
)
from runahead.context import ContextPartition, KnowsAlone, LearningPartitioner, Partitioner, decide, even
from runahead.decoding.batch import decode_batch
from runahead.decoding.gathered_result import gathered_result
from runahead.decoding.placement import Placement
from runahead.decoding.row import row_options
from runahead.decoding.sampling import check_options
from runahead.decoding.speculative.speculator import Draft, Speculator
from runahead.decoding.token_stream import OnTokens, TokenStream
from runahead.features.refused import check
from runahead.features.setup import DYNAMIC_CACHE, SEGMENTS, Setup
from runahead.features.slower import Way, slower, takes
from runahead.kv_transfer.gathering import Gathering
from runahead.model.fingerprint import model_fingerprint
from runahead.model.model import Model
from runahead.model.shares import check_arrangement
from runahead.prefill import PREFILLS, InterleavedWork, Prefilled, PrefillJob, PrefillPlan, PromptBatch
from runahead.prefill.base import exact_layers
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.prefill.reusing import ReusingPrefill
from runahead.ranks.agreement import fact, option_facts, secret
from runahead.ranks.ranks import Ranks
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.generation import GenerateOutput

    from runahead.dynamic_cache.checked import CheckedCache
    from runahead.prompt_draft.drafting import Chosen, PromptDraft
    from runahead.reuse.handover import Handover
    from runahead.reuse.prefix_tree import PrefixTree
    from runahead.reuse.prefixes import Prefixes, RowPrefix
    from runahead.reuse.reuse import Reuse
    from runahead.reuse.store import SegmentStore


LEAST_STEPS = 8
"""Tokens of an answer below which the first ones, which prepare the others, may be most of them."""


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
        draft: for speculation by a smaller model, or for a speculative prefill by one, this rank's copy of it; for
            speculation by a policy, the policies that choose what the model drafts from; a `Draft` where another one
            drafts for these.
        tree: earlier prompts and answers, of which later prompts reuse what they begin with; None reuses none. It is
            used by one thread, and may be that of several engines. All ranks have one. That of the last stage is used,
            or where stages may decode together that of each, with its part of the texts; what none of them has is
            computed.
        lends: ranks that wait lend their threads to those of their host that compute, and prompts are left to the last
            stage where it is sooner alone. False where ranks have other work, or are compared with fewer.

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
        lends: bool = True,
    ) -> None:
        self.model, self.ranks, self._lends = model, ranks, lends
        self.policies = policies or RankPolicies()
        self.prefill_options = prefill or PrefillOptions()
        self.partition, self._block = partition, self.prefill_options.block
        self._strategy = PREFILLS[self.prefill_options.name].of(self.prefill_options)
        check_arrangement(model, ranks, in_layers=self.prefill_options.name is PrefillName.pipeline)
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
        if self.prefill_options.is_sparse:
            exact_layers(model, self.prefill_options)
            for shape in model.kv_shapes:  # now, so that no prompt waits for a compiler
                heads = model.num_query_heads, shape.num_kv_heads
                flex.is_right(flex.Sizes(model.device, shape.dtype, *heads, shape.key_dim, shape.value_dim))
        self._placement = Placement(
            model,
            ranks,
            self.decode,
            by_share=bool(self.policies),
            is_timed=takes(self._setup, Way.timed),
            lends=lends,
        )
        self._taken: dict[Way, bool] = {}
        self._keeps_parts = ranks.num_stages > 1 and self.decode.name is DecodeName.sharded
        self.policies.check_pools(model, batch=1, keep_parts=self._keeps_parts)
        self.policies.read_files(model)
        self.prompt_limits = PromptLimits.of_model(model, self.policies, self.prefill_options, ranks.num_stages)
        self._grammars = model.grammars
        self._speculator = Speculator(model, draft, on_layer=ranks.progress)
        self.prefixes: Prefixes | None = None
        if tree is not None:
            from runahead.reuse.prefixes import Prefixes

            least_new = max(1, self.policies.num_observed, ranks.num_stages if self._stores_parts else 1)
            wire_bits = self.prefill_options.wire_bits if ranks.num_stages > 1 else None
            self.prefixes = Prefixes(model, tree, least_new=least_new, wire_bits=wire_bits)
        self.prefills = ReusingPrefill(
            model,
            ranks,
            self._strategy,
            self.prefill_options,
            self.policies,
            self.prompt_limits,
            prefixes=self.prefixes,
            store=store,
        )
        self._prompt_draft = self._draft_of_prompts(draft)
        self._num_calls = 0
        self._weights: str | None = None

    def _draft_of_prompts(self, draft: Model | RankPolicies | Draft | None) -> PromptDraft | None:
        """The draft that chooses the tokens of prompts that are computed; None: all are."""
        kind = self.prefill_options.speculative
        if kind is Speculative.none:
            return None
        from runahead.prompt_draft.drafting import PromptDraft

        by = draft.by if isinstance(draft, Draft) else draft
        if kind is Speculative.model and not isinstance(by, Model):
            raise ValueError("prefill.speculative=model needs a smaller model that drafts: Engine(draft=...)")
        of_layers = None if kind is Speculative.layers or not isinstance(by, Model) else by
        return PromptDraft(
            self.model,
            of_layers,
            self.ranks,
            self._strategy,
            self.prefill_options,
            self.partition,
            lends=self._lends,
        )

    def _choose(self, ids: Sequence[list[int]]) -> Chosen | None:
        """Choose the tokens of prompts that are computed, as all ranks do together; None: all are."""
        if self._prompt_draft is None:
            return None
        with self.ranks.announcing_failure():
            self.ranks.barrier("all ranks to hold the prompt")
            return self._prompt_draft.chosen(ids)

    def generate(
        self,
        prompts: Sequence[GivenPrompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        on_tokens: OnTokens | None = None,
        record_timeline: bool = False,
        first_index: int = 0,
        cancellable: bool = False,
        salts: Sequence[str] = (),
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
            salts: of the prompts, as of `Prefixes.find`.

        Returns:
            the same result on every rank.

        Raises:
            ValueError: a prompt is empty, holds an unknown id, or is too long for the model; the partition does not
                fit; the KV cache does not fit in memory, or its sink and recent tokens in the pool of a policy; or
                drafts cannot be verified.
            PeerFailure: another rank is gone or silent.
        """
        rows, asked = self._checked(prompts, options or GenerationOptions(), first_index)
        ids, each = [ids_of(prompt) for prompt in prompts], [of_row for of_row, _ in rows]
        if (chosen := self._choose(ids)) is not None:
            prompts = chosen.prompts
        with self._held_prefixes(prompts, salts) as found:
            plan = self.plan(
                prompts, each, found=found, asked=asked, record=record_timeline, salts=salts, may_be_alone=self._lends
            )
            with self.ranks.announcing_failure(), ExitStack() as profiled:
                mesh = self.ranks.mesh
                first = self._strategy.first_token_stage(plan.partition, mesh.num_stages)
                computing, decoding = plan.partition.chain, [first] if plan.shards is None else list(plan.shards)
                if self.model.boundary is not None:  # each stage has some of the layers
                    computing = decoding = list(range(mesh.num_stages))
                gather = None if decoding == [first] and plan.shards is None else self._gathering(decoding, each)
                stream = TokenStream(
                    self.ranks,
                    source=0 if 0 in decoding else mesh.rank(first, 0),  # rank 0 needs no messages of its own tokens
                    num_logprobs=[of_row.logprobs for of_row in each],
                    on_tokens=on_tokens,
                    decoders=[rank for stage in decoding for rank in mesh.members(stage)],
                    cancellable=cancellable,
                )
                ready = self.prefills.ready(plan, found=found)
                if ready.reuse is not None and ready.reuse.segments:
                    with self.ranks.busy():
                        ready.reuse.encode_missing()
                recording, offset_s = None, self.ranks.clock_offset_s() if plan.record else 0.0
                if plan.record:
                    with self.ranks.busy():
                        recording = profiled.enter_context(self.model.ranges.recording(self.ranks.device))
                self.ranks.barrier("all ranks to hold the prompt")
                began_s = time.perf_counter() if chosen is None else chosen.span.start_s
                with self.ranks.lending(computing if self._lends else []):
                    prefilled = self.prefills.run(ready)
                if chosen is not None and plan.record:
                    prefilled.spans.insert(0, chosen.span)
                self.prefills.store_prompts(ready, prefilled)
                # Under policies the cache has what is reused, too, as one text with what was computed.
                batch = PromptBatch.from_prompts(ready.ids, self.ranks.device) if self.policies else ready.job.batch
                with self.ranks.lending(decoding if self._lends else []):
                    decoded = decode_batch(
                        self.model,
                        ids,
                        rows,
                        prefilled,
                        batch,
                        policies=ready.job.own_policies,
                        speculator=self._speculator,
                        stream=stream,
                        gather=gather,
                        again=partial(self._computed_again, plan),
                    )
                stream.relay()
                if decoded is not None and prefilled.prefixes:
                    texts = decoded.seen_texts if self.takes(Way.stored_answers) else []
                    self.prefills.store_answers(ready, prefilled, texts)
                prefilled.cache = None
                with self.ranks.busy():
                    profiled.close()
                self._note_memory(ready.job, prefilled, computing, decoding)
                result = gathered_result(
                    self.ranks,
                    prefilled,
                    decoded,
                    boundaries=plan.partition.boundaries,
                    began_s=began_s,
                    offset_s=offset_s,
                    source=mesh.rank(first, 0),
                    is_warm=self._num_calls > 0,
                    recording=recording,
                )
                self._conclude(plan, ready.reuse, prefilled, result)
        result.slower = list(slower(*asked).values())
        retrieved = any(rank.retrieval and rank.retrieval.mean_fetched_share is not None for rank in result.ranks)
        result.no_room = self.policies.no_room(max(map(len, ids)), retrieved=retrieved)
        result.speculative = None if chosen is None else chosen.report
        result.cached_tokens = list(plan.stored)
        self._num_calls += 1
        return result

    def _checked(
        self, prompts: Sequence[GivenPrompt], options: GenerationOptions | Sequence[GenerationOptions], first_index: int
    ) -> tuple[list[tuple[GenerationOptions, int]], list[Setup]]:
        """Options of rows with their seeds, and what they ask for, once all ranks agree on a call that can be done.

        Args:
            options, first_index: as of `generate`.

        Raises:
            ValueError: as of `generate`.
        """
        assert self.ranks.mesh.num_shares == self.model.num_shards, "the ranks were arranged anew"
        if isinstance(options, GenerationOptions):
            options = options.resolved(self.model.module.generation_config)
        else:
            options = self._resolved(options)
        rows = row_options(options, len(prompts), first_index)
        each = [of_row for of_row, _ in rows]
        self.check(prompts, each)
        self._agree(prompts, options)  # before anything else that all ranks do together
        lengths = [(len(ids_of(prompt)), of_row.max_new_tokens) for prompt, of_row in zip(prompts, each, strict=True)]
        outgrows = any(self.prompt_limits.outgrows(*length) for length in lengths)
        setup = replace(self._setup, blends=_blend(prompts), outgrows=outgrows)
        return rows, _asked(setup, each, reuses=reuse_segments(prompts))

    @contextmanager
    def _held_prefixes(self, prompts: Sequence[GivenPrompt], salts: Sequence[str]) -> Iterator[list[RowPrefix]]:
        """Context manager in which this stage holds what each row reuses of its tree, if that of this stage is used."""
        found: list[RowPrefix] = []
        is_last = self.ranks.stage == self.ranks.num_stages - 1
        try:
            if self.prefixes is not None and (is_last or self._stores_parts) and not reuse_segments(prompts):
                ids = [ids_of(prompt) for prompt in prompts]
                found += self.prefills.found(ids, in_parts=self._stores_parts, salts=salts)
            yield found
        finally:
            for prefix in found:
                prefix.release()

    def plan(
        self,
        prompts: Sequence[GivenPrompt],
        options: Sequence[GenerationOptions] = (GenerationOptions(max_new_tokens=1),),
        *,
        found: Sequence[RowPrefix] = (),
        asked: Sequence[Setup] = (),
        record: bool = False,
        salts: Sequence[str] = (),
        may_be_alone: bool = False,
    ) -> PrefillPlan:
        """Agree with all ranks on a prefill: its chunks, what it reuses of prefixes, and where its tokens are stored.

        Args:
            options: of each row; by default no new token is stored.
            found: prefix of each row on this stage, if the engine reuses what it has.
            asked: what the prompts ask for, as `_asked` returns it; by default what this engine does anyway.
            record, salts: as of `PrefillPlan`.
            may_be_alone: the last stage may compute the prompts alone, where the partitioner knows that to be sooner,
                and all keys and values are to be on it anyway.
        """
        asked, owners = asked or [self._setup], [list[int]() for _ in prompts]
        if self.prefixes is not None and not reuse_segments(prompts):
            owners = self.prefills.owners([ids_of(prompt) for prompt in prompts], found)
        stored, stored_on = list(map(len, owners)), sorted(set().union(*owners))
        partition = self._split([len(each) - num for each, num in zip(prompts, stored, strict=True)])
        num_new, last = max(each.max_new_tokens for each in options), self.ranks.num_stages - 1
        if not set(stored_on).issubset(partition.chain):  # a stage sends what it has beside a chunk of its own
            others = [stage for stage in partition.chain if stage not in stored_on]
            have_tokens = {*stored_on, *others[: partition.num_tokens - len(stored_on)]}
            partition = partition.scaled(partition.num_tokens, have_tokens)
        self._require_same({"the context partition": fact(list(partition.boundaries))})
        shards = None
        is_chain = self.prefill_options.takes_partition and len(partition.chain) > 1
        if is_chain and all(takes(each, Way.sharded) for each in asked):
            with self.ranks.announcing_failure():
                shards = self._placement.shards(partition, batch=len(prompts), num_new=num_new - 1, stored_on=stored_on)
        if may_be_alone and len(partition.chain) > 1 and shards is None and {last}.issuperset(stored_on):
            partition = self._alone_if_sooner(partition, max(stored))
        if len(partition.chain) > 1:
            self._check_chain(partition)
        return PrefillPlan(
            prompts=prompts,
            partition=partition,
            num_new=num_new,
            reuses=True,
            stored=stored,
            owners=owners,
            shards=shards,
            record=record,
            salts=salts,
        )

    def alone(
        self, texts: list[list[int]], num_new: int, meanwhile: InterleavedWork | None = None
    ) -> tuple[PrefillJob, Prefilled]:
        """A prefill of texts by this stage alone, in the middle of their answers, whatever computed their prompts.

        Args:
            num_new: most tokens that may still come.
            meanwhile: what this rank does besides.
        """
        chunk = self._alone_on(self.ranks.stage, max(map(len, texts)))
        return self.prefills.again(texts, num_new, chunk, meanwhile=meanwhile)

    def _alone_on(self, stage: int, num_tokens: int) -> ContextPartition:
        ends = range(self.ranks.num_stages + 1)
        return ContextPartition(boundaries=tuple(num_tokens if end > stage else 0 for end in ends))

    def _alone_if_sooner(self, partition: ContextPartition, num_stored: int) -> ContextPartition:
        """The last stage alone where the partitioner knows that to be sooner than this chain of several; else this one.

        Args:
            num_stored: tokens before those of the partition, which the last stage has.
        """
        split, can_be = self.partition, self.prefill_options.takes_partition and self.takes_stage_alone
        if not can_be or not isinstance(split, KnowsAlone):
            return partition
        is_sooner = split.is_alone_sooner(partition, num_stored)
        self._require_same({"whether one stage computes the prompts": fact(is_sooner)})
        return self._alone_on(self.ranks.num_stages - 1, partition.num_tokens) if is_sooner else partition

    def _computed_again(self, plan: PrefillPlan, texts: list[list[int]], num_new: int) -> tuple[PrefillJob, Prefilled]:
        """A prefill of texts by what decodes them: this stage alone, or a chain of all stages that have shards.

        Args:
            plan: the prefill of their prompts.
            num_new: most tokens that may still come.
        """
        if plan.shards is None:
            return self.alone(texts, num_new)
        partition, shards = self._placement.again(plan.partition, max(map(len, texts)), num_new - 1, block=self._block)
        return self.prefills.again(texts, num_new, partition, shards=shards)

    def _gathering(self, stages: Sequence[int], options: Sequence[GenerationOptions]) -> Gathering | None:
        """The gathering of the stages that decode rows with these options together."""
        num_queries = 1 + max(each.speculate_tokens if each.asks_for_drafts else 0 for each in options)
        return self._placement.gathering(stages, len(options) * num_queries)

    def _note_memory(
        self, job: PrefillJob, prefilled: Prefilled, computing: Iterable[int], decoding: Iterable[int]
    ) -> None:
        """Report the memory of this rank, once some stages have computed a prompt, and some have decoded."""
        report = prefilled.report
        report.memory = self.model.memory_after(
            kv_bytes=max(report.kv_peak_bytes, self._placement.timed_bytes),
            batch=len(job.batch.pads),
            num_tokens=min(report.chunk_tokens, job.chunk_tokens or report.chunk_tokens),
            row_tokens=report.row_tokens,
            num_threads=max(self.ranks.num_threads(each if self._lends else []) for each in (computing, decoding)),
        )

    def _conclude(self, plan: PrefillPlan, reuse: Reuse | None, prefilled: Prefilled, result: GenerationBatch) -> None:
        """Add to a result what the ranks report of it, and learn from its times."""
        result.decode = "last" if plan.shards is None else "sharded"
        if self.model.boundary is not None:
            result.decode = "pipeline"
        if reuse is not None and reuse.segments:
            reuse.report.recomputed_tokens = prefilled.recomputed_tokens
            reuse.add_to(result)
        num = len(result.generations)
        if not any(plan.stored):  # the times of a rest say nothing of whole prompts
            seconds = {each.rank: (each.prefill_s / num, each.wait_s / num) for each in result.ranks}
            self.learn(plan.partition, seconds)
            num_steps = max(len(each.new_token_ids) for each in result.generations)
            drafted = any(each.speculation is not None for each in result.ranks)
            if result.step_s is not None and num_steps > LEAST_STEPS and not drafted:
                self._placement.note(
                    batch=num,
                    num_tokens=plan.partition.num_tokens + num_steps // 2,
                    is_sharded=plan.shards is not None,
                    step_s=result.step_s,
                )

    def to_cache(self, prompts: Sequence[list[int]]) -> CheckedCache | None:
        """Compute prompts for transformers: `model.generate(ids, past_key_values=engine.to_cache([prompt]))`.

        All ranks call it. Prompts are computed whole, whatever a tree has of them.

        Returns:
            a `DynamicCache` of the prompts without their last tokens, padded on the left, on the rank that decodes;
            None on the others.

        Raises:
            ValueError: as `generate`, or the keys and values are not all on one rank, or not as they were computed.
        """
        assert self.ranks.mesh.num_shares == self.model.num_shards, "the ranks were arranged anew"
        setup = replace(self._setup, options={DYNAMIC_CACHE: True})
        setup = replace(setup, segments=SEGMENTS) if reuse_segments(prompts) else setup
        check(setup)
        options = GenerationOptions(max_new_tokens=1)
        self.check(prompts, [options] * len(prompts))
        self._agree(prompts, options)
        from runahead.dynamic_cache.checked import checked_cache, require_layers

        require_layers(self.model.module.config, len(self.model.kv_shapes))
        plan = replace(self.plan(prompts, asked=[setup], may_be_alone=self._lends), reuses=False)
        with self.ranks.announcing_failure():
            ready = self.prefills.ready(plan)
            self.ranks.barrier("all ranks to hold the prompt")
            with self.ranks.lending(plan.partition.chain if self._lends else []):
                prefilled = self.prefills.run(ready)
            if prefilled.cache is None:
                return None
            batch = ready.job.batch
            with self.ranks.busy():
                return checked_cache(prefilled.cache, self.model, num_tokens=batch.num_tokens, pads=batch.pads)

    def generate_with(
        self, module: PreTrainedModel | None, prompts: Sequence[list[int]], **options: Any
    ) -> Tensor | GenerateOutput | None:
        """Compute prompts on all ranks, and let transformers answer them on the rank that decodes.

        Args:
            module: transformers' model with the same weights and dtype, on the device of that rank; None: the model of
                this engine, with transformers' own attention meanwhile.
            options: of `module.generate`: `max_new_tokens`, `do_sample`, `num_beams`, ...

        Returns:
            what `module.generate` returns for prompts padded on the left, on the rank that decodes; None on the others.

        Raises:
            ValueError: as `to_cache`, or another model gives other keys.
        """
        cache = self.to_cache(prompts)
        if cache is None:
            return None
        from runahead.model.checks.logits_check import transformers_attention
        from runahead.model.seam import ATTENTION_NAME

        batch = PromptBatch.from_prompts(list(prompts), self.ranks.device)
        places_S = torch.arange(batch.num_tokens, device=self.ranks.device)
        mask_BS = (places_S >= row_values(batch.pads, self.ranks.device)[:, None]).long()
        is_own = module is None or module.config._attn_implementation == ATTENTION_NAME
        module = self.model.module if module is None else module
        with self.ranks.busy(), transformers_attention(module) if is_own else nullcontext():
            answer: Tensor | GenerateOutput = module.generate(
                batch.ids_BS, attention_mask=mask_BS, past_key_values=cache, **options
            )
            return answer

    def prefill(
        self,
        plan: PrefillPlan,
        meanwhile: InterleavedWork | None = None,
        handovers: Mapping[int, Handover] = MappingProxyType({}),
    ) -> Prefilled:
        """Run this rank's part of a prefill that all ranks were told, for a server.

        In contrast to `generate` nothing is compared, and no rank waits for another one but for its keys and values:
        one that has no chunk, or has computed it, may go on to other prompts. All ranks run the same prefills in the
        same order; those of one stage alone may change places with others. Each stage that has a chunk of prompts
        that reuse segments encodes what its store lacks. The caller stores and releases the prefixes of the result.

        Args:
            meanwhile: what this rank does besides.
            handovers: number of a prompt -> what hands it over, on the last rank, which has all keys and values.
        """
        if len(plan.partition.chain) > 1:
            self._check_chain(plan.partition)
        ready = self.prefills.ready(plan, meanwhile=meanwhile, handovers=handovers)
        reuse = ready.reuse
        if reuse is not None and ready.job.partition.chunk(self.ranks.stage):
            reuse.encode_missing(in_stage=True)
        prefilled = self.prefills.run(ready)
        if reuse is not None:
            prefilled.encoded = reuse.encoded
            prefilled.report.prefill_s += reuse.report.encode_s + reuse.report.cluster_s
        return prefilled

    def check(self, prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions]) -> None:
        """Check that prompts can be generated from at once, as `generate` does. Raises: PromptTooLong, ValueError.

        All else was checked when this engine was made.
        """
        options = self._resolved(options)  # of the checkpoint, too
        check_options(options, self.model.tokenizer, self.model.vocab_size, self._grammars)
        check_prompts(prompts, self.prompt_limits, num_new=[each.max_new_tokens for each in options])
        self.policies.check_pools(self.model, batch=len(prompts), keep_parts=self._keeps_parts)
        if self._prompt_draft is not None:
            self._prompt_draft.check([len(ids_of(each)) for each in prompts])
        if reuse_segments(prompts):
            self.check_reuse(blends=_blend(prompts))
        if any(each.asks_for_drafts for each in options):
            self.check_speculation(options, prompts)

    def _resolved(self, options: Sequence[GenerationOptions]) -> list[GenerationOptions]:
        """Options of rows with what they leave to the checkpoint. Raises: ValueError."""
        return [each.resolved(self.model.module.generation_config) for each in options]

    def check_speculation(self, options: Sequence[GenerationOptions], prompts: Sequence[GivenPrompt]) -> None:
        """Check that drafts can be made and verified as the options of these prompts ask. Raises: ValueError."""
        setup = replace(self._setup, segments=SEGMENTS if reuse_segments(prompts) else "", blends=_blend(prompts))
        self._speculator.check(options, [len(ids_of(each)) for each in prompts], setup)

    def check_reuse(self, *, blends: bool = False) -> None:
        """Check that prompts may reuse segments, and with `blends` that some of their tokens may be computed again.

        Raises:
            ValueError: prefill, policies or model refuse it.
        """
        check(replace(self._setup, segments=SEGMENTS, blends=blends))

    def check_scores(self) -> None:
        """Check that a server can score the tokens of prompts. Raises: ValueError."""
        check(replace(self._serving, scores=True))

    def _check_chain(self, partition: ContextPartition) -> None:
        """Check that the prompts' chunks go with the options. Raises: ValueError."""
        check(replace(self._setup, num_chunks=len(partition.chain)))

    def split(self, num_tokens: int) -> ContextPartition:
        """The chunks of a prompt, one per stage. Asked for on rank 0 alone."""
        return self.in_blocks(self._strategy.split(num_tokens, self.ranks.num_stages, partial(decide, self.partition)))

    @cached_property
    def _stores_parts(self) -> bool:
        """Whether each stage may store a part of a text."""
        is_shared = self.decode.name is not DecodeName.last and self.ranks.num_stages > 1
        return is_shared and self.prefill_options.takes_partition and takes(self._setup, Way.sharded)

    def _split(self, lengths: Sequence[int]) -> ContextPartition:
        return self.in_blocks(self._strategy.split(max(lengths), self.ranks.num_stages, self.partition))

    def in_blocks(self, partition: ContextPartition) -> ContextPartition:
        """The partition, or with sparse attention the nearest one of whole blocks."""
        return partition if self._block == 1 else partition.in_blocks(self._block)

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
            if self.ranks.num_shares > 1 or self.model.boundary is not None:
                # Those of shares differ, and each is to equal that of the other stages; those of stages of layers
                # differ as well, and were compared with the whole model when they were loaded.
                by_rank, mesh = self.ranks.gather(self._weights, "the weights"), self.ranks.mesh
                members = mesh.members(self.ranks.stage) if self.model.boundary is None else range(self.ranks.size)
                self._weights = " ".join(by_rank[rank] for rank in members)
        facts = {
            "the prompts": secret(prompts),
            "the policies": secret(self.policies),
            "the model": fact(self.model.name),
            "its dtype": fact(self.model.dtype),
            "its weights": secret(self._weights),
            "its config's overrides": fact(self.model.overrides),
            "its adapters": fact(self.model.adapters),
            "whether there is a prefix tree": "no" if self.prefixes is None else "yes",
        }
        if self.prefixes is not None and self.prefixes.state_bytes:  # all stages keep states at the same places
            tree = self.prefixes.tree
            facts["the tree's snapshots of states"] = fact([tree.snapshot_tokens, tree.first_limit_bytes])
        if isinstance(options, GenerationOptions):
            facts |= option_facts({"generation": options})
        else:
            facts["the generation options"] = secret(options)
        facts |= option_facts({"prefill": self.prefill_options, "decode": self.decode})
        self._require_same(facts)

    def _require_same(self, facts: dict[str, str]) -> None:
        if self.ranks.size > 1:
            self.ranks.require_same(facts, "every rank must make the same call with the same model")

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
        return replace(self._setup, options={"a server": True}, outgrows=True)

    @property
    def store(self) -> SegmentStore | None:
        """Segments that prompts reuse; None before the first prompt that does, if the engine was given none."""
        return self.prefills.store

    @property
    def may_shard(self) -> bool:
        """Whether stages may decode together."""
        return not self.takes(Way.side_by_side)

    @property
    def takes_stage_alone(self) -> bool:
        """Whether the last stage can compute a prompt alone."""
        return self.ranks.num_stages == 1 or self._strategy.can_run_alone


def _blend(prompts: Sequence[GivenPrompt]) -> bool:
    """Whether tokens of segments that the prompts reuse are computed again."""
    return any(isinstance(each, ReusingPrompt) and each.blended for each in prompts)


def _asked(setup: Setup, options: Sequence[GenerationOptions], *, reuses: bool) -> list[Setup]:
    """The setups of a run, with what a batch of prompts asks for: one for each kind of drafts, or for none."""
    kinds = {each.speculate: each for each in options if each.asks_for_drafts} or {Speculate.none: options[0]}
    return [replace(setup, generation=each, segments=SEGMENTS if reuses else "") for each in kinds.values()]
