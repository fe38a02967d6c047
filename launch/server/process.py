"""Metrics of the server's process, rank 0, under the names that Prometheus' own clients give them."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import psutil


def process_lines() -> str:
    """Metrics of this process in Prometheus' text format."""
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, about, value in _values()
    )


def _values() -> Iterator[tuple[str, str, str, int | str]]:
    process = psutil.Process()
    with process.oneshot():
        memory, times = process.memory_info(), process.cpu_times()
        yield "process_resident_memory_bytes", "gauge", "Memory that it has.", memory.rss
        yield "process_virtual_memory_bytes", "gauge", "Addresses that it has.", memory.vms
        yield "process_cpu_seconds_total", "counter", "Processor time.", f"{times.user + times.system:.2f}"
        yield "process_open_fds", "gauge", "Open descriptors.", process.num_fds()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            yield "process_max_fds", "gauge", "Most open descriptors.", limit
        yield "process_start_time_seconds", "gauge", "Unix time of its start.", f"{process.create_time():.2f}"
