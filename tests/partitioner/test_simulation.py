"""The simulated chain: agrees with a second telling, obeys its bounds, and sends what the formulas say."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.cost.link import Link, Links
from partitioner.simulation.bounds import chain_tokens
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead.config import Transfer
from runahead.context import ContextPartition, even
from tests.examples import examples
from tests.partitioner.clusters import llama, llama_cluster, partitions, random_clusters, rank_s
from tests.partitioner.fixed_point import ttft_s

# Sums of the same seconds in another order.
ROUNDING = 1 + 1e-9

TRANSFERS = [(Transfer.relay, True), (Transfer.relay, False), (Transfer.direct, True)]


def split(*boundaries: int) -> ContextPartition:
    return ContextPartition(boundaries=boundaries)


def faster(cluster: Cluster, factor: float) -> Cluster:
    links = cluster.links
    assert links is not None

    def sped(link: Link) -> Link:
        return replace(link, bandwidth_Bps=link.bandwidth_Bps * factor)

    overrides = {pair: sped(link) for pair, link in links.overrides.items()}
    return replace(cluster, links=Links(links.num_ranks, sped(links.default), overrides))


def private(cluster: Cluster) -> Cluster:
    assert cluster.links is not None
    return replace(
        cluster,
        links=Links(cluster.num_ranks, replace(cluster.links.default, shared=False), cluster.links.overrides),
    )


@examples(60)
@given(random_clusters(4), partitions(4), st.booleans())
def test_agrees_with_the_fixed_point(cluster, boundaries, as_landed):
    cluster = replace(cluster, pass_on_as_landed=as_landed)
    partition = split(*boundaries)
    assert simulate(partition, cluster).ttft_s == pytest.approx(ttft_s(partition, cluster), rel=1e-9)


@given(random_clusters(3), st.integers(0, 2))
def test_one_rank_takes_the_sum_of_its_costs(cluster, rank):
    partition = split(*(0 if at <= rank else 1000 for at in range(4)))
    result = simulate(partition, cluster)
    expected = rank_s(cluster.compute, 1000, 0, is_last=True) / cluster.speed[rank]
    assert result.ttft_s == pytest.approx(expected, rel=1e-9)
    assert sum(result.wait_s) == sum(result.sent_bytes) == 0
    assert [seconds > 0 for seconds in result.compute_s] == [at == rank for at in range(3)]


@given(random_clusters(4), partitions(4), st.integers(2, 9))
def test_the_chain_never_stands_still(cluster, boundaries, layers_in_flight):
    result = simulate(split(*boundaries), replace(cluster, layers_in_flight=layers_in_flight))
    assert 0 < result.ttft_s < float("inf")


@given(random_clusters(4), partitions(4))
def test_all_that_is_computed_is_in_the_sums(cluster, boundaries):
    partition = split(*boundaries)
    result = simulate(partition, cluster)
    for rank in range(4):
        chunk = partition.chunk(rank)
        is_last = rank == partition.chain[-1]
        expected = rank_s(cluster.compute, len(chunk), chunk.start, is_last=is_last) / cluster.speed[rank]
        assert result.compute_s[rank] == pytest.approx(expected if chunk else 0.0, rel=1e-9)
    last = partition.chain[-1]
    assert result.ttft_s == pytest.approx(result.compute_s[last] + result.wait_s[last], rel=1e-9)
    assert result.ttft_s * ROUNDING >= max(result.compute_s)


@given(random_clusters(4), partitions(4))
def test_sent_bytes_are_the_sum_of_the_inner_boundaries(cluster, boundaries):
    partition = split(*boundaries)
    layers, per_token = cluster.compute.num_places, cluster.kv_bytes_per_token
    for transfer in Transfer:
        sent = simulate(partition, replace(cluster, transfer=transfer)).sent_bytes
        assert sum(sent) == chain_tokens(partition) * layers * per_token
    # The last rank only receives, and the first sends its own chunk, once or to everybody.
    relayed = simulate(partition, replace(cluster, transfer=Transfer.relay)).sent_bytes
    expected = [partition.boundaries[rank + 1] * layers * per_token for rank in partition.chain[:-1]]
    assert [relayed[rank] for rank in partition.chain] == [*expected, 0]


@given(random_clusters(4), partitions(4))
def test_free_communication_is_a_lower_bound(cluster, boundaries):
    partition = split(*boundaries)
    free = simulate(partition, cluster.without_communication())
    assert free.ttft_s <= simulate(partition, cluster).ttft_s * ROUNDING


@pytest.mark.parametrize(("transfer", "as_landed"), TRANSFERS)
@examples(40)
@given(cluster=random_clusters(4), boundaries=partitions(4), factor=st.floats(1, 100))
def test_more_bandwidth_never_hurts(transfer, as_landed, cluster, boundaries, factor):
    cluster = replace(private(cluster), transfer=transfer, pass_on_as_landed=as_landed)
    slow, fast = (simulate(split(*boundaries), each).ttft_s for each in (cluster, faster(cluster, factor)))
    # A relay that passes pieces on as they land serves them in another order on faster links, and the own chunk may
    # then come one piece later than before (0.3% is the worst of 12,000 draws). In a fixed order every moment is a
    # maximum of sums of earlier ones.
    assert fast <= slow * (1.05 if transfer is Transfer.relay and as_landed else ROUNDING)


@examples(40)
@given(random_clusters(4), partitions(4))
def test_more_room_never_hurts_messages_in_a_fixed_order(cluster, boundaries):
    cluster = replace(private(cluster), transfer=Transfer.direct)
    seconds = [simulate(split(*boundaries), replace(cluster, layers_in_flight=n)).ttft_s for n in (2, 3, 5, 9)]
    assert all(more <= fewer * ROUNDING for fewer, more in pairwise(seconds))


@examples(40)
@given(random_clusters(4), partitions(4))
def test_direct_is_never_later_than_relay_on_private_links_that_are_alike(cluster, boundaries):
    assert cluster.links is not None
    links = Links(4, replace(cluster.links.default, shared=False))
    room = cluster.compute.num_places + 1  # with little room, direct senders and relays wait for different receivers
    relay, direct = (
        simulate(split(*boundaries), replace(cluster, links=links, transfer=transfer, layers_in_flight=room)).ttft_s
        for transfer in (Transfer.relay, Transfer.direct)
    )
    assert direct <= relay * ROUNDING
    if len(split(*boundaries).chain) == 2:
        assert direct == relay


def test_relay_wins_where_only_neighbours_have_fast_links():
    fast, slow = Link.from_GBps(100), Link.from_GBps(1)
    links = Links(4, slow, {(i, i + 1): fast for i in range(3)})
    relay, direct = (
        simulate(even(16384, 4), llama_cluster(4, None, links=links, transfer=transfer)).ttft_s
        for transfer in (Transfer.relay, Transfer.direct)
    )
    assert relay < 0.5 * direct


def test_one_shared_port_makes_direct_no_better_than_relay():
    private_s, shared_s, relay_s = (
        simulate(even(16384, 8), llama_cluster(8, None, links=links, transfer=transfer)).ttft_s
        for links, transfer in [
            (Links(8, Link.from_GBps(10)), Transfer.direct),
            (Links(8, Link.from_GBps(10, shared=True)), Transfer.direct),
            (Links(8, Link.from_GBps(10, shared=True)), Transfer.relay),
        ]
    )
    assert private_s < 0.5 * shared_s
    assert shared_s == pytest.approx(relay_s, rel=0.05)  # either way, all K,V go through the last rank's port


@given(random_clusters(4), partitions(4))
def test_spans_cover_a_rank_from_the_start_to_its_end(cluster, boundaries):
    partition = split(*boundaries)
    plain, result = simulate(partition, cluster), simulate(partition, cluster, record=True)
    assert replace(result, spans=[]) == plain
    assert [bool(spans) for spans in result.spans] == [bool(length) for length in partition.chunk_lengths]
    for rank in partition.chain:
        for kind, expected in (("compute", result.compute_s[rank]), ("wait", result.wait_s[rank])):
            spans = [span for span in result.spans[rank] if span.kind == kind]
            assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(expected, abs=1e-9)
        busy = [span for span in result.spans[rank] if span.kind != "send"]
        assert busy[0].start_s == 0
        assert all(a.end_s == b.start_s for a, b in pairwise(busy))
        sends = [span for span in result.spans[rank] if span.kind == "send"]
        assert all(span.start_s <= span.end_s for span in sends)
        own = partition.chunk(rank)
        named = {span.layer for span in sends if span.detail.startswith(f"tokens {own.start}-{own.stop} ")}
        assert named == (set() if rank == partition.chain[-1] else set(range(cluster.compute.num_places)))
    assert result.spans[partition.chain[-1]][-1].detail == "last MLP and logits"


def test_equal_layers_do_not_wait_for_free_communication():
    # Rank i has sent a layer's K,V when rank i + 1 has its own, so only the last layer's end is seen.
    cost = llama(step_s=0.0)
    partition = split(0, 600, 1000)
    cluster = Cluster(compute=cost, speed=[1.0, 1.0], links=None, kv_bytes_per_token=1)
    per_layer = cost.between(400) + cost.own(400) + cost.prefix(400, 600)
    cluster.speed[0] = (cost.between(600) + cost.own(600)) / per_layer
    result = simulate(partition, cluster)
    assert result.wait_s[1] == pytest.approx(0, abs=1e-9)


def test_a_bottleneck_link_sets_the_pace():
    # K,V of 8,192 tokens take 134 ms per layer at 1 GB/s, far longer than a layer's compute.
    result = simulate(even(16384, 2), llama_cluster(2, 1))
    sending_s = 8192 * 2 * 4096 * 2 / 1e9
    assert result.ttft_s == pytest.approx(32 * sending_s, rel=0.02)
    assert result.wait_s[1] / result.ttft_s > 0.75


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"speed": [1.0, 0.0]}, "search.speeds=.* must be above 0"),
        ({"speed": []}, "search.speeds=.* must be above 0"),
        ({"speed": [1.0]}, "links join 2 ranks but there are speeds for 1"),
        ({"kv_bytes_per_token": -1}, "must be at least 0"),
        ({"layers_in_flight": 1}, "prefill.layers_in_flight=1 must be at least 2"),
    ],
)
def test_a_wrong_cluster_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        llama_cluster(2, 10, **wrong)


def test_a_partition_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 3 chunks but there are 2 ranks"):
        simulate(even(100, 3), llama_cluster(2, 10))
    with pytest.raises(ValueError, match="without tokens"):
        simulate(split(0, 0, 0), llama_cluster(2, 10))
    assert simulate(even(100, 1), llama_cluster(2, 10)).sent_bytes == [0, 0]
