"""Inputs that once ended otherwise than they should, each kept as a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz import models, tables, tensors
from tests.fuzz.models import Files
from tests.fuzz.prompts import PromptFile

DEEP = b"[" * 100_000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An input at a target.

    Attributes:
        what: happened, in a few words.
        make: makes the input.
        accepted: is it taken now, or refused?
    """

    target: str
    what: str
    make: Callable[[], Any]
    accepted: bool = False


def folder(name: str, **changes: Any) -> Callable[[], Files]:
    """A model's folder with other values in one of its JSON files."""

    def made() -> Files:
        files = models.sharded() if name == models.INDEX else models.whole()
        content = json.loads(models.content_of(files, name)) | changes
        return files.changed(name, json.dumps(content).encode())

    return made


def index(name: object) -> Callable[[], Files]:
    """A sharded checkpoint whose index names a file for one more tensor."""
    weight_map = json.loads(models.content_of(models.sharded(), models.INDEX))["weight_map"]
    return folder(models.INDEX, weight_map=weight_map | {"x": name})


def line(value: Any, **changes: Any) -> Callable[[], bytes]:
    return lambda: tables.as_json(value | changes)


FINDINGS = (
    Finding(
        target="prompt files, a prompt per line",
        what="a line of 100,000 brackets ended in a RecursionError",
        make=lambda: PromptFile(DEEP),
    ),
    Finding(
        target="prompt files, a prompt per line",
        what="a question of white space alone was refused without the name of the file",
        make=lambda: PromptFile(b'{"prompt": "a", "question": "\\u2028"}'),
    ),
    Finding(
        target="ids files",
        what="100,000 brackets ended in a RecursionError",
        make=lambda: PromptFile(DEEP, True),
    ),
    Finding(
        target="paths that lead to no file",
        what="a prompt from /dev/zero took all memory",
        make=lambda: ("prompt.file", "/dev/zero", ""),
    ),
    Finding(
        target="paths that lead to no file",
        what="a lookup table that is a pipe was waited for without end",
        make=lambda: ("partition.table", "a pipe", ".json"),
    ),
    Finding(
        target="paths that lead to no file",
        what="a schema that is a pipe was read twice, the second time without end",
        make=lambda: ("policy.schema", "a pipe", ".xml"),
    ),
    Finding(
        target="paths that lead to no file",
        what="model.path=~nobody/x ended in a RuntimeError",
        make=lambda: ("model.path", "a home of nobody", ""),
    ),
    Finding(
        target="paths that lead to no file",
        what="an error in the middle of a file did not name the file",
        make=lambda: ("points", "/proc/self/mem", ""),
    ),
    Finding(
        target="measured compute of a search",
        what="a length that is no number ended in a TypeError",
        make=line(tables.MEASURED, prefix_s=[["x", 64, 0.001], *tables.PREFIX_S[1:]]),
    ),
    Finding(
        target="measured compute of a search",
        what="a damaged file was not named",
        make=lambda: b"{",
    ),
    Finding(
        target="measured compute of a benchmark",
        what="a cost that is no text ended in a TypeError",
        make=line(tables.COMPUTE, cost=5),
    ),
    Finding(
        target="measured compute of a benchmark",
        what="bytes without end were an OverflowError",
        make=line(tables.COMPUTE, kv_bytes=float("inf")),
    ),
    Finding(
        target="measured compute of a benchmark",
        what="negative bytes were taken, and refused later by the cluster that they were for",
        make=line(tables.COMPUTE, kv_bytes=-(10**30)),
    ),
    Finding(
        target="points of a search",
        what="a point that was measured behind a line that was cut off was lost",
        make=lambda: tables.as_json(tables.POINT)[:30],
        accepted=True,
    ),
    Finding(
        target="points of a search",
        what="a point that costs NaN was taken, and beat all others",
        make=line(tables.POINT, cost_s=float("nan")),
        accepted=True,
    ),
    Finding(
        target="points of a search",
        what="a line of 100,000 brackets ended in a RecursionError",
        make=lambda: DEEP,
        accepted=True,
    ),
    Finding(
        target="lines of benchmarks",
        what="a line without a field that the table needs ended in a KeyError",
        make=lambda: tables.as_json({"variant": "single"}),
    ),
    Finding(
        target="lines of benchmarks",
        what="a file that is not UTF-8 was not named",
        make=lambda: b"\xff",
    ),
    Finding(
        target="lines of benchmarks",
        what="a variant of U+2028 alone was taken",
        make=lambda: tables.as_json(tables.BENCH_LINES[0] | {"variant": "\u2028"}),
    ),
    Finding(
        target="lines of benchmarks",
        what="bytes in 400 digits ended in an OverflowError",
        make=lambda: tables.as_json(tables.BENCH_LINES[0] | {"sent_bytes": 10**400}),
    ),
    Finding(
        target="lines of evaluations",
        what="a line without a field that the table needs ended in a KeyError",
        make=lambda: tables.as_json({"task": "copy"}),
    ),
    Finding(
        target="lines of evaluations",
        what="a task that does not exist ended in a KeyError",
        make=line(tables.EVALUATION_LINE, task="x"),
    ),
    Finding(
        target="skew files",
        what="queries of no heads were taken",
        make=lambda: tensors.other_tensors()[2],
    ),
    Finding(
        target="prompt cache, schemas",
        what="src= of a pipe was waited for without end",
        make=lambda: b'<schema name="s"><module name="f" src="pipe"/></schema>',
    ),
    Finding(
        target="prompt cache, schemas",
        what="a name of 20,000 letters was told whole",
        make=lambda: b'<schema name="s"><' + b"x" * 20_000 + b"/></schema>",
    ),
    Finding(
        target="sizes in bytes",
        what="400 digits ended in an OverflowError",
        make=lambda: "9" * 400,
    ),
    Finding(
        target="options of infer",
        what="${x} in a policy's part ended in a KeyError",
        make=lambda: ("policy=per_rank", "policy.ranks.last=${x}"),
    ),
    Finding(
        target="options of infer",
        what="1,000 brackets ended in a RecursionError",
        make=lambda: ("partition.ratios=" + "[" * 1000 + "]" * 1000,),
    ),
    Finding(
        target="options of infer",
        what="a field that is no option was named among those of infinigen",
        make=lambda: ("policy=sequence", "policy.steps=[{name:infinigen,_skew:1}]"),
    ),
    Finding(
        target="options of infer",
        what="experiment=null was refused in a sentence that did not name it",
        make=lambda: ("experiment=null",),
        accepted=True,
    ),
    Finding(
        target="options of infer",
        what="ten million million random tokens were drawn one by one",
        make=lambda: ("prompt.random_tokens=10000000000000",),
    ),
    Finding(
        target="whole runs of infer",
        what="a seed of more than 64 bits ended in 'Overflow when unpacking long long'",
        make=lambda: ("generation=sample", "generation.seed=100000000000000000000"),
    ),
    Finding(
        target="whole runs of infer",
        what="more threads than 64 bits count ended in 'Overflow when unpacking long'",
        make=lambda: ("ranks.threads=9223372036854775808",),
    ),
    Finding(
        target="model folders, config.json",
        what="100,000 brackets ended in a RecursionError",
        make=lambda: models.whole().changed("config.json", DEEP),
    ),
    Finding(
        target="model folders, config.json",
        what="a model of a million million layers was built without end",
        make=folder("config.json", num_hidden_layers=10**12),
    ),
    Finding(
        target="model folders, generation_config.json",
        what="an end token that is no number was taken, and no answer ended with it",
        make=folder("generation_config.json", eos_token_id="</s>"),
    ),
    Finding(
        target="model folders, tokenizer_config.json",
        what="a longest text that is a list ended in a TypeError once a prompt was read",
        make=folder("tokenizer_config.json", model_max_length=[1]),
    ),
    Finding(
        target="model folders, chat template",
        what="two loops of 99,999 in each other were waited for",
        make=lambda: models.whole().changed("chat_template.jinja", models.JINJA[0]),
    ),
    Finding(
        target="model folders, chat template",
        what="a text of gigabytes that a template made was tokenized for minutes",
        make=lambda: models.whole().changed("chat_template.jinja", b"{{ 'a' * 10000000 }}"),
    ),
    Finding(
        target="model folders, index of shards",
        what="a shard whose name is a list ended in a TypeError",
        make=index([]),
    ),
    Finding(
        target="model folders, index of shards",
        what="a shard outside of the folder was looked for",
        make=index("../x.safetensors"),
    ),
    Finding(
        target="model folders, files that are none",
        what="a tokenizer of 2 GiB of zeros was read whole, several times",
        make=lambda: ("tokenizer.json", "2 GiB of zeros"),
    ),
)
