"""Context parallelism with a balanced split: zigzag chunks, as in Llama 3 (2024) and in zigzag ring attention.

Of 2p equal chunks a rank computes one early and one late chunk, so that all ranks attend to equally many keys with a
causal kernel. Usually rank i has the chunks i and 2p - 1 - i; here it has p - 1 - i and p + i, so that the last rank
gets the first token and decodes, as in the other prefills.

In every layer a rank first sends its keys and values, then attends to its own two chunks while those of other ranks
arrive: all at once (`all_gather`, `direct`) or step by step, each while the next one travels (`ring`). What arrives at
once takes at most two more calls: both chunks to the keys before the early one, the late chunk to those between the
two.
"""

# Legend: B batch, N query heads, K kv heads, C tokens of this rank, H head dim, V value dim.

from __future__ import annotations

from torch import Tensor

from runahead.attention.op import finish, joined, rows_by_pad
from runahead.attention.partial import AttentionTerms
from runahead.attention.ranges import RunsAttention
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer import ExchangeSchedule
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.exchanging import ExchangingAttention, ExchangingPrefill


class ZigzagAttention(ExchangingAttention):
    """Attention of one rank's two chunks to themselves, then to each group of the other ranks' as it arrives."""

    def __init__(self, run: ChainRun, schedule: ExchangeSchedule) -> None:
        super().__init__(run, schedule)
        # Rows with the same padding, and this rank's runs in positions of these rows.
        self._groups: list[tuple[slice, int, list[range]]] = []
        for rows, pad in rows_by_pad(self.pads):
            runs = [range(max(run.start, pad) - pad, run.stop - pad) for run in schedule.own if run.stop > pad]
            if runs:
                self._groups.append((rows, pad, runs))

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.run.open(layer)
        slab = self.run.cache.layer(layer)
        written = 0
        for run in self.schedule.own:
            own = slice(written, written + len(run))
            slab.write(run.start, k_BKCH[:, :, own], v_BKCV[:, :, own])
            written = own.stop
        self.run.send(layer)
        parts = []
        for rows, pad, runs in self._groups:
            num_queries = sum(map(len, runs))
            q, k, v = (x[rows, :, -num_queries:] for x in (q_BNCH, k_BKCH, v_BKCV))
            parts.append(RunsAttention(q, k, v, terms, rows=rows, pad=pad, runs=runs))
        for messages in self.schedule.steps(layer):
            self.run.await_messages(layer, messages)
            # The tokens of these messages as the fewest contiguous ranges.
            arrived = sorted((range(each.start, each.end) for each in messages), key=lambda tokens: tokens.start)
            for tokens in _joined(arrived):
                for part in parts:
                    part.attend(slab, tokens)
        num_new, found = q_BNCH.shape[2], [(part.out, part.lse) for part in parts]
        places = [(part.rows, range(num_new - part.out.shape[2], num_new)) for part in parts]
        out_BNCV = finish(joined(q_BNCH, slab.value_dim, places, found), terms, q_BNCH.dtype)
        self.run.close(layer)
        return out_BNCV


class Zigzag(ExchangingPrefill):
    """Prefill of 2p even chunks, two per rank, whatever the user's partition. `split` returns their boundaries."""

    attention = ZigzagAttention

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, 2 * num_stages)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        p = partition.num_ranks // 2
        return [_joined([partition.chunk(p - 1 - rank), partition.chunk(p + rank)]) for rank in range(p)]


def _joined(ranges: list[range]) -> list[range]:
    """The same ranges, which are in order, with adjacent ones joined and empty ones left out."""
    joined: list[range] = []
    for each in filter(len, ranges):
        if joined and joined[-1].stop == each.start:
            each = range(joined.pop().start, each.stop)
        joined.append(each)
    return joined
