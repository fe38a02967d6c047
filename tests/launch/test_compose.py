"""The command line becomes one typed RunOptions, free text untouched, mistakes told in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launch.bench import BENCH
from launch.evaluate import EVALUATE
from launch.infer import HELP, INFER
from launch.inputs.options import Chat, PartitionName, RunOptions
from launch.program.compose import CONF, FLAGS_HELP
from launch.program.typed_options import leaf_names, option_kinds
from launch.serve import SERVE
from partitioner.plan import PLAN
from partitioner.search import SEARCH
from runahead.config import DecodeName, ModelName, PrefillName
from tests.examples import examples

ROOT = Path(__file__).resolve().parents[2]

# Composing takes a tenth of a second, which is Hydra's.
few = examples(10)

# What an operating system lets through as an argument: any text without NUL.
ARGUMENTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def run_of(*args: str) -> RunOptions:
    run = INFER.read(args).run
    assert run is not None
    return run


def test_overrides_of_a_config_are_nested_values_of_any_type():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    written = "{rope_type:yarn,factor:4.0,original_max_position_embeddings:32768}"
    run = run_of(f"model.overrides={{rope_parameters:{written},max_position_embeddings:131072,sliding_window:null}}")
    expected = {"rope_parameters": yarn, "max_position_embeddings": 131072, "sliding_window": None}
    assert run.model.overrides == expected
    one_by_one = [f"model.overrides.rope_parameters={written}", "model.overrides.max_position_embeddings=131072"]
    assert run_of(*one_by_one, "model.overrides.sliding_window=null").model.overrides == expected
    with pytest.raises(ValueError, match=re.escape("model.overrides=3 is not a set of options")):
        run_of("model.overrides=3")


def test_files_in_conf_hold_the_defaults_of_the_dataclasses():
    assert INFER.compose([]) == RunOptions()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("choice", sorted(f"{path.parent.name}/{path.stem}" for path in CONF.glob("*/*.yaml")))
def test_every_file_in_conf_composes(choice):
    needed = {
        "model/hf": ["model.path=x"],
        "model/random": ["model.config=x"],
        "partition/ratios": ["partition.ratios=[0.5,0.5]"],
        "partition/table": ["partition.table=x"],
        "policy/sequence": ["policy.steps=[h2o]"],
        "policy/per_rank": ["policy.ranks.last=h2o"],
    }
    INFER.compose([choice.replace("/", "="), *needed.get(choice, [])])


def test_every_choice_has_a_file():
    for group, kind in {
        "model": ModelName,
        "prefill": PrefillName,
        "partition": PartitionName,
        "decode": DecodeName,
    }.items():
        assert {path.stem for path in (CONF / group).glob("*.yaml")} == set(kind.__members__)


def test_options_and_groups_are_set():
    run = run_of(
        "model=hf",
        "model.path=org/model",
        "partition=ratios",
        "partition.ratios=[0.6,0.4]",
        "warmup=1",
        "prefill=single",
    )
    assert (run.model.name, run.model.path) == (ModelName.hf, "org/model")
    assert run.partition.ratios == [0.6, 0.4]
    assert (run.warmup, run.prefill.name) == (1, PrefillName.single)


def test_an_experiment_wins_over_groups_and_the_command_line_over_it():
    run = run_of("experiment=two_laptop_ranks", "ranks.threads=2")
    assert run.partition.name is PartitionName.ratios
    assert (run.ranks.backend.name, run.ranks.threads) == ("gloo", 2)


@pytest.mark.parametrize(("text", "chat"), [("true", Chat.true), ("false", Chat.false), ("auto", Chat.auto)])
def test_chat_is_read_though_yaml_takes_it_for_a_bool(text, chat):
    assert run_of(f"prompt.chat={text}").prompt.chat is chat


@few
@given(text=ARGUMENTS, question=ARGUMENTS)
@example(text="a=b, [c] {d}: \"e\" 'f'\n", question=" ${x} \\ ${oc.env:HOME} ")
@example(text="null", question="---")
@example(text="${", question="???")
def test_text_and_question_are_verbatim(text, question):
    run = run_of(f"prompt.text={text}", "warmup=1", f"prompt.question={question}")
    assert (run.prompt.text, run.prompt.question, run.warmup) == (text, question, 1)


@few
@given(stop=ARGUMENTS.filter(lambda text: text not in ("", "null") and not (text[0] == "[" and text[-1] == "]")))
@example(stop="[a, b")
@example(stop="${x},")
@example(stop="}")
@example(stop="a: b")
@example(stop="\n")
def test_a_stop_without_brackets_is_one_verbatim_string(stop):
    try:
        parsed = json.loads(stop)
    except ValueError:
        parsed = None
    if not (isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)):
        assert run_of(f"generation.stop={stop}").generation.stop == [stop]


@few
@given(stops=st.lists(ARGUMENTS.filter(bool)))
def test_a_stop_that_is_a_json_list_of_strings_is_that_list(stops):
    assert run_of(f"generation.stop={json.dumps(stops)}").generation.stop == stops


@pytest.mark.parametrize("program", [INFER, SERVE], ids=["infer", "serve"])
@pytest.mark.parametrize(
    ("value", "stops"),
    [
        ("[a,b]", ["a", "b"]),  # what bash leaves of ["a","b"]
        ("[a b, '\\n']", ["a b", "\\n"]),
        ("['a,b']", ["a,b"]),
        ("[]", []),
        ("null", []),
    ],
)
def test_a_stop_in_brackets_is_a_list_without_quotes_too_and_null_is_none(program, value, stops):
    assert program.read([f"generation.stop={value}"]).run.generation.stop == stops


@pytest.mark.parametrize("value", ['["a", 1]', "[1,2]", "[null]", "[[a],[b]]", "[{a: b}]", "[a,]x]", "[" * 9999 + "]"])
def test_a_stop_in_brackets_that_is_no_list_of_strings_is_refused_with_both_spellings(value):
    with pytest.raises(ValueError, match="is not a list of strings") as caught:
        run_of(f"generation.stop={value}")
    said = str(caught.value)
    assert """generation.stop='["a","b"]'""" in said
    one = said.partition("in brackets as ")[2].strip()
    if "..." not in one:
        assert run_of(one.replace("'", "")).generation.stop == [value]


def test_null_takes_back_what_was_given():
    assert run_of("generation.stop=a", "generation.stop=null", "generation.stop=b").generation.stop == ["b"]
    assert run_of('generation.json_schema={"type": "object"}', "generation.json_schema=null") == RunOptions()
    run = run_of("prompt.text=null", "prompt.question=[a,b]")
    assert (run.prompt.text, run.prompt.question) == ("null", "[a,b]")


def test_stops_add_up():
    args = ["generation.stop=x, y", 'generation.stop=["a","b"]', "generation.stop= \n"]
    assert run_of(*args).generation.stop == ["x, y", "a", "b", " \n"]


@pytest.mark.parametrize(("text", "number"), [("128k", 131_072), ("128K", 131_072), ("1M", 2**20), ("1.5k", 1536)])
def test_whole_numbers_take_k_and_m(text, number):
    run = run_of(f"prompt.random_tokens={text}", "policy=snapkv", f"policy.budget={text}")
    assert (run.prompt.random_tokens, run.policy["budget"]) == (number, number)


def test_whole_numbers_take_k_and_m_in_every_program():
    text, number = "1.5k", 1536
    assert run_of(f"draft.policy={{name:window,budget:{text}}}").draft.policy["budget"] == number
    assert PLAN.compose([f"tokens={text}", "device=h100"]).tokens == number
    assert SEARCH.compose(["table=x", f"search.lengths=[{text},7]"]).search.lengths == [7, number]
    assert BENCH.compose([f"bench.lengths=[{text}]"]).bench.lengths == [number]
    evaluation = EVALUATE.compose([f"passkey.lengths=[{text}]", f"budgets=[0.2,{text}]"])
    assert (evaluation.passkey.lengths, evaluation.budgets) == ([number], [0.2, number])
    assert SERVE.compose([f"serve.max_tokens={text}"]).serve.max_tokens == number


@pytest.mark.parametrize("text", ["1.0001k", "k", "-1k", "1kk", "1 k", "9" * 20 + "k"])
def test_other_letters_are_no_numbers(text):
    with pytest.raises(ValueError, match=r"generation.max_new_tokens=.* is not a whole number"):
        run_of(f"generation.max_new_tokens={text}")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("policy=snapvk", "snapkv"),
        ("prefill=zigzga", "zigzag"),
        ("decode=lsat", "last"),
        ("model=smolm2", "smollm2"),
        ("partition=evn", "even"),
        ("ranks.backend=glo", "gloo"),
        ("draft.policy={name:snapvk}", "snapkv"),
        ("policy.name=snapvk", "snapkv"),
    ],
)
def test_a_mistyped_choice_is_answered_with_the_one_that_was_meant(given, meant):
    with pytest.raises(ValueError, match=rf" is not one of .*; did you mean {meant}\?$"):
        run_of(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{name:snapkv,budgt:1}", "draft.policy: snapkv has no option budgt; it has budget"),
        ("{name:snapkv,budget:half}", "draft.policy.budget=half is not a whole number"),
        ("{name:adakv,budget:9}", "draft.policy: adakv has no option budget; use draft.policy.scorer.budget=9"),
        ("{name:snapkv,positions:new}", "draft.policy.positions=new is not one of original, reencoded"),
    ],
)
def test_a_mistake_in_the_drafting_policy_names_it(given, says):
    with pytest.raises(ValueError) as caught:
        run_of(f"draft.policy={given}")
    assert str(caught.value).startswith(says)
    assert run_of("draft.policy.name=adakv", "draft.policy.scorer.budget=9").draft.policy["scorer"] == {"budget": 9}


def test_a_schema_is_taken_as_it_is_and_biases_by_token_id() -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": ["${x}", "b=c, d"]}}}'
    assert run_of(f"generation.json_schema={schema}").generation.json_schema == schema
    run = run_of("generation.logit_bias={50:-100,7:0.5}", "generation.logprobs=3")
    assert run.generation.logit_bias == {50: -100.0, 7: 0.5} and run.generation.logprobs == 3


@pytest.mark.parametrize("name", ["a(1),[b]=c.txt", 'it\'s "quoted".txt', "back\\slash\\", " blank ", "x y"])
def test_file_names_need_no_quotes(name):
    run = run_of(f"prompt.file={name}", f"report={name}")
    assert (run.prompt.file, run.report) == (name, name)


def test_file_names_may_refer_to_other_options():
    assert run_of("warmup=3", "report=run-${warmup}.json").report == "run-3.json"


MISTAKES = [
    (["prompt.fil=x"], "unknown option prompt.fil; did you mean prompt.file?"),
    (["max_new_tokens=4"], "unknown option max_new_tokens; did you mean generation.max_new_tokens?"),
    (["+x=1"], "unknown option x"),
    (["~model=hf"], "unknown option ~model"),
    (["hydra.run.dir=x"], "unknown option hydra.run.dir"),
    (["prompt=x"], "prompt is not one option but several: prompt.text"),
    (["prompt.file"], "options are written name=value"),
    (["--fast"], "unknown flag --fast"),
    (["--cfg"], "use --cfg job"),
    (["--cfg", "hydra"], "use --cfg job"),
    (["model=gpt5"], "model=gpt5 is not one of hf, random, smollm2"),
    (["model=[hf]"], "is not one of hf, random, smollm2"),
    (["experiment=none"], "is not one of two_laptop_ranks"),
    (["model.dtype=float99"], "model.dtype=float99 is not one of auto, float32, bfloat16, float16"),
    (["model.name=gpt5"], "is not one of smollm2, hf, random"),
    (["prompt.batch=x"], "prompt.batch=x is not a whole number"),
    (["prompt.batch=1.5"], "prompt.batch=1.5 is not a whole number"),
    (["prompt.batch=null"], "prompt.batch=null is not a whole number"),
    (
        ["prompt.batch=1,2"],
        "has several values; give one, or a list in brackets, or run each with --multirun",
    ),
    (["sweep.ranks=2"], "sweep.ranks is an option of a sweep; give it with --multirun"),
    (["--multirun", "--cfg", "job"], "leave --multirun out"),
    (["--multirun=1"], "unknown flag --multirun=1"),
    (["generation.temperature=warm"], "generation.temperature=warm is not a number"),
    (["generation.do_sample=maybe"], "is not true or false"),
    (["generation.seed=a(b"], "cannot read generation.seed=a(b: not a value that generation.seed can take; text"),
    (["policy=snapkv budget=64"], "can take; give a name, and options one by one as policy.<option>=<value>"),
    (["generation.seed=" + "9" * 5000], "cannot read generation.seed=9999"),
    (["partition=ratios", "partition.ratios=0.4"], "is not a list of numbers"),
    (["partition=ratios", "partition.ratios=[a,b]"], "is not a list of numbers"),
    (["partition=ratios", "partition.ratios=[0.6,0.6]"], "must add up to 1, not 1.2"),
    (["prompt.chat=maybe"], "is not one of auto, true, false"),
    (["generation.max_new_tokens=0"], "generation.max_new_tokens=0 must be at least 1"),
    (["generation.stop="], "empty string"),
    (["decode=first"], "decode=first is not one of auto, last, sharded"),
    (["decode=sharded", "prefill=tsp"], "decode=sharded needs prefill=kv_runahead: prefill=tsp collects"),
    (
        ["decode=sharded", "policy=snapkv", "policy.positions=reencoded"],
        "policy.positions=reencoded counts all that are kept; use policy.positions=original or decode=last",
    ),
    (["decode=sharded", "policy=kvzip"], "this policy has to see those of all chunks at once; use decode=last"),
    (
        ["decode=sharded", "policy=per_rank", "policy.ranks.others={name:zigzagkv,budget:64}"],
        "decode=sharded leaves each rank the tokens of its own chunk, and this policy has to see",
    ),
    (["report=${nothing}"], "report=${nothing} cannot be used"),
    (["prompt.fi\nle=x"], "did you mean prompt.file?"),
    (["prompt.text=\udc80"], "not valid UTF-8"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(args, message):
    with pytest.raises(ValueError) as error:
        INFER.read(args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@few
@given(name=ARGUMENTS | st.sampled_from(["prompt.batch", "report", "partition.ratios", "model"]), value=ARGUMENTS)
@example(name="report", value="${")
@example(name="partition.ratios", value="[")
@example(name="model", value="a/../b")
def test_any_argument_is_read_or_refused_in_one_line(name, value):
    try:
        INFER.read([f"{name}={value}"])
    except ValueError as error:
        assert len(str(error).splitlines()) == 1


def test_help_names_every_option():
    to_print = INFER.read(["--help", "no=such.option"]).to_print
    assert to_print == HELP + FLAGS_HELP
    for name in leaf_names(option_kinds(RunOptions)):
        group = name.removesuffix(".name")
        assert re.search(rf"(?<![\w.]){re.escape(group)}=", HELP), name


def test_cfg_job_prints_what_would_run():
    to_print = INFER.read(["--cfg", "job", "prompt.text=${x}: 'y'", "prefill.transfer=direct"]).to_print
    assert to_print is not None
    printed = yaml.safe_load(to_print)
    assert printed["prompt"]["text"] == "${x}: 'y'"
    assert printed["prefill"] == {
        "name": "kv_runahead",
        "transfer": "direct",
        "carrier": "backend",
        "layers_in_flight": 3,
        "attention": "causal",
        "threshold": 0.99,
        "density": None,
        "stride": 16,
        "exact_layers": [],
        "exchange": "all_gather",
        "chunk_tokens": None,
        "row_tokens": None,
        "speculative": "none",
        "speculative_share": 0.25,
        "speculative_chunk": 32,
        "speculative_ahead": 8,
        "speculative_layers": None,
        "wire_bits": None,
    }


def infer(*args: str, rank: int = 0, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "infer.py"), *args]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # where nobody has to be
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", **meeting}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_program_refuses_an_unknown_option_from_any_folder(tmp_path):
    done = infer("prompt.fil=x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "unknown option prompt.fil; did you mean prompt.file?\n"


def test_other_ranks_refuse_silently(tmp_path):
    done = infer("prompt.fil=x", rank=1, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_program_prints_help_on_rank_0_before_any_process_group(tmp_path):
    # Two ranks are announced and only one is there: with a process group this would hang.
    assert infer("--help", cwd=tmp_path).stdout == HELP + FLAGS_HELP
    assert infer("--help", rank=1, cwd=tmp_path).stdout == ""
    assert list(tmp_path.iterdir()) == []
