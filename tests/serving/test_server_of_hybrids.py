"""launch/serve.py with a tiny hybrid: answers are transformers' own, computed from the last snapshot on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.families import build, prompt
from tests.serving.fakes import chat_tokenizer
from tests.serving.test_server import Job, job, options

STEP, SIZE, MIDDLE = 512, 4_000, 2_100
TREE = ("serve.prefix_cache_bytes=1000000000", f"serve.snapshot_tokens={STEP}")
NO_TREE = ("serve.prefix_cache_bytes=0",)
LENGTHS = [40, 9, 131, 1, 3, 700, 22, 2, 18, 70]
FORTY = [
    *(prompt(LENGTHS[number % 10] + number // 10, seed=number) for number in range(30)),
    *(prompt(700, seed=5)[: 600 + 9 * number] + prompt(9, seed=number) for number in range(10)),
]
"""The last ones begin as the sixth, and branch off from it."""


Expected = Callable[[list[int], int], str]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Expected]:
    """A folder with a model of states beside attention, and what transformers generates with it alone, as text."""
    folder, tokenizer = tmp_path_factory.mktemp("hybrid"), chat_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 8192}
    module = build("qwen3_next", dtype=torch.float32, **sizes)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    module.generation_config.eos_token_id = None
    known: dict[tuple[tuple[int, ...], int], str] = {}

    def expected(ids: list[int], num_new: int) -> str:
        if (tuple(ids), num_new) not in known:
            ids_1S = torch.tensor([ids])
            given = {"attention_mask": torch.ones_like(ids_1S), "max_new_tokens": num_new, "do_sample": False}
            out_1S = module.generate(ids_1S, pad_token_id=0, **given)
            known[tuple(ids), num_new] = tokenizer.decode(out_1S[0, len(ids) :], skip_special_tokens=True)
        return known[tuple(ids), num_new]

    return str(folder), expected


def ask(server: Job, ids: list[int], num_new: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    body: dict[str, Any] = {"prompt": ids, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    response = server.client.post("/v1/completions", json=body, timeout=600)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


@pytest.mark.slow
@pytest.mark.parametrize("with_tree", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_answers_as_transformers_and_computes_from_the_last_snapshot_on(
    hybrid: tuple[str, Expected], ranks: int, with_tree: bool
) -> None:
    """Of two ranks both compute the document: no prompt before it was as long."""
    folder, expected = hybrid
    given = ["serve.itl_s=0.001", "serve.max_per_client=64", "model.dtype=float32", *(TREE if with_tree else NO_TREE)]
    with job(*options(folder, *given), ranks=ranks) as server, ThreadPoolExecutor(40) as clients:
        asked = [(ids, 2 + number % 8) for number, ids in enumerate(FORTY)]
        at_once = list(clients.map(lambda each: ask(server, *each), asked))
        assert [text for text, _ in at_once] == [expected(*each) for each in asked]
        assert with_tree or not any(cached for _, cached in at_once)
        document = prompt(SIZE, seed=99)
        question, branch = [*document, *prompt(12, seed=1)], [*document[:MIDDLE], *prompt(30, seed=2)]
        other = [*document[: SIZE - 5], *prompt(20, seed=3)]
        in_middle, before_end = (size // STEP * STEP for size in (MIDDLE, SIZE - 5))
        for ids, cached in ((document, 0), (question, SIZE), (branch, in_middle), (other, before_end)):
            assert ask(server, ids, 6) == (expected(ids, 6), cached if with_tree else 0)
