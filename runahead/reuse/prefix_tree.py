"""Prefix tree: keys and values of earlier texts by their token ids, found by the texts that begin with the same tokens.

As RadixAttention (Zheng et al., NeurIPS 2024) keeps them, but for its pages: a prefix ends at any token. A node holds
a run of tokens with their keys and values in every layer, as views of the memory in which they were computed, so that
it is stored and split without a copy. A view keeps its whole allocation alive. So bytes are counted per allocation, and
nodes get memory of their own where less than half of an allocation is in the tree.

What has no room on the device is kept in host memory and then on disk, and comes back when a text begins with it (as in
CachedAttention, Gao et al., ATC 2024). A node is never in a faster tier than the one before it. Copies and files are
made by other threads; the tree itself is used by one thread only.
"""

# Legend: T tokens of a node, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import heapq
import os
import queue
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

import torch
from torch import Tensor

from runahead.cache.slabs import KVShape
from runahead.reuse.tree.layer_rows import NO_ROWS, CopiedMemory, LayerRows, LostRows
from runahead.reuse.tree.node import PrefixNode
from runahead.reuse.tree.prefix_files import PrefixFiles, PrefixRun
from runahead.reuse.tree.tiers import Allocation, Tier, TierCopies, TierMemory

DISK_BYTES = 64 * 2**30
"""Default limit of a folder."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A text of this key is in the tree, to its last token."""

    key: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Only the first `num_left` tokens of a text of this key are left in the tree."""

    key: str
    ids: tuple[int, ...]
    num_left: int


Change = Stored | Dropped


class PrefixHit:
    """The stored part of a text, whose nodes stay in the tree until it is released.

    Attributes:
        num_tokens: its length.
    """

    def __init__(self, tree: PrefixTree, end: PrefixNode, num_tokens: int) -> None:
        self._tree, self._end, self.num_tokens = tree, end, num_tokens
        self._is_held = True
        for node in end.path:
            node.num_hits += 1

    @property
    def nodes(self) -> list[PrefixNode]:
        """Its nodes in the order of the text. Later calls may find them split."""
        return self._end.path

    def release(self) -> None:
        """Let the nodes go; a second call does nothing."""
        if self._is_held:
            self._is_held = False
            for node in self._end.path:
                node.num_hits -= 1
            self._tree.make_room()


class PrefixTree:
    """Texts with their keys and values. Leaves that were not used for longest go first, held ones stay.

    Texts of different keys have nothing in common. A key names all that keys and values depend on beside the tokens:
    the model with its weights and dtype, and what its positions mean. Only texts of keys that were opened leave the
    device for another tier.

    Args:
        limit_bytes: most bytes of all allocations of the device of which the tree holds parts. What is held may exceed
            them.
        host_bytes: most bytes of host memory for what has no room on the device.
        folder: for what has no room in host memory. Other processes may use it too, and later ones find what is in it.
        disk_bytes: most bytes of prefixes in the folder, whoever stored them.
        on_change: called with every change of what is stored in any tier.
        option: where the folder was named, for messages.
        bits: of each number in host memory and on disk, 4 or 2; None is the model's dtype. A number is quantised once,
            when it leaves the device.

    Raises:
        ValueError: the folder cannot be created or written to.

    Attributes:
        found_tokens: tokens of texts that were found so far, by tier.
    """

    def __init__(
        self,
        limit_bytes: float,
        *,
        host_bytes: float = 0,
        folder: str | os.PathLike[str] | None = None,
        disk_bytes: float = DISK_BYTES,
        on_change: Callable[[Change], object] = lambda change: None,
        option: str = "folder",
        bits: int | None = None,
    ) -> None:
        self.on_change, self._bits = on_change, bits
        self._device, self._host = TierMemory[PrefixNode](limit_bytes), TierMemory[PrefixNode](host_bytes)
        self._lost: queue.SimpleQueue[str | CopiedMemory] = queue.SimpleQueue()
        self._files = None if folder is None else PrefixFiles(folder, disk_bytes, self._lost, option=option)
        self._of_file: dict[str, set[PrefixNode]] = {}
        self._opened: dict[str, TierCopies] = {}
        self._roots: dict[str, PrefixNode] = {}
        self._needed: list[PrefixNode] = []
        self._told: set[str] = set()
        self._used = 0
        self.found_tokens: Counter[Tier] = Counter()

    @property
    def limit_bytes(self) -> float:
        return self._device.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: float) -> None:
        self._device.limit_bytes = limit_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all allocations of the device of which the tree holds parts."""
        return self._device.num_bytes

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use of the tiers that it has. Those on disk are of all processes that share the folder."""
        used = {Tier.device.value: self._device.num_bytes}
        if self._host.limit_bytes:
            used[Tier.host.value] = self._host.num_bytes
        if self._files is not None:
            used[Tier.disk.value] = self._files.num_bytes
        return used

    @property
    def has_tiers(self) -> bool:
        """Whether texts may be elsewhere than on the device."""
        return bool(self._host.limit_bytes) or self._files is not None

    def open(self, key: str, shapes: Sequence[KVShape], device: torch.device) -> None:
        """Let texts of a key leave the device, and find those in the folder that are of this key.

        Args:
            shapes: of the layers.
            device: that computes.
        """
        if key in self._opened or not self.has_tiers:
            return
        self._opened[key] = TierCopies(device, shapes, self._lost.put, self._bits)
        if self._files is None:
            return
        runs, num_others = self._files.runs(self._stored_key(key))
        for run in sorted(runs, key=lambda run: run.start):
            node, at = self._walk(run.ids, key)
            if run.start <= at < len(run.ids):
                file = replace(run.rows, first=run.rows.first + at - run.start)
                new = PrefixNode(key=key, ids=run.ids[at:], tier=Tier.disk, file=file, parent=node)
                node.children[new.ids[0]] = new
                self._of_file.setdefault(run.name, set()).add(new)
        for run, used_ns in runs.items():
            for node in self._of_file.get(run.name, ()):
                node.used = used_ns
        self._read_ahead(key)
        if num_others:
            what = "prefixes of another model, dtype, RoPE setting or cache.tier_bits are not used"
            self._warn("others", f"{what}; files: {num_others}")
        self._warn_of_files()

    def _read_ahead(self, key: str) -> None:
        """Let the system read the files of those texts that were used last, as many as have room in memory."""
        assert self._files is not None
        copies, names = self._opened[key], dict[str, None]()
        room = self.limit_bytes / copies.token_bytes + self._host.limit_bytes / copies.stored_token_bytes
        for node in sorted(self._of_key(key), key=lambda node: -node.used):
            room -= len(node.ids)
            if room < 0:
                break
            if node.tier is Tier.disk and node.file is not None:
                names[node.file.name] = None
        self._files.read_ahead(list(names))

    def listen(self, on_change: Callable[[Change], object]) -> None:
        """Tell of every change from now on, and first of all that is stored."""
        self.on_change = on_change
        for node in self.nodes():
            if not node.children:
                on_change(Stored(key=node.key, ids=node.text))

    def match(self, ids: Sequence[int], key: str) -> PrefixHit:
        """Find and hold the longest stored prefix of a text, and begin to bring it to the device.

        Its layers are waited for when they are read. What is known to be lost is dropped now, and what is found to be
        lost later raises `LostRows` in its reader and is dropped with the next call.
        """
        self._settle()
        node, at = self._walk(ids, key)
        found = [(each.tier, len(each.ids)) for each in node.path]
        self._touch(node)
        hit = self._raised(PrefixHit(self, node, at))
        for tier, num_tokens in found[: len(hit.nodes)]:
            self.found_tokens[tier] += num_tokens
        self.make_room()
        return hit

    def num_stored(self, ids: Sequence[int], key: str) -> int:
        """Length in tokens of the longest stored prefix of a text, which counts as no use of it."""
        return self._known(ids, key)[1]

    def insert(
        self,
        ids: Sequence[int],
        layers_TKX: Sequence[Tensor],
        key: str,
        *,
        start: int = 0,
        is_needed: bool = False,
    ) -> PrefixHit:
        """Store what is not stored of a text, and hold all that is.

        Nothing is stored if the tokens before `start` are not, or if the text is larger than the tree may be.

        Args:
            ids: the whole text.
            layers_TKX: keys and values of its tokens from `start` on in each layer, (T, K, H + V). Nobody may change
                them.
            is_needed: store it also if it is larger than the tree may be, for as long as it is held.
        """
        self._settle()
        node, at = self._walk(ids, key)
        assert all(len(layer) == len(ids) - start for layer in layers_TKX), (len(ids), start)
        given, end = LayerRows.of(layers_TKX), 0
        for each in node.path:
            end += len(each.ids)
            if each.tier is not Tier.device and end - len(each.ids) >= start:  # it was computed anew
                self._place(each, Tier.device, given.part(end - len(each.ids) - start, end - start))
        hit = self._raised(PrefixHit(self, node, at))
        if start <= hit.num_tokens == at < len(ids):
            rows = given.part(at - start, len(ids) - start) if layers_TKX else NO_ROWS
            new = PrefixNode(key=key, ids=tuple(ids[at:]), layers_TKX=rows, parent=node, used=self._used)
            if is_needed or new.num_bytes <= self.limit_bytes:
                node.children[new.ids[0]] = new
                self._device.add(new)
                held, hit = hit, PrefixHit(self, new, len(ids))
                held.release()
                self.on_change(Stored(key=key, ids=tuple(ids)))
        self._touch(node)
        self.make_room()
        return hit

    def apply(self, change: Change) -> None:
        """Do what another tree has done, in this one, which has its texts without keys and values."""
        if isinstance(change, Stored):
            self.insert(change.ids, [], change.key).release()
            return
        node, at = self._walk(change.ids[: change.num_left], change.key)
        assert at == change.num_left, (at, change.num_left)
        if (child := node.children.get(change.ids[at])) is not None:
            self._remove(child)

    def soon(self, texts: Sequence[Sequence[int]], key: str) -> None:
        """Note which texts are asked for next, the first one first, in place of those that were noted before.

        What they need goes last from every tier, and is brought from disk to host memory as far as it has room there.
        """
        self._settle()
        for node in self._needed:
            node.turn = None
        self._needed = list(dict.fromkeys(node for ids in texts for node in self._known(ids, key)[0]))
        for turn, node in enumerate(self._needed):
            node.turn = turn
        if self._files is not None:
            self._files.keep = frozenset(node.file.name for node in self._needed if node.file is not None)
        room = self._host.limit_bytes - sum(node.num_bytes for node in self._needed if node.tier is Tier.host)
        for node in self._needed:
            if node.tier is Tier.disk and node.is_attached:
                room -= self._opened[key].stored_token_bytes * len(node.ids)
                if room < 0:
                    break
                if (rows := self._read(node)) is None:
                    self._lose(node)
                else:
                    self._place(node, Tier.host, rows)
        self.make_room()

    def make_room(self) -> None:
        """Free memory: move what is left of wasted allocations, and let leaves go until the limits are kept."""
        for memory, tier in ((self._device, Tier.device), (self._host, Tier.host)):
            for allocation in memory.wasted():
                self._move(allocation)
            if memory.num_bytes <= memory.limit_bytes:
                continue
            order = count()
            leaves = [(*self.precedence(node), next(order), node) for node in memory.owners() if node.is_free_leaf]
            heapq.heapify(leaves)
            while leaves and memory.num_bytes > memory.limit_bytes:
                *_, leaf = heapq.heappop(leaves)
                parent = leaf.parent
                assert parent is not None
                rest = self._lower(leaf)
                if parent.tier is tier and parent.is_free_leaf:
                    heapq.heappush(leaves, (*self.precedence(parent), next(order), parent))
                if rest is not None and rest.owners and rest.is_wasted:
                    self._move(rest)

    def precedence(self, node: PrefixNode) -> tuple[bool, int, int]:
        """Which nodes leave a tier first, as a number: those that nobody soon needs, and those not used for longest."""
        return node.turn is not None, -(node.turn or 0), node.used

    def save(self, timeout_s: float | None = None) -> None:
        """Write all texts to the folder, as far as there is room and time, those that were used last first."""
        end_s = inf if timeout_s is None else time.monotonic() + timeout_s
        for node in sorted(self.nodes(), key=lambda node: -node.used):
            if node.is_attached and node.file is None and time.monotonic() < end_s:
                self._save(node)
                self.settle(None if timeout_s is None else end_s - time.monotonic())  # one at a time has room in memory

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all copies and files that were begun are there, and drop what could not be kept."""
        end_s = inf if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if end_s == inf else max(0.0, end_s - time.monotonic())

        for copies in self._opened.values():
            copies.wait(left_s())
        if self._files is not None:
            self._files.wait(left_s())
        self._settle()

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, each after its parent."""
        for key in list(self._roots):
            yield from self._of_key(key)

    def _of_key(self, key: str) -> Iterator[PrefixNode]:
        waiting = list(self._roots[key].children.values()) if key in self._roots else []
        while waiting:
            yield (node := waiting.pop())
            waiting += node.children.values()

    def _known(self, ids: Sequence[int], key: str) -> tuple[list[PrefixNode], int]:
        """The nodes with tokens of the longest stored prefix of a text, and the length of that prefix."""
        node, at, nodes = self._roots.get(key), 0, list[PrefixNode]()
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is not None:
                nodes.append(node)
                same = node.num_same(ids, at)
                at += same
                if same < len(node.ids):
                    break
        return nodes, at

    def _walk(self, ids: Sequence[int], key: str) -> tuple[PrefixNode, int]:
        """The node with which the longest stored prefix ends, split off if need be, and the length of that prefix."""
        node, at, now = self._roots.setdefault(key, PrefixNode(key=key)), 0, self._now()
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = child.num_same(ids, at)
            node, at = child if same == len(child.ids) else self._split(child, same), at + same
            self._use(node, now)
        return node, at

    def _now(self) -> int:
        """The time in ns, or the next moment that no use had."""
        self._used = max(self._used + 1, time.time_ns())
        return self._used

    def _use(self, node: PrefixNode, now: int) -> None:
        node.used = now

    def _split(self, node: PrefixNode, num_tokens: int) -> PrefixNode:
        """Let a node begin after its first tokens. Returns the new node before it, which has these."""
        before = node.split(num_tokens)
        self._memory(node.tier).share(node, before)
        if node.turn is not None:
            self._needed.append(before)
        if node.file is not None:
            self._of_file[node.file.name].add(before)
        return before

    def _memory(self, tier: Tier) -> TierMemory[PrefixNode]:
        return self._device if tier is Tier.device else self._host

    def _place(self, node: PrefixNode, tier: Tier, rows: LayerRows) -> Allocation[PrefixNode] | None:
        """Put a node's keys and values into a tier. Returns the allocation that it leaves."""
        left = self._memory(node.tier).forget(node)
        node.tier, node.layers_TKX = tier, rows
        self._memory(tier).add(node)
        return left

    def _raised(self, hit: PrefixHit) -> PrefixHit:
        """Begin to bring what is held to the device. Returns what is held then: less, where a part is lost."""
        nodes, limit, total = hit.nodes, self.limit_bytes, 0
        if all(node.tier is Tier.device for node in nodes):
            return hit
        copies = self._opened[nodes[0].key]
        for end, node in enumerate(nodes):
            total += copies.token_bytes * len(node.ids)
            if node.tier is not Tier.device and total > limit:  # of an earlier process, whose limit was higher
                return self._shortened(hit, nodes[:end])
        for end, node in enumerate(nodes):
            if node.tier is Tier.device:
                continue
            is_read = node.tier is Tier.disk
            rows = self._read(node) if is_read else node.layers_TKX
            if rows is None or rows.memory.is_lost:
                shorter = self._shortened(hit, nodes[:end])
                if node.is_attached:
                    self._lose(node)
                return shorter
            # In memory that is its own, and as it is computed with.
            is_there = is_read and copies.device.type == "cpu" and not copies.is_packed
            self._place(node, Tier.device, rows if is_there else copies.to_device(rows))
        return hit

    def _shortened(self, hit: PrefixHit, nodes: Sequence[PrefixNode]) -> PrefixHit:
        """Hold only the first nodes of a hit."""
        end = nodes[-1] if nodes else self._roots[hit.nodes[0].key]
        shorter = PrefixHit(self, end, sum(len(node.ids) for node in nodes))
        hit.release()
        return shorter

    def _read(self, node: PrefixNode) -> LayerRows | None:
        """Begin to bring a node from disk to host memory; None if it is not there any more."""
        assert self._files is not None and node.file is not None
        return self._files.read(node.file, len(node.ids), self._opened[node.key])

    def _stored_key(self, key: str) -> str:
        """Key of a text's files: of other bits, other numbers."""
        return key if self._bits is None else f"{key} in {self._bits} bits"

    def _stored_bytes(self, node: PrefixNode) -> int:
        """Bytes that a node of a faster tier than the disk takes in host memory of its own."""
        return self._opened[node.key].stored_token_bytes * node.layers_TKX.stored.whole.num_tokens

    def _lower(self, node: PrefixNode) -> Allocation[PrefixNode] | None:
        """Let a node go to the next tier that has room for it, or out of the tree. Returns the allocation it leaves."""
        if node.key in self._opened:
            if node.tier is Tier.device and self._stored_bytes(node) <= self._host.limit_bytes:
                return self._place(node, Tier.host, self._opened[node.key].to_host(node.layers_TKX))
            if self._save(node):
                return self._place(node, Tier.disk, NO_ROWS)
        return self._lose(node)

    def _save(self, node: PrefixNode) -> bool:
        """Begin to write a node, and all before it, to files. Returns whether they may be that large."""
        if self._files is None or node.key not in self._opened:
            return False
        copies, text = self._opened[node.key], list[int]()
        if not self._files.takes(sum(self._stored_bytes(each) for each in node.path if each.file is None)):
            return False
        for each in node.path:
            text += each.ids
            if each.file is None:
                rows = each.layers_TKX if each.tier is Tier.host else copies.to_host(each.layers_TKX)
                run = PrefixRun(
                    key=self._stored_key(each.key),
                    ids=tuple(text),
                    start=len(text) - len(each.ids),
                    around=(rows.start - rows.whole.start, rows.whole.stop - rows.stop),
                )
                each.file = run.rows
                self._of_file.setdefault(run.name, set()).add(each)
                self._files.save(run, rows.whole, each.file_times_ns)
        return True

    def _touch(self, node: PrefixNode) -> None:
        """Let other processes know which files are used."""
        if self._files is not None and (used_ns := node.file_times_ns):
            self._files.touch(used_ns)

    def _settle(self) -> None:
        """Drop what other threads have found to be lost."""
        while True:
            try:
                lost = self._lost.get_nowait()
            except queue.Empty:
                break
            if isinstance(lost, CopiedMemory):
                nodes = self._host.owners_of(lost) + self._device.owners_of(lost)
            else:
                nodes = list(self._of_file.pop(lost, ()))
                for node in nodes:
                    node.file = None
                nodes = [node for node in nodes if node.tier is Tier.disk]
            for node in nodes:
                if node.is_attached:
                    self._lose(node)
        self._warn_of_files()

    def _lose(self, node: PrefixNode) -> Allocation[PrefixNode] | None:
        """Drop a node and all that follow it, and tell. Returns its allocation, as far as others have parts of it."""
        text = node.text
        left = self._remove(node)
        self.on_change(Dropped(key=node.key, ids=text, num_left=len(text) - len(node.ids)))
        return left

    def _remove(self, node: PrefixNode) -> Allocation[PrefixNode] | None:
        """Drop a node and all that follow it. Returns its allocation, as far as others have parts of it."""
        for child in list(node.children.values()):
            self._remove(child)
        assert node.parent is not None
        del node.parent.children[node.ids[0]]
        if node.file is not None:
            self._of_file[node.file.name].discard(node)
        return self._memory(node.tier).forget(node)

    def _move(self, allocation: Allocation[PrefixNode]) -> None:
        """Give the nodes of an allocation memory of their own."""
        for node in list(allocation.owners):
            if node.tier is Tier.host:
                self._place(node, Tier.host, self._opened[node.key].to_host(node.layers_TKX))
                continue
            try:
                copy = node.layers_TKX.cloned()
            except LostRows:
                continue  # it will be dropped
            self._place(node, Tier.device, copy)

    def _warn_of_files(self) -> None:
        for kind, error in {} if self._files is None else dict(self._files.errors).items():
            self._warn(kind, f"{error}: prefixes that cannot be kept on disk are computed anew")

    def _warn(self, kind: str, sentence: str) -> None:
        """Warn, but once only of each kind of thing."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(sentence, stacklevel=4)
