"""Layout of a schema for a model: token ids and positions of every module (paper, section 3.3).

The position of a module follows from everything before it in the schema, whether or not a prompt imports that. Members
of a union start at the same position; what follows a union comes after its longest member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.schema import Module, Node, Param, Role, Schema, Union
from policies.reuse import Segment

OUTSIDE = ""
"""Name of the text outside of modules, which is part of every prompt."""


@dataclass(kw_only=True)
class ModuleLayout:
    """Tokens of a module, without those of modules inside of it.

    Attributes:
        name: name of the module.
        start, end: range of all its positions, including those of modules inside of it.
        tokens: its token ids by position, ascending, including placeholders of its slots.
        slots: positions that are reserved for the arguments of its parameters, by their names.
        parent: module that contains it.
        union: number of the union that it is a member of.
        pinned: whether it stays in memory.
        line: its line in the schema.
    """

    name: str
    start: int = 0
    end: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    slots: dict[str, range] = field(default_factory=dict)
    parent: str | None = None
    union: int | None = None
    pinned: bool = False
    line: int | None = None

    @property
    def stored(self) -> set[int]:
        """Positions of the tokens whose keys and values are stored: all but those of its slots."""
        return self.tokens.keys() - chain(*self.slots.values())

    @property
    def num_stored(self) -> int:
        """Number of `stored`."""
        return len(self.tokens) - sum(map(len, self.slots.values()))


class Layout:
    """Tokens and positions of a schema.

    Attributes:
        modules: modules in the order of the schema; the text outside of modules, if any, comes first.

    Args:
        schema: schema that prompts are checked against.
        text: tokenizer and chat template of the model.
        max_positions: number of positions of the model; None: no limit.
        max_tokens: most tokens of all modules; None: no limit.
        sinks: number of first tokens that all modules attend to while they are encoded.

    Raises:
        PMLError: a module exceeds the model's positions, there are too many tokens, a chat tag does not fit the model's
            chat template, or the schema does not begin with `sinks` tokens outside of modules.
    """

    def __init__(
        self, schema: Schema, text: ModelText, *, max_positions: int | None, sinks: int, max_tokens: int | None = None
    ) -> None:
        self.schema, self.max_positions, self.sinks = schema, max_positions, sinks
        self.modules = _Walk(schema, text, max_positions, max_tokens).modules
        self._segments: dict[tuple[str, ...], Segment] = {}
        if sinks and self._sink_tokens is None:
            raise schema.error(
                None, None, f"policy.sinks={sinks} needs a schema that begins with as many tokens outside of modules"
            )

    @cached_property
    def by_name(self) -> dict[str, ModuleLayout]:
        return {module.name: module for module in self.modules}

    @property
    def num_positions(self) -> int:
        return max((module.end for module in self.modules), default=0)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all modules and scaffolds, which is what may be encoded of the schema."""
        alone = {module.name: len(module.tokens) for module in self.modules}
        together = sum(alone[name] for names in self.scaffolds for name in self.scaffold_modules(names))
        return sum(alone.values()) + together

    @property
    def scaffolds(self) -> list[tuple[str, ...]]:
        """Names of modules that are also encoded together."""
        return [scaffold.modules for scaffold in self.schema.scaffolds]

    @property
    def asks(self) -> bool:
        """Whether the schema ends with a user's message, which the model answers."""
        last = self.schema.children[-1]
        return isinstance(last, Role) and last.role == "user"

    @property
    def segments(self) -> list[Segment]:
        """All segments that prompts may use: one per module, and one per scaffold."""
        alone = [self.segment((module.name,)) for module in self.modules if module.stored]
        return alone + [self.segment(self.scaffold_modules(names)) for names in self.scaffolds]

    def scaffold_modules(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Modules that are encoded together: those of the scaffold, and the text outside of modules, if any."""
        return (OUTSIDE, *names) if OUTSIDE in self.by_name else names

    def segment(self, names: tuple[str, ...]) -> Segment:
        """Segment of modules that attend to each other. It is made once."""
        if names not in self._segments:
            modules = [self.by_name[name] for name in names]
            tokens = dict(sorted(token for module in modules for token in module.tokens.items()))
            index_at = {position: index for index, position in enumerate(tokens)}
            slots = sorted((index_at[slot.start], len(slot)) for module in modules for slot in module.slots.values())
            sinks = [] if OUTSIDE in names else (self._sink_tokens or [])
            self._segments[names] = Segment(
                name=" + ".join(name or "(outside)" for name in names),
                ids=tuple(tokens.values()),
                positions=tuple(tokens),
                placeholders=tuple(range(start, start + num_tokens) for start, num_tokens in slots),
                context_ids=tuple(sinks),
                context_positions=tuple(range(len(sinks))),
                pinned=any(module.pinned for module in modules),
            )
        return self._segments[names]

    @cached_property
    def _sink_tokens(self) -> list[int] | None:
        """The first tokens, or None if some of them are in modules or are placeholders."""
        outside = self.by_name.get(OUTSIDE)
        if outside is None or list(outside.tokens)[: self.sinks] != list(range(self.sinks)):
            return None
        if any(slot.start < self.sinks for slot in outside.slots.values()):
            return None
        return list(outside.tokens.values())[: self.sinks]


class _Walk:
    """Assigns positions to `modules` by walking through a schema once."""

    def __init__(self, schema: Schema, text: ModelText, max_positions: int | None, max_tokens: int | None) -> None:
        self._schema, self._text, self._max_positions = schema, text, max_positions
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._at = 0
        self._num_unions = 0
        outside = ModuleLayout(name=OUTSIDE)
        self.modules = [outside]
        if not isinstance(schema.children[0], Role):  # a chat template brings its own first tokens
            self._add(text.front, outside)
        self._visit(schema.children, outside)
        outside.end = self._at
        if not outside.tokens:
            self.modules.remove(outside)

    def _visit(self, children: tuple[Node, ...], owner: ModuleLayout) -> None:
        for child in children:
            if isinstance(child, str):
                self._add(self._text.ids(child), owner)
            elif isinstance(child, Param):
                owner.slots[child.name] = range(self._at, self._at + child.num_tokens)
                self._add([self._text.placeholder] * child.num_tokens, owner, child.line)
            elif isinstance(child, Role):
                self._role(child, owner)
            elif isinstance(child, Union):
                self._union(child, owner)
            else:
                self._module(child, owner)

    def _role(self, role: Role, owner: ModuleLayout) -> None:
        try:
            before, after = self._text.message(role.role, first=self._at == 0)
        except ValueError as error:
            raise self._schema.error(role.line, role.role, str(error)) from error
        self._add(before, owner, role.line)
        self._visit(role.children, owner)
        self._add(after, owner, role.line)

    def _union(self, union: Union, owner: ModuleLayout) -> None:
        self._num_unions += 1
        number, start, end = self._num_unions, self._at, self._at
        for member in union.members:
            self._at = start
            self._module(member, owner, union=number)
            end = max(end, self._at)
        self._at = end

    def _module(self, module: Module, owner: ModuleLayout, union: int | None = None) -> None:
        own = ModuleLayout(
            name=module.name,
            start=self._at,
            parent=owner.name or None,
            union=union,
            pinned=module.pinned,
            line=module.line,
        )
        self.modules.append(own)
        self._visit(module.children, own)
        own.end = self._at

    def _add(self, ids: list[int], owner: ModuleLayout, line: int | None = None) -> None:
        self._num_tokens += len(ids)
        if self._max_tokens is not None and self._num_tokens > self._max_tokens:
            rule = f"has more than {self._max_tokens:,} tokens in all modules; shorten it"
            raise self._schema.error(owner.line if line is None else line, "schema", rule)
        owner.tokens.update(enumerate(ids, self._at))
        self._at += len(ids)
        if self._max_positions is not None and self._at > self._max_positions:
            what = f"module {owner.name}" if owner.name else "the text outside of modules"
            raise self._schema.error(
                owner.line if line is None else line,
                "module" if owner.name else "schema",
                f"{what} reaches position {self._at:,} of the model's "
                f"{self._max_positions:,}; shorten it, or put modules that exclude each other into a union",
            )
