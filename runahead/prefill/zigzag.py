"""Context parallelism with a balanced split, as Llama 3 (2024) and ring attention with zigzag chunks have it.

Of 2p equal chunks a rank computes one early and one late, so that all ranks attend to equally many keys with a causal
kernel. Usually rank i has the chunks i and 2p - 1 - i; here it is the other way round, p - 1 - i and p + i, so that the
last rank gets the first token and decodes, as in the other prefills.

In every layer a rank sends its keys and values before anything else and attends to its own two chunks while the others'
are on their way: at once (`all_gather`, `direct`) or step by step, each while the next one travels (`ring`). What
arrives at once takes two more calls at most: both chunks to the keys before the early one, the late one to those
between the two.
"""

# Legend: B batch, N query heads, K kv heads, C tokens of this rank, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms, with_sinks
from runahead.attention.ranges import RunsAttention
from runahead.config import Exchange, PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer import ExchangeSchedule, Message
from runahead.model.model import Model
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.exchanging import ExchangingPrefill


class ZigzagAttention(LayerAttention):
    """Attend to the own chunks, then to each group of the others' as it arrives: once per layer."""

    def __init__(self, run: ChainRun, schedule: ExchangeSchedule) -> None:
        super().__init__(start=schedule.own[0].start, pads=run.job.batch.pads)
        self.run, self._schedule = run, schedule
        self._groups = _row_groups(schedule.own, self.pads)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.run.open(layer)
        slab = self.run.cache.layer(layer)
        written = 0
        for run in self._schedule.own:
            part = slice(written, written + len(run))
            slab.write(run.start, k_BKCH[:, :, part], v_BKCV[:, :, part])
            written = part.stop
        self.run.send(layer)
        parts = []
        for rows, pad, runs in self._groups:
            num_queries = sum(map(len, runs))
            q, k, v = (x[rows, :, -num_queries:] for x in (q_BNCH, k_BKCH, v_BKCV))
            part_of_rows = RunsAttention(q, terms, rows=rows, pad=pad, runs=runs)
            part_of_rows.own(k, v)
            parts.append(part_of_rows)
        for messages in self._schedule.steps(layer):
            self.run.transfer.await_messages(layer, messages)
            for tokens in _side_by_side(messages):
                for part_of_rows in parts:
                    part_of_rows.others(slab, tokens)
        out_BNCV = self._assembled(parts, q_BNCH, v_BKCV.shape[-1], terms)
        self.run.close(layer)
        return out_BNCV

    def _assembled(self, parts: list[RunsAttention], q_BNCH: Tensor, value_dim: int, terms: AttentionTerms) -> Tensor:
        """Output (B, N, C, V) of all rows, 0 on padding."""
        outs = [with_sinks(part.out, part.lse, terms) for part in parts]
        if len(outs) == 1 and outs[0].shape[:3] == q_BNCH.shape[:3]:
            return outs[0].to(q_BNCH.dtype)
        padded_out = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim)
        for (rows, _, _), out in zip(self._groups, outs, strict=True):
            padded_out[rows, :, -out.shape[2] :] = out.to(q_BNCH.dtype)
        return padded_out


class Zigzag(ExchangingPrefill):
    """2p chunks, whatever the user's partition; their boundaries are what `split` returns."""

    def check(self, model: Model, num_ranks: int) -> None:
        if num_ranks > 1 and model.uneven_limit is not None:
            raise ValueError(
                f"model {model.name} ({model.config.model_type}) counts positions by itself, and prefill=zigzag gives "
                "ranks tokens that do not lie side by side; use prefill=kv_runahead or prefill=tsp"
            )

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, 2 * num_ranks)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        p = partition.num_ranks // 2
        return [_joined([partition.chunk(p - 1 - rank), partition.chunk(p + rank)]) for rank in range(p)]

    def exchange(self, options: PrefillOptions) -> Exchange:
        return options.exchange

    def attention(self, run: ChainRun, schedule: ExchangeSchedule) -> ZigzagAttention:
        return ZigzagAttention(run, schedule)


def _row_groups(runs: Sequence[range], pads: list[int]) -> list[tuple[slice, int, list[range]]]:
    """(rows, their padding, runs in the positions of these rows): all rows at once without padding, else one by one."""
    every_row = [(slice(None), 0)] if not any(pads) else [(slice(row, row + 1), pad) for row, pad in enumerate(pads)]
    groups = []
    for rows, pad in every_row:
        positions = [range(max(run.start, pad) - pad, run.stop - pad) for run in runs if run.stop > pad]
        if positions:
            groups.append((rows, pad, positions))
    return groups


def _side_by_side(messages: list[Message]) -> list[range]:
    """The tokens that messages bring, in as few ranges as they make."""
    return _joined([range(message.start, message.end) for message in sorted(messages, key=lambda each: each.start)])


def _joined(ranges: list[range]) -> list[range]:
    """Ranges in order, without empty ones; those that touch are one."""
    joined: list[range] = []
    for each in filter(len, ranges):
        if joined and joined[-1].stop == each.start:
            each = range(joined.pop().start, each.stop)
        joined.append(each)
    return joined
