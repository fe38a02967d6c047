"""Transfer of keys and values between ranks: who sends what to whom, over Gloo and over NCCL."""

from __future__ import annotations

from runahead.kv_transfer.base import KVTransfer, TransferLog
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.gloo import GlooTransfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.kv_transfer.nccl_exchange import NcclExchange
from runahead.kv_transfer.schedule import Message, TransferSchedule, chain_links

TRANSFERS: dict[str, type[KVTransfer]] = {"gloo": GlooTransfer, "nccl": NcclTransfer}
"""Transfers along a chain of ranks, by backend."""

EXCHANGES: dict[str, type[KVTransfer]] = {"gloo": GlooTransfer, "nccl": NcclExchange}
"""Transfers in which all ranks exchange their keys and values, by backend."""

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
