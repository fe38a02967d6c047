"""A prefix tree and a segment store with the same few verbs, for tests of what both do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from policies.reuse import Segment
from runahead.cache.slabs import KVShape
from runahead.reuse.prefix_tree import PrefixHit, PrefixTree
from runahead.reuse.store import Found, SegmentStore, StoreLimits
from runahead.reuse.tiers.entry import Entry
from runahead.reuse.tiers.store import TieredStore

CPU = torch.device("cpu")
KEY = "a model"
SHAPES = [
    KVShape(num_kv_heads=2, key_dim=8, value_dim=4, dtype=torch.float32),
    KVShape(num_kv_heads=1, key_dim=3, value_dim=5, dtype=torch.float32),
]
TOKEN_BYTES = sum(shape.bytes_per_token() for shape in SHAPES)
NUM_TOKENS = 40


def numbers(ids: Sequence[int], shapes: Sequence[KVShape] = SHAPES) -> list[Tensor]:
    """Keys and values of each layer, which say which token they are of."""
    layers = list[Tensor]()
    for shape in shapes:
        width = shape.key_dim + shape.value_dim
        head = torch.arange(shape.num_kv_heads * width).view(shape.num_kv_heads, width)
        layers.append((torch.tensor(ids)[:, None, None] * 7 + head * 3).remainder(11).to(shape.dtype))
    return layers


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


class Kept(ABC):
    """Texts of `NUM_TOKENS` tokens, each of which has a number, in one tier of memory and on disk.

    Args:
        room: texts for which the fastest tier has room.
    """

    store: TieredStore[Any]
    option: str

    def __init__(
        self, folder: Path | None = None, *, room: float = 9, disk_bytes: float = 2**30, bits: int | None = None
    ) -> None:
        self.held: list[PrefixHit | Found] = []

    def ids(self, number: int) -> list[int]:
        return [number, *range(1, NUM_TOKENS)]

    @abstractmethod
    def put(self, number: int) -> None:
        """Store a text, and hold it no longer."""

    @abstractmethod
    def find(self, number: int) -> Sequence[Tensor] | None:
        """Find and hold a text; None if it is not there, whole."""

    @abstractmethod
    def release(self) -> None:
        """Release all that was found."""

    @abstractmethod
    def entry(self, number: int) -> Entry | None:
        """Where a text is."""

    @abstractmethod
    def save(self) -> None:
        """Have all texts on disk."""

    @abstractmethod
    def wait_for_copies(self) -> None: ...

    def tier(self, number: int) -> str:
        entry = self.entry(number)
        return "-" if entry is None else entry.tier.value


class Prefixes(Kept):
    """In a prefix tree, found by token ids."""

    option = "serve.prefix_folder"

    def __init__(
        self, folder: Path | None = None, *, room: float = 9, disk_bytes: float = 2**30, bits: int | None = None
    ) -> None:
        super().__init__()
        limit, more = room * NUM_TOKENS * TOKEN_BYTES, {"disk_bytes": disk_bytes, "bits": bits}
        self.tree = PrefixTree(limit, folder=folder, option=self.option, **more)  # type: ignore[arg-type]
        self.tree.open(KEY, SHAPES, CPU)
        self.store = self.tree._store

    def put(self, number: int) -> None:
        self.tree.insert(self.ids(number), numbers(self.ids(number)), KEY).release()

    def find(self, number: int) -> Sequence[Tensor] | None:
        hit = self.tree.match(self.ids(number), KEY)
        self.held.append(hit)
        return hit.nodes[0].layers_TKX if hit.num_tokens == NUM_TOKENS else None

    def release(self) -> None:
        while self.held:
            hit = self.held.pop()
            assert isinstance(hit, PrefixHit)
            hit.release()

    def entry(self, number: int) -> Entry | None:
        self.wait_for_copies()
        nodes, num_tokens = self.tree._texts.known(self.ids(number), KEY)
        return nodes[-1] if num_tokens == NUM_TOKENS else None

    def save(self) -> None:
        self.tree.save()

    def wait_for_copies(self) -> None:
        self.tree.wait_for_copies()


class Segments(Kept):
    """In a segment store, found by a name."""

    option = "policy.store"

    def __init__(
        self, folder: Path | None = None, *, room: float = 9, disk_bytes: float = 2**30, bits: int | None = None
    ) -> None:
        super().__init__()
        limits = StoreLimits(host_bytes=int(room * NUM_TOKENS * TOKEN_BYTES), disk_bytes=int(disk_bytes))
        model: Any = SimpleNamespace(kv_shapes=SHAPES, device=CPU)
        with patch("runahead.reuse.store.model_key", lambda model: KEY):
            self.segments = SegmentStore(model, folder, limits, bits=bits)
        self.store = self.segments._store

    def segment(self, number: int) -> Segment:
        return Segment(name=f"{number}", ids=tuple(self.ids(number)), positions=tuple(range(NUM_TOKENS)))

    def put(self, number: int) -> None:
        self.segments.put(self.segment(number), numbers(self.ids(number)))

    def find(self, number: int) -> Sequence[Tensor] | None:
        found = self.segments.find(self.segment(number))
        if found is None:
            return None
        self.held.append(found)
        return found.layers_TKX

    def release(self) -> None:
        self.held.clear()
        self.segments._collect()

    def entry(self, number: int) -> Entry | None:
        self.wait_for_copies()
        return self.segments._entry(self.segment(number))

    def save(self) -> None:
        self.segments.wait_for_copies()

    def wait_for_copies(self) -> None:
        self.segments.wait_for_copies()


FINDERS: list[type[Kept]] = [Prefixes, Segments]
