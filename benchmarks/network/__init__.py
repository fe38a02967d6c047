"""Network of hosts simulated on one machine: network namespaces, veth pairs, and token buckets of a chosen rate."""

from benchmarks.network.noise import Noise, RateChange
from benchmarks.network.shaped_network import ShapedNetwork
from benchmarks.network.torchrun import run_in

__all__ = ["Noise", "RateChange", "ShapedNetwork", "run_in"]
