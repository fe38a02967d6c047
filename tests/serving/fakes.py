"""A server whose engine makes up its tokens, on a real socket of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from openai import OpenAI

from launch.server.api import API
from launch.server.handover import PromptFiles
from launch.server.http import HTTPServer, bound_socket
from launch.server.keys import Keys
from launch.server.options import ServeOptions, ServeRun
from launch.server.page.state import setup_json
from policies.prompt_cache.schemas import Schemas
from policies.reuse import ReusingPrompt, ids_of
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore, LayerStore
from runahead.cache.rows import RowsAttention
from runahead.config import DecodeName, DecodeOptions, Device, GenerationOptions, PrefillOptions, RanksOptions
from runahead.context import ContextPartition
from runahead.features.slower import Way
from runahead.model.grammars import Grammars
from runahead.prefill import Prefilled, PrefillPlan
from runahead.prefill.prompt_check import PromptLimits
from runahead.ranks.ranks import Ranks
from runahead.report import PromptLogprobs, RankReport
from runahead.reuse.handover import HandoverFolder
from runahead.reuse.tiers.file_format import LayerShape
from runahead.serving.limits import QueueLimits
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.ranges import Ranges
from runahead.timeline.trace import TraceSpan
from tests.tokenizers_for_tests import byte_level
from tests.waiting import until

POSITIONS = 4096
TOKEN_BYTES = 8
"""Numbers of a token in a file of the fake model: its id in two layers, in the second one more by 1."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS_TEMPLATE = "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}" + TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content }}{{ message.tool_call_id }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.id }} {{ call.function.name }} {{ call.function.arguments.ship }}{% endfor %}",
)
"""A chat template that takes tools, calls of tools and their results."""


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """A tokenizer of its own with a chat template."""
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = template
    return tokenizer


class FakeRow(LayerStore):
    """A row of the fake model: its next token is the next one of its prompt, from the end, over and over again."""

    def __init__(self, prompt: list[int], note: Callable[[int], object]) -> None:
        self._prompt, self._note, self._num_made = prompt, note, 0

    def next_token(self) -> int:
        self._num_made += 1
        self._note(self._num_made)
        return self._prompt[-1 - (self._num_made - 1) % len(self._prompt)]

    def append(self, *_: object) -> None:
        raise AssertionError("the fake model has no attention")

    seen = append  # type: ignore[assignment]
    num_bytes = 0  # type: ignore[assignment]


class FakeCache(KVStore):
    """KV cache of fake rows."""

    def __init__(self, rows: Sequence[FakeRow]) -> None:
        self.layers = list(rows)

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        return [FakeCache([row]) for row in self.layers]

    def fork(self) -> FakeCache:
        return FakeCache([copy(row) for row in self.layers])

    def take_back(self, num_tokens: int) -> None:
        assert not num_tokens, "fake rows have no drafts"


class FakeModel(SimpleNamespace):
    """A model without layers: what it decodes are `FakeRow`s."""

    ranges = Ranges()
    marks = held = None
    runs_in_passes = False
    shard_number, num_shards = 0, 1

    def forward(self, ids_B1: torch.Tensor, attention: CausalAttention | RowsAttention, **_: object) -> torch.Tensor:
        self.engine.before_step()
        rows = attention.rows if isinstance(attention, RowsAttention) else [attention]
        return self.engine.logits([row.cache.layers[0] for row in rows])


class FakeEngine:
    """Answers every prompt with its own tokens, in reverse and over again.

    Attributes:
        batches: all tokens of the prompts of each prefill.
        stored: content keys of the segments that prompts have reused.
        options: of all rows so far.
        steps: most tokens that a row of each prefill has made.
        when_prefilling: called when a prefill begins.
        meanwhile: of the last prefill, which is told of its layers.
        spans: timeline of every prefill that is recorded.
        step_s: seconds per step of decoding.
        error: raised by the next prefill or step.
        slow: faster ways that it does not take.
        says: tokens of every answer, before the end; None: those of the prompt.
    """

    may_shard, takes_stage_alone, prefixes = False, True, None

    def __init__(self) -> None:
        self.tokenizer = byte_level()
        self.ranks = Ranks.start(RanksOptions(device=Device.cpu))
        self.policies, self.prefill_options, self.decode = (
            RankPolicies(),
            PrefillOptions(),
            DecodeOptions(name=DecodeName.last),
        )
        config = SimpleNamespace(
            max_position_embeddings=POSITIONS, num_hidden_layers=2, vocab_size=len(self.tokenizer), model_type="fake"
        )
        self.model = FakeModel(
            config=config,
            num_layers=config.num_hidden_layers,
            uneven_limit=None,
            rotates_by_length=False,
            length_threshold=None,
            repeats_steps=False,
            name="fake",
            device=torch.device("cpu"),
            eos_token_ids={self.tokenizer.eos_token_id},
            tokenizer=self.tokenizer,
            shares=None,
            grammars=Grammars(self.tokenizer, len(self.tokenizer), {self.tokenizer.eos_token_id}),
            memory_after=lambda **_: None,
            engine=self,
        )
        self.prompt_limits = PromptLimits.of_model(self.model, self.policies, self.prefill_options, 1)  # type: ignore[arg-type]
        self.batches: list[list[list[int]]] = []
        self.options: list[GenerationOptions] = []
        self.steps: list[int] = []
        self.stored: set[str] = set()
        self.when_prefilling: Callable[[], object] = lambda: None
        self.meanwhile: Any = None
        self.spans: list[TraceSpan] = []
        self.step_s = 0.0
        self.error: BaseException | None = None
        self.slow = {Way.shared_prompt}
        self.says: list[int] | None = None

    def takes(self, way: Way) -> bool:
        return way not in self.slow

    def split(self, num_tokens: int) -> ContextPartition:
        return ContextPartition(boundaries=(0, num_tokens))

    def in_blocks(self, partition: ContextPartition) -> ContextPartition:
        return partition

    def check_scores(self) -> None:
        pass

    def learn(self, *_: object) -> None:
        pass

    def prefill(self, plan: PrefillPlan, meanwhile: Any, handovers: Any = None) -> Prefilled:
        prompts = [ids_of(prompt) for prompt in plan.prompts]
        uses = [use for prompt in plan.prompts if isinstance(prompt, ReusingPrompt) for use in prompt.uses]
        encoded = {use.segment.content_key for use in uses} - self.stored
        self.stored |= encoded
        self.batches.append(prompts)
        self.meanwhile = meanwhile
        self.steps.append(0)
        number, began_s = len(self.steps) - 1, time.perf_counter()
        self.when_prefilling()
        self.before_step()

        def note(num_made: int) -> None:
            self.steps[number] = max(self.steps[number], num_made)

        for row, handover in (handovers or {}).items():
            layers = [torch.tensor(prompts[row], dtype=torch.float32)[:, None, None] + layer for layer in range(2)]
            handover.begin([LayerShape(shape=tuple(layer.shape), dtype=layer.dtype) for layer in layers])
            for layer in layers:
                handover.put([layer])
        answers = prompts
        if self.says is not None:
            answers = [[self.tokenizer.eos_token_id, *reversed(self.says)]] * len(prompts)
        rows = [FakeRow(answer, note) for answer in answers]
        report = RankReport(rank=0, prefill_s=max(time.perf_counter() - began_s, 1e-4))
        spans = self.spans if plan.record else []
        scores = []
        if (most := plan.scores) is not None:
            scores = [
                [
                    PromptLogprobs(
                        first=1,
                        logprobs=[-1.0] * (len(ids) - 1),
                        top_logprobs=[[-1.0] * most] * (len(ids) - 1),
                        top_ids=[[id] * most for id in ids[1:]],
                    )
                ]
                for ids in prompts
            ]
        logits_BV, cache = self.logits(rows), FakeCache(rows)
        return Prefilled(report=report, logits_BV=logits_BV, cache=cache, encoded=encoded, spans=spans, scores=scores)

    def logits(self, rows: Sequence[FakeRow]) -> torch.Tensor:
        logits_BV = torch.zeros(len(rows), len(self.tokenizer))
        logits_BV[torch.arange(len(rows)), [row.next_token() for row in rows]] = 1e4
        return logits_BV

    def before_step(self) -> None:
        if self.error is not None:
            raise self.error
        time.sleep(self.step_s)


@contextmanager
def held(engine: FakeEngine) -> Iterator[threading.Event]:
    """Context manager that lets prefills wait for the event. Leaving the block sets it, also after an error."""
    gate = threading.Event()
    engine.when_prefilling = gate.wait
    try:
        yield gate
    finally:
        gate.set()


class Served:
    """A running server: its address, engine, scheduler and API."""

    def __init__(
        self,
        engine: Any,
        options: ServeOptions,
        limits: QueueLimits,
        keys: Keys,
        tokenizer: Any,
        seed: int,
        schemas: Schemas | None = None,
    ) -> None:
        self.engine, self.options = engine, options
        handover = files = None
        if options.handover is not None:
            handover = HandoverFolder(options.handover, options.handover_bytes, "the fake model")
            files = PromptFiles(
                key=handover.key,
                folder=handover,
                place=handover.place,
                layers=[(TOKEN_BYTES // 2, None)] * 2,
                about={"dtype": "float32"},
            )
        self.handover = handover
        self.scheduler = Scheduler(engine, limits, handover=handover)
        submit = self.scheduler.submit

        def noted(request: Request) -> None:
            engine.options = [*getattr(engine, "options", []), *request.options]
            submit(request)

        self.scheduler.submit = noted  # type: ignore[method-assign]
        self.api = API(
            self.scheduler,
            tokenizer=tokenizer,
            eos_ids={tokenizer.eos_token_id},
            vocab_size=len(tokenizer),
            names=["fake", "smollm2"],
            adapters=["poems"],
            options=options,
            defaults=GenerationOptions(max_new_tokens=16, seed=seed),
            keys=keys,
            schemas=schemas,
            setup=setup_json(ServeRun(policy={"name": "full"})),
            files=files,
        )
        bound = bound_socket("127.0.0.1", 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # which the system may not make larger
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = HTTPServer(self.api.app, bound, options, on_failure=self.scheduler.fail)
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except BaseException as error:
            self.ended = error


@contextmanager
def serving(
    *,
    keys: Keys | None = None,
    limits: QueueLimits | None = None,
    engine: Any = None,
    tokenizer: Any = None,
    seed: int = 0,
    schemas: Schemas | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server in threads of this process, stopped after the block; with an engine that makes up tokens by default."""
    made = ServeOptions(port=0, **({"log": False} | options))
    served = Served(
        engine or FakeEngine(),
        made,
        limits or made,
        keys or Keys(),
        tokenizer or chat_tokenizer(),
        seed,
        schemas,
    )
    served.http.start()
    served.thread.start()
    try:
        until(lambda: served.http._server.started)
        yield served
    finally:
        served.scheduler.drain()
        served.thread.join(60)
        served.http.stop(10)
        assert not served.thread.is_alive(), "the scheduler has not ended"


@contextmanager
def saying(text: str, template: str = TOOLS_TEMPLATE, **options: Any) -> Iterator[tuple[OpenAI, FakeEngine]]:
    """A client of a server whose model says a text, and its engine."""
    engine = FakeEngine()
    engine.says = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    with serving(engine=engine, tokenizer=chat_tokenizer(template), **options) as served:
        yield OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0), engine
