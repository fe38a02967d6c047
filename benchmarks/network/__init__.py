"""Hosts on one machine, joined by links of a chosen rate: network namespaces, veth pairs and token buckets."""

from benchmarks.network.noise import Noise, RateChange
from benchmarks.network.shaped_network import ShapedNetwork
from benchmarks.network.torchrun import run_in

__all__ = ["Noise", "RateChange", "ShapedNetwork", "run_in"]
