"""Prefix tree: keys and values of earlier texts by their token ids, found by the texts that begin with the same tokens.

As RadixAttention (Zheng et al., NeurIPS 2024) keeps them, but for its pages: a prefix ends at any token. A node holds
a run of tokens with their keys and values in every layer, as views of the memory in which they were computed, so that
it is stored and split without a copy. A view keeps its whole allocation alive. So bytes are counted per allocation, and
nodes get memory of their own where less than half of an allocation is in the tree.

Only one thread uses a tree.
"""

# Legend: T tokens of a node, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor


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


@dataclass(eq=False, repr=False, kw_only=True)
class PrefixNode:
    """A run of tokens.

    Attributes:
        key: of the texts that it belongs to.
        ids: token ids; none in the root of a key.
        layers_TKX: keys and values of each layer, (T, K, H + V).
        parent: the node before; None for a root.
        children: the nodes after it, by their first token.
        num_hits: hits that are held and include it.
        used: number of its last use; a later one is larger.
    """

    key: str
    ids: tuple[int, ...] = ()
    layers_TKX: list[Tensor] = field(default_factory=list)
    parent: PrefixNode | None = None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    num_hits: int = 0
    used: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers_TKX)

    @property
    def path(self) -> list[PrefixNode]:
        """The nodes from the first token of the text to this one."""
        nodes, node = list[PrefixNode](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def is_free_leaf(self) -> bool:
        return not self.children and self.num_hits == 0 and self.parent is not None


@dataclass(eq=False, repr=False, kw_only=True)
class _Memory:
    """Allocations of the layers of some nodes.

    Attributes:
        num_bytes: allocated.
        live_bytes: of the nodes.
    """

    num_bytes: int
    live_bytes: int = 0
    nodes: set[PrefixNode] = field(default_factory=set)

    @property
    def is_wasted(self) -> bool:
        """Whether less than half of it is in the tree, and nobody reads it: a copy would not free what is read."""
        return 2 * self.live_bytes < self.num_bytes and not any(node.num_hits for node in self.nodes)


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
    the model with its weights and dtype, and what its positions mean.

    Args:
        limit_bytes: most bytes of all allocations of which the tree holds parts. What is held may exceed them.
        on_change: called with every change of what is stored.

    Attributes:
        num_bytes: bytes of these allocations.
    """

    def __init__(self, limit_bytes: float, *, on_change: Callable[[Change], object] = lambda change: None) -> None:
        self.limit_bytes, self.on_change = limit_bytes, on_change
        self.num_bytes = 0
        self._roots: dict[str, PrefixNode] = {}
        self._memories: dict[tuple[int, ...], _Memory] = {}
        self._uses = count(1)

    def match(self, ids: Sequence[int], key: str) -> PrefixHit:
        """Find and hold the longest stored prefix of a text."""
        return PrefixHit(self, *self._walk(ids, key))

    def num_stored(self, ids: Sequence[int], key: str) -> int:
        """Length in tokens of the longest stored prefix of a text, which counts as no use of it."""
        node, at = self._roots.get(key), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is not None:
                same = _num_same(node.ids, ids, at)
                at += same
                if same < len(node.ids):
                    break
        return at

    def insert(self, ids: Sequence[int], layers_TKX: Sequence[Tensor], key: str, *, start: int = 0) -> PrefixHit:
        """Store what is not stored of a text, and hold all that is.

        Nothing is stored if the tokens before `start` are not, or if the text is larger than the tree may be.

        Args:
            ids: the whole text.
            layers_TKX: keys and values of its tokens from `start` on in each layer, (T, K, H + V). Nobody may change
                them.
        """
        node, at = self._walk(ids, key)
        if start <= at < len(ids):
            assert all(len(layer) == len(ids) - start for layer in layers_TKX), (len(ids), start)
            layers = [layer[at - start :] for layer in layers_TKX]
            new = PrefixNode(key=key, ids=tuple(ids[at:]), layers_TKX=layers, parent=node, used=next(self._uses))
            if new.num_bytes <= self.limit_bytes:
                node.children[new.ids[0]] = new
                self._add(new)
                node, at = new, len(ids)
                self.on_change(Stored(key=key, ids=tuple(ids)))
        hit = PrefixHit(self, node, at)
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

    def make_room(self) -> None:
        """Free memory: move what is left of wasted allocations, and drop leaves until the limit is kept."""
        for memory in [each for each in self._memories.values() if each.is_wasted]:
            self._move(memory)
        if self.num_bytes <= self.limit_bytes:
            return
        nodes = (node for memory in self._memories.values() for node in memory.nodes)
        order = count()
        leaves = [(node.used, next(order), node) for node in nodes if node.is_free_leaf]
        heapq.heapify(leaves)
        while leaves and self.num_bytes > self.limit_bytes:
            _, _, leaf = heapq.heappop(leaves)
            parent, ids = leaf.parent, tuple(token for node in leaf.path for token in node.ids)
            assert parent is not None
            rest = self._remove(leaf)
            self.on_change(Dropped(key=leaf.key, ids=ids, num_left=len(ids) - len(leaf.ids)))
            if parent.is_free_leaf:
                heapq.heappush(leaves, (parent.used, next(order), parent))
            if rest is not None and rest.nodes and rest.is_wasted:
                self._move(rest)

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, each after its parent."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            yield (node := waiting.pop())
            waiting += node.children.values()

    def _walk(self, ids: Sequence[int], key: str) -> tuple[PrefixNode, int]:
        """The node with which the longest stored prefix ends, split off if need be, and the length of that prefix."""
        node, at, now = self._roots.setdefault(key, PrefixNode(key=key)), 0, next(self._uses)
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = _num_same(child.ids, ids, at)
            node, at = child if same == len(child.ids) else self._split(child, same), at + same
            node.used = now
        return node, at

    def _split(self, node: PrefixNode, num_tokens: int) -> PrefixNode:
        """Let a node begin after its first tokens. Returns the new node before it, which has these."""
        assert node.parent is not None
        before = PrefixNode(
            key=node.key,
            ids=node.ids[:num_tokens],
            layers_TKX=[layer[:num_tokens] for layer in node.layers_TKX],
            parent=node.parent,
            children={node.ids[num_tokens]: node},
            num_hits=node.num_hits,  # all of them end after it
            used=node.used,
        )
        if node.layers_TKX:
            self._memories[_allocations(node)].nodes.add(before)
        node.parent.children[before.ids[0]] = before
        node.parent, node.ids = before, node.ids[num_tokens:]
        node.layers_TKX = [layer[num_tokens:] for layer in node.layers_TKX]
        return before

    def _add(self, node: PrefixNode) -> None:
        """Count a node's memory."""
        if not node.layers_TKX:
            return
        where = _allocations(node)
        if where not in self._memories:
            storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, node.layers_TKX)}
            self._memories[where] = _Memory(num_bytes=sum(each.nbytes() for each in storages.values()))
            self.num_bytes += self._memories[where].num_bytes
        self._memories[where].nodes.add(node)
        self._memories[where].live_bytes += node.num_bytes

    def _remove(self, node: PrefixNode) -> _Memory | None:
        """Drop a node and all that follow it. Returns its memory, as far as others have parts of it."""
        for child in list(node.children.values()):
            self._remove(child)
        assert node.parent is not None
        del node.parent.children[node.ids[0]]
        return self._forget(node)

    def _forget(self, node: PrefixNode) -> _Memory | None:
        """Count a node's memory no longer."""
        if not node.layers_TKX:
            return None
        memory = self._memories[where := _allocations(node)]
        memory.nodes.remove(node)
        memory.live_bytes -= node.num_bytes
        if not memory.nodes:
            self.num_bytes -= memory.num_bytes
            del self._memories[where]
        return memory

    def _move(self, memory: _Memory) -> None:
        """Give the nodes of an allocation memory of their own."""
        for node in list(memory.nodes):
            self._forget(node)
            node.layers_TKX = [layer.clone(memory_format=torch.contiguous_format) for layer in node.layers_TKX]
            self._add(node)


def _allocations(node: PrefixNode) -> tuple[int, ...]:
    """Identify the allocations of a node's layers, as long as one of its tensors lives."""
    return tuple(layer.untyped_storage().data_ptr() for layer in node.layers_TKX)


def _num_same(of_node: tuple[int, ...], ids: Sequence[int], at: int) -> int:
    """Number of tokens of a node with which a text goes on at an index."""
    text = tuple(ids[at : at + len(of_node)])
    most = len(text)
    if of_node[:most] == text:
        return most
    low, high = 0, most  # the first `low` are the same, and not the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        if of_node[low:middle] == text[low:middle]:
            low = middle
        else:
            high = middle
    return low
