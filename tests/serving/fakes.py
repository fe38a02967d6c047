"""A server whose engine makes up its tokens, on a real socket of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from launch.server.api import API
from launch.server.http import HTTPServer, bound_socket
from launch.server.keys import Keys
from launch.server.options import ServeOptions
from runahead.config import Device, GenerationOptions, PrefillOptions, RanksOptions
from runahead.decoding.scored_tokens import ScoredToken
from runahead.ranks.ranks import Ranks
from runahead.report import TokenLogprobs
from runahead.serving.scheduler import QueueLimits, Scheduler
from runahead.thinning.rank_policies import RankPolicies
from tests.unit.tokenizers_for_tests import byte_level

POSITIONS = 4096
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


def scored(token: int, number: int | None) -> int:
    """A token with made-up log-probabilities, if it is to have any."""
    if number is None:
        return token
    top = [(token + place, -1.0 - place) for place in range(number)]
    return ScoredToken(token, TokenLogprobs(logprob=-0.5, top=top))


class FakeEngine:
    """Answers every prompt with its own tokens, in reverse and over again.

    Attributes:
        batches: prompts of each call.
        options: of all rows so far.
        steps: tokens that each call made.
        prefill: called when a prefill begins.
        step_s: seconds per token.
        error: raised by the next call.
    """

    def __init__(self) -> None:
        self.tokenizer = byte_level()
        self.ranks = Ranks.start(RanksOptions(device=Device.cpu))
        self.policies, self.prefill_options = RankPolicies(), PrefillOptions()
        config = SimpleNamespace(
            max_position_embeddings=POSITIONS, num_hidden_layers=2, vocab_size=len(self.tokenizer), model_type="fake"
        )
        self.model = SimpleNamespace(config=config, uneven_limit=None, length_threshold=None, name="fake")
        self.prefill = self.prefill_options
        self.batches: list[list[list[int]]] = []
        self.options: list[GenerationOptions] = []
        self.steps: list[int] = []
        self.when_prefilling: Callable[[], object] = lambda: None
        self.step_s = 0.0
        self.error: BaseException | None = None

    def generate(
        self,
        prompts: list[list[int]],
        options: Sequence[GenerationOptions],
        *,
        on_tokens: Callable[[list[int | None]], list[int]],
        cancellable: bool,
    ) -> Any:
        self.batches.append(prompts)
        self.options += options
        self.steps.append(0)
        began_s = time.perf_counter()
        self.when_prefilling()
        ttft_s = time.perf_counter() - began_s
        ended = [False] * len(prompts)
        step = 0
        while not all(ended):
            if self.error is not None:
                raise self.error
            tokens = [
                None if end else scored(ids[-1 - step % len(ids)], each.logprobs)
                for ids, end, each in zip(prompts, ended, options, strict=True)
            ]
            ended = [end or step + 1 >= each.max_new_tokens for end, each in zip(ended, options, strict=True)]
            for row in on_tokens(tokens):
                ended[row] = True
            step += 1
            self.steps[-1] = step
            time.sleep(self.step_s)
        rows = [SimpleNamespace(new_token_ids=[0] * each.max_new_tokens) for each in options]
        return SimpleNamespace(ttft_s=max(ttft_s, 1e-4), tpot_s=1e-3, generations=rows)


class Served:
    """A running server: its address, engine, scheduler and API."""

    def __init__(
        self, engine: Any, options: ServeOptions, limits: QueueLimits, keys: Keys, tokenizer: Any, seed: int
    ) -> None:
        self.engine, self.options = engine, options
        self.scheduler = Scheduler(engine, limits)
        self.api = API(
            self.scheduler,
            tokenizer=tokenizer,
            eos_ids={tokenizer.eos_token_id},
            vocab_size=len(tokenizer),
            model="fake",
            options=options,
            defaults=GenerationOptions(max_new_tokens=16, seed=seed),
            keys=keys,
        )
        bound = bound_socket("127.0.0.1", 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # which the system may not make larger
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = HTTPServer(self.api.app, bound, options, on_end=self.scheduler.drain)
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
    **options: Any,
) -> Iterator[Served]:
    """A server in threads of this process, stopped after the block; with an engine that makes up tokens by default."""
    made = ServeOptions(log=False, port=0, **options)
    limits = limits or QueueLimits(batch=made.batch, batch_wait_s=0.0)
    served = Served(engine or FakeEngine(), made, limits, keys or Keys(), tokenizer or chat_tokenizer(), seed)
    served.http.start()
    served.thread.start()
    deadline = time.monotonic() + 20
    while not served.http._server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield served
    finally:
        served.scheduler.drain()
        served.thread.join(10)
        served.http.stop(10)
        assert not served.thread.is_alive(), "the scheduler has not ended"


def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until `is_so`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
