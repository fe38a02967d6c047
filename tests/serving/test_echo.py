"""Prompts before their answers, with the log-probabilities of their tokens, as programs for evaluation ask for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.server.answer import answering
from runahead import Engine, GenerationOptions, Ranks
from runahead.config import Device, RanksOptions
from runahead.report import PromptLogprobs
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.batch import Batch
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox, Part, PrefillItem, Report, Tokens
from runahead.serving.limits import QueueLimits
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler
from tests.conftest import RankPools
from tests.families import build, prompt
from tests.ranks.tasks import generate, tiny_model
from tests.ranks.test_prompt_scores import NUMBER, require_scores
from tests.serving import rank_tasks
from tests.serving.fakes import FakeEngine, Served, serving
from tests.serving.rank_tasks import Kept, Load
from tests.serving.test_api import error_of, post

PATH = "/v1/completions"
TEXTS = [prompt(40), prompt(17, seed=1)]
GREEDY = GenerationOptions(max_new_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    engine = Engine(tiny_model("llama", torch.float32), ranks, tree=PrefixTree(1 << 30))
    with serving(engine=engine) as running:
        yield running


def expected(ids: list[int]) -> Tensor:
    """Log-probabilities (S, V) after each token, by transformers alone."""
    with torch.inference_mode():
        logits_SV: Tensor = build("llama", dtype=torch.float32)(input_ids=torch.tensor([ids])).logits[0]
    return logits_SV.log_softmax(dim=-1)


def test_a_likelihood_is_read_from_an_answer_as_lm_eval_reads_it(served: Served) -> None:
    """Its request, and its sum over all tokens from the context's end to the one before the new token."""
    body = {"prompt": TEXTS, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for _ in range(2):  # the second time the tree has them
        answer = post(served, PATH, body).json()
        for choice, ids in zip(sorted(answer["choices"], key=lambda each: each["index"]), TEXTS, strict=True):
            context, logprobs = len(ids) - 6, choice["logprobs"]
            found = logprobs["token_logprobs"][context:-1]
            tops = [max(top.values()) for top in logprobs["top_logprobs"][context:-1]]
            right = expected(ids)[context - 1 : -1]
            own = right.gather(1, torch.tensor(ids[context:])[:, None])[:, 0]
            assert found == pytest.approx(own.tolist(), abs=1e-4) and len(found) == 6
            assert tops == pytest.approx(right.max(dim=-1).values.tolist(), abs=1e-4)
            assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
            assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
            new = expected(ids)[-1].max().item()
            assert logprobs["token_logprobs"][-1] == pytest.approx(new, abs=1e-4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["usage"]["completion_tokens"] == 2


def test_without_new_tokens_there_are_those_of_the_prompt_alone(served: Served) -> None:
    both, alone = (
        post(served, PATH, {"prompt": TEXTS[0], "max_tokens": number, "logprobs": 3, "echo": True}).json()
        for number in (1, 0)
    )
    [of_both], [of_prompt] = both["choices"], alone["choices"]
    for name, values in of_prompt["logprobs"].items():
        assert values == of_both["logprobs"][name][:-1]
    assert of_both["text"].startswith(of_prompt["text"])
    assert of_prompt["finish_reason"] == "length" and alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["total_tokens"] == len(TEXTS[0])


def test_texts_are_echoed_as_they_were_given_and_offsets_are_those_of_the_whole_text() -> None:
    text = "the größer ship"
    with serving() as served:
        plain = post(served, PATH, {"prompt": text, "max_tokens": 3}).json()["choices"][0]["text"]
        echoed = post(served, PATH, {"prompt": text, "max_tokens": 3, "echo": True, "n": 2}).json()["choices"]
        assert [(each["text"], each["logprobs"]) for each in echoed] == [(text + plain, None)] * 2
        asked = {"prompt": [text, "ice"], "max_tokens": 2, "logprobs": 0, "echo": True}
        for choice, given in zip(post(served, PATH, asked).json()["choices"], asked["prompt"], strict=True):
            logprobs = choice["logprobs"]
            assert choice["text"].startswith(given)
            for piece, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                assert "\ufffd" in piece or choice["text"][offset:].startswith(piece)
            assert given == "ice" or logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -1.0}  # which is one token


def test_offsets_count_special_tokens_that_a_prompt_names() -> None:
    text = "<s>the größer<|end|> ship <|end|>x"
    with serving() as served:
        ids = post(served, "/tokenize", {"prompt": text, "return_token_strs": True}).json()["token_strs"]
        assert ids.count("<|end|>") == 2
        asked = {"prompt": text, "max_tokens": 1, "logprobs": 0, "echo": True}
        [choice] = post(served, PATH, asked).json()["choices"]
    pieces, offsets = (choice["logprobs"][name][:-1] for name in ("tokens", "text_offset"))
    assert (
        len(pieces) == len(ids)
        and choice["text"].startswith(text)
        and choice["logprobs"]["text_offset"][-1] == len(text)
    )
    starts = [offset for piece, offset in zip(pieces, offsets, strict=True) if piece == "<|end|>"]
    assert starts == [text.index("<|end|>"), text.rindex("<|end|>")]
    for piece, offset in list(zip(pieces, offsets, strict=True))[pieces.count("<s>") :]:
        assert "\ufffd" in piece or text[offset:].startswith(piece), (piece, offset)


def test_large_answers_are_written_beside_the_event_loop_and_before_their_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list[str]()

    def failing(value: Any) -> bytes:
        names.append(threading.current_thread().name)
        raise MemoryError

    monkeypatch.setattr(answering, "dumps", failing)
    with serving() as served:
        assert post(served, PATH, {"prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True}).status_code == 500
    assert len(names) == 1 and names[0].startswith("asyncio_")  # asyncio's threads for calls


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "echo"),
        ({"prompt_cache": {"prompt": "<prompt/>"}}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_does_not_go_with_an_echo_is_named(served: Served, more: dict[str, Any], param: str) -> None:
    response = post(served, PATH, {"prompt": "a", "echo": True} | more)
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_a_server_that_cannot_score_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: FakeEngine) -> None:
        raise ValueError("policy X leaves tokens out; use another")

    monkeypatch.setattr(FakeEngine, "check_scores", refusing)
    with serving() as served:
        response = post(served, PATH, {"prompt": "a", "echo": True, "logprobs": 1})
        assert response.status_code == 400 and "policy X leaves tokens out" in error_of(response)["message"]
        assert post(served, PATH, {"prompt": "a", "echo": True}).status_code == 200


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("short", [0, 1000], ids=["by all stages", "by the last one"])
def test_stages_score_a_prompt_together_while_others_reuse_what_it_begins_with(
    rank_pools: RankPools, size: int, short: int
) -> None:
    texts = [TEXTS[0], TEXTS[0] + TEXTS[1], TEXTS[0] + TEXTS[1], TEXTS[0] + TEXTS[1]]
    load = Load(
        prompts=texts,
        options=[GREEDY] * 4,
        limits=QueueLimits(itl_s=1e-3),
        after={1: 0, 2: 0, 3: 2},
        short=short,
        chain_token_s=0 if short else 1e-4,
        tree_bytes=1 << 40,
        num_answers=2,
        scores={1: NUMBER, 2: NUMBER},
    )
    served = rank_pools.run(size, rank_tasks.serve, load)[0]
    assert served.tokens == [
        rank_pools.run(1, generate, load.family, [ids], GREEDY)[0][0].generations[0].new_token_ids
        for ids in texts
        for _ in range(2)
    ]
    assert served.cached[:3] == [0, 0, 0]  # those that are scored are computed whole
    for number, found in enumerate(served.scores):
        assert found.keys() == ({0, 1} if number in load.scores else set())
        for scores in found.values():
            require_scores([[[scores]]], load.family, [texts[number]])


def test_equal_prompts_of_different_salts_are_each_computed_and_no_row_has_the_scores_of_another_text() -> None:
    texts, salts, reports = [TEXTS[0], TEXTS[0], TEXTS[1], TEXTS[0]], ["a", "b", "a", "b"], list[Report]()
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    engine = Engine(tiny_model("llama", torch.float32), ranks, tree=PrefixTree(1 << 30))
    item = PrefillItem(
        number=0, prompts=texts, options=[GREEDY] * 4, boundaries=(0, len(TEXTS[0])), salts=salts, scores=0
    )
    executor = Executor(engine, Inbox(), reports.append, QueueLimits(itl_s=1e3))
    executor.carry_out(item)
    request = Request(prompts=texts, options=[GREEDY] * 4, listener=Kept(4), scores=0)
    batch = Batch(
        item=item,
        owners=[(request, row) for row in range(4)],
        predicted_s=1.0,
        is_short=False,
        is_alone=True,
        shares_prompts=True,
    )
    [batch.parts[0]] = [report for report in reports if isinstance(report, Part)]
    for row, ids in enumerate(texts):
        right = expected(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert batch.scores_of(row).logprobs == pytest.approx(right.tolist(), abs=1e-4)
    assert batch.computed == [0, 1, 2] and batch.of_computed(batch.lengths) == list(map(len, texts[:3]))
    assert batch.num_tokens == 3 * len(TEXTS[0]) + (3 + 2) * 5  # two rows share a prompt, and have a place each


def test_tokens_are_told_once_all_ranks_have_told_their_scores() -> None:
    engine: Any = FakeEngine()
    scheduler = Scheduler(engine, QueueLimits())
    request = Request(prompts=[[5, 6, 7]], options=[GREEDY], listener=(listener := Kept(1)), scores=0)
    item = PrefillItem(number=0, prompts=request.prompts, options=request.options, boundaries=(0, 3), scores=0)
    batch = Batch(item=item, owners=[(request, 0)], predicted_s=1.0, is_short=False, is_alone=True)
    scheduler._queue.running.append(request)
    scheduler._queue.batches[0] = scheduler._unread[0] = batch
    engine.ranks.size, parts = 2, [[-1.0], [-2.0]]
    try:
        for rank, found in enumerate(parts):
            scheduler._hear(Tokens(tokens={(0, 0): 9 + rank}))
            assert listener.heard == [] and not request.prompt_scores
            scores = PromptLogprobs(first=1 + rank, logprobs=found, top_logprobs=[[]], top_ids=[[]])
            scheduler._hear(Part(number=0, rank=rank, prefill_s=1.0, wait_s=0.0, is_alone=True, scores=[[scores]]))
    finally:
        engine.ranks.size = 1
    assert listener.rows == [[9, 10]] and request.prompt_scores[0].logprobs == [-1.0, -2.0]
