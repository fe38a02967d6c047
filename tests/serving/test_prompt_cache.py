"""Prompt Cache by request: what the API takes and refuses, schemas that clients bring, and answers on live ranks."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from openai import OpenAI

from launch.inputs.prompt_cache import read_schemas
from launch.serve import SERVE
from launch.server import serving as server
from policies.prompt_cache import PMLError, PromptCache, Schema
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from policies.prompt_cache.schemas import Schemas
from policies.reuse import ReusingPrompt
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions
from runahead.config import Carrier, Device, DType, ModelName
from runahead.reuse.reuse import encode_segment
from runahead.serving.limits import QueueLimits
from tests.conftest import RankPools
from tests.examples import examples
from tests.families import prompt, save_tiny_llama, throughout
from tests.prompt_cache.serving import one_rank, random_prompt, random_segments
from tests.prompt_cache.test_pml import pieces
from tests.ranks.tasks import generate, tiny_model
from tests.serving import rank_tasks
from tests.serving.fakes import POSITIONS, FakeEngine, Served, chat_tokenizer, serving
from tests.serving.rank_tasks import Load
from tests.serving.test_api import CHAT, TEXT, error_of, events_of, post

ROOT = Path(__file__).resolve().parents[2]
ICE = """<schema name="ice">
  <module name="letters">the letters of <param name="who" len="12"/> from the ice</module>
  <union><module name="ship">the ship of the captain</module><module name="sledge">a sledge</module></union>
</schema>"""
ASKED = '<prompt schema="ice"><letters who="his sister"/><ship/></prompt>'
TALK = '<schema name="talk"><system>Help.</system><module name="doc">the letters</module></schema>'
MOST_TOKENS = 2000


def made(schema: Schema) -> PromptCache:
    return PromptCache(schema, chat_tokenizer(), max_positions=POSITIONS, max_tokens=MOST_TOKENS)


def expected(prompt: str, schema: str = ICE) -> ReusingPrompt:
    return made(Schema.from_xml(schema)).prompt(prompt)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    schemas = Schemas([made(Schema.from_xml(TALK))], made, max_tokens=MOST_TOKENS)
    with serving(schemas=schemas) as running:
        yield running


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_request_brings_its_schema_and_later_ones_name_it() -> None:
    with serving(schemas=Schemas([], made, max_tokens=MOST_TOKENS)) as served:
        body = {"prompt": " hello", "max_tokens": 4, "prompt_cache": {"prompt": ASKED}}
        assert error_of(post(served, TEXT, body))["param"] == "prompt_cache.prompt"
        whole = expected(ASKED.replace("</prompt>", " hello</prompt>"))
        first = post(served, TEXT, body | {"prompt_cache": {"prompt": ASKED, "schema": ICE}}).json()
        assert served.engine.batches == [[whole.ids]]
        assert first["usage"]["prompt_tokens"] == len(whole.ids) and cached(first) == 0
        second = post(served, TEXT, body | {"n": 2}).json()
        assert served.engine.batches[1] == [whole.ids]  # once for both answers
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert cached(second) == whole.num_cached > 5
        other = ASKED.replace("<ship/>", "<sledge/>")
        third = post(served, TEXT, body | {"prompt": "", "prompt_cache": {"prompt": other}}).json()
        bare = expected(other)
        assert served.engine.batches[2] == [bare.ids]
        letters = next(use.num_tokens for use in bare.uses if use.segment.name == "letters")
        assert 0 < cached(third) == letters < bare.num_cached  # the sledge is new
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        assert cached(events_of(post(served, TEXT, body | stream))[-1]) == whole.num_cached


def test_messages_come_after_the_modules(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "hello!"}],
        "prompt_cache": {"prompt": '<prompt schema="talk"><doc/></prompt>'},
        "max_tokens": 2,
    }
    assert error_of(post(served, CHAT, body))["param"] == "messages"
    body["messages"] += [{"role": "user", "content": "a b c"}]  # type: ignore[operator]
    answer = post(served, CHAT, body).json()
    told = chat_tokenizer().decode(served.engine.batches[-1][0])
    assert told == "system: Help.\nthe lettersuser: hello?\nassistant: hello!\nuser: a b c\nassistant:"
    assert answer["usage"]["prompt_tokens"] == len(served.engine.batches[-1][0])
    del body["messages"]
    assert post(served, CHAT, body).status_code == 200
    assert chat_tokenizer().decode(served.engine.batches[-1][0]) == "system: Help.\nthe letters"


def brings(schema: str, prompt: str = '<prompt schema="s"><a/></prompt>') -> dict[str, Any]:
    return {"prompt_cache": {"schema": schema, "prompt": prompt}}


TOO_LONG = f'<schema name="s"><param name="p" len="{MOST_TOKENS + 1}"/></schema>'


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt_cache": 3}, "prompt_cache", "must be an object"),
        ({"prompt_cache": {}}, "prompt_cache.prompt", "must be XML that begins with <prompt"),
        ({"prompt_cache": {"prompt": ASKED, "file": "x"}}, "prompt_cache", "prompt_cache.file"),
        ({"prompt_cache": {"prompt": "/etc/passwd"}}, "prompt_cache.prompt", "must be XML"),
        (brings("/etc/passwd"), "prompt_cache.schema", "must be XML that begins with <schema"),
        (brings(7), "prompt_cache.schema", "must be XML"),  # type: ignore[arg-type]
        (brings("<schema \ud800>"), "prompt_cache.schema", "not valid Unicode"),
        (
            brings('<schema name="s"><module name="a" src="/etc/passwd"/></schema>'),
            "prompt_cache.schema",
            'schema:1: <module>: src="/etc/passwd" is for schemas in files',
        ),
        (brings('<!DOCTYPE s [<!ENTITY x SYSTEM "/etc/passwd">]><schema/>'), "prompt_cache.schema", "document types"),
        (
            brings('<schema name="s">\n<module name="a"/></schema>'),
            "prompt_cache.schema",
            "schema:2: <module>: a is emp",
        ),
        (brings('<schema name="s">\n<system>x'), "prompt_cache.schema", "schema:2: <system>: is not well-formed"),
        (
            brings('<schema name="s"><module name="a" pinned="true">x</module></schema>'),
            "prompt_cache.schema",
            "pinned",
        ),
        (brings(TALK), "prompt_cache.schema", "talk is the name of a schema of the server"),
        (brings(TOO_LONG), "prompt_cache.schema", "has more than 2,000 tokens in all modules"),
        (
            brings(f'<schema name="s"><module name="a">{"x" * 1500}</module><scaffold modules="a"/></schema>'),
            "prompt_cache.schema",
            "has 3,000 tokens, and 2,000 are the most",
        ),
        (brings("<prompt/>"), "prompt_cache.schema", 'a schema begins with <schema name="...">'),
        (brings(ICE), "prompt_cache.prompt", 'prompt:1: <prompt>: schema="s" is not the schema ice'),
        (brings(ICE, '<prompt schema="ice">\n<shi/></prompt>'), "prompt_cache.prompt", "did you mean <ship/>?"),
        (brings(ICE, ASKED.replace("who", "whom")), "prompt_cache.prompt", "has no parameter whom; it has who"),
        (brings(ICE, ASKED.replace("his", "his " * 20)), "prompt_cache.prompt", "who has "),
        (brings(ICE, ASKED.replace("/></", "/><")), "prompt_cache.prompt", "is not well-formed XML"),
        ({"prompt_cache": {"prompt": "<schema/>"}}, "prompt_cache.prompt", "must begin with <prompt schema="),
        ({"prompt_cache": {"prompt": '<prompt schema="x y"/>'}}, "prompt_cache.prompt", "is of the schema x y, which"),
        (brings(ICE, ASKED) | {"prompt": [5, 6]}, "prompt", "must be a text"),
        (brings(ICE, ASKED) | {"prompt": "a" * (POSITIONS + 9)}, "prompt_cache.prompt", "of the model's 4,096"),
        (brings(ICE, ASKED) | {"max_tokens": POSITIONS - 9}, "max_tokens", "exceeds the model's 4,096 pos"),
        (
            brings(ICE, ASKED) | {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
            "messages[0]",
            "role",
        ),
        (brings(ICE, ASKED) | {"messages": [{"role": "system", "content": "x"}]}, "messages", "must end with a user's"),
        (
            brings(ICE, ASKED) | {"messages": [{"role": "user", "content": "x", "name": "y"}]},
            "messages[0]",
            "only 'conte",
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field_and_the_line(
    served: Served, body: dict[str, Any], param: str, message: str
) -> None:
    num_batches = len(served.engine.batches)
    response = post(served, CHAT if "messages" in body else TEXT, {"max_tokens": 2} | body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert len(served.engine.batches) == num_batches


def test_a_prompt_without_room_for_its_answer_has_the_code_of_one(served: Served) -> None:
    error = error_of(post(served, TEXT, brings(ICE, ASKED) | {"prompt": "a" * (POSITIONS + 9), "max_tokens": 1}))
    assert error["code"] == "context_length_exceeded"
    error = error_of(post(served, TEXT, brings(ICE, ASKED) | {"max_tokens": POSITIONS - 9}))
    assert error["code"] == "invalid_value" and "; max_tokens=40" in error["message"]
    fitting = post(served, TEXT, brings(ICE, ASKED)).json()
    assert fitting["usage"]["completion_tokens"] == 16


def test_a_prompt_counts_with_all_that_it_keeps_in_memory() -> None:
    with serving(schemas=Schemas([], made, max_tokens=MOST_TOKENS), limits=QueueLimits(max_tokens=30)) as served:
        error = error_of(post(served, TEXT, brings(ICE, ASKED) | {"max_tokens": 2}))
        assert "than this server has memory for" in error["message"]
        only = '<prompt schema="ice"><sledge/></prompt>'
        assert post(served, TEXT, {"prompt_cache": {"prompt": only}}).json()["usage"]["completion_tokens"] > 2


def test_servers_without_it_say_so() -> None:
    with serving() as served:
        error = error_of(post(served, TEXT, brings(ICE, ASKED)))
        assert (error["param"], error["code"]) == ("prompt_cache", "unsupported_parameter")
        assert "policy=prompt_cache" in error["message"]


def test_the_log_quotes_nothing_of_a_wrong_schema(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.options, "log", True)
        post(served, TEXT, brings('<schema name="s"><union>secret words</union></schema>'))
    told = capsys.readouterr().err
    assert "400 'prompt_cache.schema' is wrong" in told and "secret" not in told


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=pieces(), schema=st.none() | pieces(), is_chat=st.booleans())
def test_any_xml_gets_an_answer_or_an_error_in_openais_shape(
    served: Served, body: str, schema: str | None, is_chat: bool
) -> None:
    fields = {"prompt": f'<prompt schema="s">{body}</prompt>'}
    if schema is not None:
        fields["schema"] = f'<schema name="s">{schema}</schema>'
    response = post(served, CHAT if is_chat else TEXT, {"prompt_cache": fields, "max_tokens": 1})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        error_of(response)


def schema_of(name: str, num_tokens: int = 4) -> str:
    return f'<schema name="{name}"><module name="m">a<param name="p" len="{num_tokens - 1}"/></module></schema>'


def test_schemas_are_their_clients_and_the_least_recently_used_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(schema: Schema) -> PromptCache:
        calls.append(schema.name)
        return made(schema)

    schemas = Schemas([made(Schema.from_xml(TALK))], noted, max_tokens=100)
    first = schemas.bring(schema_of("a", 40), "one")
    assert schemas.bring(schema_of("a", 40), "one") is first and calls == ["a"]
    assert schemas.find("a", "one") is first and schemas.find("a", "two") is None
    assert schemas.find("talk", "one") is schemas.find("talk", "two") is not None
    schemas.bring(schema_of("b", 40), "one")
    schemas.find("a", "one")
    schemas.bring(schema_of("c", 40), "two")
    assert schemas.find("b", "one") is None and schemas.find("a", "one") is first
    other = schemas.bring(schema_of("a", 20), "one")  # of the same name
    assert schemas.find("a", "one") is other is not first
    assert schemas.find("c", "two") is not None
    monkeypatch.setattr("policies.prompt_cache.schemas.MOST_BROUGHT", 3)
    many = Schemas([], made, max_tokens=1000)
    for name in ("n0", "n1", "n2", "n3"):
        many.bring(schema_of(name), "one")
    assert many.find("n0", "one") is None and many.find("n1", "one") is not None
    with pytest.raises(PMLError, match="has 102 tokens, and 100 are the most"):
        schemas.bring(schema_of("d", 102), "one")
    with pytest.raises(PMLError, match="this server takes no schemas"):
        Schemas([], noted, max_tokens=0).bring(schema_of("a"), "one")
    with pytest.raises(PMLError, match="is no XML"):
        schemas.bring(str(ROOT / "examples/cities.xml"), "one")


def test_schemas_of_a_server_are_files_with_different_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.xml", "b.xml", "again.xml")]
    for path, name in zip(paths, "aba", strict=True):
        path.write_text(schema_of(name), encoding="utf-8")
    config = FakeEngine().model.config

    def read(*files: Path) -> Schemas:
        policy = PromptCacheOptions(schema=[str(path) for path in files])
        return read_schemas(policy, chat_tokenizer(), config, max_tokens=100)

    schemas = read(*paths[:2])
    assert {name for name in "abc" if schemas.find(name, "") is not None} == {"a", "b"}
    with pytest.raises(ValueError, match=r"again.xml has the name of another schema, a; rename one"):
        read(*paths)
    with pytest.raises(ValueError, match="does not exist; check the path"):
        read(tmp_path / "none.xml")
    with pytest.raises(ValueError, match="is no XML file; name one"):
        PromptCacheOptions(schema=["a.xml", 3])


def test_the_python_of_the_page_runs() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert set(re.findall(r'\bmodel="([^"]*)"', page)) == {"smollm2"}  # as in the page's commands
    section = page.partition("### Prompt Cache")[2].partition("\n## ")[0].partition("\n### ")[0]
    blocks = re.findall(r"(?:^    .*\n|^\n)+", section, flags=re.MULTILINE)
    [code] = [textwrap.dedent(block) for block in blocks if "extra_body" in block]
    own = [made(Schema.from_xml(ROOT / "examples/cities.xml"))]
    with serving(schemas=Schemas(own, made, max_tokens=MOST_TOKENS)) as served:
        names: dict[str, Any] = {"client": OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)}
        exec(code, names)
        told = [chat_tokenizer().decode(ids) for [ids] in served.engine.batches]
        assert "Plan a trip of 3 days" in told[0] and "Miami" in told[0] and "surf" in told[0]
        assert len(told) >= 2 and "Lisbon" not in told[0]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a tiny random model on one rank."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=1024)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), schemas=Schemas([], made, max_tokens=MOST_TOKENS)) as served,
    ):
        yield served


def test_the_official_client_gets_the_engines_answer(running: Served) -> None:
    client = OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
    extra = {"prompt_cache": {"schema": ICE, "prompt": ASKED}}
    answers = [
        client.completions.create(model="fake", prompt=" and so on", max_tokens=12, extra_body=extra) for _ in range(2)
    ]
    plain = Engine(running.engine.model, Ranks.start(RanksOptions(device=Device.cpu)))
    asked = expected(ASKED.replace("</prompt>", " and so on</prompt>"))
    [theirs] = plain.generate([asked], GenerationOptions(max_new_tokens=12)).generations
    assert [answer.choices[0].text for answer in answers] == [theirs.text] * 2
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, asked.num_cached]
    assert [answer.usage.prompt_tokens for answer in answers] == [len(asked.ids)] * 2


GREEDY = GenerationOptions(max_new_tokens=9, ignore_eos=True)


def load_of_modules() -> Load:
    """Prompts that reuse segments between plain ones; the last two come later and reuse what others did."""
    draw = random.Random(9)
    segments = random_segments(draw)
    reusing = [random_prompt(draw, segments) for _ in range(4)]
    assert all(each.num_cached for each in reusing)
    return Load(
        prompts=[reusing[0], prompt(40, seed=1), reusing[1], prompt(9, seed=2), reusing[2], reusing[3], reusing[0]],
        options=[replace(GREEDY, max_new_tokens=9 + number) for number in range(7)],
        limits=QueueLimits(batch=6, itl_s=1e-6),
        after={4: 1, 5: 0, 6: 4},
        short=30,
    )


MODULES = load_of_modules()


@pytest.mark.parametrize(
    ("size", "load"),
    [
        (1, MODULES),
        (2, MODULES),
        (2, replace(MODULES, short=0)),
        pytest.param(
            2, replace(MODULES, family="bloom", limits=replace(MODULES.limits, itl_s=1e3)), marks=pytest.mark.slow
        ),
        pytest.param(
            2, replace(MODULES, prefill=PrefillOptions(carrier=Carrier.copy), short=0), marks=pytest.mark.slow
        ),
        pytest.param(3, replace(MODULES, limits=replace(MODULES.limits, decode_ranks=1)), marks=pytest.mark.slow),
    ],
    ids=["1 rank", "2 ranks", "all in the chain", "biases", "copies", "a stage that decodes"],
)
def test_answers_are_those_of_the_engine_and_modules_are_encoded_once(
    rank_pools: RankPools, size: int, load: Load
) -> None:
    by_rank = rank_pools.run(size, rank_tasks.serve, load)
    alone = [
        rank_pools.run(1, generate, load.family, [each], options)[0][0].generations[0].new_token_ids
        for each, options in zip(load.prompts, load.options, strict=True)
    ]
    assert by_rank[0].tokens == alone
    assert [each.left_bytes for each in by_rank] == [0] * size
    for each in by_rank:
        assert len(each.encoded) == len(set(each.encoded))
    assert by_rank[-1].encoded, "the stage that decodes has encoded what it needs"
    last, first = load.prompts[6], by_rank[0].cached
    assert isinstance(last, ReusingPrompt) and first[6] == last.num_cached > 0
    assert first[1] == first[3] == 0


@pytest.mark.slow
def test_stages_of_shares_agree_on_what_is_encoded(rank_pools: RankPools) -> None:
    load = replace(MODULES, num_shares=2)
    together = rank_pools.run(2, rank_tasks.serve, load)
    one_by_one = rank_pools.run(2, rank_tasks.serve, replace(load, limits=replace(load.limits, batch=1)))
    assert together[0].tokens == one_by_one[0].tokens
    assert together[0].encoded == together[1].encoded != []
    assert together[0].cached[6] > 0


def test_rows_go_on_while_modules_are_encoded_and_after_they_are_evicted(rank_pools: RankPools) -> None:
    small = replace(MODULES, store_bytes=14_000)
    served = rank_pools.run(2, rank_tasks.serve, small)
    assert served[0].tokens == rank_pools.run(2, rank_tasks.serve, MODULES)[0].tokens
    assert len(served[1].encoded) > len(set(served[1].encoded)), "the store has no room for all"
    assert "step" in served[1].inside


def test_modules_in_a_folder_outlive_a_server(tmp_path: Path) -> None:
    run, model = SERVE.compose(["policy=prompt_cache", f"policy.store={tmp_path}"]), tiny_model("llama")
    segment, ranks = random_segments(random.Random(1))[0], one_rank()
    with throughout(model.dtype):
        computed = encode_segment(model, segment)
    before = server.made_store(run, model, ranks)
    assert before is not None and before.find(segment) is None
    before.put(segment, computed)
    before.wait_for_copies()
    after = server.made_store(run, model, ranks)
    found = None if after is None else after.find(segment)
    assert found is not None and list(map(torch.equal, found.layers_TKX, computed)) == [True] * model.num_layers
