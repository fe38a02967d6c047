"""Layout of a schema for a model: token ids and positions of every module (paper, section 3.3).

The position of a module follows from everything before it in the schema, whether or not a prompt imports that. Members
of a union start at the same position; what follows a union comes after its longest member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.schema import Node, Param, Role, Schema, Union
from policies.reuse import Segment

OUTSIDE = ""
"""Name of the text outside of modules, which is part of every prompt."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Positions that are reserved for the argument of a parameter."""

    param: str
    start: int
    num_tokens: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """Tokens of a module, without those of modules inside of it.

    Attributes:
        name: name of the module.
        ids, positions: its tokens and their positions, ascending, including placeholders of its slots.
        slots: positions of its parameters.
        start, end: range of all its positions, including those of modules inside of it.
        parent: module that contains it.
        union: number of the union that it is a member of.
        pinned: whether it stays in memory.
        line: its line in the schema.
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
        """Number of tokens whose keys and values are stored."""
        return len(self.ids) - sum(slot.num_tokens for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens and positions of a schema.

    Attributes:
        schema: schema that prompts are checked against.
        modules: modules in the order of the schema; the text outside of modules, if any, comes first.
        scaffolds: names of modules that are also encoded together.
        sinks: number of first tokens that all modules attend to while they are encoded.
        asks: whether the schema ends with a user's message, which the model answers.
        max_positions: number of positions of the model; None: no limit.
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
            schema: the schema.
            text: tokenizer and chat template of the model.
            max_positions: number of positions of the model; None: no limit.
            sinks: number of first tokens that all modules attend to.

        Raises:
            PMLError: a module exceeds the model's positions, a chat tag does not fit the model's chat template, or the
                schema does not begin with `sinks` tokens outside of modules.
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
        """All segments that prompts may use: one per module, and one per scaffold."""
        alone = [self.segment((module.name,)) for module in self.modules if module.num_cached]
        return alone + [self.segment(self.scaffold_modules(names)) for names in self.scaffolds]

    def scaffold_modules(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Modules that are encoded together: those of the scaffold, and the text outside of modules, if any."""
        return (OUTSIDE, *names) if OUTSIDE in self.by_name else names

    def segment(self, names: tuple[str, ...]) -> Segment:
        """Segment of modules that attend to each other. It is made once."""
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
        """The first tokens, or None if some of them are in modules or are placeholders."""
        outside = self.by_name.get(OUTSIDE)
        if outside is None or outside.positions[: self.sinks] != tuple(range(self.sinks)):
            return None
        if any(slot.start < self.sinks for slot in outside.slots):
            return None
        return list(outside.ids[: self.sinks])


class _Own:
    """Tokens of a module that are being collected."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[Slot] = []

    def add(self, ids: list[int], start: int) -> None:
        self.ids += ids
        self.positions += range(start, start + len(ids))


class _Walk:
    """Assigns positions by walking through a schema once."""

    def __init__(self, schema: Schema, text: ModelText, max_positions: int | None) -> None:
        self._schema, self._text, self._max_positions = schema, text, max_positions
        self._at = 0
        self._num_unions = 0
        self._unions: dict[str, int] = {}
        self._own = {OUTSIDE: _Own(0)}
        if not isinstance(schema.children[0], Role):  # a chat template brings its own first tokens
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
