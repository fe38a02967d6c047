"""Links: units, and one link per directed pair."""

import math

import pytest

from partitioner.cost.link import Link, Links


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    assert Link(latency_s=1e-3, bandwidth_Bps=1e6).seconds(5e5) == pytest.approx(0.501)
    assert Link(latency_s=0, bandwidth_Bps=math.inf).seconds(1e12) == 0


def test_units():
    assert Link.from_gbps(25).bandwidth_Bps == 25e9 / 8
    assert Link.from_GBps(300).bandwidth_Bps == 300e9
    assert Link.from_gbps(80, latency_s=1e-5, shared=True) == Link.from_GBps(10, latency_s=1e-5, shared=True)


def test_a_pair_has_its_own_link_or_the_default():
    slow = Link.from_GBps(1)
    links = Links(3, Link.from_GBps(10), {(0, 2): slow})
    assert links.between(0, 2) == slow
    assert links.between(2, 0) == links.between(0, 1) == Link.from_GBps(10)


@pytest.mark.parametrize("gbps", [0, -1, math.nan])
def test_a_bandwidth_must_be_above_zero(gbps):
    with pytest.raises(ValueError, match="link.gbps=.* must be above 0"):
        Link.from_gbps(gbps)
    with pytest.raises(ValueError, match="must be above 0"):
        Link(latency_s=0, bandwidth_Bps=gbps)


@pytest.mark.parametrize("latency_s", [-1e-6, math.inf, math.nan])
def test_a_latency_must_not_be_negative(latency_s):
    with pytest.raises(ValueError, match="link.latency_s=.* must be"):
        Link(latency_s=latency_s, bandwidth_Bps=1)


@pytest.mark.parametrize("pair", [(0, 0), (0, 3), (-1, 1)])
def test_an_override_joins_two_ranks_that_exist(pair):
    with pytest.raises(ValueError, match="must join two different ranks of 0 to 2"):
        Links(3, Link.from_GBps(1), {pair: Link.from_GBps(2)})
