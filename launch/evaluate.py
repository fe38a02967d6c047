"""Measure the cost of cache policies in quality, bytes and time: `python launch/evaluate.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.evaluation.options import TASK_NAMES, EvaluateRun, ineffective_settings
from launch.inputs.text_files import EXAMPLE_TEXT
from launch.program.compose import Program, model_help
from launch.program.ending import leave
from launch.program.run import run_program

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python launch/evaluate.py [name=value ...]     (one rank)

Measures cache policies under budgets in several tasks, each against the full cache: quality, bytes of the KV cache,
the share of the context that attention saw, time to first token and time per token. Prints a table per task, writes a
JSON report, and draws quality over the share that is kept, retrieval by depth, and what each layer keeps.

  policies=[full,pyramidinfer,snapkv]   names, or {{name:snapkv,window:64}}; {{name:file,path:my.py}} is your own;
                                        one with a budget among its options, as {{name:window,budget:256}}, runs under
                                        that one; {{name:full,bits:4}} stores keys and values in 4 (8 or 2) bits;
                                        docs/cache_precision.md says which policies take bits;
                                        {{name:duo_attention,heads:gates,attention:streaming_heads}} computes the prompt
                                        as prefill.attention=streaming_heads does; full is added if it is missing
  budgets=[0.2,0.5,0.8]                 shares of the prompt (pyramidinfer's mean_keep), or tokens if whole numbers, of
                                        a policy, of the scorer that it wraps, of the last step of a sequence that has
                                        a budget; policies without one, such as those that retrieve, run once
  tasks=[perplexity,copy,passkey]       of {", ".join(TASK_NAMES)}
  text.file=<text in UTF-8>             for perplexity, copy, needle and ruler; by default {EXAMPLE_TEXT}

  perplexity   perplexity.tokens=2048   perplexity.samples=1   perplexity.chunk=256
               of text that is read in chunks, each with what was kept of those before it
  copy         copy.passage=128   copy.filler=640   copy.samples=4   copy.following=0   copy.timed=true
               NLL of a passage that has been read before, with other text between, and of the text that follows
  passkey      passkey.lengths=[512,1024,2048]   passkey.depths=[0,0.25,0.5,0.75,1]   passkey.samples=1
               passkey.question=separate|with_context   passkey.new_tokens=8
               a number in text that repeats itself; the question is a turn of its own after the thinned context
  needle       needle....: as passkey, in the text of text.file
  ruler        ruler.tasks=[niah_single_1,...,vt,cwe,fwe]   ruler.lengths=[4096]   ruler.samples=10   ruler.question=...
               ruler.new_tokens=<n>   ruler.squad=<dev-v2.0.json>   ruler.hotpotqa=<hotpot_dev_distractor_v1.json>
               the thirteen tasks of RULER; qa_1 and qa_2 need these files
  key_value    key_value.pairs=[<n>,...]   key_value.samples=20   key_value.question=...
               key_value.search_samples=8   key_value.most_tokens=8192
               one value among random keys and values; without pairs as many as make the full cache answer half
  file         tasks=[copy,{{name:file,path:questions.jsonl}}]   also metric, question, new_tokens, most_tokens, samples
               questions of your own: a line has prompt, question, answers and perhaps metric
               (exact_match|contained|f1|perplexity); LongBench's files are read too
  throughput   throughput.prompt_tokens=512   throughput.new_tokens=256   throughput.kv_tokens=6144 (or .kv_bytes)
               throughput.max_batch=64   throughput.rounds=3
               tokens/s with the largest batch whose KV cache fits

Policies that retrieve do so from texts of any length (policy.min_tokens=0), unless their options say otherwise.

{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>
  report=<json>   lines=<jsonl>, by default beside the report: eval.jsonl of report=eval.json

Started again after an interruption it goes on from its lines. python -m benchmarks.evaluation.plot draws and tabulates
them again.
"""

EVALUATE = Program(module="launch.evaluate", options=EvaluateRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(EVALUATE, args, _evaluate, warnings=ineffective_settings)


def _evaluate(run: EvaluateRun, ranks: Ranks) -> None:
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    from benchmarks.evaluation.evaluate import evaluate

    evaluate(run, ranks)


if __name__ == "__main__":
    leave(main())
