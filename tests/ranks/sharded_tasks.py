"""Tasks of ranks in test_sharded.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from policies.reuse import GivenPrompt, ReusingPrompt
from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import DecodeName
from runahead.decoding import together
from runahead.decoding.placement import Placement
from runahead.decoding.sampling import Sampler
from runahead.kv_transfer import gathering
from runahead.ranks.mapped.memory import Unmapped
from runahead.report import GenerationBatch, RankReport
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.ranks.tasks import generate, kv_bytes_in_layers, tiny_model

Case = tuple[list[list[int]], tuple[int, ...], GenerationOptions, PrefillOptions]
"""Prompts, boundaries and options of one batch."""


def sharded(ranks: Ranks, family: str, cases: Sequence[Case]) -> list[tuple[list[list[int]], list[list[float]], str]]:
    """New tokens of every row of each case, logits of the last token on the rank that chooses, and where KV were."""
    found = []
    seen: list[Tensor] = []
    choose = together.next_tokens

    def next_tokens(samplers: Sequence[Sampler | None], logits_BV: Tensor) -> list[int | None]:
        seen[:] = [logits_BV.clone()]
        return choose(samplers, logits_BV)

    for prompts, bounds, options, prefill in cases:
        seen.clear()
        with mock.patch.object(together, "next_tokens", next_tokens):
            batch, _ = generate(ranks, family, prompts, options, bounds, prefill, decode=DecodeName.sharded)
        rows = [generation.new_token_ids for generation in batch.generations]
        found.append((rows, seen[0].tolist() if seen else [], batch.decode))
    return found


Asked = tuple[str, PrefillOptions, RankPolicies | None, GivenPrompt, GenerationOptions]
"""Family, prefill, policies, prompt and options of a batch."""


def placed(ranks: Ranks, batches: Sequence[Asked]) -> list[tuple[str, list[str]]]:
    """Where keys and values of each batch are under decode=auto if the last stage has no memory for all, and why."""
    found = []
    for family, prefill, policies, asked, options in batches:
        model = tiny_model(family)
        with mock.patch.object(Placement, "_must_shard", lambda *_: True), throughout(model.dtype):
            engine = Engine(model, ranks, prefill=prefill, policies=policies)
            batch = engine.generate([asked], options)
        found.append((batch.decode, batch.slower))
    return found


def segments_both_ways(
    ranks: Ranks, family: str, prompts: list[ReusingPrompt], shares: tuple[float, ...]
) -> list[GenerationBatch]:
    """Generate from prompts that reuse segments, with decode=sharded and with decode=last."""
    model = tiny_model(family)
    options = GenerationOptions(max_new_tokens=5, ignore_eos=True, logprobs=5)

    def split(num_tokens: int, _: int) -> ContextPartition:
        return ContextPartition(boundaries=tuple(round(share * num_tokens) for share in shares))

    with throughout(model.dtype):
        return [
            Engine(model, ranks, partition=split, decode=DecodeOptions(name=name)).generate(prompts, options)
            for name in (DecodeName.sharded, DecodeName.last)
        ]


def kv_bytes(
    ranks: Ranks, family: str, prompts: list[list[int]], options: GenerationOptions, bounds: tuple[int, ...]
) -> tuple[int, int, RankReport]:
    """Most bytes of slabs alive in a layer of the prefill, those alive after the call, and this rank's report."""
    sizes, afterwards, report = kv_bytes_in_layers(ranks, family, prompts, options, bounds, decode=DecodeName.sharded)
    return max(sizes, default=0), afterwards, report


def over_the_backend(
    ranks: Ranks, family: str, prompts: list[list[int]], options: GenerationOptions, bounds: tuple[int, ...]
) -> tuple[GenerationBatch, str]:
    """`generate` on ranks that map no memory for decoding, and the class that gathered."""
    made: list[str] = []
    begin = gathering.Gathering.__init__

    def noted(self: gathering.Gathering, *args: Any) -> None:
        begin(self, *args)
        made.append(type(self).__name__)

    with (
        mock.patch.object(gathering, "SharedBytes", side_effect=Unmapped("no memory today")),
        mock.patch.object(gathering.Gathering, "__init__", noted),
    ):
        batch, _ = generate(ranks, family, prompts, options, bounds, decode=DecodeName.sharded)
    return batch, made[-1]


def auto(
    ranks: Ranks, family: str, lengths: Sequence[int], gains_s: dict[int, float], free: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Places that decode=auto chooses for keys and values of prompts of these lengths, and the lengths that it timed.

    Args:
        gains_s: seconds that sharding gains at the lengths that are timed.
        free: free bytes of every rank.
    """
    from runahead.decoding import placement

    model, timed = tiny_model(family), list[int]()

    def timing(self: placement.Placement, partition: ContextPartition, num_tokens: int, batch: int) -> Any:
        timed.append(num_tokens)
        made = placement.Timing(batch=batch, num_tokens=num_tokens, last_s=1.0, sharded_s=1.0 - gains_s[num_tokens])
        self.timings.append(made)
        return made

    chosen = []
    with (
        mock.patch.object(placement.Placement, "_timing", timing),
        mock.patch.object(placement, "available_bytes", lambda: free[ranks.rank] * ranks.local_size),
        mock.patch.object(placement, "LEAST_BYTES", 100),
        mock.patch.object(placement, "LEAST_SHARE", 0.0),
        mock.patch.object(placement, "TIMED_BYTES", 60 * sum(s.bytes_per_token() for s in model.kv_shapes)),
        throughout(model.dtype),
    ):
        engine = Engine(model, ranks)
        for length in lengths:
            batch = engine.generate([prompt(length)], GenerationOptions(max_new_tokens=3, ignore_eos=True))
            chosen.append(batch.decode)
    return chosen, timed


def memory_questions(ranks: Ranks, family: str, lengths: Sequence[int], free: int) -> list[int]:
    """How often decode=auto asks for the free memory, of which there is `free` bytes, by prompt."""
    from runahead.decoding import placement

    asked, model = list[int](), tiny_model(family)
    available = mock.Mock(return_value=free * ranks.local_size)
    with mock.patch.object(placement, "available_bytes", available), throughout(model.dtype):
        engine = Engine(model, ranks)
        for length in lengths:
            engine.generate([prompt(length)], GenerationOptions(max_new_tokens=2, ignore_eos=True))
            asked.append(available.call_count - sum(asked))
    return asked


def timed_for_real(
    ranks: Ranks, family: str, ids: list[int]
) -> tuple[list[int], str, list[tuple[float, float]], list[int]]:
    """Tokens of a prompt whose placement is timed as in real use, where they were, what was timed, and in which bytes.

    The bytes are those of each rank.
    """
    from runahead.decoding import placement

    with mock.patch.object(placement, "LEAST_BYTES", 100), mock.patch.object(placement, "LEAST_SHARE", 0.0):
        model = tiny_model(family)
        with throughout(model.dtype):
            engine = Engine(model, ranks)
            batch = engine.generate([ids], GenerationOptions(max_new_tokens=4, ignore_eos=True))
    seconds = [(timing.last_s, timing.sharded_s) for timing in engine._placement.timings]
    timed_bytes = ranks.gather(engine._placement.timed_bytes, "the bytes of the timing")
    return batch.generations[0].new_token_ids, batch.decode, seconds, timed_bytes


def refused(ranks: Ranks) -> list[str]:
    """Errors of an engine for options that do not go with sharded decoding."""
    from policies.window import Window
    from runahead.config import Positions, PrefillName
    from runahead.thinning.rank_policies import RankPolicies

    said = []
    for prefill, policies in (
        (PrefillOptions(name=PrefillName.zigzag), None),
        (None, RankPolicies.everywhere([Window(budget=8)], Positions.reencoded)),
    ):
        try:
            decode = DecodeOptions(name=DecodeName.sharded)
            engine = Engine(tiny_model("llama"), ranks, prefill=prefill, policies=policies, decode=decode)
            engine.generate([[5, 6]])
        except ValueError as error:
            said.append(str(error))
    return said


def decided_again(
    ranks: Ranks, family: str, length: int, timed_s: tuple[float, float], seconds: Sequence[tuple[float, float]]
) -> list[str]:
    """Places that decode=auto chooses for prompts of a length, one after the other.

    Args:
        timed_s: seconds that a step takes on the last stage alone and sharded, while they are timed.
        seconds: the same of each answer.
    """
    from runahead import engine as engines
    from runahead.decoding import placement

    given = {False: timed_s[0], True: timed_s[1]}

    def times(self: Any, forward: Any, batch: int, gather: Any = None) -> list[float]:
        return [9.0, given[gather is not None]]

    chosen, gathered = list[str](), engines.gathered_result
    with (
        mock.patch.object(placement.Placement, "_times", times),
        mock.patch.object(placement, "LEAST_BYTES", 100),
        mock.patch.object(placement, "LEAST_SHARE", 0.0),
    ):
        model = tiny_model(family)
        with throughout(model.dtype):
            engine = Engine(model, ranks)
            for of_answer in seconds:

                def result(*args: Any, by_way: tuple[float, float] = of_answer, **more: Any) -> GenerationBatch:
                    made = gathered(*args, **more)
                    is_sharded = ranks.size == sum(report.kv_kept_bytes > 0 for report in made.ranks)
                    made.step_s = by_way[is_sharded]
                    return made

                with mock.patch.object(engines, "gathered_result", result):
                    batch = engine.generate([prompt(length)], GenerationOptions(max_new_tokens=10, ignore_eos=True))
                chosen.append(batch.decode)
    return chosen
