"""The prompts that a server hands over: what it tells of them, and the answers that need no rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from launch.server.answer.form import Form
from launch.server.answer.listener import RequestListener
from launch.server.answer.usage import Usage
from launch.server.errors import APIError, json_response, wrong
from launch.server.metrics import Metrics
from launch.server.request.fields import HandoverWay
from launch.server.request_log import RequestLog
from policies.reuse import GivenPrompt, ids_of
from runahead.attention.masks import MaskRule
from runahead.model.fingerprint import checkpoint_digest
from runahead.model.loading.checkpoint import Checkpoint, weight_files
from runahead.model.model import Model
from runahead.prefill.kv_runahead import BEFORE_WINDOW
from runahead.report import package_version
from runahead.reuse.handover import HandoverFolder, HandoverPlace, file_name
from runahead.reuse.store import model_key
from runahead.reuse.tiers.file_format import FORMAT
from runahead.serving.items import Handed
from runahead.serving.request import Request

TOLD = ("model_type", "hidden_size", "num_attention_heads")
"""Fields of the config that are told as they are."""


MOST_POSITIONS = 2**17
"""Positions up to which windows are looked for where a model names no limit."""


@dataclass(frozen=True, kw_only=True)
class PromptFiles:
    """The files of handed-over prompts, as rank 0 knows them.

    Attributes:
        key: of the model, for the names of files.
        folder: where they are; None if that is on another host.
        place: of the folder.
        layers: bytes of a token in each layer of a file, and the tokens that it may lack no more of; None: it has all.
        about: what other engines compare.
    """

    key: str
    folder: HandoverFolder | None
    place: HandoverPlace
    layers: Sequence[tuple[int, int | None]]
    about: Mapping[str, Any]

    def least_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values that the file of a prompt of so many tokens has at least."""
        return sum(
            token_bytes * (num_tokens if least is None else min(num_tokens, least))
            for token_bytes, least in self.layers
        )

    def name(self, salt: str, ids: Sequence[int]) -> str:
        """Name of the file of a prompt."""
        return file_name(self.key, salt, ids)

    def found(self, name: str) -> Handed | None:
        """A prompt whose file is there, which counts as used now; None if it is not, or not on this host."""
        num_bytes = None if self.folder is None else self.folder.found(name)
        if num_bytes is None:
            return None
        return Handed(row=(-1, 0), name=name, folder=self.place.path, host=self.place.host, num_bytes=num_bytes)

    def told(self, *, model: str, salt: str, max_model_len: int | None) -> dict[str, Any]:
        """The answer of GET /v1/prefill.

        Args:
            model: its name in the API.
            salt: of who asks.
        """
        where = {"folder": self.place.path, "host": self.place.host, "max_bytes": self.place.limit_bytes}
        names = {"key": self.key, "salt": salt, "max_model_len": max_model_len}
        return {"object": "prefill_server", "format": FORMAT, "model": model, **where, **names, **self.about}


class HandingOver:
    """Requests for a prompt that is to be handed over, before and instead of the queue.

    Args:
        files: of the prompts; None: none are handed over.
    """

    def __init__(self, files: PromptFiles | None, metrics: Metrics, log: RequestLog) -> None:
        self._files, self._metrics, self._log = files, metrics, log

    def files(self, way: HandoverWay) -> PromptFiles:
        """The files of prompts that are handed over. Raises: APIError: none are."""
        if self._files is None:
            message = "this server hands no prompts over; start it with serve.handover=<folder>"
            if way is HandoverWay.prefill:
                raise APIError(404, message, code="handover_off")
            raise wrong(way.field, f"asks for the prompt alone, and {message}", code="unsupported_value")
        return self._files

    def checked(self, way: HandoverWay, prompt: GivenPrompt) -> PromptFiles:
        """Likewise, where there is room for this prompt's."""
        files, num_tokens = self.files(way), len(ids_of(prompt))
        limit_bytes = files.place.limit_bytes
        if (num_bytes := files.least_bytes(num_tokens)) >= limit_bytes:  # a file has a header, too
            what = f"has keys and values of {num_bytes:,} bytes, and serve.handover_bytes={limit_bytes}"
            raise wrong(way.field, what)
        return files

    def found(
        self, request: HTTPRequest, handed: Handed, form: Form, queued: Request, listener: RequestListener
    ) -> Response:
        """The answer to a request for a prompt that is handed over already. It has no token."""
        num_tokens, key = len(ids_of(queued.prompts[0])), request.state.key.name
        self._metrics.counters["handover_found_total"] += 1
        self._metrics.ended("stop", key)
        self._log.ended(request, f"found, {num_tokens} tokens, {handed.num_bytes} bytes", request.state.began_s)
        listener.handed, listener.handed_s = handed, time.monotonic()
        return self._answer(request, form, queued, listener, Usage(prompt=num_tokens, cached=num_tokens))

    def without_file(
        self,
        request: HTTPRequest,
        error: APIError,
        way: HandoverWay,
        form: Form,
        queued: Request,
        listener: RequestListener,
    ) -> Response:
        """The answer to a proxy whose request is not taken, so that its own engine computes the prompt.

        One that waits for parameters does so after a 503, and gives a 429 to its client. One that looks for a file
        gives every error to its client.

        Raises:
            APIError: 503.
        """
        if way is HandoverWay.params:
            raise APIError(503, str(error), headers=error.headers) from error
        self._metrics.ended("429", request.state.key.name)
        self._log.ended(request, f"without a file: {error}", request.state.began_s)
        return self._answer(request, form, queued, listener, Usage(prompt=0))

    def _answer(
        self, request: HTTPRequest, form: Form, queued: Request, listener: RequestListener, usage: Usage
    ) -> Response:
        """An answer without a token, as one that has ended for its length."""
        told = form.whole(listener.rows, usage)
        for choice in told["choices"]:
            choice["finish_reason"] = "length"
        told = form.finished(told, list(map(ids_of, queued.prompts)), queued, listener)
        return json_response(told, headers={"x-request-id": request.state.identity})


def prompt_files(
    model: Model, folder: HandoverFolder | None, place: HandoverPlace, source: Checkpoint | None, *, num_stages: int
) -> PromptFiles:
    """The files that a server with this model writes.

    Args:
        source: the checkpoint of its weights; None if they come from elsewhere.
        num_stages: of the chain, whose last one may lack tokens of window layers.
    """
    config = model.config
    digest, why = _digest(model, source)
    layers = [
        {
            "kv_heads": shape.num_kv_heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "window": None if rule is None else _window(rule, model.max_positions or MOST_POSITIONS),
        }
        for shape, rule in zip(model.kv_shapes, model.rules, strict=True)
    ]
    about = {
        "version": package_version("runahead"),
        "checkpoint": digest,
        "why_no_checkpoint": why,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "layers": layers,
        **{name: getattr(config, name, None) for name in TOLD},
    }
    least = [
        each["window"] + BEFORE_WINDOW if num_stages > 1 and isinstance(each["window"], int) else None
        for each in layers
    ]
    token_bytes = [shape.bytes_per_token() for shape in model.kv_shapes]
    stored = list(zip(token_bytes, least, strict=True))
    return PromptFiles(key=model_key(model), folder=folder, place=place, layers=stored, about=about)


def _digest(model: Model, source: Checkpoint | None) -> tuple[str | None, str]:
    """Digest of the checkpoint whose weights a model has as they are there; else None, and why it has none."""
    for differs, why in (
        (source is None or source.config_file is not None or source.gguf is not None, "it has no safetensors weights"),
        (model.adapters, "adapters are merged into its weights"),
        (model.stored_as, f"its weights were {model.stored_as}"),
        (model.overrides, f"its config has other values than the checkpoint's: {model.overrides}"),
    ):
        if differs:
            return None, why
    assert source is not None
    return checkpoint_digest(weight_files(source)), ""


def _window(rule: MaskRule, num_positions: int) -> int | str | None:
    """Tokens that a query sees, itself included; None if it sees all before it, "other" if their number changes."""
    last, middle = num_positions - 1, num_positions // 2
    first = rule.first_key(last)
    if first == 0:
        return None
    window = last - first + 1
    return window if rule.first_key(middle) == max(0, middle - window + 1) else "other"


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
