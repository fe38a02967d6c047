"""Hosts on one machine, joined by links of a given rate; made on entering a `with` block, removed on leaving it.

Two hosts have one veth pair, each end the interface `link0` of a namespace. More hosts have a bridge in a namespace of
its own and a veth pair from each host to it. Both ends of a link send through a token bucket (tc-tbf(8)), so it is full
duplex. There is no added latency: that needs netem, which not every kernel has.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import shutil
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.network import namespaces
from benchmarks.network.interruptions import signals_deferred, signals_raise
from benchmarks.network.namespaces import CommandFailed, system

INTERFACE = "link0"
SUBNET = "10.77.0"  # nothing outside the namespaces sees it
# Jumbo frames: payload is 99% of the rate (96% with an MTU of 1500).
MTU = 9000
TOOLS = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux", "taskset": "util-linux"}

_numbers = itertools.count()


class ShapedNetwork:
    """`num_hosts` hosts (2 to 254) on links of `gbps` (10^9 bits per second, frame headers included).

    Attributes: `hosts`, their namespaces; `addresses`, their IP addresses; `num_links`, 1 for two hosts, else one per
    host.

    Raises: ValueError, with nothing left behind, if this machine or user cannot make such a network.
    """

    def __init__(self, num_hosts: int = 2, *, gbps: float) -> None:
        if not 2 <= num_hosts <= 254:
            raise ValueError(f"a network of {num_hosts} hosts is not possible; use 2 to 254")
        self.gbps = check_rate(gbps)
        number = next(_numbers)
        self.hosts = [namespaces.owned_name(f"{number}-{host}") for host in range(num_hosts)]
        self.addresses = [f"{SUBNET}.{host + 1}" for host in range(num_hosts)]
        self._switch = namespaces.owned_name(f"{number}-switch") if num_hosts > 2 else None
        # The two ends of each link, as (namespace, interface).
        self._links = [[(self.hosts[0], INTERFACE), (self.hosts[1], INTERFACE)]]
        self._namespaces = [*self.hosts, self._switch] if self._switch else self.hosts
        if self._switch:
            self._links = [[(name, INTERFACE), (self._switch, f"port{host}")] for host, name in enumerate(self.hosts)]
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        check_machine()
        with ExitStack() as undo:
            undo.enter_context(signals_raise())
            undo.callback(self._remove)
            atexit.register(self._remove)  # for an exception between this call and the block
            with signals_deferred():
                self._make()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def inside(self, host: int) -> list[str]:
        """Command prefix that runs a program on `host`."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def set_rate(self, gbps: float, *, link: int | None = None) -> None:
        """Change the rate of one link, or of all, in both directions. Takes milliseconds; queued data is kept."""
        bucket = token_bucket(check_rate(gbps))
        for ends in self._links if link is None else [self._links[link]]:
            for name, interface in ends:
                system("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)

    def _make(self) -> None:
        try:
            for name in namespaces.leftovers():
                namespaces.remove(name)
            for name in self._namespaces:
                namespaces.create(name)
            if self._switch:
                system("ip", "-n", self._switch, "link", "add", "name", "bridge", "type", "bridge")
                system("ip", "-n", self._switch, "link", "set", "bridge", "up", "mtu", str(MTU))
            for (name, interface), (peer, peer_interface) in self._links:
                ends = ["name", interface, "netns", name, "mtu", str(MTU), "type", "veth", "peer"]
                ends += ["name", peer_interface, "netns", peer, "mtu", str(MTU)]
                system("ip", "link", "add", *ends)
            for name, interface in itertools.chain(*self._links):
                if name == self._switch:
                    system("ip", "-n", name, "link", "set", interface, "master", "bridge")
                # No IPv6 address, so that only the programs cause traffic.
                system("ip", "-n", name, "link", "set", interface, "addrgenmode", "none")
                system("ip", "-n", name, "link", "set", interface, "up")
            for name, address in zip(self.hosts, self.addresses, strict=True):
                system("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE, "noprefixroute")
                # Reno is in every kernel. The machine's default may pace itself, such as BBR, whose rate
                # oscillates on a link without delay.
                route = ["dev", INTERFACE, "src", address, "congctl", "reno"]
                system("ip", "-n", name, "route", "add", f"{SUBNET}.0/24", *route)
            self.set_rate(self.gbps)
        except CommandFailed as error:
            raise ValueError(
                f"no shaped network here ({error}); it needs a kernel with network namespaces, veth, bridge and tbf, "
                "and root with CAP_SYS_ADMIN and CAP_NET_ADMIN"
            ) from None

    def _remove(self) -> None:
        with signals_deferred():
            for name in self._namespaces:
                namespaces.remove(name)
        atexit.unregister(self._remove)


def check_machine() -> None:
    """Check that this user and this machine can make a network. Raises: ValueError."""
    if os.geteuid() != 0:
        raise ValueError("a shaped network needs root to make network namespaces; run it with sudo")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise ValueError(f"a shaped network needs the command {tool}; install {package}")


def check_rate(gbps: float) -> float:
    """Check that the token bucket can keep a rate. Raises: ValueError."""
    if not (math.isfinite(gbps) and 1e-3 <= gbps <= 1e3):
        raise ValueError(f"a link of {gbps} Gbit/s is not possible; use 0.001 to 1000")
    return gbps


def token_bucket(gbps: float) -> list[str]:
    """Arguments of tbf.

    burst: bytes that may leave at once after a pause. It also bridges late timers, so it grows with the rate. 1 ms is
    enough up to 40 Gbit/s, and a message gains at most that. At least two frames.
    limit: bytes of the queue. A host's kernel keeps its own queue short, but one connection may put 4 MiB in before
    that; a queue that overflows costs retransmissions. 20 ms is for the ports of a switch at high rates.
    """
    bytes_per_s = gbps * 1e9 / 8
    burst = max(round(bytes_per_s * 1e-3), 2 * MTU)
    limit = max(round(bytes_per_s * 20e-3), 16 << 20)
    return ["rate", f"{round(gbps * 1e9)}bit", "burst", str(burst), "limit", str(limit)]
