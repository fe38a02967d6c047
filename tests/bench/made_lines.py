"""Lines as launch/bench.py writes them, with made-up seconds."""

from __future__ import annotations

from typing import Any

PLACE: dict[str, Any] = {
    "commit": "abc1234",
    "code": "0123456789ab",
    "hardware": {"cpu": "a processor", "cores": 2, "ram_gib": 24, "gpus": []},
    "versions": {"python": "3.11", "torch": "2.13"},
    "model": {"name": "a model", "num_layers": 2},
    "dtype": "float32",
    "ranks": 2,
    "hosts": 1,
    "threads": 1,
    "backend": "gloo",
    "device": "cpu",
    "layers_in_flight": 3,
}


def line(
    variant: str,
    length: int,
    seconds: list[float],
    *,
    job: str = "first",
    gbps: float | None = None,
    noise: bool = False,
    share: float | None = None,
    wire_bytes: int | None = None,
    **other: Any,
) -> dict[str, Any]:
    """One variant at one length; the formula of a chain of even chunks stands for all."""
    return {
        "variant": variant,
        "length": length,
        "key": f"{variant} {length}",
        "job": job,
        **PLACE,
        "network": {
            "kind": "loopback" if gbps is None else "netns",
            "gbps": gbps,
            "compute_share": share,
            "noise": noise,
        },
        "runs": [{"round": number, "ttft_s": each} for number, each in enumerate(seconds)],
        "sent_bytes": 256 * length,
        "formula_bytes": 256 * length,
        "kv_bytes_per_token": 512,
        "wire_bytes": wire_bytes,
        "memory": {"of": "run", "kv_peak_bytes": [1000, 512 * length], "peak_bytes": [10**8, 10**8]},
        "bounds": {
            "single_s": 1e-3 * length,
            "free_s": 5e-4 * length,
            "free_boundaries": [0, length // 2, length],
            "star_dense_s": 4e-4 * length,
            "star_causal_s": 5e-4 * length,
        },
        "flops": {"matmul": 10**6 * length, "attention": 10**3 * length**2},
        "peak_flops": 1e10,
        **other,
    }
