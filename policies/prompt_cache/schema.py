"""Schemas: trees of named texts that prompts are composed of (Gim et al., MLSys 2024, section 3.2).

    <schema name="cities">
      <system>You are a travel guide.</system>
      <module name="trip-plan">Plan a trip of <param name="duration" len="4"/>.</module>
      <union>
        <module name="miami" src="miami.txt"/>
        <module name="paris">Paris has many bridges.</module>
      </union>
      <scaffold modules="trip-plan miami"/>
    </schema>

Text outside of modules is part of every prompt. A module may contain text, parameters, other modules, and unions, of
which a prompt imports at most one member. `system`, `user` and `assistant` are rendered by the model's chat template.
Modules of a scaffold are also encoded together, for prompts that import all of them.

The schemas of the paper's authors (github.com/yale-sys/prompt-cache) say `<parameter name="..." length="...">` for a
param, and `<union scaffold="miami">` for the member that stands for the union when the others are encoded: all modules
outside of unions and these members are then one scaffold. Inside of a member that does not stand for its union, unions
with a scaffold make one of that member. (In the authors' code, prompts that import only some of its modules use it,
too; here these use modules that were encoded alone, so no prompt is told of what it does not import.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from policies.prompt_cache.xml_reader import (
    Element,
    PMLError,
    read_bytes,
    read_xml,
    read_xml_file,
    shown,
    without_layout,
)

ROLES = ("system", "user", "assistant")
PARAMS = ("param", "parameter")
RESERVED = ("schema", "prompt", "module", "union", *PARAMS, "scaffold", *ROLES)
MAX_PARAM_TOKENS = 1 << 16
NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Param:
    """A slot of `num_tokens` tokens for an argument."""

    name: str
    num_tokens: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Role:
    """A message of the chat."""

    role: str
    children: tuple[Node, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class Module:
    """A named text. `pinned`: it stays in memory."""

    name: str
    children: tuple[Node, ...]
    line: int
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class Union:
    """Modules of which a prompt imports at most one. They start at the same position.

    Attributes:
        scaffold: name of the member that stands for the union when other modules are encoded together.
    """

    members: tuple[Module, ...]
    line: int
    scaffold: str | None = None


Node = str | Param | Role | Module | Union


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """Names of modules that are also encoded together."""

    modules: tuple[str, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a module in the tree.

    Attributes:
        module: the module.
        outer: modules that contain it, the outermost first.
        union: union that it is a member of.
    """

    module: Module
    outer: tuple[str, ...]
    union: Union | None

    @property
    def parent(self) -> str | None:
        """The innermost module that contains it."""
        return self.outer[-1] if self.outer else None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A checked schema. `source` is its name in messages."""

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...] = field(default=())
    source: str = "schema"

    @classmethod
    def from_xml(cls, source: str | os.PathLike[str]) -> Schema:
        """Schema from a file, or from XML if `source` is a string that begins with "<".

        Raises:
            PMLError: a mistake, in one line that names file, line, element and rule.
            OSError: the file cannot be read.
        """
        if isinstance(source, str) and source.lstrip().startswith("<"):
            return _SchemaReader(None).read(read_xml(source, source="schema"))
        path = Path(source)
        return _SchemaReader(path.parent).read(read_xml_file(path))

    def __post_init__(self) -> None:
        self._check_names()
        for scaffold in self.scaffolds:
            self._check_scaffold(scaffold)

    def error(self, line: int | None, element: str | None, rule: str) -> PMLError:
        return PMLError(self.source, line, element, rule)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Modules by name, in the order of the schema."""
        return {place.module.name: place for place in _places(self.children)}

    def params(self, module: str | None) -> dict[str, Param]:
        """Parameters of a module's own text, or of the text outside of modules."""
        children = self.children if module is None else self.places[module].module.children
        return {param.name: param for param in _params(children)}

    def ancestors(self, module: str) -> list[str]:
        """Modules that contain a module, the outermost first."""
        return list(self.places[module].outer)

    def _check_names(self) -> None:
        seen: dict[str, Module] = {}
        for place in _places(self.children):
            module = place.module
            if module.name in place.outer:
                raise self.error(module.line, "module", f"{module.name} contains itself; modules cannot recur")
            if module.name in seen:
                line = seen[module.name].line
                rule = f"{module.name} is also the name of the module in line {line}; rename one"
                raise self.error(module.line, "module", rule)
            seen[module.name] = module
        for owner in (None, *seen):
            children = self.children if owner is None else seen[owner].children
            names: dict[str, Param] = {}
            for param in _params(children):
                if param.name in names:
                    rule = f"{param.name} is there twice in one module (line {names[param.name].line}); rename one"
                    raise self.error(param.line, "param", rule)
                names[param.name] = param

    def _check_scaffold(self, scaffold: Scaffold) -> None:
        for name in scaffold.modules:
            if name not in self.places:
                raise self.error(scaffold.line, "scaffold", f"there is no module {shown(name)}")
        if len(set(scaffold.modules)) < len(scaffold.modules):
            raise self.error(scaffold.line, "scaffold", "names a module twice")
        chosen: dict[int, str] = {}  # by union
        for module in (each for name in scaffold.modules for each in (*self.ancestors(name), name)):
            union = self.places[module].union
            if union is not None and (other := chosen.setdefault(id(union), module)) != module:
                rule = f"{other} and {module} are members of one union and never imported together"
                raise self.error(scaffold.line, "scaffold", rule)


def _places(children: tuple[Node, ...], outer: tuple[str, ...] = ()) -> Iterator[Place]:
    for child in children:
        if isinstance(child, Role):
            yield from _places(child.children, outer)
        elif isinstance(child, Module | Union):
            union = child if isinstance(child, Union) else None
            for module in child.members if isinstance(child, Union) else (child,):
                yield Place(module=module, outer=outer, union=union)
                yield from _places(module.children, (*outer, module.name))


def _params(children: tuple[Node, ...]) -> Iterator[Param]:
    for child in children:
        if isinstance(child, Param):
            yield child
        elif isinstance(child, Role):
            yield from _params(child.children)


def _of_unions(children: tuple[Node, ...]) -> Iterator[Scaffold]:
    """Scaffolds that unions ask for: of what is outside of unions, and the members that stand for theirs.

    Every other member begins anew, so no module is in two of these scaffolds.
    """
    names: list[str] = []
    asking: list[Union] = []
    others: list[Module] = []

    def visit(children: tuple[Node, ...]) -> None:
        for child in children:
            if isinstance(child, Union):
                asking.extend([child] if child.scaffold is not None else [])
                others.extend(member for member in child.members if member.name != child.scaffold)
                visit(tuple(member for member in child.members if member.name == child.scaffold))
            elif isinstance(child, Module | Role):
                names.extend([child.name] if isinstance(child, Module) else [])
                visit(child.children)

    visit(children)
    if asking:
        yield Scaffold(modules=tuple(names), line=asking[0].line)
    for member in others:
        yield from _of_unions((member,))


class _SchemaReader:
    """From XML elements to a schema; `folder` is where files of `src` are."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, root: Element) -> Schema:
        if root.tag != "schema":
            raise root.error('a schema begins with <schema name="...">')
        root.check_attributes(needed=("name",))
        scaffolds = tuple(self._scaffold(child) for child in root.elements() if child.tag == "scaffold")
        content = [child for child in root.children if isinstance(child, str) or child.tag != "scaffold"]
        children = tuple(self._node(child, root, in_role=False) for child in content)
        if not children:
            raise root.error("is empty; give it text or modules")
        scaffolds += tuple(_of_unions(children))
        return Schema(name=root.attributes["name"], children=children, scaffolds=scaffolds, source=root.source)

    def _node(self, child: Element | str, parent: Element, *, in_role: bool) -> Node:
        if isinstance(child, str):
            return child
        if child.tag == "module":
            return self._module(child, in_role=in_role)
        if child.tag == "union":
            return self._union(child, in_role=in_role)
        if child.tag in PARAMS:
            return self._param(child)
        if child.tag in ROLES:
            if in_role:
                raise child.error("is inside of another message; close that one first")
            child.check_attributes()
            inner = tuple(self._node(each, child, in_role=True) for each in child.children)
            return Role(role=child.tag, children=inner, line=child.line)
        if child.tag == "scaffold":
            raise child.error(f"stands directly in <schema>, not in <{parent.tag}>")
        raise child.error(f"is unknown in a schema; <{parent.tag}> takes module, union, param, {', '.join(ROLES)}")

    def _module(self, element: Element, *, in_role: bool) -> Module:
        element.check_attributes(needed=("name",), known=("src", "pinned"))
        name = self._name(element)
        pinned = element.attributes.get("pinned", "false")
        if pinned not in ("true", "false"):
            raise element.error(f'pinned="{shown(pinned)}" is neither "true" nor "false"')
        if "src" in element.attributes:
            if element.children:
                raise element.error("has src and content of its own; use one of them")
            text = self._file_text(element)
            children: tuple[Node, ...] = (text,) if text else ()
        else:
            children = tuple(self._node(child, element, in_role=in_role) for child in element.children)
        if not children:
            raise element.error(f"{name} is empty; give it text")
        return Module(name=name, children=children, line=element.line, pinned=pinned == "true")

    def _union(self, element: Element, *, in_role: bool) -> Union:
        element.check_attributes(known=("scaffold",))
        members = []
        for child in element.children:
            if isinstance(child, str) or child.tag != "module":
                what = f"text ({shown(child)})" if isinstance(child, str) else f"<{child.tag}>"
                raise element.error(f"holds modules only, and there is {what}")
            members.append(self._module(child, in_role=in_role))
        if not members:
            raise element.error("is empty; give it modules")
        scaffold, names = element.attributes.get("scaffold"), [member.name for member in members]
        if scaffold is not None and scaffold not in names:
            has = shown(", ".join(names))
            raise element.error(f'scaffold="{shown(scaffold)}" is no member of this union; it has {has}')
        return Union(members=tuple(members), line=element.line, scaffold=scaffold)

    def _param(self, element: Element) -> Param:
        given = [spelling for spelling in ("len", "length") if spelling in element.attributes]
        if len(given) == 2:
            raise element.error("has len and length, which mean the same; give one of them")
        spelling = given[0] if given else "len" if element.tag == "param" else "length"
        element.check_attributes(needed=("name", spelling))
        if element.children:
            raise element.error(f"is a slot and has no content; write <{element.tag} .../>")
        name, length = self._name(element), element.attributes[spelling]
        if not (length.isascii() and length.isdigit() and 1 <= int(length[:9]) <= MAX_PARAM_TOKENS):
            rule = f'{spelling}="{shown(length)}" must be a number of tokens from 1 to {MAX_PARAM_TOKENS:,}'
            raise element.error(rule)
        return Param(name=name, num_tokens=int(length), line=element.line)

    def _scaffold(self, element: Element) -> Scaffold:
        element.check_attributes(needed=("modules",))
        if element.children:
            raise element.error('has no content; write <scaffold modules="a b"/>')
        return Scaffold(modules=tuple(element.attributes["modules"].split()), line=element.line)

    def _name(self, element: Element) -> str:
        name = element.attributes["name"]
        if not NAME.fullmatch(name):
            raise element.error(f'name="{shown(name)}" must be letters, digits, "-", "_", ".", and begin with a letter')
        if name in RESERVED:
            raise element.error(f'name="{name}" has a meaning of its own in PML; choose another')
        return name

    def _file_text(self, element: Element) -> str:
        """Text of a file in the schema's folder, with the same rule for white space."""
        src = element.attributes["src"]
        if self._folder is None:
            raise element.error(f'src="{shown(src)}" is for schemas in files, which it is beside')
        try:
            folder = self._folder.resolve()
            path = (folder / src).resolve()
            if not path.is_relative_to(folder):
                raise element.error(f'src="{shown(src)}" leaves the schema\'s folder; put the file beside the schema')
            text = read_bytes(path, f"{element.source}:{element.line}: {shown(src)}").decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise element.error(f'src="{shown(src)}" is not UTF-8 text; convert it') from error
        except PMLError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            raise element.error(f'src="{shown(src)}" cannot be read: {reason}; name another file') from error
        text = text.replace("\r\n", "\n")  # as XML requires
        keeps = element.attributes.get("xml:space") == "preserve"
        return without_layout([(text, keeps)])
