"""Reasoning before an answer, variables of chat templates, and sampling options of the checkpoint."""

from __future__ import annotations

import inspect
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import GenerationConfig, PreTrainedTokenizerFast

from launch.server.answer.parser import Parts
from launch.server.options import Reasoning
from launch.server.request.chats import Chats
from launch.server.request.fields import read_chat
from launch.server.request.template_variables import RESERVED
from policies.prompt_cache.model_text import render
from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, GenerationOptions, ModelName
from runahead.conversation.conversation import Conversation
from tests.families import save_tiny_llama
from tests.serving.fakes import TEMPLATE, TOOLS_TEMPLATE, FakeEngine, chat_tokenizer, serving

HELLO: list[Any] = [{"role": "user", "content": "the letters"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 300}
THINKING = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}"
    " {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}"
    " <think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A chat template as Qwen3 has it: the model begins to reason by itself, unless it is not to."""
BEGUN = THINKING.replace("{% endif %}{% endif %}", "{% else %} <think>\n{% endif %}{% endif %}")
"""As DeepSeek R1 has it: the prompt begins the reasoning."""
EFFORT = THINKING.replace("assistant:{%", "effort {{ reasoning_effort }} assistant:{%")
SAID = "<think>\nSo, so.\n</think>\n\nYes."


def parts_of(template: str, *, reasoning: Reasoning = Reasoning.auto, **fields: Any) -> tuple[str, Parts]:
    chats = Chats(chat_tokenizer(template), reasoning=reasoning, variables={"enable_thinking": True})
    return chats.prompt(read_chat({"messages": HELLO} | fields, GenerationOptions()))


def begins(parts: Parts) -> str:
    """How an answer begins: "in" reasoning, "before" it, or "without"."""
    return "in" if parts.in_reasoning else "before" if parts.reasons else "without"


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (TEMPLATE, {}, "without"),
        (TEMPLATE, {"reasoning": Reasoning.think}, "before"),
        (THINKING, {}, "before"),
        (THINKING, {"reasoning": Reasoning.none}, "without"),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": False}}, "without"),
        (THINKING, {"reasoning_effort": "none"}, "without"),
        (BEGUN, {}, "in"),
        (BEGUN, {"chat_template_kwargs": {"enable_thinking": False}}, "without"),
        (BEGUN, {"messages": [*HELLO, {"role": "assistant", "content": "<think> So"}]}, "in"),
        (THINKING, {"messages": [*HELLO, {"role": "assistant", "content": "<think>So</think> Y"}]}, "without"),
        (THINKING, {"messages": [*HELLO, {"role": "assistant", "content": "Y"}]}, "without"),
        (THINKING, {"messages": [{"role": "user", "content": "<think>"}]}, "before"),
    ],
)
def test_where_an_answer_begins_is_seen_by_the_prompt(template: str, fields: dict[str, Any], expected: str) -> None:
    assert begins(parts_of(template, **fields)[1]) == expected


@pytest.mark.parametrize(("template", "said"), [(THINKING, SAID), (BEGUN, SAID.removeprefix("<think>"))])
def test_reasoning_is_apart_in_answers_and_streams(template: str, said: str) -> None:
    engine = FakeEngine()
    engine.says = engine.tokenizer(said, add_special_tokens=False)["input_ids"]
    with serving(engine=engine, tokenizer=chat_tokenizer(template)) as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        choice = client.chat.completions.create(**ASKED).choices[0]
        assert (choice.message.content, choice.message.model_extra["reasoning_content"]) == ("Yes.", "So, so.")
        assert choice.finish_reason == "stop"
        content, reasoning = "", ""
        for chunk in client.chat.completions.create(**ASKED, stream=True):
            delta = chunk.choices[0].delta
            more = (delta.model_extra or {}).get("reasoning_content") or ""
            assert not (more and content), "reasoning comes first"
            content, reasoning = content + (delta.content or ""), reasoning + more
        assert (content, reasoning) == ("Yes.", "So, so.")
        text = client.completions.create(model="fake", prompt="a", max_tokens=300).choices[0].text
        assert text == said  # a completion has no parts


def test_reasoning_of_earlier_answers_is_given_to_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        messages = [*HELLO, {"role": "assistant", "content": "Yes.", name: "So."}, *HELLO]
        text, _ = parts_of(THINKING, messages=messages)
        assert "assistant: <think>So.</think> Yes.\n" in text


def test_of_two_names_of_reasoning_the_one_that_is_given_counts() -> None:
    for given in ({"reasoning_content": None, "reasoning": "So."}, {"reasoning_content": "So.", "reasoning": None}):
        [message] = read_chat(
            {"messages": [{"role": "assistant", "content": "Yes."} | given]}, GenerationOptions()
        ).messages
        assert message["reasoning_content"] == "So."


def test_effort_is_for_templates_that_read_it() -> None:
    assert "effort high assistant:" in parts_of(EFFORT, reasoning_effort="high")[0]
    given = {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}
    assert "effort low assistant:" in parts_of(EFFORT, **given)[0]


def test_variables_that_requests_may_not_give_are_all_that_has_a_meaning_of_its_own() -> None:
    own = {
        *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
        *inspect.signature(render).parameters,
    }
    assert own - {"options"} <= RESERVED


def test_json_and_calls_come_after_the_reasoning(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A random model, which begins in the reasoning and may end it: what follows is what was asked for."""
    tokenizer = chat_tokenizer(BEGUN + TOOLS_TEMPLATE[: TOOLS_TEMPLATE.index("{% endfor %}") + len("{% endfor %}")])
    tokenizer.add_tokens(["</think>"], special_tokens=True)
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer, max_position_embeddings=4096)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    bias = {str(tokenizer.convert_tokens_to_ids("</think>")): 5}
    asked = ASKED | {"temperature": 1.0, "max_tokens": 600, "logit_bias": bias}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    formatted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ended = 0
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=tokenizer) as served,
    ):
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        for seed in range(6):
            choice = client.chat.completions.create(**asked, seed=seed, response_format=formatted).choices[0]
            if choice.finish_reason == "stop":
                ended += 1
                assert json.loads(choice.message.content)["a"] in (1, 2)
            more = {"tools": [tool], "tool_choice": "required"}
            choice = client.chat.completions.create(**asked, seed=seed, **more).choices[0]
            if choice.finish_reason == "tool_calls":
                ended += 1
                assert json.loads(choice.message.tool_calls[0].function.arguments)["a"] in (1, 2)
    assert ended > 6


def test_sampling_options_of_the_checkpoint_are_taken_where_others_are_not_given() -> None:
    theirs = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=1)
    assert GenerationOptions(top_p=0.5).resolved(theirs) == GenerationOptions(top_p=0.5)
    found = GenerationOptions(of_model=True, top_p=0.5).resolved(theirs)
    assert found == GenerationOptions(do_sample=True, temperature=0.6, top_p=0.5, top_k=20)
    assert GenerationOptions(of_model=True).resolved(GenerationConfig()) == GenerationOptions()
    other = "; use generation=greedy or generation=sample, or correct the file"
    for name, value, rule in (
        ("temperature", 0.0, "above 0"),
        ("top_p", "0.9", "a number"),
        ("top_k", 20.5, "a whole number"),
        ("do_sample", "false", "true or false"),
        ("repetition_penalty", True, "a number"),
        ("min_p", 1.5, "from 0 to 1"),
    ):
        wrong: Any = SimpleNamespace(**{name: value})
        told = re.escape(f"the checkpoint's generation_config.json has {name}={value}, which must be {rule}{other}")
        with pytest.raises(ValueError, match=f"^{told}$"):
            GenerationOptions(of_model=True).resolved(wrong)
        assert GenerationOptions().resolved(wrong) == GenerationOptions()
    assert GenerationOptions(of_model=True, min_p=0.5).resolved(wrong).min_p == 0.5  # which was given


def test_an_engine_samples_as_the_checkpoint_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=256)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    model.module.generation_config.update(do_sample=True, temperature=2.0, top_k=40)
    with Ranks.start(RanksOptions(device=Device.cpu)) as ranks:
        engine = Engine(model, ranks)

        def answer(**options: Any) -> list[int]:
            made = GenerationOptions(max_new_tokens=20, ignore_eos=True, seed=3, **options)
            return engine.generate([[5, 6, 7]], made).generations[0].new_token_ids

        assert answer(of_model=True) == answer(do_sample=True, temperature=2.0, top_k=40) != answer()
        conversation = Conversation(engine.model)
        conversation.feed(torch.tensor([[5, 6, 7]]))
        told = GenerationOptions(max_new_tokens=20, ignore_eos=True, seed=3, of_model=True)
        assert conversation.generate(told).rows[0].new_ids == answer(of_model=True)
        model.module.generation_config.temperature = -1.0
        with pytest.raises(ValueError, match="generation_config.json has temperature=-1.0, which must be above 0"):
            engine.check([[5, 6, 7]], [told])  # before anything is computed
