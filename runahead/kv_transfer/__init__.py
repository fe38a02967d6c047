"""The only place that sends or receives K,V between ranks."""

from __future__ import annotations

from runahead.kv_transfer.base import KVTransfer, TransferLog
from runahead.kv_transfer.gloo import GlooTransfer
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.kv_transfer.schedule import Message, TransferSchedule, chain_links

TRANSFERS: dict[str, type[KVTransfer]] = {"gloo": GlooTransfer, "nccl": NcclTransfer}
"""Backend -> what carries K,V over it."""

__all__ = ["TRANSFERS", "KVTransfer", "Message", "TransferLog", "TransferSchedule", "chain_links"]
