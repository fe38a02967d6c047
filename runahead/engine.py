"""The way of a prompt: chunks, prefill on all ranks, first token and decoding on the last, the result everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from policies.base import ReusingPrompt
from runahead.cache.kept import KeptCache
from runahead.config import GenerationOptions, PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.decoding.decode import Decoded, Row, attention_over, decode
from runahead.decoding.token_stream import TokenStream
from runahead.model.fingerprint import model_fingerprint
from runahead.model.model import Model
from runahead.model.seam import LayerAttention
from runahead.prefill import PREFILLS, Prefilled, PrefillJob, PromptBatch
from runahead.ranks.agreement import fact, option_facts, secret
from runahead.ranks.ranks import Ranks
from runahead.report import Generation, GenerationBatch, RankReport
from runahead.reuse.attention import ReusedKV, reused_attention_over
from runahead.reuse.reuse import Reuse
from runahead.reuse.store import SegmentStore
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.text_limits import check_chunk_tokens, pieces_of, remedy

OnTokens = Callable[[list[int | None]], None]


class Engine:
    """Generates from long prompts on several ranks. Load once, generate many times; every rank makes the same calls.

    Args:
        model: this rank's copy of the model.
        ranks: the ranks of the job; `Ranks.start(RanksOptions())` without a launcher is one rank.
        prefill: how the KV cache is filled.
        partition: (number of tokens, number of ranks) -> chunks; `even`, `from_ratios([...])`, a lookup table. Prefills
            with a split of their own do not ask it.
        policies: what of the K,V is computed and kept; by default everything.
        store: of segments that prompts reuse; by default host memory, and the device's.

    Raises:
        ValueError: the model cannot be prefilled like this on these ranks.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        prefill: PrefillOptions | None = None,
        partition: Partitioner = even,
        policies: RankPolicies | None = None,
        store: SegmentStore | None = None,
    ) -> None:
        self.model, self.ranks = model, ranks
        self.policies = policies or RankPolicies()
        self.prefill = prefill or PrefillOptions()
        self.partition = partition
        self._strategy = PREFILLS[self.prefill.name]
        if model.num_shares != (ranks.size if self._strategy.shares_model else 1):
            whose = "that is shared out over these ranks" if self._strategy.shares_model else "that each rank has whole"
            raise ValueError(
                f"prefill={self.prefill.name.name} needs a model {whose}, and this one has {model.num_shares} shares; "
                "see runahead.prefill.tensor.share_out"
            )
        self._strategy.check(model, ranks.size)
        if self.policies:
            if not self._strategy.takes_policies:
                raise ValueError(
                    f"prefill={self.prefill.name.name} computes and keeps all K,V; cache policies need "
                    "prefill=kv_runahead or prefill=single"
                )
            self.policies.check(model)
        self.store = store
        self._num_calls = 0
        self._weights: str | None = None

    def generate(
        self,
        prompts: Sequence[list[int] | ReusingPrompt],
        options: GenerationOptions | None = None,
        *,
        on_tokens: OnTokens | None = None,
        record_timeline: bool = False,
        first_index: int = 0,
    ) -> GenerationBatch:
        """Generate from token ids, all prompts at once.

        Args:
            prompts: token ids, or what is reused and what is new, the same on every rank.
            options: how to generate; greedy by default.
            on_tokens: called on rank 0 with every step's new ids, None for rows that have ended.
            record_timeline: fill the result's spans.
            first_index: place of the first prompt among all, which seeds its sampling.

        Returns:
            the same result on every rank.

        Raises:
            ValueError: a prompt is empty, holds an unknown id, or is too long for the model; the partition does not
                fit; or the K,V do not fit in memory.
            PeerFailure: another rank is gone or silent.
        """
        options = options or GenerationOptions()
        ids = [prompt.ids if isinstance(prompt, ReusingPrompt) else prompt for prompt in prompts]
        reuse = self._reuse(prompts, options)
        self._check(ids, options)
        new_ids = ids if reuse is None else [list(prompt.new_ids) for prompt in reuse.prompts]
        partition = self._strategy.split(max(map(len, new_ids)), self.ranks.size, self.partition)
        check_chunk_tokens(self.prefill, len(partition.chain))
        self._agree(prompts, options, partition.boundaries)
        with self.ranks.failing_together():
            batch = PromptBatch.of(new_ids, self.ranks.device)
            result = self._generate(ids, batch, reuse, options, partition, on_tokens, record_timeline, first_index)
        self._num_calls += 1
        return result

    def _generate(
        self,
        prompts: list[list[int]],
        batch: PromptBatch,
        reuse: Reuse | None,
        options: GenerationOptions,
        partition: ContextPartition,
        on_tokens: OnTokens | None,
        record_timeline: bool,
        first_index: int,
    ) -> GenerationBatch:
        source = self._strategy.first_token_rank(partition, self.ranks.size)
        stream = TokenStream(self.ranks, source=source, num_rows=len(prompts), on_tokens=on_tokens)
        with self.ranks.busy():
            self._strategy.connect(self.ranks, partition, self.prefill)
            if reuse is not None:
                reuse.encode_missing()
        offset_s = self.ranks.clock_offset_s() if record_timeline else 0.0
        self.ranks.barrier("all ranks to hold the prompt")
        began_s = time.perf_counter()
        reused = reuse.fetch() if reuse is not None and partition.chunk(self.ranks.rank) else None
        job = PrefillJob(
            model=self.model,
            ranks=self.ranks,
            batch=batch,
            partition=partition,
            capacity=batch.num_tokens + options.max_new_tokens - 1,
            options=self.prefill,
            policies=self.policies,
            reused=reused,
            pieces_of=pieces_of(
                batch.num_tokens,
                max_positions=self.model.max_positions,
                num_layers=self.model.num_layers,
                policies=self.policies,
                prefill=self.prefill,
            ),
            record=record_timeline,
        )
        prefilled = self._strategy.run(job)
        if reused is not None:
            reused = reused.joined()
            del job  # which holds what was joined
        decoded = self._decode(prompts, options, prefilled, batch, reused, stream, first_index)
        stream.relay()
        if prefilled.cache is not None:
            prefilled.kv_peak_bytes = max(prefilled.kv_peak_bytes, prefilled.cache.num_bytes)
        if isinstance(prefilled.cache, KeptCache) and prefilled.cache.retrieval is not None:
            prefilled.retrieval = prefilled.cache.retrieval.report()
        prefilled.cache = None
        result = self._result(prefilled, decoded, partition.boundaries, began_s, offset_s, source)
        if reuse is not None:
            reuse.add_to(result)
        return result

    def _agree(
        self, prompts: Sequence[list[int] | ReusingPrompt], options: GenerationOptions, boundaries: tuple[int, ...]
    ) -> None:
        """Ranks with different work would wait for each other for ever."""
        if self.ranks.size == 1:
            return
        if self._weights is None:
            # Of a share of the weights no two ranks have the same; whether they fit was found out when they were made.
            self._weights = "" if self.model.num_shares > 1 else model_fingerprint(self.model.module)
        facts = {
            "the prompts": secret(prompts),
            "the context partition": fact(list(boundaries)),
            "the policies": secret(self.policies),
            "the model": fact(self.model.name),
            "its dtype": fact(self.model.dtype),
            "its weights": secret(self._weights),
        }
        facts |= option_facts({"generation": options, "prefill": self.prefill})
        self.ranks.require_same(facts, "every rank must make the same call with the same model")

    def _reuse(self, prompts: Sequence[list[int] | ReusingPrompt], options: GenerationOptions) -> Reuse | None:
        """What the prompts reuse, if one of them does.

        Raises:
            ValueError: this engine cannot, or a prompt is beyond the model's positions.
        """
        if not any(isinstance(prompt, ReusingPrompt) for prompt in prompts):
            return None
        if not self._strategy.takes_policies or self.policies or self.prefill.chunk_tokens is not None:
            raise ValueError(
                "prompts that reuse K,V need prefill=kv_runahead or prefill=single without prefill.chunk_tokens, and "
                "no cache policy that thins them out"
            )
        self.store = self.store or SegmentStore(self.model)
        return Reuse.of(prompts, self.store, self.model, self.ranks, num_new=options.max_new_tokens)

    def _check(self, prompts: list[list[int]], options: GenerationOptions) -> None:
        if not prompts:
            raise ValueError("no prompt was given")
        if options.stop and self.model.tokenizer is None:
            raise ValueError(f"generation.stop={options.stop} needs a tokenizer, and this model has none; leave it out")
        longest, uneven_limit = max(len(prompt) for prompt in prompts), self.model.uneven_limit
        uneven = any(len(prompt) < longest for prompt in prompts)
        if uneven and uneven_limit is not None and longest + options.max_new_tokens > uneven_limit:
            raise ValueError(
                f"model {self.model.name} ({self.model.config.model_type}) counts positions from the start of the "
                "longest prompt, so prompts of different lengths cannot run at once; use prompt.batch=1"
            )
        limit = self.model.max_positions
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty; it needs at least one token")
            if not all(0 <= token < self.model.vocab_size for token in prompt):
                raise ValueError(f"prompt {index} holds token ids outside 0..{self.model.vocab_size - 1}")
            total = len(prompt) + options.max_new_tokens
            helps = remedy(
                len(prompt),
                options.max_new_tokens,
                max_positions=limit,
                num_layers=self.model.num_layers,
                policies=self.policies,
                prefill=self.prefill,
                num_ranks=self.ranks.size,
            )
            if helps is not None:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, and with {options.max_new_tokens} new ones exceeds the "
                    f"model's {limit} positions; use {helps}"
                )
            threshold = self.model.length_threshold
            if threshold is not None and len(prompt) <= threshold < total - 1:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens and may grow past {threshold}, where this model's RoPE "
                    f"changes; use generation.max_new_tokens={threshold - len(prompt) + 1} or a longer prompt"
                )

    def _decode(
        self,
        prompts: list[list[int]],
        options: GenerationOptions,
        prefilled: Prefilled,
        batch: PromptBatch,
        reused: ReusedKV | None,
        stream: TokenStream,
        first_index: int,
    ) -> Decoded | None:
        """On the ranks with K,V and logits: the first token and the following ones."""
        if prefilled.logits_BV is None or prefilled.cache is None:
            return None
        policies = self.policies.of(is_last=True)
        rows = [
            Row(self.model, prompt, options, seed=options.seed + first_index + index)
            for index, prompt in enumerate(prompts)
        ]
        attention_at: Callable[[int], LayerAttention]
        if reused is not None:
            attention_at = reused_attention_over(prefilled.cache, reused, pads=batch.pads)
        else:
            attention_at = attention_over(
                prefilled.cache,
                policies,
                pads=batch.pads,
                prompt_tokens=batch.num_tokens,
                num_layers=self.model.num_layers,
            )
        return decode(
            self.model,
            rows,
            prefilled.logits_BV,
            attention_at,
            num_tokens=batch.num_tokens,
            pads=batch.pads,
            on_step=stream.send,
        )

    def _result(
        self,
        prefilled: Prefilled,
        decoded: Decoded | None,
        boundaries: tuple[int, ...],
        began_s: float,
        offset_s: float,
        source: int,
    ) -> GenerationBatch:
        """What every rank found out, put together on all of them."""
        report = RankReport(
            rank=self.ranks.rank,
            chunk_tokens=prefilled.chunk_tokens,
            prefill_s=prefilled.prefill_s,
            wait_s=prefilled.wait_s,
            kv_sent_bytes=prefilled.kv_sent_bytes,
            kv_received_bytes=prefilled.kv_received_bytes,
            kv_peak_bytes=prefilled.kv_peak_bytes,
            kv_kept_bytes=prefilled.kv_kept_bytes,
            kept_tokens=prefilled.kept_tokens,
            kv_host_bytes=prefilled.kv_host_bytes,
            retrieval=prefilled.retrieval,
        )
        outcome = None
        if decoded is not None:
            assert prefilled.logits_BV is not None
            tpot_s = None
            if decoded.num_steps > 1:
                tpot_s = (decoded.last_token_s - decoded.first_token_s) / (decoded.num_steps - 1)
            generations = [
                Generation(
                    prompt_tokens=len(row.prompt),
                    new_token_ids=row.new_ids,
                    text=row.text,
                    finish_reason=row.finish_reason or "length",
                    first_token_logits_top5=_top5(logits_V),
                )
                for row, logits_V in zip(decoded.rows, prefilled.logits_BV, strict=True)
            ]
            outcome = generations, decoded.first_token_s - began_s, tpot_s
        shared = self.ranks.gather(
            (report, outcome, began_s + offset_s, [span.shifted(offset_s) for span in prefilled.spans]),
            "the end of the generation",
        )
        reports, outcomes, began, spans = (list(column) for column in zip(*shared, strict=True))
        generations, ttft_s, tpot_s = outcomes[source]
        return GenerationBatch(
            generations=generations,
            boundaries=list(boundaries),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            warm=self._num_calls > 0,
            ranks=reports,
            spans=[[span.shifted(-began[source]) for span in of_rank] for of_rank in spans] if any(spans) else [],
        )


def _top5(logits_V: torch.Tensor) -> list[tuple[int, float]]:
    values, ids = logits_V.topk(min(5, len(logits_V)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
