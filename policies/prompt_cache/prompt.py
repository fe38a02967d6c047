"""Prompts of a schema: imported modules, their arguments, and new text.

    <prompt schema="cities"> <trip-plan duration="3 days"/> <miami/> Highlight the surf spots. </prompt>

A module inside of another is imported inside of it: <outer> <inner/> </outer>. Text is outside of imports; in <system>,
<user> and <assistant> it is a separate message.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path

from policies.prompt_cache.schema import ROLES, Schema
from policies.prompt_cache.xml_reader import Element, read_xml, read_xml_file, shown

SOME_NAMES = 1000
"""Modules that are compared with an unknown name, which takes up to a millisecond each."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """An imported module, with arguments for its own parameters."""

    module: str
    arguments: dict[str, str] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class NewText:
    """New text of a prompt; with a role, a message."""

    text: str
    role: str | None = None
    line: int = 0


Item = Import | NewText


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt that was checked against its schema.

    Attributes:
        schema: name of the schema.
        items: its imports and texts in order; a module comes before the modules inside of it.
        arguments: arguments of the parameters outside of modules.
        source: name of the prompt in messages.
        line: its line in the file.
    """

    schema: str
    items: tuple[Item, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    source: str = "prompt"
    line: int = 1

    @classmethod
    def from_xml(cls, source: str | os.PathLike[str], schema: Schema, *, name: str = "prompt") -> Prompt:
        """Prompt from a file, or from XML if `source` is a string that begins with "<".

        Args:
            source: path of the file, or XML.
            schema: schema of the prompt.
            name: name of XML that is not in a file, for messages.

        Raises:
            PMLError: it is not a prompt, or does not fit the schema.
            OSError: the file cannot be read.
        """
        if isinstance(source, str) and source.lstrip().startswith("<"):
            return _PromptReader(schema).read(read_xml(source, source=name))
        return _PromptReader(schema).read(read_xml_file(Path(source)))


class _PromptReader:
    """Reader that checks a prompt against its schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._items: list[Item] = []
        self._imported: dict[str, Element] = {}
        self._members: dict[int, str] = {}

    def read(self, root: Element) -> Prompt:
        if root.tag != "prompt":
            raise root.error('a prompt begins with <prompt schema="...">')
        if "schema" not in root.attributes:
            raise root.error('needs schema="..."')
        if root.attributes["schema"] != self._schema.name:
            raise root.error(f'schema="{shown(root.attributes["schema"])}" is not the schema {self._schema.name}')
        arguments = self._arguments(root, None, besides="schema")
        for child in root.children:
            if isinstance(child, str):
                self._items.append(NewText(text=child, line=root.line))
            elif child.tag in ROLES:
                self._message(child)
            else:
                self._import(child, None)
        return Prompt(
            schema=self._schema.name,
            items=tuple(self._items),
            arguments=arguments,
            source=root.source,
            line=root.line,
        )

    def _message(self, element: Element) -> None:
        element.check_attributes()
        for child in element.elements():
            raise child.error(f"stands in <{element.tag}>, which holds only text here; import it outside")
        text = "".join(child for child in element.children if isinstance(child, str))
        self._items.append(NewText(text=text, role=element.tag, line=element.line))

    def _import(self, element: Element, parent: str | None) -> None:
        name = element.tag
        places = self._schema.places
        if name not in places:
            near = difflib.get_close_matches(name, list(places)[:SOME_NAMES], n=1)
            hint = f"did you mean <{near[0]}/>?" if near else f"it has {shown(', '.join(places)) or 'none'}"
            raise element.error(f"schema {self._schema.name} has no such module; {hint}")
        if name in self._imported:
            raise element.error(f"is imported twice (first in line {self._imported[name].line})")
        if places[name].parent != parent:
            path = [*self._schema.ancestors(name), name]
            nested = (
                "".join(f"<{each}>" for each in path[:-1])
                + f"<{name}/>"
                + "".join(f"</{each}>" for each in reversed(path[:-1]))
            )
            raise element.error(
                f"is not a module of {f'<{parent}>' if parent else 'the schema itself'}; write {nested}"
            )
        union = places[name].union  # unions of outer modules were checked when these were imported
        if union is not None and (other := self._members.setdefault(id(union), name)) != name:
            raise element.error(f"is in one union with <{other}>, and a prompt imports one of them; leave one out")
        self._imported[name] = element
        self._items.append(Import(module=name, arguments=self._arguments(element, name), line=element.line))
        for child in element.children:
            if isinstance(child, str):
                raise element.error(f"has text in it ({shown(child)}); text stands outside of imports")
            self._import(child, name)

    def _arguments(self, element: Element, module: str | None, besides: str | None = None) -> dict[str, str]:
        params = self._schema.params(module)
        given = {name: value for name, value in element.attributes.items() if name not in (besides, "xml:space")}
        for name in given:
            if name not in params:
                has = ", ".join(params) or "none"
                raise element.error(f"has no parameter {shown(name)}; it has {has}")
        return given
