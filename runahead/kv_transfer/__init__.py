"""The only place that sends or receives K,V between ranks."""

from __future__ import annotations

from runahead.kv_transfer.base import KVTransfer, TransferLog
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.gloo import GlooTransfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.kv_transfer.nccl_exchange import NcclExchange
from runahead.kv_transfer.schedule import Message, TransferSchedule, chain_links

TRANSFERS: dict[str, type[KVTransfer]] = {"gloo": GlooTransfer, "nccl": NcclTransfer}
"""Backend -> what carries K,V along a chain over it."""

EXCHANGES: dict[str, type[KVTransfer]] = {"gloo": GlooTransfer, "nccl": NcclExchange}
"""Backend -> what carries K,V that all ranks exchange."""

__all__ = [
    "EXCHANGES",
    "TRANSFERS",
    "ExchangeSchedule",
    "KVTransfer",
    "Message",
    "TransferLog",
    "TransferSchedule",
    "chain_links",
]
