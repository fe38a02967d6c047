"""Small Python objects from rank to rank: pickles, each with the seal of the job, without which it is not read."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runahead.ranks.meeting.seal import Seal

T = TypeVar("T")


def broadcast_object(value: T, source: int, group: dist.ProcessGroup, seal: Seal, about: str) -> T:
    """The value of the rank `source`, on every rank of a group on CPUs. They all call this.

    Args:
        about: what the value is about, the same on all ranks.

    Raises:
        RunFailure: a stranger has sent it.
    """
    is_source = dist.get_rank() == source
    data = seal.close(pickle.dumps(value), about) if is_source else b""
    length = torch.tensor([len(data)])
    dist.broadcast(length, source, group=group)
    box = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if is_source
        else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(box, source, group=group)
    return value if is_source else _read(box, seal, about)


def gather_objects(
    value: T, group: dist.ProcessGroup, seal: Seal, about: str, device: torch.device | None = None
) -> list[T]:
    """The values of all ranks of a group, in order, on each of them. They all call this.

    Args:
        about: what the values are about, the same on all ranks.
        device: on which the group communicates.

    Raises:
        RunFailure: a stranger has sent one.
    """
    data = seal.close(pickle.dumps(value), f"{about} from {group.rank()}")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    sizes = [int(length) for length in lengths]
    boxes = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(boxes, torch.nn.functional.pad(own, (0, max(sizes) - len(own))), group=group)
    parts = enumerate(zip(boxes, sizes, strict=True))
    return [_read(box[:size].cpu(), seal, f"{about} from {number}") for number, (box, size) in parts]


def _read(box: torch.Tensor, seal: Seal, about: str) -> Any:
    return pickle.loads(seal.open(box.numpy().tobytes(), about))
