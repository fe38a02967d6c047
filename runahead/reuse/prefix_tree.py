"""Prefix tree: keys and values of earlier texts by their token ids, found by the texts that begin with the same tokens.

As RadixAttention (Zheng et al., NeurIPS 2024) keeps them, but for its pages: a prefix ends at any token. A node holds
a run of tokens with their keys and values in every layer, as views of the memory in which they were computed, so that
it is stored and split without a copy. A view keeps its whole allocation alive. So bytes are counted per allocation, and
nodes get memory of their own where less than half of an allocation is in the tree.

What has no room on the device is kept in host memory and then on disk, and comes back when a text begins with it (as in
CachedAttention, Gao et al., ATC 2024). A node is never in a faster tier than the one before it.

Of models whose layers hold states a text can be continued only where its states were kept. A snapshot of them is a node
of one row without tokens, after the node with whose last token its text ends, and has places of its own: in each tier
the least recently used nodes go first, snapshots among them, so a text may lose its snapshots one by one and keep its
keys and values for the texts that go on after it. What follows the last snapshot of a text is used by no match, and so
goes soon, too. A match ends at a snapshot. A split leaves it at the end of the second half. Where layers hold states
alone tokens have no rows and no bytes, and stay as long as a snapshot follows them or a text holds them.

Where several stages decode together, each has a tree with the tokens that it stores of a text. Other stages have the
others, and it depends on all of them how long a prefix is (`runahead/reuse/prefixes.py`).
"""

# Legend: T tokens of a node, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import inf

import torch
from torch import Tensor

from runahead.cache.slabs import KVShape
from runahead.reuse.prefix_node import SNAPSHOT, PrefixNode, moved
from runahead.reuse.prefix_run import SUFFIX, PrefixRun
from runahead.reuse.radix_tree import RadixTree
from runahead.reuse.tiers.copies import TierCopies
from runahead.reuse.tiers.entry import Tier
from runahead.reuse.tiers.files import FileAbout, TierFiles
from runahead.reuse.tiers.folder import TierFolder
from runahead.reuse.tiers.layer_rows import NO_ROWS, LayerRows, LostRows
from runahead.reuse.tiers.store import TieredStore

DISK_BYTES = 64 * 2**30
"""Default limit of a folder."""

SALT = " with salt "


def salted(key: str, salt: str) -> str:
    """The key of those texts of a key that have a salt, and nothing in common with others; "" is none."""
    return f"{key}{SALT}{salt}" if salt else key


def unsalted(key: str) -> str:
    """The key that was given to `salted`."""
    return key.partition(SALT)[0]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A text of this key is in the tree, to its last token.

    Attributes:
        states: None: no layer holds any. Otherwise whether those after the text are in the tree, and not its tokens.
    """

    key: str
    ids: tuple[int, ...]
    states: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Only the first `num_left` tokens of a text of this key are left in the tree; all of them: without the states."""

    key: str
    ids: tuple[int, ...]
    num_left: int


Change = Stored | Dropped


@dataclass(kw_only=True)
class TextKind:
    """How the texts of a key are kept, with any salt.

    Attributes:
        copies: of their tokens; None: they stay on the device.
        copies_of_states: of the states after them.
        has_states: whether they are continued only where states are kept.
        has_states_alone: whether they have no keys and values.
    """

    copies: TierCopies | None = None
    copies_of_states: TierCopies | None = None
    has_states: bool = False
    has_states_alone: bool = False


class PrefixHit:
    """The stored part of a text, whose nodes stay in the tree until it is released.

    Args:
        end: its last node; a snapshot if the text is to be continued from there.

    Attributes:
        num_tokens: its length.
    """

    def __init__(self, tree: PrefixTree, end: PrefixNode, num_tokens: int) -> None:
        self._tree, self._end, self.num_tokens = tree, end, num_tokens
        self._is_held = True
        for node in end.path:
            node.holds += 1

    @property
    def nodes(self) -> list[PrefixNode]:
        """Its nodes with tokens in the order of the text. Later calls may find them split."""
        return [node for node in self._end.path if not node.is_snapshot]

    @property
    def all_nodes(self) -> list[PrefixNode]:
        """Its nodes, with the snapshot if there is one."""
        return self._end.path

    @property
    def snapshot(self) -> PrefixNode | None:
        """The states after its last token, if they are held."""
        return self._end if self._end.is_snapshot else None

    def release(self) -> None:
        """Let the nodes go; a second call does nothing."""
        if self._is_held:
            self._is_held = False
            for node in self._end.path:
                node.holds -= 1
            self._tree.released(self._end)


class PrefixTree:
    """Texts with their keys and values. Leaves that were not used for longest go first, held ones stay.

    Texts of different keys have nothing in common. A key names all that keys and values depend on beside the tokens:
    the model with its weights and dtype, and what its positions mean; and perhaps a salt (`salted`). Only texts of keys
    that were opened leave the device for another tier.

    Args:
        limit_bytes: most bytes of all allocations of the device of which the tree holds parts. What is held may exceed
            them.
        host_bytes: most bytes of host memory for what has no room on the device.
        folder: for what has no room in host memory. Other processes may use it too, and later ones find what is in it.
        disk_bytes: most bytes of prefixes in the folder, whoever stored them.
        on_change: called with every change of what is stored in any tier.
        option: where the folder was named, for messages.
        bits: of each number in host memory and on disk, 8, 4 or 2; None is the model's dtype. A number is quantised
            once, when it leaves the device. States stay as they are.
        snapshot_tokens: keep states also after every so many tokens of a prompt; 0: after prompts and answers alone.

    Raises:
        ValueError: the folder cannot be created or written to.

    Attributes:
        first_limit_bytes: the limit with which it was made; `limit_bytes` may change.
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
        snapshot_tokens: int = 0,
    ) -> None:
        self.on_change, self._bits, self.snapshot_tokens = on_change, bits, snapshot_tokens
        self.first_limit_bytes = limit_bytes
        limits = {Tier.device: limit_bytes} | ({Tier.host: host_bytes} if host_bytes else {})
        kept = None
        if folder is not None:
            kept = TierFolder(folder, disk_bytes, option=option, suffix=SUFFIX, is_private=True)
        self._store = TieredStore[PrefixNode](
            limits,
            kept,
            file_of=self._file_of,
            is_right=lambda metadata, name: PrefixRun.from_metadata(metadata, name) is not None,
            lose=self._lose,
            lost_on_disk="prefixes that cannot be kept on disk are computed anew",
        )
        self._texts = RadixTree(self._store)
        self._kinds = defaultdict[str, TextKind](TextKind)
        self._needed: list[PrefixNode] = []
        self.found_tokens: Counter[Tier] = Counter()

    @property
    def limit_bytes(self) -> float:
        return self._store.memory[Tier.device].limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: float) -> None:
        self._store.memory[Tier.device].limit_bytes = limit_bytes

    @contextmanager
    def nothing_stored(self) -> Iterator[None]:
        """Context manager in which no text is stored, such as those of a warm-up."""
        limit_bytes, self.limit_bytes = self.limit_bytes, 0
        try:
            yield
        finally:
            self.limit_bytes = limit_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all allocations of the device of which the tree holds parts."""
        return self._store.memory[Tier.device].num_bytes

    @property
    def _host_bytes(self) -> float:
        return self._store.memory[Tier.host].limit_bytes if Tier.host in self._store.memory else 0

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use of the tiers that it has. Those on disk are of all processes that share the folder."""
        return self._store.bytes_by_tier

    @property
    def has_tiers(self) -> bool:
        """Whether texts may be elsewhere than on the device."""
        return Tier.host in self._store.memory or self._store.files is not None

    def open(
        self, key: str, shapes: Sequence[KVShape], device: torch.device, *, states: Sequence[KVShape] = ()
    ) -> None:
        """Let texts of a key, with any salt, leave the device, and find those in the folder.

        Args:
            key: without a salt.
            shapes: of the layers; none if all hold states alone.
            device: that computes.
            states: shapes of the states of layers that hold one, as rows. Texts of this key are continued only where
                these are kept.
        """
        kind = self._kind(key)
        kind.has_states, kind.has_states_alone = bool(states), not shapes
        if kind.copies is not None or not self.has_tiers:
            return
        kind.copies = self._store.copies(device, shapes, self._bits)
        kind.copies_of_states = self._store.copies(device, states, None) if states else None
        if self._store.files is not None:
            self._find(key, self._store.files)
            self._store.collect()

    def _find(self, key: str, files: TierFiles) -> None:
        """Have the texts of a key in the tree that are in files, and those read ahead that have room in memory."""
        runs, num_others = list[tuple[PrefixRun, str, int]](), 0
        for file, metadata in files.all_metadata():
            run = PrefixRun.from_metadata(metadata, file.key)
            if run is not None and unsalted(run.key) == self._stored_key(key):
                runs.append((run, salted(key, run.key.partition(SALT)[2]), file.used_ns))
            else:
                num_others += 1
        for run, of_salt, _ in sorted(runs, key=lambda each: each[0].start):
            self._add_run(run, of_salt)
        for run, _, used_ns in runs:
            for node in self._store.entries_of_file(run.name):
                node.used = used_ns
        files.read_ahead(self._to_read_ahead(key))
        if num_others:
            what = "prefixes of another model, dtype, RoPE setting or cache.tier_bits are not used"
            self._store.warn("others", f"{what}; files: {num_others}")

    def _add_run(self, run: PrefixRun, key: str) -> None:
        """Add those tokens of a file, or states, that are not in the tree, if all tokens before them are."""
        node, at = self._texts.walk(run.ids, key)
        if run.is_snapshot:
            if at < len(run.ids) and self.has_states_alone(key):  # its tokens are in no other file
                node, at = self._added_text(node, run.ids[at:]), len(run.ids)
                self._store.put(node, NO_ROWS)
            if at == len(run.ids) and self._kind(key).has_states:
                self._store.file_found(self._added_snapshot(node), run.rows(0))
        elif run.start <= at < len(run.ids):
            first = at - run.start
            numbers = moved(run.here[bisect_left(run.here, first) :], -first)
            self._store.file_found(self._added_text(node, run.ids[at:], numbers), run.rows(first))

    def _to_read_ahead(self, key: str) -> list[str]:
        """Names of the files of those texts that were used last, as many as have room in memory."""
        names, copies = dict[str, None](), self._kind(key).copies
        assert copies is not None
        ratio = copies.token_bytes / copies.stored_token_bytes if copies.stored_token_bytes else 1.0
        room = self.limit_bytes + self._host_bytes * ratio
        of_key = [node for node in self.nodes() if unsalted(node.key) == key]
        for node in sorted(of_key, key=lambda node: -node.used):
            room -= self._device_bytes(node)
            if room < 0:
                break
            if node.tier is Tier.disk and node.file is not None:
                names[node.file.name] = None
        return list(names)

    def listen(self, on_change: Callable[[Change], object]) -> None:
        """Tell of every change from now on, and first of all that is stored."""
        self.on_change = on_change
        nodes = list(self.nodes())
        leaves = [node for node in nodes if not node.is_snapshot and not node.children.keys() - {SNAPSHOT}]
        for node in (*leaves, *(node for node in nodes if node.is_snapshot)):
            on_change(self._stored(node))

    def match(self, ids: Sequence[int], key: str) -> PrefixHit:
        """Find and hold the longest stored prefix after which a text can go on, and begin to bring it to the device.

        Its layers are waited for when they are read. What is known to be lost is dropped now, and what is found to be
        lost later raises `LostRows` in its reader and is dropped with the next call.
        """
        self._store.collect()
        node, at = self._texts.walk(ids[: self.num_stored(ids, key)], key)
        if self._kind(key).has_states and node.snapshot is not None:
            node = node.snapshot
            node.used = self._store.now()
        found = [(each.tier, each.num_tokens) for each in node.path]
        if self.has_states_alone(key):  # what is found of tokens is their states
            found = [(node.tier, len(each.ids)) for each in node.path]
        self._store.touch(node)
        hit = self._raised(PrefixHit(self, node, at))
        for tier, num_tokens in found[: len(hit.nodes)]:
            self.found_tokens[tier] += num_tokens
        self.make_room()
        return hit

    def hold(self, ids: Sequence[int], key: str) -> PrefixHit:
        """Hold what is stored of a text, whether it can go on after that or not."""
        return PrefixHit(self, *self._texts.walk(ids, key))

    def has_states_alone(self, key: str) -> bool:
        """Whether texts of a key have no keys and values, but states alone."""
        return self._kind(key).has_states_alone

    def num_stored(self, ids: Sequence[int], key: str) -> int:
        """Length in tokens of the longest stored prefix after which a text can go on; this counts as no use of it."""
        nodes, at = self._texts.known(ids, key)
        return _end_of_last_snapshot(nodes, at) if self._kind(key).has_states else at

    def insert(
        self,
        ids: Sequence[int],
        layers_TKX: Sequence[Tensor],
        key: str,
        *,
        start: int = 0,
        own: Sequence[int] | None = None,
        is_needed: bool = False,
        copies: bool = False,
    ) -> PrefixHit:
        """Store what is not stored of a text, and hold all that is.

        Nothing is stored if the tokens before `start` are not, or if the text is larger than the tree may be.

        Args:
            ids: the whole text.
            layers_TKX: keys and values of its tokens from `start` on in each layer, (T, K, H + V). Nobody may change
                them.
            own: indices of those of these tokens that are given, ascending, where other stages store the others, and
                those before `start`; None: all are.
            is_needed: store it also if it is larger than the tree may be, for as long as it is held.
            copies: store copies, since the memory will have other tokens.
        """
        self._store.collect()
        needs_all, own = own is None, range(start, len(ids)) if own is None else own
        assert all(len(layer) == len(own) for layer in layers_TKX), (len(ids), start, own)
        ids, given = ids[: own[-1] + 1 if own else start], LayerRows.from_tensors(layers_TKX)
        if not needs_all:
            self._texts.walk(ids[:start], key)  # so that a node begins there
        node, at = self._texts.walk(ids, key)
        end = 0
        for each in node.path:
            begin, end = end, end + len(each.ids)
            first, last = bisect_left(own, begin), bisect_left(own, end)
            if begin >= start and first < last and layers_TKX:
                self._fill(each, given.part(first, last), moved(own[first:last], -begin), copies)
            if not each.is_attached:  # it was found to be lost
                node, at = self._texts.walk(ids, key)
                break
        hit = self._raised(PrefixHit(self, node, at))
        first = bisect_left(own, at)
        if hit.num_tokens == at < len(ids) and (at >= start or not needs_all):
            rows = given.part(first, len(own)) if layers_TKX else NO_ROWS
            if is_needed or rows.num_bytes <= self.limit_bytes:
                numbers = () if self.has_states_alone(key) else moved(own[first:], -at)
                new = self._added_text(node, ids[at:], numbers)
                self._store.put(new, rows.cloned() if copies and layers_TKX else rows)
                held, hit = hit, PrefixHit(self, new, len(ids))
                held.release()
                self.on_change(self._stored(new))
        self._store.touch(node)
        self.make_room()
        return hit

    def keep_states(self, ids: Sequence[int], key: str, rows: Sequence[Tensor], *, is_needed: bool = False) -> None:
        """Keep the states after a text, if all of it is stored.

        Args:
            rows: of each layer that holds a state, (1, 1, bytes), in memory of their own.
            is_needed: also if they are larger than the tree may be, until room is made.
        """
        if self._texts.known(ids, key)[1] < len(ids):
            return
        node, _ = self._texts.walk(ids, key)
        if node.parent is None or node.snapshot is not None:
            return
        given = LayerRows.from_tensors(rows)
        if is_needed or given.num_bytes <= self.limit_bytes:
            self._store.put(new := self._added_snapshot(node), given)
            self.on_change(self._stored(new))
            self._store.touch(new)
            if not is_needed:
                self.make_room()

    def _added_text(self, node: PrefixNode, ids: Sequence[int], numbers: Sequence[int] = ()) -> PrefixNode:
        """A new node with tokens after a node, whose rows have no place yet. `numbers` is as of `PrefixNode`."""
        copies = self._kind(node.key).copies
        return self._texts.add(
            PrefixNode(key=node.key, ids=tuple(ids), numbers=numbers, copies=copies, parent=node, used=node.used)
        )

    def _added_snapshot(self, node: PrefixNode) -> PrefixNode:
        """A new snapshot after a node, without a place."""
        copies, now = self._kind(node.key).copies_of_states, self._store.now()
        return self._texts.add(PrefixNode(key=node.key, numbers=range(1), copies=copies, parent=node, used=now))

    def _stored(self, node: PrefixNode) -> Stored:
        states = node.is_snapshot if self._kind(node.key).has_states else None
        return Stored(key=node.key, ids=node.text, states=states)

    def _kind(self, key: str) -> TextKind:
        return self._kinds[unsalted(key)]

    def _fill(self, node: PrefixNode, given: LayerRows, numbers: Sequence[int], copies: bool) -> None:
        """Let a node have tokens that are given: anew, or in place of those that another stage had stored.

        Args:
            copies: as of `insert`.
        """
        new = set(numbers)
        others = [row for row, number in enumerate(node.numbers) if number not in new]
        if len(numbers) + len(others) > node.num_tokens:
            merged = [*numbers, *(node.numbers[row] for row in others)]
            order = sorted(range(len(merged)), key=merged.__getitem__)
            if others:
                try:
                    layers = [
                        torch.cat([new_TKX, old_TKX[others]])[order]
                        for new_TKX, old_TKX in zip(given, node.layers_TKX, strict=True)
                    ]
                except LostRows:
                    self._lose(node)
                    return
                given, copies = LayerRows.from_tensors(layers), False
            self._store.remove(node)
            node.numbers, node.copies = [merged[row] for row in order], self._kind(node.key).copies
            node.places, node.file = {}, None
            self._store.put(node, given.cloned() if copies else given)
        elif node.tier is not Tier.device and not others:
            self._store.put(node, given.cloned() if copies else given)

    def apply(self, change: Change) -> None:
        """Do what another tree has done, in this one, which has its texts without keys and values."""
        if isinstance(change, Stored):
            if change.states is not None:
                self._kind(change.key).has_states = True
            if change.states:
                self.keep_states(change.ids, change.key, [])
            else:
                self.insert(change.ids, [], change.key).release()
            return
        node, at = self._texts.walk(change.ids[: change.num_left], change.key)
        assert at == change.num_left, (at, change.num_left)
        first = change.ids[at] if at < len(change.ids) else SNAPSHOT
        if (child := node.children.get(first)) is not None:
            self._texts.remove(child)

    def prefetch(self, texts: Sequence[tuple[Sequence[int], str]]) -> None:
        """Note which texts are asked for next, the first one first, in place of those that were noted before.

        Each comes with its key. What they need goes last from every tier, and is brought from disk to host memory as
        far as it has room there.
        """
        self._store.collect()
        for node in self._needed:
            for each in takewhile(lambda each: each.turn is not None, node.path[::-1]):  # it may be split meanwhile
                each.turn = None
        self._needed = list(dict.fromkeys(node for ids, key in texts for node in self._needed_by(ids, key)))
        for turn, node in enumerate(self._needed):
            node.turn = turn
        if self._store.files is not None:
            self._store.files.keep = frozenset(node.file.name for node in self._needed if node.file is not None)
        room = self._host_bytes - sum(node.num_bytes for node in self._needed if node.tier is Tier.host)
        for node in self._needed:
            if node.tier is Tier.disk and node.is_attached:
                assert node.copies is not None
                room -= node.copies.stored_token_bytes * node.num_tokens
                if room < 0:
                    break
                if not self._store.to_host(node):
                    self._lose(node)
        self.make_room()

    def _needed_by(self, ids: Sequence[int], key: str) -> list[PrefixNode]:
        """The nodes with which a text begins, and the states after which it can go on."""
        nodes, at = self._texts.known(ids, key)
        if not self._kind(key).has_states:
            return nodes
        end = _end_of_last_snapshot(nodes, at)
        nodes, _ = self._texts.known(ids[:end], key)
        last = nodes[-1].snapshot if end else None
        return nodes if last is None else [*nodes, last]

    def released(self, end: PrefixNode) -> None:
        """Called when nobody holds the nodes up to this one on behalf of a text any more."""
        if self.has_states_alone(end.key):
            while not end.is_attached and end.parent is not None:  # it was lost meanwhile
                end = end.parent
            left = self._texts.remove_bare(end)
            if left is not end:
                self.on_change(Dropped(key=end.key, ids=end.text, num_left=len(left.text)))
        self.make_room()

    def make_room(self) -> None:
        """Let texts that nobody holds leave, until the limits are kept."""
        self._store.make_room()

    def save(self, timeout_s: float | None = None) -> None:
        """Write all texts to the folder, as far as there is room and time, those that were used last first."""
        end_s = inf if timeout_s is None else time.monotonic() + timeout_s

        def wait() -> None:
            self.wait_for_copies(None if timeout_s is None else max(0.0, end_s - time.monotonic()))

        for node in sorted(self.nodes(), key=lambda node: -node.used):
            if node.is_attached and node.file is None and time.monotonic() < end_s:
                self._store.save(node)
                wait()  # one at a time has room in memory
        wait()  # also files that were begun before

    def wait_for_copies(self, timeout_s: float | None = None) -> None:
        """Wait until all copies and files that were begun are there, and drop what could not be kept."""
        self._store.wait_for_copies(timeout_s)

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, each after its parent."""
        yield from self._texts

    def _raised(self, hit: PrefixHit) -> PrefixHit:
        """Begin to bring what is held to the device. Returns what is held then: less, where a part is lost."""
        nodes, limit, total = hit.all_nodes, self.limit_bytes, 0
        if all(node.tier is Tier.device for node in nodes):
            return hit
        for end, node in enumerate(nodes):
            total += self._device_bytes(node)
            if node.tier is not Tier.device and total > limit:  # of an earlier process, whose limit was higher
                return self._shortened(hit, nodes[:end])
        for end, node in enumerate(nodes):
            if self._store.bring(node, needed=True) is None:
                shorter = self._shortened(hit, nodes[:end])
                self._lose(node)
                return shorter
        return hit

    def _shortened(self, hit: PrefixHit, nodes: Sequence[PrefixNode]) -> PrefixHit:
        """Hold only the first nodes of a hit, to the last after which a text can go on."""
        key, nodes = hit.all_nodes[0].key, list(nodes)
        if hit.snapshot is not None:
            while nodes and nodes[-1].snapshot in (None, hit.snapshot):
                nodes.pop()
            nodes += [snapshot for node in nodes[-1:] if (snapshot := node.snapshot) is not None]
        shorter = PrefixHit(self, nodes[-1] if nodes else PrefixNode(key=key), sum(len(node.ids) for node in nodes))
        hit.release()
        return self._raised(shorter) if shorter.snapshot is not None else shorter

    def _device_bytes(self, node: PrefixNode) -> int:
        """Bytes of a node's rows on the device."""
        return node.num_bytes if node.copies is None else node.copies.token_bytes * node.num_tokens

    def _stored_key(self, key: str) -> str:
        """Key of a text's files: of other bits, other numbers."""
        of_model, salt = unsalted(key), key.partition(SALT)[2]
        return key if self._bits is None else salted(f"{of_model} in {self._bits} bits", salt)

    def _file_of(self, entry: PrefixNode, around: tuple[int, int]) -> FileAbout:
        run = PrefixRun.of(entry, self._stored_key(entry.key), around)
        return FileAbout(name=run.name, title="states" if run.is_snapshot else "prefix", metadata=run.metadata)

    def _lose(self, entry: PrefixNode) -> None:
        """Drop a node and all that follow it, and tell."""
        if entry.is_attached:
            text = entry.text
            self._texts.remove(entry)
            assert entry.parent is not None
            left = self._texts.remove_bare(entry.parent)
            self.on_change(Dropped(key=entry.key, ids=text, num_left=len(left.text)))


def _end_of_last_snapshot(nodes: Sequence[PrefixNode], at: int) -> int:
    """Number of tokens of a text up to its last snapshot, of the nodes with its first `at` tokens; 0 if it has none."""
    end = found = 0
    for node in nodes:
        end += len(node.ids)
        if end <= at and node.snapshot is not None:
            found = end
    return found
