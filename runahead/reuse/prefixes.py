"""Prefixes of one model's texts: what prompts reuse of earlier prompts and answers, and what is kept of them.

A prompt's last token is always computed, since its logits are needed. Keys and values stay where they were computed,
as views. Where stages decode together, each keeps what it has of a text, and all of them agree on how much of a prompt
they have together (`owners_of`), and which one of them gives which token. Of models with states a prefix ends where its
states were kept (`runahead/reuse/state_rows.py`).
"""

# Legend: B batch, T tokens, K kv heads, X = H + V key and value dims, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from runahead.attention.states import States
from runahead.cache.base import KVStore
from runahead.model.model import Model
from runahead.reuse.prefix_node import PrefixNode, moved
from runahead.reuse.prefix_tree import PrefixTree, salted
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.reuse.state_rows import row_shape, state_rows
from runahead.reuse.store import model_key
from runahead.reuse.tiers.layer_rows import Layers, RecomputedRows


class RowPrefix:
    """Prefix that one row reuses, and holds in the tree of its text so far, until it is released.

    Attributes:
        num_tokens: number of tokens that it reuses.
        num_cached: of these, tokens that were there before and are not lost.
        snapshots: number of first tokens of the row's text -> the states after them, which are kept with its prompt.
    """

    def __init__(self, tree: PrefixTree, key: str, ids: Sequence[int]) -> None:
        self._tree, self._key = tree, key
        self._hit = tree.match(ids, key)
        self.num_tokens = self.num_cached = self._hit.num_tokens
        self._given: set[int] | None = None
        self.snapshots: dict[int, Sequence[Tensor]] = {}

    @property
    def nodes(self) -> list[PrefixNode]:
        """The nodes that it holds, in the order of the text."""
        return self._hit.nodes

    @property
    def states(self) -> Sequence[Tensor] | None:
        """The states after the tokens that it reuses; None if it reuses none, or no layer holds any."""
        snapshot = self._hit.snapshot
        return None if snapshot is None else snapshot.layers_TKX

    @property
    def here(self) -> list[range]:
        """The tokens that this stage has, as runs."""
        if self._tree.has_states_alone(self._key):
            return _runs(range(self._hit.num_tokens))
        start, runs = 0, list[range]()
        for node in self.nodes:
            runs += _runs(moved(node.numbers, start))
            start += len(node.ids)
        return runs

    @property
    def num_alone(self) -> int:
        """Number of first tokens all of which this stage has."""
        end = 0
        for run in self.here:
            if run.start > end:
                break
            end = run.stop
        return end

    def agree(self, ids: Sequence[int], owners: Sequence[int], stage: int) -> None:
        """Reuse as many tokens as all stages together have.

        Args:
            ids: the prompt.
            owners: of each of these tokens, the stage that gives it.
            stage: this one.
        """
        if self._hit.num_tokens > len(owners):
            before, self._hit = self._hit, self._tree.match(ids[: len(owners)], self._key)
            before.release()
        self.num_tokens = self.num_cached = len(owners)
        if owners.count(stage) < len(owners):
            self._given = {at for at, owner in enumerate(owners) if owner == stage}

    def given(self, node: PrefixNode, start: int) -> Sequence[int]:
        """Those of a node's tokens that are here which this stage gives. `start` is the index of its first token."""
        if self._given is None:
            return range(node.num_tokens)
        return [row for row, number in enumerate(node.numbers) if start + number in self._given]

    def num_whole(self) -> int:
        """Wait for what is reused. Returns the number of first tokens of which no layer and no state is lost."""
        there = takewhile(lambda node: node.layers_TKX.are_whole(), self.nodes)
        num_there, snapshot = sum(len(node.ids) for node in there), self._hit.snapshot
        if snapshot is not None and not snapshot.layers_TKX.are_whole():
            num_there = min(num_there, self.num_tokens - 1)
        return num_there

    def extend(self, ids: Sequence[int], layers_TKX: Sequence[Tensor], states: Sequence[Tensor] | None = None) -> None:
        """Reuse a longer prefix, whose last tokens were computed for that.

        Args:
            ids: the whole prefix.
            layers_TKX: keys and values of its last tokens.
            states: after it, in layers that hold one.
        """
        before = self._hit
        self._hit = self._tree.insert(ids, layers_TKX, self._key, start=self.num_tokens, is_needed=True)
        before.release()
        if states is not None:
            self._tree.keep_states(ids, self._key, states, is_needed=True)
            before, self._hit = self._hit, self._tree.match(ids, self._key)
            before.release()
        self.num_tokens = self._hit.num_tokens

    def replace_lost(self, ids: Sequence[int], layers_TKX: Sequence[Tensor]) -> None:
        """Note that the last tokens of a prefix of what is reused were lost, and computed anew.

        Args:
            ids: the text up to them.
            layers_TKX: their keys and values.
        """
        before, num_lost = self._hit, len(layers_TKX[0])
        self._hit = self._tree.insert(ids, layers_TKX, self._key, start=len(ids) - num_lost, is_needed=True)
        before.release()
        self.num_cached -= num_lost

    def store(
        self,
        ids: Sequence[int],
        layers_TKX: Sequence[Tensor] | None,
        *,
        num_shared: int = 0,
        own: Sequence[int] | None = None,
        copies: bool = False,
    ) -> None:
        """Store the row's text so far.

        Args:
            ids: the whole text.
            layers_TKX: keys and values of the tokens after those that the row reused and shares, as views; None: not
                all are there.
            num_shared: tokens after the reused ones that belong to other rows, too, and were stored by one of them.
            own: indices of those of these tokens that this stage has; None: all.
            copies: as of `PrefixTree.insert`.
        """
        if layers_TKX is not None:
            start = self.num_tokens + num_shared
            if own is None and self._given is not None:
                own = range(start, len(ids))  # those before them may be on other stages
            before = self._hit
            self._hit = self._tree.insert(ids, layers_TKX, self._key, start=start, own=own, copies=copies)
            before.release()
            for num_tokens, states in self.snapshots.items():
                self.keep_states(ids[:num_tokens], states)
            self.snapshots = {}

    def note_states(self, num_new: int, states: States | None) -> None:
        """Let the states after what the row reuses and so many tokens more be kept once its text is stored.

        Args:
            states: of the row alone, which are copied; None: no layer holds any.
        """
        if states is not None:
            self.snapshots[self.num_tokens + num_new] = state_rows(states)

    def keep_states(self, ids: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keep the states after a text, if all of it is stored."""
        self._tree.keep_states(ids, self._key, states)

    def fork(self, ids: Sequence[int]) -> RowPrefix:
        """Prefix of another row of the same prompt, which holds what is stored of this text."""
        other = copy(self)
        other._hit, other.snapshots = self._tree.hold(ids, self._key), {}
        return other

    def release(self) -> None:
        """Let the tree drop what the row held."""
        self._hit.release()


class Prefixes:
    """A tree with the texts of one model, or with this stage's part of them, on a rank that decodes.

    Args:
        tree: may have texts of other models, too.
        least_new: last tokens of a prompt that are always computed.
        wire_bits: as `prefill.wire_bits`, which texts depend on; None: they do not.

    Attributes:
        key: of the model's texts that have no salt.
        token_bytes: bytes of a token's keys and values in all layers.
        state_bytes: bytes of the states after a text; 0 if no layer holds any.
        step: of texts with states: a text can go on after every so many tokens of a prompt, as far as there was room,
            and after all of it; 0: after all alone. None: after any token.
    """

    def __init__(self, model: Model, tree: PrefixTree, *, least_new: int = 1, wire_bits: int | None = None) -> None:
        self.tree, self._least_new = tree, least_new
        self.key = f"{model_key(model)} at original positions"
        if wire_bits is not None:
            self.key += f", of earlier ranks in {wire_bits} bits"
        self.token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
        states = [row_shape(shape) for shape in model.state_shapes]
        self.state_bytes = sum(shape.bytes_per_token() for shape in states)
        self.step = tree.snapshot_tokens if states else None
        tree.open(self.key, model.kv_shapes, model.device, states=states)

    def prefetch(self, texts: Sequence[tuple[Sequence[int], str]]) -> None:
        """Keep at hand what these texts, which will be asked for next, begin with. Each comes with its salt."""
        self.tree.prefetch([(ids, salted(self.key, salt)) for ids, salt in texts])

    def find(
        self,
        prompts: Sequence[Sequence[int]],
        most: Sequence[int] | None = None,
        *,
        in_parts: bool = False,
        salts: Sequence[str] = (),
    ) -> list[RowPrefix]:
        """Find the prefix of each prompt, held for its row.

        Args:
            most: tokens that each reuses at most; by default all but its last ones. With 0 it can still be stored.
            in_parts: other stages may have what this one lacks of them.
            salts: of the prompts, which reuse and are reused by those with the same; by default they have none.
        """
        ends = [max(0, len(ids) - self._least_new) for ids in prompts] if most is None else most
        keys = [salted(self.key, salt) for salt in salts or [""] * len(prompts)]
        found = [RowPrefix(self.tree, key, ids[:end]) for ids, end, key in zip(prompts, ends, keys, strict=True)]
        if not in_parts and any(prefix.num_alone < prefix.num_tokens for prefix in found):
            ends = [prefix.num_alone for prefix in found]
            for prefix in found:
                prefix.release()
            return self.find(prompts, ends, salts=salts)
        return found


def owners_of(here: Sequence[Sequence[range]]) -> list[int]:
    """The stage that gives each token of a prompt, up to the first one that no stage has.

    Args:
        here: the tokens that each stage has. Of several that have one the last gives it.
    """
    owners = [-1] * max((run.stop for runs in here for run in runs), default=0)
    for stage, runs in enumerate(here):
        for run in runs:
            owners[run.start : run.stop] = [stage] * len(run)
    return owners[: owners.index(-1)] if -1 in owners else owners


def _runs(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as runs of consecutive ones."""
    if isinstance(numbers, range) and numbers.step == 1:
        return [numbers] if numbers else []
    edges = [0, *(at for at, (low, high) in enumerate(pairwise(numbers), 1) if high > low + 1), len(numbers)]
    return [range(numbers[first], numbers[end - 1] + 1) for first, end in pairwise(edges) if first < end]


def store_prompts(
    prefixes: Sequence[RowPrefix], prompts: Sequence[Sequence[int]], cache: KVStore, logits_BV: Tensor
) -> None:
    """Store the prompts of a batch, but for those after which there are no numbers.

    Args:
        cache: their new tokens, padded on the left to the most that a prompt has.
        logits_BV: of their last tokens.
    """
    is_wrong = logits_BV.isnan().any(dim=-1).tolist()
    lengths = [len(ids) - prefix.num_tokens for ids, prefix in zip(prompts, prefixes, strict=True)]
    for row, (prefix, ids, length) in enumerate(zip(prefixes, prompts, lengths, strict=True)):
        if not is_wrong[row]:
            prefix.store(ids, cache.row_kv(row, max(lengths) - length, length))
        prefix.snapshots = {}


Compute = Callable[[Sequence[int], ReusedKV | None], Sequence[Tensor]]
"""Computes keys and values (T, K, H + V) of tokens in each layer, after what is reused of the tokens before them."""


def reused_kv(prompts: Sequence[Sequence[int]], prefixes: Sequence[RowPrefix], compute: Compute) -> ReusedKV | None:
    """Keys and values that the rows of a batch reuse, each node once for all rows that do; None if none reuses any.

    Args:
        compute: called for a node whose keys and values are found to be lost when a layer reads them.
    """
    if not any(prefix.num_tokens for prefix in prefixes):
        return None
    rows: dict[PrefixNode, list[int]] = {}
    starts: dict[PrefixNode, int] = {}
    for row, prefix in enumerate(prefixes):
        start = 0
        for node in prefix.nodes:
            rows.setdefault(node, []).append(row)
            starts[node] = start
            start += len(node.ids)
    parts: dict[PrefixNode, ReusedPart] = {}
    for node, users in rows.items():
        given = prefixes[users[0]].given(node, starts[node])
        if not given:
            continue
        layers: Sequence[Tensor] = node.layers_TKX
        if not node.layers_TKX.memory.is_there:
            before = [parts[each] for each in node.path[:-1]]
            anew = partial(_computed_anew, node.text, before, [prefixes[row] for row in users], compute)
            layers = RecomputedRows(node.layers_TKX, anew)
        positions_T = starts[node] + torch.tensor(node.numbers)
        if len(given) < node.num_tokens:
            layers, positions_T = _SomeRows(layers, given), positions_T[list(given)]
        parts[node] = ReusedPart(layers_TKX=layers, positions_T=positions_T, rows=tuple(users))
    return reused_prefixes(prompts, [prefix.num_tokens for prefix in prefixes], list(parts.values()))


class _SomeRows(Layers):
    """Some rows of each layer (T, K, H + V), copied when it is first read."""

    def __init__(self, rows: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, list(numbers)
        self._layers_TKX: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def layer(self, number: int) -> Tensor:
        if number not in self._layers_TKX:
            rows_TKX = self._rows[number]
            index_T = torch.tensor(self._numbers, device=rows_TKX.device)
            self._layers_TKX[number] = rows_TKX.index_select(0, index_T)
        return self._layers_TKX[number]


def _computed_anew(
    text: Sequence[int], before: Sequence[ReusedPart], users: Sequence[RowPrefix], compute: Compute
) -> Sequence[Tensor]:
    """Compute what follows these parts in a text, for all rows that reuse it, and store it."""
    start = sum(len(part.positions_T) for part in before)
    reused = reused_prefixes([text], [start], [replace(part, rows=(0,)) for part in before]) if before else None
    layers_TKX = compute(text[start:], reused)
    for user in users:
        user.replace_lost(text, layers_TKX)
    return layers_TKX


def reused_prefixes(
    prompts: Sequence[Sequence[int]], num_reused: Sequence[int], parts: list[ReusedPart], *, arrives: bool = False
) -> ReusedKV:
    """Tokens that a batch reuses if each prompt begins with so many that are in the parts; see `ReusedKV`."""
    ends = [len(ids) for ids in prompts]
    longest = max(end - num for end, num in zip(ends, num_reused, strict=True))
    positions = [
        [0] * (longest - (end - num)) + list(range(num, end)) for end, num in zip(ends, num_reused, strict=True)
    ]
    return ReusedKV(parts=parts, positions_BS=torch.tensor(positions), ends=ends, arrives=arrives)
