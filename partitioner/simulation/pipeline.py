"""Simulated TTFT of chunked pipeline parallelism: ranks hold layers, and a prompt's chunks go from one to the next.

SGLang, Mooncake and vLLM-Ascend prefill long prompts so. A rank computes its layers for one chunk after the other, as
soon as the hidden states of a chunk have arrived from the rank before, and sends its own to the next one while it goes
on: per token as many numbers as the model is wide, whatever keys and values take. So the pipeline is the chain with
time and place exchanged: there a rank waits for one layer of the ranks before it, here for one chunk.
"""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

from partitioner.simulation.chain import Simulated
from partitioner.simulation.cluster import Cluster
from partitioner.simulation.exchange import check_prompt
from runahead.context import ContextPartition, even


def simulate_pipeline(
    chunks: ContextPartition, num_ranks: int, cluster: Cluster, *, activation_bytes: float
) -> Simulated:
    """Simulate a prompt whose chunks go through the leading ranks, each of which has as many layers as the others.

    Layers that are left over are on the last ranks. Of chunks before the last one nothing is computed after the keys
    and values (or the state) of the last place. What leads from a rank's last place to the first one of the next rank
    counts as the sender's.

    Args:
        chunks: of the prompt, in the order in which they are computed; there may be any number of them.
        activation_bytes: bytes of a token's hidden state, for all rows of the batch.

    Raises:
        ValueError: no tokens, or more ranks than the cluster has, or than the model has places.
    """
    check_prompt(chunks.num_tokens, num_ranks, cluster)
    compute, links = cluster.compute, cluster.links
    if num_ranks > compute.num_places:
        raise ValueError(f"{compute.num_places} layers cannot be shared out to {num_ranks} ranks; use fewer ranks")
    lengths = [chunks.chunk(number) for number in chunks.chain]
    arrived_s = [0.0] * len(lengths)
    result = Simulated(
        ttft_s=0.0,
        compute_s=[0.0] * cluster.num_ranks,
        wait_s=[0.0] * cluster.num_ranks,
        sent_bytes=[0.0] * cluster.num_ranks,
    )
    for rank in range(num_ranks):
        link = None if links is None or rank == num_ranks - 1 else links.between(rank, rank + 1)
        now_s = left_s = 0.0
        for number, chunk in enumerate(lengths):
            seconds = _stage_s(rank, num_ranks, chunk, cluster, ends=number == len(lengths) - 1)
            now_s = max(now_s, arrived_s[number]) + seconds
            result.compute_s[rank] += seconds
            num_bytes = len(chunk) * activation_bytes
            left_s = max(left_s, now_s) + (0.0 if link is None else num_bytes / link.bandwidth_Bps)
            arrived_s[number] = left_s + (0.0 if link is None else link.latency_s)
            result.sent_bytes[rank] += num_bytes * (rank < num_ranks - 1)
        result.wait_s[rank] = now_s - result.compute_s[rank]
        result.ttft_s = now_s
    return result


def _stage_s(rank: int, num_ranks: int, chunk: range, cluster: Cluster, *, ends: bool) -> float:
    """Seconds of a rank's places for one chunk.

    Args:
        ends: it is the prompt's last chunk.
    """
    compute, c, P = cluster.compute, len(chunk), chunk.start
    places = even(compute.num_places, num_ranks).chunk(rank)
    is_last = rank == num_ranks - 1
    held = sum(place in places for place in compute.states)
    attending = len(places) - held
    if is_last and not ends and compute.num_places - 1 not in compute.states:
        attending -= 1
    seconds = attending * (compute.own(c) + compute.prefix(c, P)) + (len(places) - is_last) * compute.between(c)
    if held:
        seconds += held * compute.state(c, P)
    if rank == 0:
        seconds += compute.first(c)
    if is_last and ends:
        seconds += compute.last(c)
    return seconds / cluster.speed[rank]
