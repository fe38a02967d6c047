"""Arguments of all programs: options, sizes, and whole runs under such options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from benchmarks.evaluation.contenders import contenders
from benchmarks.evaluation.options import ineffective_settings as without_effect_in_evaluate
from benchmarks.ttft.options import ineffective_settings as without_effect_in_bench
from launch import infer
from launch.bench import BENCH
from launch.duo_gates import GATES
from launch.encode import ENCODE
from launch.evaluate import EVALUATE
from launch.exact_layers import EXACT
from launch.fit_kvzap import FIT
from launch.infer import INFER
from launch.inputs.options import ineffective_settings
from launch.inputs.policies import NAMES, options_of, rank_policies
from launch.program.compose import CommandLine, Program
from launch.program.typed_options import leaf_names, option_kinds
from launch.retrieval_heads import HEADS
from launch.skew import SKEW
from partitioner.plan import PLAN
from partitioner.search import SEARCH
from policies import POLICIES
from policies.byte_size import num_bytes
from runahead import context
from tests.fuzz.harness import Outcome, judged, run_main
from tests.fuzz.models import tiny_model
from tests.fuzz.target import Target

SCALARS = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "16",
    "64",
    "-1",
    "0.5",
    "-0.5",
    "1.0",
    "0.1",
    "1e-320",
    "1e308",
    "1e999",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "100000000000000000000000000000",
    "9" * 400,
    "9" * 5000,
    "nan",
    "-nan",
    "inf",
    "-inf",
    ".inf",
    ".nan",
    "NaN",
    "1_000",
    "0x10",
    "1e3",
    "٣",
    "true",
    "false",
    "yes",
    "off",
    "null",
    "none",
    "",
    " ",
    "auto",
    "full",
    "''",
    '""',
    "'",
    '"',
    "\\",
    "a b",
    "größer 中",
    "\ud800",
    "\0",
    "a\nb",
    "???",
    "${x}",
    "${seed}",
    "${model.seed}",
    "${oc.env:NO_SUCH_VARIABLE}",
    "${oc.env:HOME}",
    "${policy}",
    "${",
    "$",
    "@",
    "a=b",
    "a,b",
    "a:b",
    "int(3)",
    "int(x)",
    "float(nan)",
    "choice(1,2)",
    "range(1,9)",
    "glob(*)",
    "shuffle(1,2)",
    "extend_list(1)",
    "-3GiB",
    "3GiB",
    "2GB",
    "1 MiB",
    "3XB",
    "~nobody/x",
    "x" * 5000,
    "x" * 300,
)
COMPOUND = (
    "[]",
    "[0.5,0.5]",
    "[1]",
    "[nan]",
    "[nan,nan]",
    "[inf,-inf]",
    "[-1,2]",
    "[1,[2]]",
    "[a,b]",
    "[null]",
    "[true]",
    "[1e308,1e308]",
    "[0.3333,0.3333,0.3333]",
    "{}",
    "{a:1}",
    "{bytes:1GiB}",
    "{bytes:-1}",
    "{bytes:[1]}",
    "{victim:lru}",
    "{victim:[1]}",
    "{name:snapkv}",
    "{name:snapkv,budget:4,window:2}",
    "{name:snapkv,kernel:3.5}",
    "{name:h2o,budget:nan}",
    "{name:window,budget:abc}",
    "{name:[1]}",
    "{1:2}",
    "[snapkv]",
    "[pyramidinfer,{name:snapkv,budget:8,window:2}]",
    "[{name:sequence,steps:[h2o]}]",
    "[[h2o]]",
    "[h2o,h2o]",
    "[infinigen,h2o]",
    "[" * 30 + "]" * 30,
    "[" * 1000 + "]" * 1000,
    "[" * 1000,
    "[1,2",
    "{a:1",
    "[1,,2]",
    "[1 2]",
)
FRACTIONS = st.lists(st.floats(), min_size=1, max_size=4).map(lambda values: "[" + ",".join(map(str, values)) + "]")
TYPED: SearchStrategy[str] = (
    st.sampled_from(SCALARS)
    | st.sampled_from(SCALARS[:20])
    | st.sampled_from(COMPOUND)
    | st.integers().map(str)
    | st.floats().map(str)
    | FRACTIONS
    | st.text(max_size=12)
)
CHOICES = {
    "model": ("smollm2", "hf", "random"),
    "prefill": ("kv_runahead", "single", "tsp", "zigzag", "tensor"),
    "partition": ("auto", "even", "ratios", "table"),
    "decode": ("auto", "last", "sharded"),
    "ranks": ("auto", "cpu", "cuda"),
    "generation": ("greedy", "sample"),
    "policy": NAMES,
    "experiment": ("two_laptop_ranks", "null"),
}
NO_OPTIONS = (
    "",
    "=",
    "=1",
    "prompt",
    "prompt=a",
    "prompt.txt=a",
    "modle=hf",
    "+x=1",
    "++model.seed=1",
    "~model.seed",
    "~model",
    "+model.seed=1",
    "model@x=hf",
    "hydra.run.dir=x",
    "hydra/launcher=basic",
    "policy.ranks=1",
    "policy.ranks.last.x=1",
    "--cfg",
    "--cfg=job",
    "--cfg=all",
    "--help",
    "-h",
    "--multirun",
    "-",
    "--",
    "a b=c",
    "größe=1",
    "\ud800=1",
    "\n",
    "[=1",
    "model.seed.x=1",
    "model..seed=1",
    ".seed=1",
    "model.=1",
)


@cache
def option_names(program: Program[Any]) -> list[str]:
    names = leaf_names(option_kinds(program.options))
    if "policy" in names:
        names += [
            f"policy.{option}" for name in NAMES for option in ("name", *leaf_names(option_kinds(options_of(name))))
        ]
    return names


@st.composite
def command_lines(draw: st.DrawFn, program: Program[Any], always: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Up to four options; most of them exist."""
    names = option_names(program)
    policy_names = [name for name in names if name.startswith("policy.")]
    found = list(always)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 11))
        if kind == 0:
            found.append(draw(st.sampled_from(NO_OPTIONS)))
        elif kind < 4:
            group = draw(st.sampled_from(list(CHOICES)))
            found.append(f"{group}={draw(st.sampled_from(CHOICES[group]))}")
        elif kind < 7 and policy_names:
            found.append(f"{draw(st.sampled_from(policy_names))}={draw(TYPED)}")
        else:
            found.append(f"{draw(st.sampled_from(names))}={draw(TYPED)}")
    return tuple(found)


def checked_by(program: Program[Any], use: Callable[[Any], object]) -> Callable[[tuple[str, ...], Path], Outcome]:
    """The arguments are read, and what only needs them is done, such as making the policies."""

    def check(args: tuple[str, ...], folder: Path) -> Outcome:
        def read() -> CommandLine[Any]:
            command = program.read(args)
            if command.run is not None:
                use(command.run)
            return command

        def printable(command: CommandLine[Any]) -> None:
            if command.to_print is not None:
                command.to_print.encode()

        return judged(read, printable, folder=folder)

    return check


def use_infer(run: Any) -> None:
    ineffective_settings(run)
    rank_policies(run.policy, run.cache)
    if run.partition.ratios is not None:
        partition = context.from_ratios(run.partition.ratios)
        for length in (1, 7, 100_000):
            partition(length, len(run.partition.ratios)).check(length, len(run.partition.ratios))


def use_evaluate(run: Any) -> None:
    without_effect_in_evaluate(run)
    contenders(run.policies, run.budgets)


def check_size(text: str, folder: Path) -> Outcome:
    def use(size: int) -> None:
        assert type(size) is int and size >= 1

    return judged(lambda: num_bytes(text, "policy.host_bytes"), use, names=["policy.host_bytes"], folder=folder)


SIZES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", " ", "-", "+", "\n", "a"]),
        st.integers(0, 10**6).map(str) | st.floats().map(str) | st.sampled_from(SCALARS),
        st.sampled_from(["", " ", "  ", "_"]),
        st.sampled_from(["", "b", "B", "k", "KB", "KiB", "GiB", "gib", "TB", "PiB", "bytes", "GiBs", "ﬁ", "K", "%"]),
        st.sampled_from(["", "", "", " ", "\n", "x"]),
    ),
)


# Whole runs, on a tiny model.


SECTIONS = (
    "model",
    "prompt",
    "ranks",
    "prefill",
    "partition",
    "policy",
    "generation",
    "report",
    "timeline",
    "profile",
    "option",
)


def check_run(args: tuple[str, ...], folder: Path) -> Outcome:
    """launch/infer.py itself, in this process."""
    model = tiny_model()
    threads = torch.get_num_threads()
    base = ["model=hf", f"model.path={model}", "ranks.device=cpu", "ranks.threads=1", "generation.max_new_tokens=3"]
    prompt = () if any(arg.startswith("prompt.") for arg in args) else ("prompt.text=the letters of the captain",)
    try:
        return run_main(infer.main, [*base, *prompt, *args], folder=folder, names=SECTIONS)
    finally:
        torch.set_num_threads(threads)


RUN_POLICIES: dict[str, dict[str, str]] = {
    "full": {},
    "window": {"budget": "12"},
    "streaming_llm": {"budget": "12"},
    "h2o": {"budget": "12"},
    "snapkv": {"budget": "12", "window": "4", "kernel": "3"},
    "pyramidkv": {"budget": "12", "window": "4", "kernel": "3"},
    "keydiff": {"budget": "12"},
    "tova": {"budget": "12"},
    "expected_attention": {"budget": "12", "future_tokens": "16"},
    "chunkkv": {"budget": "12", "window": "4", "chunk": "3"},
    "r_kv": {"budget": "12", "window": "4", "kernel": "3"},
    "lagkv": {"budget": "12", "sinks": "2", "lag": "4"},
    "kvzip": {"budget": "12", "chunk_tokens": "16"},
    "zigzagkv": {"budget": "12", "window": "4"},
    "cake": {"budget": "12", "window": "4"},
    "dms": {},
    "scissorhands": {"budget": "12", "recent": "3", "window": "4"},
    "keyformer": {"budget": "12"},
    "k_centers": {"budget": "12"},
    "fastgen": {"frequent": "4", "local": "4", "window": "4"},
    "pyramidinfer": {"min_tokens": "4"},
    "infinigen": {"min_tokens": "0"},
    "quest": {"min_tokens": "0", "page": "4", "fetch": "8"},
    "em_llm": {"min_tokens": "0", "sinks": "2", "recent": "4", "fetch": "12", "observed": "4", "clamped": "false"},
    "magicpig": {"min_tokens": "0", "bits": "2", "tables": "6", "dense_every": "0"},
    "retrieval_attention": {"min_tokens": "0", "fetch": "8", "sinks": "1", "observed": "6", "width": "3"},
    "exact_topk": {"min_tokens": "0", "fetch": "8"},
    "offload": {"min_tokens": "0"},
}
NUMERIC = st.sampled_from(SCALARS[:20]) | st.integers(-2, 40).map(str) | st.floats(-1, 2).map(str) | FRACTIONS
RUN_OPTIONS = tuple(
    name
    for name in option_names(INFER)
    if name.split(".")[0] in ("generation", "prefill", "policy", "prompt", "partition")
    and name not in ("prompt.random_tokens", "prompt.file", "policy.store", "prompt.text")
)
RUN_FILES = (
    "report",
    "timeline",
    "profile",
    "ranks.fault_report",
    "model.seed",
    "model.dtype",
    "ranks.timeout_s",
    "ranks.threads",
)


WORDS = ("max", "avg", "top_k", "top_p", "power", "cosine", "uniform", "more", "fifo", "lru", "counter", "auto", "none")


def _plain_values(default: object) -> SearchStrategy[str]:
    """Values of the kind that an option has by default, not all of them in its range."""
    if isinstance(default, bool):
        return st.sampled_from(["true", "false"])
    if isinstance(default, float):
        return st.floats(-0.25, 2).map(str) | st.sampled_from(["0.5", "1.0", "1e-9", "inf", "nan", "40"])
    if isinstance(default, int) or default is None:
        return st.integers(-1, 50).map(str) | st.sampled_from(["0.5", "2147483648", "9223372036854775807"])
    if isinstance(default, str | Enum):
        return st.sampled_from(WORDS)
    return st.sampled_from(
        ["{bytes:10KiB}", "{bytes:1}", "{bytes:20KiB,victim:lru}", "{bytes:20KiB,victim:fifo}", "avg"]
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, ...]:
    """A policy with one or two of its options set to something, or other options of a run."""
    found = []
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(RUN_POLICIES)))
        settings = dict(RUN_POLICIES[name])
        known = [field.name for field in fields(POLICIES[name]) if field.init]  # type: ignore[arg-type]
        for option in draw(st.lists(st.sampled_from(known), max_size=3)) if known else []:
            plain = _plain_values(getattr(POLICIES[name](), option))
            settings[option] = draw(plain if draw(st.integers(0, 3)) else NUMERIC | st.sampled_from(COMPOUND[:24]))
        if draw(st.integers(0, 3)) == 0 and name != "full":
            step = ",".join([f"name:{name}", *(f"{option}:{value}" for option, value in settings.items())])
            found += ["policy=sequence", f"policy.steps=[{{{step}}}]"]
        else:
            found += [f"policy={name}", *(f"policy.{option}={value}" for option, value in settings.items())]
    for _ in range(draw(st.integers(0, 2))):
        option = draw(st.sampled_from((*RUN_OPTIONS, *RUN_FILES)))
        found.append(f"{option}={draw(NUMERIC | TYPED)}")
    return tuple(found) or ("prompt.random_tokens=9",)


def _program_target(
    program: Program[Any], reads: str, use: Callable[[Any], object], share: int, always: tuple[str, ...] = ()
) -> Target:
    return Target(
        name=f"options of {program.name}",
        reads=reads,
        inputs=command_lines(program, always),
        check=checked_by(program, use),
        share=share,
    )


TARGETS = (
    _program_target(INFER, "launch/infer.py", use_infer, 20),
    _program_target(BENCH, "launch/bench.py", without_effect_in_bench, 6),
    _program_target(EVALUATE, "launch/evaluate.py", use_evaluate, 6),
    _program_target(PLAN, "partitioner/plan.py", lambda run: None, 4, ("tokens=9", "device=h100")),
    _program_target(SEARCH, "partitioner/search.py", lambda run: None, 6, ("table=x.json",)),
    _program_target(ENCODE, "launch/encode.py", lambda run: None, 3, ("schema=x.xml",)),
    _program_target(EXACT, "launch/exact_layers.py", lambda run: None, 3),
    _program_target(HEADS, "launch/retrieval_heads.py", lambda run: None, 2, ("out=x",)),
    _program_target(GATES, "launch/duo_gates.py", lambda run: None, 2, ("out=x",)),
    _program_target(SKEW, "launch/skew.py", lambda run: None, 3, ("out=x",)),
    _program_target(FIT, "launch/fit_kvzap.py", lambda run: None, 3, ("out=x",)),
    Target(
        name="sizes in bytes",
        reads="policies/byte_size.py num_bytes",
        inputs=SIZES | st.text(max_size=12),
        check=check_size,
        share=8,
    ),
    Target(name="whole runs of infer", reads="launch/infer.py main", inputs=runs(), check=check_run, share=6),
)
