"""A server of one rank with a tiny random model: rows that fail alone, and what is left after many requests."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.studies.endurance import sample, send
from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, ModelName
from runahead.decoding.sampling import NOT_NUMBERS
from tests.families import save_tiny_llama
from tests.serving.fakes import Served, chat_tokenizer, serving, until
from tests.serving.test_api import TEXT

RARE = 77
"""A token id whose embedding is no number."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=1024)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    assert isinstance(model.module, LlamaForCausalLM)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[RARE] = torch.nan
        model.module.lm_head.weight[RARE] = 0.0  # which is never the largest logit
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(
            engine=Engine(model, ranks), tokenizer=chat_tokenizer(), max_waiting=4000, max_per_client=4000
        ) as running,
    ):
        yield running


def ask(served: Served, **body: Any) -> httpx2.Response:
    return httpx2.post(served.url + TEXT, json={"max_tokens": 6} | body, trust_env=False, timeout=60)


def test_a_prompt_that_gives_no_numbers_is_an_error_of_its_client_alone(served: Served) -> None:
    expected = ask(served, prompt=[5, 6, 7], max_tokens=300, ignore_eos=True).json()["choices"][0]["text"]

    async def several() -> list[Any]:
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
            bodies = [
                {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True},
                {"prompt": [5, RARE, 7]},
                {"prompt": [[5, 6, 8], [5, RARE, 8]], "max_tokens": 1000, "ignore_eos": True},
                {"prompt": [RARE], "stream": True},
            ]
            return await asyncio.gather(*(client.post(served.url + TEXT, json=body) for body in bodies))

    long, whole, two, stream = asyncio.run(several())
    assert long.json()["choices"][0]["text"] == expected
    for refused in (whole, two):
        assert refused.status_code == 503 and refused.json()["error"]["message"] == NOT_NUMBERS
    assert NOT_NUMBERS in stream.text and "[DONE]" not in stream.text
    until(lambda: served.scheduler.num_running == 0)
    assert served.ended is None


def held(served: Served) -> Counter[str]:
    """What the server keeps while nobody asks: objects of our own by type, and what its collections hold."""
    until(lambda: served.scheduler.num_running == served.scheduler.num_waiting == 0)
    until(lambda: not served.http._server.server_state.connections)
    scheduler = served.scheduler
    until(lambda: not scheduler._queue.batches and not scheduler._unread)
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        if str(type(each).__module__).partition(".")[0] in ("runahead", "launch", "uvicorn", "starlette", "h11"):
            found[type(each).__name__] += 1
        found["Tensor"] += type(each) is torch.Tensor
    return found


@pytest.mark.slow
def test_what_is_held_after_2000_requests_is_what_was_held_after_200(served: Served) -> None:
    draw = random.Random(0)

    async def one(number: int, limits: asyncio.Semaphore) -> str:
        async with limits:
            ids = draw.choices(range(60), k=draw.randint(1, 200))
            closing = (draw.choice(("sent", "waiting", "prefill", "decoding")), draw.uniform(0, 0.02))
            _, end = await send(served.url, ids, draw.randint(1, 12), closing if number % 5 == 0 else None, 60.0)
            return end

    async def many(count: int) -> Counter[str]:
        limits = asyncio.Semaphore(24)
        return Counter(await asyncio.gather(*(one(number, limits) for number in range(count))))

    ends = asyncio.run(many(200))
    early, early_sample = held(served), sample(os.getpid())
    ends += asyncio.run(many(1800))
    late, late_sample = held(served), sample(os.getpid())
    assert ends.keys() == {"answered", "closed"} and ends["answered"] >= 1600
    grown = {name: (early[name], count) for name, count in late.items() if count > early[name] + 3}
    # The test itself keeps the options of all requests.
    assert not grown.keys() - {"GenerationOptions"}, grown
    assert late_sample["threads"] <= early_sample["threads"] and late_sample["files"] <= early_sample["files"] + 2
    assert late_sample["pss_mib"] < 1.05 * early_sample["pss_mib"] + 8, (early_sample, late_sample)
