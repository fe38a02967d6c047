"""A dialect: an API's names of a request's fields, the form of its answers and of its errors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launch.server.answer.form import Form
from launch.server.answer.logprobs import TokenTexts
from launch.server.errors import APIError
from launch.server.request.fields import ChatRequest, CompletionRequest, read_chat
from runahead.config import GenerationOptions


class Dialect(ABC):
    """One request in the words of an API. What it becomes is a chat or a completion, of which all else knows.

    Attributes:
        names: names of its fields, by those of the chat's fields that it becomes. What is not here has its own.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def translated(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the chat or completion that says the same. Raises: APIError."""
        return body

    def read(self, fields: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest | CompletionRequest:
        """The request, of a translated body. Raises: APIError."""
        return read_chat(fields, defaults)

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Context manager in which errors about the fields of a chat come to name those of this API."""
        try:
            yield
        except APIError as error:
            self._rename(error)
            raise

    @abstractmethod
    def form(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> Form:
        """The form that writes the answer.

        Args:
            identity: of the request.
            model: the model's name in the API.
            read: the request.
            texts: of single tokens, for log-probabilities.
        """

    def error(self, error: APIError) -> dict[str, Any]:
        """The body of an error."""
        return error.body

    def _rename(self, error: APIError) -> None:
        if error.param is None or not self.names:
            return
        own, message = self._own(error.param), str(error)
        if own != error.param:
            message = message.replace(f"'{error.param}'", f"'{own}'")
        # A length is told with its field, as in "max_tokens=5 would fit".
        message = re.sub(r"(?<![\w.])\w+(?==\d)", lambda found: self.names.get(found[0], found[0]), message)
        error.param, error.args = own, (message,)

    def _own(self, name: str) -> str:
        """The name of a field here, whose name as one of a chat, or of a part of one, is `name`."""
        for end in range(len(name), 0, -1):
            if (end == len(name) or name[end] in ".[") and name[:end] in self.names:
                return self.names[name[:end]] + name[end:]
        return name
