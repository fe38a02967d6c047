"""The scheduler's side: which prompts are asked for, loaded, or left to vLLM, each with a line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runahead_vllm.asking import Asked, Asking, GivenUp, Ready
from runahead_vllm.refusals import why_alone

logger = logging.getLogger("vllm.runahead")

ENDS = {"given_up": (logging.WARNING, "given up", "; vLLM computes it"), "dropped": (logging.INFO, "dropped", "")}
"""Ends of a prompt without a file: the log's level, and its words before and after the reason."""


@dataclass(frozen=True)
class Load:
    """Tokens [start, stop) of a file, which go into blocks of each KV cache group."""

    request_id: str
    path: str
    num_tokens: int
    start: int
    stop: int
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True)
class Report:
    """A worker's report of a load: `error` is "" if all was well."""

    num_bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Happened:
    """The end of a prompt, for the metrics. `kind`: loaded, given_up, dropped or alone."""

    kind: str
    waited_s: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    load_s: float = 0.0


class SchedulerSide:
    """Requests from their first question to their end. No call waits for anything.

    Attributes:
        happened: since somebody looked last.
    """

    def __init__(self, asking: Asking, *, min_tokens: int, look_only: bool) -> None:
        self._asking, self._min_tokens, self._look_only = asking, min_tokens, look_only
        self._asked: dict[str, Asked] = {}
        self._alone: set[str] = set()  # requests of which the log has said so
        self._told: set[str] = set()  # likewise, of those given up or dropped
        self._promised: dict[str, Load] = {}
        self._reports: dict[str, list[Report]] = {}
        self._loads: list[Load] = []
        self.happened: list[Happened] = []

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Tokens to load after the first `num_computed`, and whether that is asynchronous; (None, False): ask later.

        vLLM computes the last token itself, for its logits. The question may come in each step, also after it was
        answered, and again once a request was pre-empted.
        """
        name, stop = request.request_id, request.num_prompt_tokens - 1
        if stop - num_computed < self._min_tokens:
            return 0, False
        if why := why_alone(request):
            self._say_alone(name, stop + 1, why)
            return 0, False
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = self._begin(request)
        if asked.outcome is None and time.monotonic() > asked.began_s + self._asking.wait_s:
            asked.give_up(f"it is not there within {self._asking.wait_s:g} s")
        outcome = asked.outcome
        if outcome is None:
            return None, False
        if isinstance(outcome, GivenUp):
            self._say_without_file("given_up", name, asked, outcome.why)
            return 0, False
        return stop - num_computed, True

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], num_external: int) -> None:
        """vLLM has blocks for these tokens. It calls again with 0 after a load, and for prompts that it computes."""
        name, asked = request.request_id, self._asked.get(request.request_id)
        if num_external == 0:
            if asked is not None and asked.outcome is None:
                why = "vLLM's own cache has most of it by now"
                asked.give_up(why)
                self._say_without_file("dropped", name, asked, why)
            return
        assert asked is not None and isinstance(asked.outcome, Ready), (name, asked)
        stop = request.num_prompt_tokens - 1
        load = Load(name, str(asked.outcome.path), stop + 1, stop - num_external, stop, block_ids)
        self._promised[name] = load
        self._loads.append(load)

    def take_loads(self) -> list[Load]:
        """Loads that begin in this step, once."""
        loads, self._loads = self._loads, []
        return loads

    def reported(self, reports: Mapping[str, list[Report]]) -> None:
        """Note the reports of workers; with several ranks, those of one load may come in different steps."""
        for name, each in reports.items():
            self._reports.setdefault(name, []).extend(each)

    def received(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """All ranks have ended these loads. A failure is remembered: vLLM asks again at once, and must hear 0."""
        failed = set(failed)
        for name in finished:
            load, reports = self._promised.pop(name, None), self._reports.pop(name, [])
            asked = self._asked.get(name)
            if load is None or asked is None:  # it was aborted meanwhile
                continue
            errors = [report.error for report in reports if report.error]
            if name in failed or errors:
                why = f"its file is not usable: {(errors or ['a rank did not say why'])[0]}"
                asked.give_up(why)
                self._say_without_file("given_up", name, asked, why)
                continue
            num_bytes = sum(report.num_bytes for report in reports)
            load_s = max((report.seconds for report in reports), default=0.0)
            logger.info(
                "runahead: %s: asked for %d tokens, waited %.2f s, loaded %d (%.1f MB in %.2f s)",
                name, load.num_tokens, asked.waited_s, load.stop - load.start, num_bytes / 1e6, load_s,
            )  # fmt: skip
            self.happened.append(Happened("loaded", asked.waited_s, load.stop - load.start, num_bytes, load_s))

    def ended(self, request_id: str) -> None:
        """A request has its answer or was aborted."""
        asked = self._asked.pop(request_id, None)
        if asked is not None and (asked.outcome is None or request_id in self._promised):
            asked.cancel()
            self._say_without_file("dropped", request_id, asked, "the request ended")
        self._alone.discard(request_id)
        self._told.discard(request_id)

    def close(self) -> None:
        for asked in self._asked.values():
            asked.cancel()
        self._asking.close()

    def _begin(self, request: Any) -> Asked:
        ids = request.prompt_token_ids
        given = request.kv_transfer_params or {}
        if "runahead_file" in given:  # a proxy has had the prompt computed
            if (name := given["runahead_file"]) is not None:
                return self._asking.look(ids, str(name))
            asked = Asked(len(ids), time.monotonic())
            asked.give_up("its file could not be written")
            return asked
        return self._asking.look(ids) if self._look_only else self._asking.compute(ids)

    def _say_alone(self, name: str, num_tokens: int, why: str) -> None:
        if name not in self._alone:
            self._alone.add(name)
            logger.info("runahead: %s: not asked for, as %s; vLLM computes its %d tokens", name, why, num_tokens)
            self.happened.append(Happened("alone"))

    def _say_without_file(self, kind: Literal["given_up", "dropped"], name: str, asked: Asked, why: str) -> None:
        """Say once that a prompt is not loaded. `dropped`: nobody wants it any more, which is no failure."""
        if name in self._told:
            return
        self._told.add(name)
        level, words, then = ENDS[kind]
        logger.log(
            level, "runahead: %s: asked for %d tokens, waited %.2f s, %s: %s%s",
            name, asked.num_tokens, asked.waited_s, words, why, then,
        )  # fmt: skip
        self.happened.append(Happened(kind, asked.waited_s))
