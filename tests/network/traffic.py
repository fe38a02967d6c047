"""Bytes that the hosts of a network have sent."""

import json

from benchmarks.network import ShapedNetwork
from benchmarks.network.namespaces import system
from benchmarks.network.shaped_network import INTERFACE


def traffic(network: ShapedNetwork) -> list[int]:
    """Bytes that each host has sent: payload, headers and acknowledgements.

    The kernel hands up to 64 KiB of one connection to the interface as one packet with one header.
    """
    show = ["-json", "-statistics", "link", "show", "dev", INTERFACE]
    found = [json.loads(system("ip", "-n", name, *show)) for name in network.hosts]
    return [int(interface["stats64"]["tx"]["bytes"]) for (interface,) in found]
