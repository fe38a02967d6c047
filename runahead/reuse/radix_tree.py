"""Radix tree of texts: each is a path of nodes, found by its tokens, and a node is split where texts part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.tiers.store import TieredStore


class RadixTree:
    """Texts as paths of nodes. Texts of different keys have nothing in common.

    Args:
        store: of the nodes' rows.
    """

    def __init__(self, store: TieredStore[PrefixNode]) -> None:
        self._store = store
        self._roots: dict[str, PrefixNode] = {}

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes, each after its parent."""
        for root in list(self._roots.values()):
            waiting = list(root.children.values())
            while waiting:
                yield (node := waiting.pop())
                waiting += node.children.values()

    def known(self, ids: Sequence[int], key: str) -> tuple[list[PrefixNode], int]:
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

    def walk(self, ids: Sequence[int], key: str) -> tuple[PrefixNode, int]:
        """The node with which the longest stored prefix ends, split off if need be, and the length of that prefix.

        It counts as a use of that prefix.
        """
        nodes, at = self.known(ids, key)
        path, now = [self._roots.get(key) or PrefixNode(key=key), *nodes], self._store.now()
        if num_others := sum(len(node.ids) for node in nodes) - at:
            path[-1] = self._split(path[-1], len(path[-1].ids) - num_others)
        for node in path:
            node.used = now
        return path[-1], at

    def _split(self, node: PrefixNode, num_tokens: int) -> PrefixNode:
        """Let a node begin after its first tokens. Returns the new node before it, which has these."""
        before = node.split(num_tokens)
        self._store.share(node, before)
        for each in (before, node):
            if not each.numbers:
                self._store.remove(each)
                each.forget()
        return before

    def add(self, node: PrefixNode) -> PrefixNode:
        """Let a new node come after its parent."""
        assert node.parent is not None
        node.parent.children[node.first] = node
        if node.parent.parent is None:
            self._roots[node.key] = node.parent
        return node

    def remove(self, node: PrefixNode) -> None:
        """Drop a node and all that follow it."""
        for child in list(node.children.values()):
            self.remove(child)
        assert node.parent is not None
        del node.parent.children[node.first]
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.key, None)  # there may be a salt for each request
        self._store.remove(node)

    def remove_bare(self, node: PrefixNode) -> PrefixNode:
        """Drop a node and those before it, as far as they have no rows here, and nothing follows or holds them.

        Returns:
            the last node that is left.
        """
        while node.parent is not None and not (node.numbers or node.children or node.holds):
            self.remove(node)
            node = node.parent
        return node
