"""Schemas of a server by name: its own ones, and those that its clients bring, within a bound."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.prompt_cache.prompt_cache import PromptCache
from policies.prompt_cache.schema import Schema
from policies.prompt_cache.xml_reader import PMLError, shown

MOST_BROUGHT = 256
"""Schemas of clients that are kept at a time."""


class Schemas:
    """Prompt Caches by the names of their schemas. Any thread may call.

    A client names the schemas that it brought and those of the server, and never those of another client. Of the ones
    that clients brought the least recently used are forgotten.

    Args:
        own: those of the server, with different names.
        make: makes the Prompt Cache of a schema for the model. Raises: PMLError.
        max_tokens: most tokens of all schemas that clients brought; 0 takes none.
    """

    def __init__(self, own: Sequence[PromptCache], make: Callable[[Schema], PromptCache], *, max_tokens: int) -> None:
        self._own = {cache.schema.name: cache for cache in own}
        self._make, self._max_tokens = make, max_tokens
        self._brought: OrderedDict[tuple[str, bytes], PromptCache] = OrderedDict()
        """By client and digest of the XML, the least recently used first."""
        self._lock = threading.Lock()

    def find(self, name: str, client: str) -> PromptCache | None:
        """The schema of this name that the server has or the client brought last; None if there is none."""
        if name in self._own:
            return self._own[name]
        with self._lock:
            for key, cache in self._brought.items():
                if key[0] == client and cache.schema.name == name:
                    self._brought.move_to_end(key)
                    return cache
        return None

    def bring(self, xml: str, client: str) -> PromptCache:
        """The Prompt Cache of a client's schema, which replaces an earlier one of the same name.

        Args:
            xml: the schema. No file is read for it.
            client: whose it is.

        Raises:
            PMLError: it is no schema, has the name of one of the server's, pins modules, has too many tokens, or does
                not fit the model.
        """
        key = client, hashlib.sha256(xml.encode()).digest()
        with self._lock:
            if key in self._brought:
                self._brought.move_to_end(key)
                return self._brought[key]
        if self._max_tokens == 0:
            raise PMLError("schema", None, None, "this server takes no schemas; use one of its own")
        if not xml.lstrip().startswith("<"):  # which would name a file
            raise PMLError("schema", None, None, 'is no XML; it begins with <schema name="...">')
        made = self._made(Schema.from_xml(xml))
        with self._lock:
            for other in [each for each in self._brought if each[0] == client]:
                if self._brought[other].schema.name == made.schema.name:
                    del self._brought[other]
            self._brought[key] = made
            while self._num_tokens > self._max_tokens or len(self._brought) > MOST_BROUGHT:
                self._brought.popitem(last=False)
        return made

    def _made(self, schema: Schema) -> PromptCache:
        if schema.name in self._own:
            rule = f"{shown(schema.name)} is the name of a schema of the server; leave it out, or choose another name"
            raise schema.error(None, "schema", rule)
        for place in schema.places.values():
            if place.module.pinned:
                rule = f'{place.module.name} has pinned="true", which is for schemas of the server; leave it out'
                raise schema.error(place.module.line, "module", rule)
        made = self._make(schema)
        if made.layout.num_tokens > self._max_tokens:
            rule = f"has {made.layout.num_tokens:,} tokens, and {self._max_tokens:,} are the most; shorten it"
            raise schema.error(None, "schema", rule)
        return made

    @property
    def _num_tokens(self) -> int:
        return sum(cache.layout.num_tokens for cache in self._brought.values())
