"""Holds a network until a signal comes, with a process inside; prints the names and that process's id.

With the argument `interrupted` it is a Ctrl-C that comes while the network is being removed.
"""

import os
import signal
import subprocess
import sys
import time

from benchmarks.network import ShapedNetwork, namespaces

if "interrupted" in sys.argv:
    remove = namespaces.remove

    def interrupted_remove(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(name)

    namespaces.remove = interrupted_remove

with ShapedNetwork(gbps=1) as network:
    inside = subprocess.Popen(
        [*network.inside(0), "sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while inside.pid not in namespaces.processes(network.hosts[0]):
        time.sleep(0.01)
    print(*network.hosts, inside.pid, flush=True)
    if "interrupted" not in sys.argv:
        time.sleep(100)
