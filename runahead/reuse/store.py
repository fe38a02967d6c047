"""Store of encoded segments in three tiers (device, host memory, disk), each with a budget in bytes.

A tier evicts the least recently used segments; pinned segments stay, and the clusters of a segment never push it out. A
segment is put into every tier that has room for it, so one that a faster tier evicts is still in the slower ones. Its
key is a hash of the model and of the segment's tokens and positions, so that another model or another text is never
found. On disk a segment is a file that is named by its key and appears atomically, so several processes may share a
folder. Segments in host memory and on disk may be in 4 or 2 bits; each is quantised once, when it is put there.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch

from policies.base import Segment
from runahead.cache.quantised.records import KVRecords
from runahead.cache.slabs import KVShape
from runahead.config import BITS
from runahead.model.loading.overrides import plain
from runahead.model.model import Model
from runahead.reuse.folder import SegmentFolder
from runahead.reuse.segment import FORMAT, SegmentKV, read_segment, write_segment
from runahead.reuse.tree.tiers import Tier

VOLATILE = ("_name_or_path", "_model_name_or_path", "transformers_version", "architectures", "_attn_implementation")
"""Entries of a model's config that do not change its results."""


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Budget of each tier in bytes. On a CPU `device_bytes` has no effect.

    Raises:
        ValueError: a budget is negative.
    """

    device_bytes: int = 2 * 2**30
    host_bytes: int = 8 * 2**30
    disk_bytes: int = 64 * 2**30

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"policy.{name}={getattr(self, name)} must not be negative; 0 turns this tier off")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A segment that was found in the store.

    Attributes:
        kv: its keys and values, in the model's dtype.
        tier: the tier in which it was found.
        num_bytes: that it takes there.
        is_mapped: whether it is mapped from a file, since memory has no room for it.
    """

    kv: SegmentKV
    tier: Tier
    num_bytes: int
    is_mapped: bool = False


class SegmentStore:
    """Store of one model's encoded segments.

    Args:
        model: the model that encodes them.
        folder: folder of the disk tier, created if it is missing; None is no disk tier.
        limits: budgets of the tiers.
        bits: of each number in host memory and on disk, 4 or 2; None is the model's dtype.

    Raises:
        ValueError: the folder cannot be created or written to.
    """

    def __init__(
        self,
        model: Model,
        folder: str | os.PathLike[str] | None = None,
        limits: StoreLimits | None = None,
        *,
        bits: int | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        self._bits, self._records = bits, None if bits is None else KVRecords(model.kv_shapes, bits)
        self._shapes, self._device = model.kv_shapes, model.device
        self._model_key, self._is_told = model_key(model), False
        self._memory = {
            tier: _MemoryTier(limit)
            for tier, limit in ((Tier.device, self.limits.device_bytes), (Tier.host, self.limits.host_bytes))
            if tier is Tier.host or self._device.type != "cpu"
        }
        self._folder = None
        if folder is not None:
            self._folder = SegmentFolder(folder, self.limits.disk_bytes, option="policy.store")

    def key(self, segment: Segment, clusters_key: str = "") -> str:
        """Key of a segment: a hash of the model and the segment's content, 64 hexadecimal digits.

        Args:
            clusters_key: of the segment's clusters (`Retriever.clusters_key`), which are stored by themselves.
        """
        return self._key(segment, self._bits, clusters_key)

    def _key(self, segment: Segment, bits: int | None, clusters_key: str = "") -> str:
        content = f"{self._model_key} {segment.content_key}"
        if bits is not None:
            content += f" in {bits} bits"
        return hashlib.sha256(f"{content} {clusters_key}".encode() if clusters_key else content.encode()).hexdigest()

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of a token in host memory and on disk, in all layers."""
        return sum(shape.bytes_per_token() for shape in self._stored_shapes)

    @property
    def shares_disk(self) -> bool:
        """Whether other processes find what this one stores."""
        return self._folder is not None and self.limits.disk_bytes > 0

    def __contains__(self, segment: Segment) -> bool:
        key = self.key(segment)
        if any(key in tier for tier in self._memory.values()):
            return True
        return self._mapped(segment, key) is not None

    def find(self, segment: Segment, clusters_key: str = "") -> Found | None:
        """Look up a segment and copy it to all faster tiers that have room; None if it is in no tier.

        A segment on disk for which memory has no room is mapped, and read when it is used.

        Args:
            clusters_key: look up its clusters, see `key`.
        """
        key, missed = self.key(segment, clusters_key), list[Tier]()
        for tier, memory in self._memory.items():  # the fastest first
            if (kv := memory.take(key)) is not None:
                break
            missed.append(tier)
        else:
            tier, kv = Tier.disk, self._mapped(segment, key, is_clusters=bool(clusters_key))
            if kv is None:
                return None
            assert self._folder is not None
            self._folder.touch(key)
        found = kv
        for faster in reversed(missed):
            if is_new := faster is Tier.device and kv.is_packed:
                kv = self._exact(kv)
            if self._memory[faster].make_room(key, kv.num_bytes, keep=self.key(segment)):
                kv = kv if is_new else self._copy(kv, faster)
                self._memory[faster].add(key, kv, pinned=segment.pinned)
        kv = self._exact(kv)
        return Found(kv=kv, tier=tier, num_bytes=found.num_bytes, is_mapped=tier is Tier.disk and kv is found)

    def put(self, segment: Segment, kv: SegmentKV, clusters_key: str = "") -> None:
        """Store a segment in every tier that has room for it.

        Args:
            clusters_key: `kv` are its clusters, (T, K, 1), int32, see `key`.

        Raises:
            OSError: the disk tier cannot be written.
        """
        key, own = self.key(segment, clusters_key), self.key(segment)
        stored = kv if clusters_key else self._packed(kv)
        if self._folder is not None and stored.num_bytes <= self.limits.disk_bytes:
            bits = {"bits": str(self._bits)} if stored.is_packed else {}
            write_segment(self._folder.path(key), stored, key=key, name=segment.name, more=bits)
            if segment.pinned:
                self._folder.pin(key)
            if clusters_key:
                self._folder.touch(own)  # so that of the two the clusters go first
            self._folder.make_room(keep={key, own})
        for tier, memory in self._memory.items():
            put = kv if tier is Tier.device else stored
            if memory.make_room(key, put.num_bytes, keep=own):
                on_device = put.layers_TKX[0].device.type == self._device.type
                is_there = on_device and (tier is Tier.device or self._device.type == "cpu")
                memory.add(key, put if is_there else self._copy(put, tier), pinned=segment.pinned)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use, by tier."""
        used = {tier.value: memory.num_bytes for tier, memory in self._memory.items()}
        if self._folder is not None:
            used[Tier.disk.value] = sum(file.num_bytes for file in self._folder.files())
        return used

    def _copy(self, kv: SegmentKV, tier: Tier) -> SegmentKV:
        if tier is Tier.device:
            return kv.to(self._device)
        copy = kv.to(torch.device("cpu"), pin_memory=self._device.type == "cuda")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # later reads do not wait for a stream
        return copy

    @property
    def _stored_shapes(self) -> list[KVShape]:
        return self._shapes if self._records is None else self._records.shapes

    def _packed(self, kv: SegmentKV) -> SegmentKV:
        """Keys and values as they are in host memory and on disk."""
        if self._records is None:
            return kv
        layers = [self._records.pack(layer, kv_TKX).contiguous() for layer, kv_TKX in enumerate(kv.layers_TKX)]
        return SegmentKV(layers_TKX=layers, is_packed=True)

    def _exact(self, kv: SegmentKV) -> SegmentKV:
        """Keys and values in the model's dtype; those that were packed are then on the device."""
        if not kv.is_packed:
            return kv
        assert self._records is not None
        records = kv.layers_TKX if self._device.type == "cpu" else kv.to(self._device).layers_TKX
        return SegmentKV(layers_TKX=[self._records.unpack(*each).contiguous() for each in enumerate(records)])

    def _mapped(self, segment: Segment, key: str, *, is_clusters: bool = False) -> SegmentKV | None:
        if self._folder is None:
            return None
        shapes = self._stored_shapes
        if is_clusters:
            shapes = [replace(shape, key_dim=1, value_dim=0, dtype=torch.int32) for shape in self._shapes]
        kv = read_segment(self._folder.path(key), key=key, shapes=shapes, num_tokens=len(segment.stored))
        if kv is None:
            if not is_clusters:
                self._tell_of_other_bits(segment)
            return None
        return replace(kv, is_packed=self._records is not None and not is_clusters)

    def _tell_of_other_bits(self, segment: Segment) -> None:
        """Warn, once, if a segment's file is there in other bits than this store's."""
        assert self._folder is not None
        others = [bits for bits in (None, *BITS) if bits != self._bits]
        found = [bits for bits in others if self._folder.path(self._key(segment, bits)).exists()]
        if found and not self._is_told:
            self._is_told = True
            names = ["null" if bits is None else str(bits) for bits in (self._bits, found[0])]
            warnings.warn(
                f"{self._folder.folder} has segments that were stored with tier_bits={names[1]}; with "
                f"tier_bits={names[0]} they are not used, and are encoded again",
                stacklevel=4,
            )


class _MemoryTier:
    """Tier in memory: segments by key, the least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.num_bytes = limit_bytes, 0
        self._kept: OrderedDict[str, SegmentKV] = OrderedDict()
        self._pinned: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def take(self, key: str) -> SegmentKV | None:
        """Look up a segment and mark it as just used."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def make_room(self, key: str, num_bytes: int, *, keep: str) -> bool:
        """Evict segments that are neither pinned nor to be kept to make room for a new one.

        Returns:
            whether there is room.
        """
        if key in self._kept or num_bytes > self.limit_bytes:
            return False
        evictable = [each for each in self._kept if each not in self._pinned and each != keep]
        if self.num_bytes - sum(self._kept[each].num_bytes for each in evictable) + num_bytes > self.limit_bytes:
            return False
        for each in evictable:
            if self.num_bytes + num_bytes <= self.limit_bytes:
                break
            self.num_bytes -= self._kept.pop(each).num_bytes
        return True

    def add(self, key: str, kv: SegmentKV, *, pinned: bool) -> None:
        self._kept[key] = kv
        self.num_bytes += kv.num_bytes
        if pinned:
            self._pinned.add(key)


def model_key(model: Model) -> str:
    """Hash of all that determines a model's keys and values: weights, config and dtype, and which of the heads."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    if model.overrides:  # which have numbers as a user writes them
        config = plain(config)
    facts = [FORMAT, model.fingerprint, str(model.dtype), json.dumps(config, sort_keys=True, default=str)]
    if model.num_shards > 1:  # which differ in their heads alone
        facts.append(f"share {model.shard_number} of {model.num_shards}")
    shapes = [(each.num_kv_heads, each.key_dim, each.value_dim, str(each.dtype)) for each in model.kv_shapes]
    return hashlib.sha256(repr((facts, shapes)).encode()).hexdigest()
