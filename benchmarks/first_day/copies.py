"""Rates of copies to, from and within a GPU, beside compute too, and the time of page-locking host memory."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.first_day.visit import Visit

NUM_BYTES = 1 << 30
DIM, PRODUCTS = 8192, 30
"""Rows and columns of the matrices whose products are computed beside a copy, and their number."""


def measure(visit: Visit) -> None:
    """Copies of 1 GiB; the first page-locks."""
    figures, device = visit.figures, visit.device
    visit.say("page-locking")
    pageable = torch.ones(NUM_BYTES, dtype=torch.uint8)
    locked: list[torch.Tensor] = []
    seconds = visit.seconds(lambda: locked.append(torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=True)))
    figures.note("page-locking", seconds / (NUM_BYTES / 1e9), "page-locking")
    [host] = locked
    here, there = (torch.empty(NUM_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    for name, target, source, kind in (
        ("within the GPU", there, here, "copy within"),
        ("from page-locked memory", here, host, "copy to or from the host"),
        ("to page-locked memory", host, here, "copy to or from the host"),
        ("from other host memory", here, pageable, "GB/s"),
        ("to other host memory", pageable, here, "GB/s"),
    ):
        visit.say(f"a copy {name}")
        copy = partial(target.copy_, source, non_blocking=True)
        seconds = min(visit.seconds(copy) for _ in range(4))
        figures.note(f"a copy {name}", NUM_BYTES / seconds / 1e9, kind)
    visit.say("a product beside a copy")
    accelerator = visit.ranks.accelerator
    assert accelerator is not None, "this part needs a GPU"
    x = torch.randn(DIM, DIM, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    def beside_copy() -> None:
        with accelerator.on(accelerator.stream("copy")):
            host.copy_(here, non_blocking=True)
        products()

    products()
    alone_s = min(visit.seconds(products) for _ in range(3))
    figures.note(
        f"{PRODUCTS} products beside a copy to the host",
        min(visit.seconds(beside_copy) for _ in range(3)) / alone_s,
        "product beside a copy",
    )
