"""Where every token of a schema stands for a model: modules' token ids and positions, as a value (paper, section 3.3).

A module's position is fixed by what is in front of it in the schema, whether or not a prompt imports that. Members of a
union share their start, and what follows a union stands behind its longest member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.schema import Node, Param, Role, Schema, Union
from policies.reuse import Segment

OUTSIDE = ""
"""The name of the text outside of modules, which every prompt has."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where an argument goes."""

    param: str
    start: int
    num_tokens: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """A module's own tokens: those of modules inside of it are theirs.

    Attributes:
        ids, positions: by ascending position, placeholders of its slots among them.
        start, end: all positions that it takes, with the modules inside of it.
        union: number of the union that it is a member of.
        line: in the schema.
    """

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[Slot, ...]
    start: int
    end: int
    parent: str | None = None
    union: int | None = None
    pinned: bool = False
    line: int | None = None

    @property
    def num_cached(self) -> int:
        """Tokens whose K,V are stored."""
        return len(self.ids) - sum(slot.num_tokens for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A schema's tokens and positions.

    Attributes:
        schema: what prompts are checked against.
        modules: in the order of the schema; the text outside of modules, if there is any, first.
        scaffolds: names of modules that are also encoded together.
        sinks: tokens at the beginning that all modules see while they are encoded.
        asks: the schema ends with a user's message, which the model is to answer.
        max_positions: of the model.
    """

    schema: Schema = field(repr=False)
    modules: tuple[ModuleLayout, ...]
    scaffolds: tuple[tuple[str, ...], ...]
    sinks: int
    asks: bool
    max_positions: int | None

    @classmethod
    def of(cls, schema: Schema, text: ModelText, *, max_positions: int | None = None, sinks: int = 0) -> Layout:
        """Lay out a schema.

        Args:
            text: of the model.
            max_positions: of the model, if it has an end.
            sinks: so many tokens at the beginning are seen by all modules.

        Raises:
            PMLError: a module lies beyond the model's positions, a chat tag does not fit the model's chat template, or
                the schema does not begin with so many tokens outside of modules.
        """
        walk = _Walk(schema, text, max_positions)
        walk.visit(schema.children, OUTSIDE)
        last = schema.children[-1]
        layout = cls(
            schema=schema,
            modules=walk.modules(),
            scaffolds=tuple(scaffold.modules for scaffold in schema.scaffolds),
            sinks=sinks,
            asks=isinstance(last, Role) and last.role == "user",
            max_positions=max_positions,
        )
        if sinks and layout._sink_tokens is None:
            raise schema.error(
                None, None, f"policy.sinks={sinks} needs a schema that begins with as many tokens outside of modules"
            )
        return layout

    @cached_property
    def by_name(self) -> dict[str, ModuleLayout]:
        return {module.name: module for module in self.modules}

    @property
    def num_positions(self) -> int:
        return max((module.end for module in self.modules), default=0)

    @property
    def segments(self) -> list[Segment]:
        """All that prompts may use: every module, and every scaffold."""
        alone = [self.segment((module.name,)) for module in self.modules if module.num_cached]
        return alone + [self.segment(self.scaffold_modules(names)) for names in self.scaffolds]

    def scaffold_modules(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Modules that are encoded together: those of the scaffold, and the text outside, which is always there."""
        return (OUTSIDE, *names) if OUTSIDE in self.by_name else names

    def segment(self, names: tuple[str, ...]) -> Segment:
        """The segment of modules that see each other. It is put together once."""
        if names not in self._segments:
            self._segments[names] = self._made(names)
        return self._segments[names]

    @cached_property
    def _segments(self) -> dict[tuple[str, ...], Segment]:
        return {}

    def _made(self, names: tuple[str, ...]) -> Segment:
        modules = [self.by_name[name] for name in names]
        tokens = sorted(
            (position, token)
            for module in modules
            for position, token in zip(module.positions, module.ids, strict=True)
        )
        positions = tuple(position for position, _ in tokens)
        index_at = {position: index for index, position in enumerate(positions)}
        slots = sorted(slot.start for module in modules for slot in module.slots)
        lengths = {slot.start: slot.num_tokens for module in modules for slot in module.slots}
        sinks = [] if OUTSIDE in names else (self._sink_tokens or [])
        return Segment(
            name=" + ".join(name or "(outside)" for name in names),
            ids=tuple(token for _, token in tokens),
            positions=positions,
            placeholders=tuple(range(index_at[start], index_at[start] + lengths[start]) for start in slots),
            context_ids=tuple(sinks),
            context_positions=tuple(range(len(sinks))),
            pinned=any(module.pinned for module in modules),
        )

    @cached_property
    def _sink_tokens(self) -> list[int] | None:
        """The first tokens, if they are all outside of modules and no placeholders."""
        outside = self.by_name.get(OUTSIDE)
        if outside is None or outside.positions[: self.sinks] != tuple(range(self.sinks)):
            return None
        if any(slot.start < self.sinks for slot in outside.slots):
            return None
        return list(outside.ids[: self.sinks])


class _Own:
    """A module's tokens while they are collected."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[Slot] = []

    def add(self, ids: list[int], start: int) -> None:
        self.ids += ids
        self.positions += range(start, start + len(ids))


class _Walk:
    """Goes through a schema once, a position at a time."""

    def __init__(self, schema: Schema, text: ModelText, max_positions: int | None) -> None:
        self._schema, self._text, self._max_positions = schema, text, max_positions
        self._at = 0
        self._num_unions = 0
        self._unions: dict[str, int] = {}
        self._own = {OUTSIDE: _Own(0)}
        if not isinstance(schema.children[0], Role):  # a chat template has its own beginning
            self._add(text.front, OUTSIDE, None)

    def visit(self, children: tuple[Node, ...], owner: str) -> None:
        for child in children:
            if isinstance(child, str):
                self._add(self._text.ids(child), owner, None)
            elif isinstance(child, Param):
                self._own[owner].slots.append(Slot(param=child.name, start=self._at, num_tokens=child.num_tokens))
                self._add([self._text.placeholder] * child.num_tokens, owner, child.line)
            elif isinstance(child, Role):
                self._role(child, owner)
            elif isinstance(child, Union):
                self._union(child)
            else:
                self._own[child.name] = _Own(self._at)
                self.visit(child.children, child.name)
                self._own[child.name].end = self._at

    def modules(self) -> tuple[ModuleLayout, ...]:
        self._own[OUTSIDE].end = self._at
        found = []
        for name, own in self._own.items():
            place = self._schema.places.get(name)
            if place is None and not own.ids:
                continue
            order = sorted(range(len(own.ids)), key=lambda index: own.positions[index])
            found.append(
                ModuleLayout(
                    name=name,
                    ids=tuple(own.ids[index] for index in order),
                    positions=tuple(own.positions[index] for index in order),
                    slots=tuple(own.slots),
                    start=own.start,
                    end=own.end,
                    parent=None if place is None else place.parent,
                    union=self._unions.get(name),
                    pinned=place is not None and place.module.pinned,
                    line=None if place is None else place.module.line,
                )
            )
        return tuple(found)

    def _role(self, role: Role, owner: str) -> None:
        try:
            before, after = self._text.message(role.role, first=self._at == 0)
        except ValueError as error:
            raise self._schema.error(role.line, role.role, str(error)) from error
        self._add(before, owner, role.line)
        self.visit(role.children, owner)
        self._add(after, owner, role.line)

    def _union(self, union: Union) -> None:
        start, end = self._at, self._at
        self._num_unions += 1
        self._unions |= {member.name: self._num_unions for member in union.members}
        for member in union.members:
            self._at = start
            self.visit((member,), OUTSIDE)
            end = max(end, self._at)
        self._at = end

    def _add(self, ids: list[int], owner: str, line: int | None) -> None:
        self._own[owner].add(ids, self._at)
        self._at += len(ids)
        if self._max_positions is not None and self._at > self._max_positions:
            place = self._schema.places.get(owner)
            line = line if line is not None or place is None else place.module.line
            what = f"module {owner}" if owner else "the text outside of modules"
            raise self._schema.error(
                line,
                "module" if owner else "schema",
                f"{what} reaches position {self._at:,} of the model's "
                f"{self._max_positions:,}; shorten it, or put modules that exclude each other into a union",
            )
