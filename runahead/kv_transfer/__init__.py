"""Transfer of keys and values between ranks: who sends what to whom, by copies, over Gloo and over NCCL."""

from __future__ import annotations

import warnings

from runahead.config import Carrier, Table
from runahead.kv_transfer.base import KVTransfer, NoTransfer, TransferLog
from runahead.kv_transfer.schedule import Message, TransferSchedule, chain_links
from runahead.ranks.ranks import Ranks

TRANSFERS: Table[str, type[KVTransfer]] = Table(
    {"gloo": "runahead.kv_transfer.gloo:GlooTransfer", "nccl": "runahead.kv_transfer.nccl:NcclTransfer"}
)
"""Transfers along a chain of ranks, by backend."""

EXCHANGES: Table[str, type[KVTransfer]] = Table(
    {"gloo": "runahead.kv_transfer.gloo:GlooTransfer", "nccl": "runahead.kv_transfer.nccl_exchange:NcclExchange"}
)
"""Transfers in which all ranks exchange their keys and values, by backend."""

__all__ = [
    "EXCHANGES",
    "TRANSFERS",
    "KVTransfer",
    "Message",
    "NoTransfer",
    "TransferLog",
    "TransferSchedule",
    "chain_carrier",
    "chain_links",
]


def chain_carrier(carrier: Carrier, ranks: Ranks) -> type[KVTransfer]:
    """The transfer along a chain that the option prefill.carrier chooses. Every rank calls this.

    Raises:
        ValueError: copies are asked for, and ranks cannot map each other's memory.
    """
    backend = TRANSFERS[ranks.backend]
    if carrier is Carrier.backend or ranks.num_stages == 1:
        return backend
    if carrier is Carrier.auto and ranks.device.type != "cpu":
        return backend  # copies between GPUs were only ever made on virtual ones
    has_said = ranks.unmapped is not None
    can_copy = ranks.map_memory()
    if ranks.accelerator is not None and ranks.backend == "gloo":  # to other hosts only NCCL sends from streams
        can_copy = can_copy and len(ranks.mapped_links) == ranks.size * (ranks.size - 1)
    if carrier is Carrier.copy and (not can_copy or ranks.unmapped is not None):
        reason = ranks.unmapped or "each is on a host of its own"
        raise ValueError(
            f"prefill.carrier=copy, but ranks cannot map each other's memory ({reason}); use prefill.carrier=backend"
        )
    if ranks.rank == 0 and ranks.unmapped is not None and not has_said:
        warnings.warn(
            f"keys and values go over {ranks.backend}, since ranks of one host cannot map each other's memory "
            f"({ranks.unmapped})",
            stacklevel=2,
        )
    if not can_copy:
        return backend
    from runahead.kv_transfer.copy import CopyTransfer

    return CopyTransfer
