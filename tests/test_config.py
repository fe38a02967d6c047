"""Options check themselves, in one line, and work as OmegaConf schemas."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from launch.inputs.engine import arrange
from launch.inputs.options import Chat, PartitionOptions, PromptOptions, RunOptions, ineffective_settings
from launch.server.options import ServeRun, warnings
from runahead.config import (
    CacheOptions,
    DecodeOptions,
    DType,
    GenerationOptions,
    ModelName,
    ModelOptions,
    PrefillOptions,
    RanksOptions,
    Transfer,
)


def test_defaults_are_a_valid_run():
    run = RunOptions()
    assert run.model.name is ModelName.smollm2
    assert ineffective_settings(run) == []


def test_schema_accepts_names_of_choices():
    schema = OmegaConf.structured(RunOptions)
    run = OmegaConf.to_object(OmegaConf.merge(schema, {"prefill": {"transfer": "direct"}, "warmup": 2}))
    assert isinstance(run, RunOptions)
    assert run.prefill.transfer is Transfer.direct
    assert run.warmup == 2


def test_models_are_named_as_in_the_results_that_were_measured_before():
    before = "ModelOptions(name=<ModelName.hf: 'hf'>, path='a/b', config=None, dtype=<DType.auto: 'auto'>, seed=0, "
    before += "layers=None, trust_remote_code=False)"
    assert repr(ModelOptions(name="hf", path="a/b")) == before
    longer = ModelOptions(name="hf", path="a/b", overrides={"max_position_embeddings": 4}, revision="v1")
    assert repr(longer) == before[:-1] + ", overrides={'max_position_embeddings': 4}, revision='v1')"


@pytest.mark.parametrize("value", [True, "true", Chat.true])
def test_chat_may_be_a_bool_a_name_or_a_member(value):
    assert PromptOptions(chat=value).chat is Chat.true


def test_library_users_may_pass_bare_names():
    assert ModelOptions(name="hf", path="x", dtype="bfloat16").dtype is DType.bfloat16


MISTAKES = [
    (ModelOptions, {"name": "gpt5"}, "model=gpt5 is not one of smollm2, hf, random"),
    (ModelOptions, {"name": "hf"}, "model.path"),
    (ModelOptions, {"name": "random"}, "model.config"),
    (ModelOptions, {"path": "somewhere"}, "add model=hf"),
    (ModelOptions, {"name": "hf", "path": "x", "config": "y"}, "add model=random"),
    (ModelOptions, {"dtype": "int4"}, "model.dtype=int4"),
    (ModelOptions, {"seed": -1}, "model.seed=-1"),
    (PromptOptions, {"batch": 0}, "prompt.batch=0"),
    (PromptOptions, {"random_tokens": 0}, "prompt.random_tokens=0"),
    (PromptOptions, {"chat": "maybe"}, "auto, true, false"),
    (RanksOptions, {"timeout_s": 0.0}, "ranks.timeout_s=0"),
    (RanksOptions, {"timeout_s": math.nan}, "ranks.timeout_s=nan"),
    (RanksOptions, {"threads": 0}, "ranks.threads=0"),
    (RanksOptions, {"backend": "nccl", "device": "cpu"}, "ranks.backend=gloo"),
    (PrefillOptions, {"layers_in_flight": 1}, "at least 2"),
    (PrefillOptions, {"transfer": "post"}, "relay, direct"),
    (PrefillOptions, {"attention": "flash"}, "flash is not one of dense, causal, xattention, streaming_heads"),
    (PrefillOptions, {"exact_layers": [3, 5, 3]}, "prefill.exact_layers=[3, 5, 3] names 3 twice; name each once"),
    (PrefillOptions, {"exact_layers": [-1]}, "prefill.exact_layers=[-1] must be numbers of layers from 0 to"),
    (PrefillOptions, {"exchange": "mail"}, "prefill.exchange=mail is not one of all_gather, ring, direct"),
    (PartitionOptions, {"name": "ratios"}, "partition.ratios="),
    (PartitionOptions, {"name": "ratios", "ratios": []}, "partition.ratios="),
    (PartitionOptions, {"name": "ratios", "ratios": [0.6, 0.3]}, "add up to 1, not 0.9"),
    (PartitionOptions, {"name": "ratios", "ratios": [1.5, -0.5]}, "negative"),
    (PartitionOptions, {"name": "ratios", "ratios": [math.nan, 1.0]}, "partition.ratios=[nan"),
    (PartitionOptions, {"ratios": [0.5, 0.5]}, "add partition=ratios"),
    (PartitionOptions, {"name": "table"}, "partition.table="),
    (GenerationOptions, {"max_new_tokens": 0}, "at least 1"),
    (GenerationOptions, {"temperature": 0.0}, "do_sample=false is greedy"),
    (GenerationOptions, {"temperature": math.nan}, "temperature=nan"),
    (GenerationOptions, {"top_p": 0.0}, "top_p=0"),
    (GenerationOptions, {"top_p": 1.01}, "at most 1"),
    (GenerationOptions, {"top_k": -1}, "top_k=-1"),
    (GenerationOptions, {"repetition_penalty": 0.0}, "repetition_penalty=0"),
    (GenerationOptions, {"stop": ["a", ""]}, "empty string"),
    (GenerationOptions, {"min_p": 1.5}, "from 0 to 1"),
    (GenerationOptions, {"presence_penalty": 2.5}, "presence_penalty=2.5 must be from -2 to 2"),
    (GenerationOptions, {"frequency_penalty": math.nan}, "frequency_penalty=nan"),
    (GenerationOptions, {"logit_bias": {5: 101.0}}, "from -100 to 100"),
    (GenerationOptions, {"logit_bias": {-1: 1.0}}, "token ids"),
    (GenerationOptions, {"logprobs": 21}, "from 0 to 20"),
    (GenerationOptions, {"json_schema": "[1]"}, "not an object in JSON"),
    (GenerationOptions, {"json_schema": "{" * 100_000}, "not an object in JSON"),
    (GenerationOptions, {"json_schema": "{}", "ignore_eos": True}, "does not go with generation.json_schema"),
    (GenerationOptions, {"grammar": "x", "ignore_eos": True}, "does not go with generation.grammar"),
    (GenerationOptions, {"grammar": "x", "json_schema": "{}"}, "are both given"),
    (GenerationOptions, {"grammar": "x", "free_part": ["a"]}, "must be two texts"),
    (GenerationOptions, {"free_part": ["", "a"]}, "has no effect without"),
    (RunOptions, {"warmup": -1}, "warmup=-1"),
]


@pytest.mark.parametrize(("kind", "options", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_value(kind, options, message):
    with pytest.raises(ValueError) as error:
        kind(**options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ratios_may_be_rounded_and_zero():
    assert PartitionOptions(name="ratios", ratios=[0.333, 0.333, 0.333]).ratios
    assert PartitionOptions(name="ratios", ratios=[1.0, 0.0]).ratios


def test_settings_without_effect_are_told():
    run = RunOptions(
        generation=GenerationOptions(temperature=0.5),
        prefill=PrefillOptions(name="single", transfer="direct"),
        partition=PartitionOptions(name="ratios", ratios=[0.5, 0.5]),
        model=ModelOptions(seed=3),
    )
    sentences = " ".join(ineffective_settings(run))
    for option in ("generation.temperature", "prefill.transfer", "partition=ratios", "model.seed"):
        assert option in sentences
    peers = PrefillOptions(name="tsp", exchange="ring"), PrefillOptions(name="zigzag", attention="dense")
    for prefill, option in zip(peers, ("exchange", "attention"), strict=True):
        assert ineffective_settings(RunOptions(prefill=prefill)) == [
            f"prefill.{option} has no effect with prefill={prefill.name.name}"
        ]
        assert ineffective_settings(RunOptions(prefill=PrefillOptions(name=prefill.name))) == []
    assert not ineffective_settings(RunOptions(generation=GenerationOptions(do_sample=True, temperature=0.5, top_k=3)))
    (told,) = ineffective_settings(RunOptions(prefill=PrefillOptions(exact_layers=[5])))
    assert told == "prefill.exact_layers has no effect without prefill.attention=xattention"


GUIDED = GenerationOptions(stop=["a"], include_stop=True, kept_tokens=["<s>"], logprobs=2)
WITHOUT_EFFECT: list[tuple[RunOptions, list[str]]] = [
    (RunOptions(generation=GenerationOptions(include_stop=True)), ["generation.include_stop"]),
    (RunOptions(generation=replace(GUIDED, skip_special_tokens=False), report="a.json"), ["generation.kept_tokens"]),
    (RunOptions(generation=GUIDED), ["generation.logprobs"]),
    (RunOptions(generation=GUIDED, report="a.json"), []),
    (RunOptions(prompt=PromptOptions(text="a", batch=4)), ["prompt.batch"]),
    (RunOptions(prompt=PromptOptions(random_tokens=9, batch=4)), []),
    (RunOptions(prompt=PromptOptions(random_tokens=9, chat="true")), ["prompt.chat"]),
    (RunOptions(prompt=PromptOptions(file="a.jsonl", batch=4)), []),
    (RunOptions(model=ModelOptions(trust_remote_code=True)), ["model.trust_remote_code"]),
    (RunOptions(model=ModelOptions(dequantize=False)), ["model.dequantize"]),
    (RunOptions(model=ModelOptions(keep_dequantized=True)), ["model.keep_dequantized"]),
    (
        RunOptions(model=ModelOptions(name="hf", path="a", keep_dequantized=True, trust_remote_code=True)),  # type: ignore[arg-type]
        [],
    ),
    (RunOptions(cache=CacheOptions(residual=64)), ["cache.residual"]),
    (RunOptions(prefill=PrefillOptions(stride=8)), ["prefill.stride"]),
]


@pytest.mark.parametrize(("run", "options"), WITHOUT_EFFECT)
def test_each_option_without_effect_beside_others_is_told_alone(run, options):
    assert [sentence.split(" has no effect ")[0] for sentence in ineffective_settings(run)] == options


def test_a_server_tells_what_has_no_effect_on_its_engine():
    run = ServeRun(cache=CacheOptions(residual=64), prefill=PrefillOptions(stride=8), generation=GUIDED)
    assert warnings(run) == [
        "prefill.stride has no effect without prefill.attention=xattention",
        "cache.residual has no effect without cache.bits",
    ]
    assert warnings(ServeRun()) == []


@pytest.mark.parametrize("program", [RunOptions, ServeRun])
def test_an_answer_may_be_as_long_as_it_has_to_be(program):
    with pytest.raises(ValueError, match=r"generation.min_new_tokens=6 is more than generation.max_new_tokens=5"):
        program(generation=GenerationOptions(min_new_tokens=6, max_new_tokens=5))
    assert program(generation=GenerationOptions(min_new_tokens=5, max_new_tokens=5)).generation.min_new_tokens == 5


ON_ONE_STAGE: list[tuple[RunOptions, list[str]]] = [
    (RunOptions(), []),
    (RunOptions(prefill=PrefillOptions(transfer="direct", wire_bits=8)), ["prefill.transfer", "prefill.wire_bits"]),
    (RunOptions(prefill=PrefillOptions(layers_in_flight=5)), ["prefill.layers_in_flight"]),
    (RunOptions(partition=PartitionOptions(name="even")), ["partition=even"]),
    (RunOptions(partition=PartitionOptions(learn=False)), ["partition.learn"]),
    (RunOptions(decode=DecodeOptions(name="sharded")), ["decode=sharded"]),
    (RunOptions(policy={"name": "per_rank", "ranks": {"others": "h2o"}}), ["policy.ranks.others"]),
    (RunOptions(policy={"name": "per_rank", "ranks": {"last": "h2o"}}), []),
]


@pytest.mark.parametrize(("run", "options"), ON_ONE_STAGE)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_options_of_a_chain_are_told_where_there_is_one_stage(run, options, num_stages, capsys):
    arrange(run, SimpleNamespace(num_stages=num_stages))
    told = [f"warning: {option} has no effect on one rank" for option in options]
    assert capsys.readouterr().err.splitlines() == (told if num_stages == 1 else [])


def test_sampling_options_beside_those_of_the_checkpoint_may_have_an_effect():
    assert not ineffective_settings(RunOptions(generation=GenerationOptions(of_model=True, temperature=0.5, seed=3)))
