"""Store of encoded segments in three tiers (device, host memory, disk), each with a budget in bytes, found by a name.

A segment is put into every tier that has room for it, so one that a faster tier evicts is still in the slower ones. A
tier evicts the least recently used segments; pinned segments stay, and the clusters of a segment never push it out. The
name is a hash of the model and of the segment's tokens and positions, so that another model or another text is never
found. On disk a segment is a file of this name that appears atomically, so several processes may share a folder.
Segments in host memory and on disk may be in 8, 4 or 2 bits; each is quantised once, when it is put there.
"""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import hashlib
import json
import os
import queue
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.reuse import Segment
from runahead.config import BITS
from runahead.model.loading.overrides import plain
from runahead.model.model import Model
from runahead.reuse.tiers.entry import Entry, FileRows, Tier
from runahead.reuse.tiers.file_format import FORMAT
from runahead.reuse.tiers.files import FileAbout
from runahead.reuse.tiers.folder import TierFolder
from runahead.reuse.tiers.layer_rows import LayerRows
from runahead.reuse.tiers.store import TieredStore

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


@dataclass(eq=False, repr=False, kw_only=True)
class SegmentEntry(Entry):
    """A segment, or the clusters of one.

    Attributes:
        about: its file.
        own: the segment, of clusters.
    """

    about: FileAbout
    length: int
    own: SegmentEntry | None = None

    @property
    def num_tokens(self) -> int:
        return self.length

    def file_times_ns(self) -> dict[str, int]:
        return {each.about.name: each.used for each in (self, self.own) if each is not None and each.file is not None}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A segment that was found in the store.

    Attributes:
        layers_TKX: its keys and values of each layer, (T, K, H + V), in the model's dtype, on the device. A reader
            waits for each layer, and gets `LostRows` if it is lost. The segment is held as long as anybody has them.
        tier: the fastest tier that had it.
        num_bytes: that it takes there.
        is_mapped: whether it is mapped from a file, since memory has no room for it.
    """

    layers_TKX: LayerRows
    tier: Tier
    num_bytes: int
    is_mapped: bool = False


class SegmentStore:
    """Store of one model's encoded segments.

    Args:
        model: the model that encodes them.
        folder: folder of the disk tier, created if it is missing; None is no disk tier.
        limits: budgets of the tiers.
        bits: of each number in host memory and on disk, 8, 4 or 2; None is the model's dtype.

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
        self._bits, self._shapes, self._device = bits, model.kv_shapes, model.device
        self._model_key, self._is_told = model_key(model), False
        memory = {Tier.device: self.limits.device_bytes, Tier.host: self.limits.host_bytes}
        if self._device.type == "cpu":
            del memory[Tier.device]
        self._folder = None
        if folder is not None:
            self._folder = TierFolder(folder, self.limits.disk_bytes, option="policy.store")
        self._store = TieredStore[SegmentEntry](
            memory,
            self._folder,
            file_of=lambda entry, _: entry.about,
            is_right=lambda metadata, name: metadata.get("key") == name,
            lose=self._lose,
            lost_on_disk="segments that cannot be kept on disk are encoded again",
        )
        self._copies = self._store.copies(self._device, self._shapes, bits)
        shapes = [replace(shape, key_dim=1, value_dim=0, dtype=torch.int32) for shape in self._shapes]
        self._cluster_copies = self._store.copies(self._device, shapes, None)
        self._entries: dict[str, SegmentEntry] = {}
        self._released: queue.SimpleQueue[SegmentEntry] = queue.SimpleQueue()

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
        return self._copies.stored_token_bytes

    @property
    def shares_disk(self) -> bool:
        """Whether other processes find what this one stores."""
        return self._folder is not None and self.limits.disk_bytes > 0

    def __contains__(self, segment: Segment) -> bool:
        self._collect()
        return self._entry(segment) is not None

    def find(self, segment: Segment, clusters_key: str = "") -> Found | None:
        """Look up a segment, hold it, and begin to bring it to the device and to all faster tiers that have room.

        A segment on disk for which memory has no room is mapped, and read when it is used.

        Args:
            clusters_key: look up its clusters, see `key`.

        Returns:
            None if it is in no tier. What is found to be lost later raises `LostRows` in its reader.
        """
        self._collect()
        entry = self._entry(segment, clusters_key)
        if entry is None:
            return None
        assert entry.copies is not None
        tier, is_exact = entry.tier, entry.tier is Tier.device
        token_bytes = entry.copies.token_bytes if is_exact else entry.copies.stored_token_bytes
        rows = self._store.bring(entry)
        if rows is None:
            self._lose(entry)
            return None
        self._use(entry)
        layers = rows.part(0, rows.num_tokens)  # of this user alone
        entry.holds += 1
        weakref.finalize(layers, self._released.put, entry).atexit = False
        self._store.make_room()
        is_mapped = entry.copies.is_direct and not entry.places
        return Found(layers_TKX=layers, tier=tier, num_bytes=token_bytes * entry.num_tokens, is_mapped=is_mapped)

    def put(self, segment: Segment, layers_TKX: Sequence[Tensor], clusters_key: str = "") -> None:
        """Store a segment in every tier that has room for it. Copies and files are made by threads.

        Args:
            layers_TKX: keys and values of each layer, (T, K, H + V). Nobody may change them.
            clusters_key: they are the segment's clusters, (T, K, 1), int32, see `key`.
        """
        self._collect()
        entry = self._entries.get(self.key(segment, clusters_key)) or self._made(segment, clusters_key)
        self._entries[entry.about.name] = entry
        self._use(entry)
        self._store.put(entry, LayerRows.from_tensors(layers_TKX), everywhere=True)
        self._store.make_room()
        if not entry.places and entry.file is None:
            self._lose(entry)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use, by tier. Those on disk are of all processes that share the folder."""
        self._collect()
        return self._store.bytes_by_tier

    def wait_for_copies(self, timeout_s: float | None = None) -> None:
        """Wait until all copies and files that were begun are there, and drop what could not be kept."""
        self._store.wait_for_copies(timeout_s)

    @property
    def write_error(self) -> OSError | None:
        """Why the first file that could not be written was not."""
        return None if self._store.files is None else self._store.files.write_error

    def _made(self, segment: Segment, clusters_key: str) -> SegmentEntry:
        bits = {} if clusters_key or self._bits is None else {"bits": str(self._bits)}
        return SegmentEntry(
            about=FileAbout(
                name=self.key(segment, clusters_key), title=segment.name, metadata=bits, is_pinned=segment.pinned
            ),
            length=len(segment.stored),
            copies=self._cluster_copies if clusters_key else self._copies,
            is_pinned=segment.pinned,
            own=self._entries.get(self.key(segment)) if clusters_key else None,
        )

    def _entry(self, segment: Segment, clusters_key: str = "") -> SegmentEntry | None:
        """A segment that is in memory, or of which there is a file now, whoever wrote it."""
        entry = self._entries.get(self.key(segment, clusters_key))
        if entry is not None and entry.places:
            return entry
        made = entry or self._made(segment, clusters_key)
        file = FileRows(name=made.about.name, num_tokens=made.num_tokens)
        assert made.copies is not None
        if self._store.files is None or not self._store.files.has(file, made.copies):
            self._lose(made)
            self._collect()
            if self._folder is not None and not clusters_key:
                self._tell_of_other_bits(segment)
            return None
        if made.file is None:
            self._store.file_found(made, file)
        return self._entries.setdefault(file.name, made)

    def _use(self, entry: SegmentEntry) -> None:
        """Note a use: of clusters and then of their segment, so that of the two the clusters go first."""
        for each in filter(None, (entry, entry.own)):
            each.used = self._store.now()
        if entry.file is not None:
            self._store.touch(entry)

    def _collect(self) -> None:
        """Let go of what nobody has any more, and drop what was found to be lost."""
        is_released = not self._released.empty()
        while not self._released.empty():
            self._released.get().holds -= 1
        self._store.collect()
        if is_released:
            self._store.make_room()

    def _lose(self, entry: SegmentEntry) -> None:
        """Forget an entry that is in no tier."""
        if self._entries.get(entry.about.name) is entry:
            del self._entries[entry.about.name]
            self._store.remove(entry)

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
