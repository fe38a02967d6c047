"""Reader of XML from untrusted sources: elements and their text, with line numbers.

It refuses document types, entities, processing instructions and namespaces, fetches nothing, and bounds size, depth and
the number of elements. Every mistake is a `PMLError` that names file, line, element and rule.

White space that touches a tag and contains a line break is layout and is dropped; all other white space is kept.
Character references (`&#10;`) and CDATA are text, and so is all white space inside of an element with
xml:space="preserve".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
MAX_ELEMENTS = 100_000
LONGEST_RULE = 600
"""Largest number of characters of a message, since names of users in it may have any length."""

WHITE = " \t\r\n"


class PMLError(ValueError):
    """A mistake in a schema or a prompt, in one line."""

    def __init__(self, source: str, line: int | None, element: str | None, rule: str) -> None:
        where = source if line is None else f"{source}:{line}"
        rule = rule if len(rule) <= LONGEST_RULE else rule[: LONGEST_RULE - 3] + "..."
        super().__init__(f"{where}: {'' if element is None else f'<{shown(element)}>: '}{rule}")


@dataclass(kw_only=True)
class Element:
    """One element; `children` are elements and texts, without empty texts."""

    tag: str
    attributes: dict[str, str]
    line: int
    source: str
    children: list[Element | str] = field(default_factory=list)

    def error(self, rule: str) -> PMLError:
        return PMLError(self.source, self.line, self.tag, rule)

    def elements(self) -> Iterator[Element]:
        return (child for child in self.children if isinstance(child, Element))

    def check_attributes(self, *, needed: tuple[str, ...] = (), known: tuple[str, ...] = ()) -> None:
        """Raise a PMLError for attributes that are missing, empty or unknown."""
        for name in needed:
            if not self.attributes.get(name, "").strip():
                raise self.error(f'needs {name}="..."')
        for name in self.attributes:
            if name not in (*needed, *known, "xml:space"):
                takes = ", ".join((*needed, *known)) or "none"
                raise self.error(f"has no attribute {shown(name)}; it takes {takes}")


def shown(text: str) -> str:
    """A user's text for a message: on one line and shortened."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def read_xml_file(path: str | Path) -> Element:
    """Root element of a file.

    Raises:
        PMLError: the file is too large, not UTF-8, or not XML that this reader takes.
        OSError: the file cannot be read.
    """
    return read_xml(read_bytes(Path(path), str(path)), source=str(path))


def read_bytes(path: Path, source: str) -> bytes:
    """Content of a regular file of bounded size. Raises: PMLError, OSError."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise PMLError(source, None, None, "is no regular file; name one")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise PMLError(source, None, None, f"is larger than {MAX_BYTES // 2**20} MiB; split it")
    return data


def read_xml(text: str | bytes, *, source: str) -> Element:
    """Root element of an XML text; `source` is its name in messages. Raises: PMLError."""
    try:
        data = text.encode() if isinstance(text, str) else text.decode("utf-8-sig").encode()
    except UnicodeError as error:
        raise PMLError(source, None, None, "is not UTF-8 text; convert it") from error
    if len(data) > MAX_BYTES:
        raise PMLError(source, None, None, f"is larger than {MAX_BYTES // 2**20} MiB; split it")
    return _XMLReader(data, source).read()


class _XMLReader:
    """Builder of the tree from expat's events. Text up to the next tag is collected as (characters, whether kept)."""

    def __init__(self, data: bytes, source: str) -> None:
        self._data, self._source = data, source
        self._stack: list[Element] = []
        self._root: Element | None = None
        self._text: list[tuple[str, bool]] = []
        self._preserve = [False]
        self._in_cdata = False
        self._num_elements = 0
        # The explicit encoding overrides the one of an XML declaration: these bytes are UTF-8.
        parser = expat.ParserCreate("utf-8")
        parser.buffer_text = False
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartCdataSectionHandler = partial(setattr, self, "_in_cdata", True)
        parser.EndCdataSectionHandler = partial(setattr, self, "_in_cdata", False)
        parser.StartDoctypeDeclHandler = lambda *_: self._refuse("document types and entities are not taken; leave out")
        parser.EntityDeclHandler = lambda *_: self._refuse("entities are not taken; write the text itself")
        parser.ProcessingInstructionHandler = lambda *_: self._refuse("processing instructions are not taken")
        parser.SkippedEntityHandler = lambda *_: self._refuse("entities are not taken; write the text itself")
        parser.ExternalEntityRefHandler = lambda *_: self._refuse("external entities are not taken")
        self._parser = parser

    def read(self) -> Element:
        try:
            self._parser.Parse(self._data, True)
        except expat.ExpatError as error:
            reason = expat.errors.messages.get(error.code, str(error))
            tag = self._stack[-1].tag if self._stack else None
            raise PMLError(self._source, error.lineno, tag, f"is not well-formed XML: {reason}") from error
        assert self._root is not None
        return self._root

    def _refuse(self, rule: str) -> NoReturn:
        tag = self._stack[-1].tag if self._stack else None
        raise PMLError(self._source, self._parser.CurrentLineNumber, tag, rule)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._end_text()
        self._num_elements += 1
        element = Element(tag=tag, attributes=attributes, line=self._parser.CurrentLineNumber, source=self._source)
        if len(self._stack) >= MAX_DEPTH:
            raise element.error(f"is nested deeper than {MAX_DEPTH} levels")
        if self._num_elements > MAX_ELEMENTS:
            raise element.error(f"is one of more than {MAX_ELEMENTS:,} elements; split the file")
        if ":" in tag or any(":" in name and name != "xml:space" for name in attributes):
            raise element.error("namespaces are not taken")
        space = attributes.get("xml:space")
        if space not in (None, "default", "preserve"):
            raise element.error(f'xml:space="{shown(str(space))}" is neither "default" nor "preserve"')
        self._preserve.append(self._preserve[-1] if space is None else space == "preserve")
        if self._stack:
            self._stack[-1].children.append(element)
        self._root = self._root or element
        self._stack.append(element)

    def _end(self, _tag: str) -> None:
        self._end_text()
        self._stack.pop()
        self._preserve.pop()

    def _characters(self, characters: str) -> None:
        is_reference = self._data[self._parser.CurrentByteIndex : self._parser.CurrentByteIndex + 1] == b"&"
        self._text.append((characters, is_reference or self._in_cdata or self._preserve[-1]))

    def _end_text(self) -> None:
        """Add the collected text to the tree, at a tag."""
        if self._text and self._stack:
            text = without_layout(self._text)
            if text:
                self._stack[-1].children.append(text)
        self._text = []


def without_layout(parts: list[tuple[str, bool]]) -> str:
    """Text between two tags without the layout white space at its ends.

    Args:
        parts: pieces of the text, and whether the white space of each is kept.
    """
    # expat reports line breaks separately, so white space may be in several pieces.
    texts = ["".join(text for text, _ in run) for _, run in groupby(parts, key=itemgetter(1))]
    if parts and not parts[0][1]:
        texts[0] = re.sub(rf"\A[{WHITE}]*\n[{WHITE}]*", "", texts[0])
    if parts and not parts[-1][1]:
        bare = texts[-1].rstrip(WHITE)
        texts[-1] = bare if "\n" in texts[-1][len(bare) :] else texts[-1]
    return "".join(texts)
