"""A node of a prefix tree: a run of tokens, with their keys and values or the place where these are."""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runahead.reuse.tree.layer_rows import NO_ROWS, LayerRows
from runahead.reuse.tree.prefix_files import FileRows
from runahead.reuse.tree.tiers import Tier


@dataclass(eq=False, repr=False, kw_only=True)
class PrefixNode:
    """A run of tokens.

    Attributes:
        key: of the texts that it belongs to.
        ids: token ids; none in the root of a key.
        tier: where its keys and values are.
        layers_TKX: keys and values of each layer, (T, K, H + V), on the device or in host memory.
        file: where they are on disk, also while they are in memory; None: nowhere.
        parent: the node before; None for a root.
        children: the nodes after it, by their first token.
        num_hits: hits that are held and include it.
        used: time of its last use in ns; no two uses have the same, and no node is used without those before it.
        turn: number of the first text that will soon need it; None if none is known.
    """

    key: str
    ids: tuple[int, ...] = ()
    tier: Tier = Tier.device
    layers_TKX: LayerRows = NO_ROWS
    file: FileRows | None = None
    parent: PrefixNode | None = None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    num_hits: int = 0
    used: int = 0
    turn: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values in memory."""
        return self.layers_TKX.num_bytes

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
    def is_free_leaf(self) -> bool:
        """Whether it may leave its tier: nobody holds it, and no node after it is there."""
        is_last = all(child.tier is not self.tier for child in self.children.values())
        return is_last and self.num_hits == 0 and self.parent is not None

    @property
    def is_attached(self) -> bool:
        """Whether it is still in the tree."""
        node = self
        while node.parent is not None:
            if node.parent.children.get(node.ids[0]) is not node:
                return False
            node = node.parent
        return True

    @property
    def file_times_ns(self) -> dict[str, int]:
        """Times of the last use of the text's files by name, each later than those of all that follow it."""
        return {each.file.name: each.used - depth for depth, each in enumerate(self.path) if each.file is not None}

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
        rows = self.layers_TKX
        before = replace(
            self,  # all hits end after it
            ids=self.ids[:num_tokens],
            layers_TKX=rows.part(0, num_tokens) if rows else NO_ROWS,
            children={self.ids[num_tokens]: self},
        )
        if self.file is not None:
            self.file = replace(self.file, first=self.file.first + num_tokens)
        self.parent.children[before.ids[0]] = before
        self.parent, self.ids = before, self.ids[num_tokens:]
        self.layers_TKX = rows.part(num_tokens, rows.stop - rows.start) if rows else NO_ROWS
        return before
