"""A server of one rank with a tiny random model, one prompt of which gives no numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaForCausalLM

from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, ModelName
from runahead.decoding.sampling import NOT_NUMBERS
from tests.families import save_tiny_llama
from tests.serving.fakes import Served, chat_tokenizer, serving
from tests.serving.test_api import TEXT
from tests.waiting import until

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
        assert refused.status_code == 500 and refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["message"] == NOT_NUMBERS
    assert NOT_NUMBERS in stream.text and "[DONE]" not in stream.text
    until(lambda: served.scheduler.num_running == 0)
    assert served.ended is None
