"""A node of a prefix tree: a run of tokens with the places of their keys and values, or a snapshot of states."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runahead.reuse.tiers.entry import Entry, Tier
from runahead.reuse.tiers.layer_rows import NO_ROWS

SNAPSHOT = -1
"""Takes the place of a first token where a node has states."""


@dataclass(eq=False, repr=False, kw_only=True)
class PrefixNode(Entry):
    """A run of tokens. No node is used without those before it.

    Of models whose layers hold states, a node may also be a snapshot: the states after the last token before it, which
    are one row. It has no tokens, and nothing follows it.

    Attributes:
        key: of the texts that it belongs to.
        ids: token ids; none in the root of a key, and in a snapshot.
        numbers: of those tokens whose keys and values are here, ascending; other stages have the others.
        parent: the node before; None for a root.
        children: the nodes after it, by their first token, and its snapshot.
        turn: number of the first text that will soon need it; None if none is known.
    """

    key: str
    ids: tuple[int, ...] = ()
    numbers: Sequence[int] = ()
    parent: PrefixNode | None = None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    turn: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.numbers)

    @property
    def first(self) -> int:
        """Its place among the children of the node before it."""
        return self.ids[0] if self.ids else SNAPSHOT

    @property
    def is_snapshot(self) -> bool:
        return self.parent is not None and not self.ids

    @property
    def snapshot(self) -> PrefixNode | None:
        """The states after its last token, if they are kept."""
        return self.children.get(SNAPSHOT)

    @property
    def path(self) -> list[PrefixNode]:
        """The nodes from the first token of the text to this one."""
        nodes, node = list[PrefixNode](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens from the first one to the last one of this node."""
        return tuple(token for node in self.path for token in node.ids)

    @property
    def may_leave(self) -> bool:
        """Whether no node after it has tokens in its tier."""
        return not any(child.reaches(self.tier) for child in self.children.values())

    def reaches(self, tier: Tier) -> bool:
        """Whether it has tokens whose fastest tier this is; if it has none at all, whether a node after it does."""
        if self.numbers:
            return self.tier is tier
        return any(child.reaches(tier) for child in self.children.values())

    @property
    def precedence(self) -> tuple[int, ...]:
        """Eviction order: nodes not needed by queued prompts first, then least recently used."""
        return self.turn is not None, -(self.turn or 0), self.used

    def before(self) -> list[PrefixNode]:
        return [node for node in self.path if node.numbers]

    def after(self) -> list[PrefixNode]:
        """The nodes with rows that come next; those between them have all their tokens on other stages."""
        children, found = list(self.children.values()), list[PrefixNode]()
        while children:
            node = children.pop()
            if node.numbers:
                found.append(node)
            else:
                children += node.children.values()
        return found

    def file_times_ns(self) -> dict[str, int]:
        """Times of the last use of a text's files by name, each later than those of all that follow it."""
        files = [(depth, each) for depth, each in enumerate(self.path) if each.file is not None]
        return {each.file.name: each.used - depth for depth, each in files if each.file is not None}

    @property
    def is_attached(self) -> bool:
        """Whether it is still in the tree."""
        node = self
        while node.parent is not None:
            if node.parent.children.get(node.first) is not node:
                return False
            node = node.parent
        return True

    def num_same(self, ids: Sequence[int], at: int) -> int:
        """Number of its tokens with which a text goes on at an index."""
        text = tuple(ids[at : at + len(self.ids)])
        most = len(text)
        if self.ids[:most] == text:
            return most
        low, high = 0, most  # the first `low` are the same, and not the first `high`
        while high - low > 1:
            middle = (low + high) // 2
            if self.ids[low:middle] == text[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def split(self, num_tokens: int) -> PrefixNode:
        """Begin after the first tokens. Returns the new node before it, which has these."""
        assert self.parent is not None
        num_before = bisect_left(self.numbers, num_tokens)
        before = replace(
            self,  # all hits end after it
            ids=self.ids[:num_tokens],
            numbers=self.numbers[:num_before],
            places={tier: rows.part(0, num_before) if rows else rows for tier, rows in self.places.items()},
            children={self.ids[num_tokens]: self},
        )
        if self.file is not None:
            self.file = replace(self.file, first=self.file.first + num_before)
        self.parent.children[before.ids[0]] = before
        self.parent, self.ids = before, self.ids[num_tokens:]
        self.numbers = moved(self.numbers[num_before:], -num_tokens)
        for tier, rows in self.places.items():
            self.places[tier] = rows.part(num_before, rows.num_tokens) if rows else rows
        return before

    def forget(self) -> None:
        """Have no keys and values, as after a split that leaves those of other stages alone."""
        assert not self.numbers, self.numbers
        self.places, self.copies, self.file = {Tier.device: NO_ROWS}, None, None


def moved(numbers: Sequence[int], by: int) -> Sequence[int]:
    """Numbers of tokens, counted from another one."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]
