"""Answer OpenAI's API on the ranks that torchrun started, or on one rank: `python launch/serve.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.inputs.policies import NAMES
from launch.inputs.policy_help import choices
from launch.program.compose import Program
from launch.program.ending import leave
from launch.program.run import run_program
from launch.server.options import ServeRun, warnings

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: torchrun --nproc-per-node=N launch/serve.py [name=value ...]     (or: python launch/serve.py ..., one
rank)

Answers OpenAI's API (/v1/chat/completions, /v1/completions) on rank 0: long prompts are read on all ranks with
KV-Runahead. It needs the extra serve: pip install -e '.[serve]'. docs/server.md explains it.

  serve.host=127.0.0.1  serve.port=8000   serve.api_key_file=<file, a key per line>   serve.model_name=<name>
  serve.hosts=[<name>]         by which clients call it, and serve.cors_origins=[<origin>], whose pages may read answers
  serve.chat_template=<jinja>  and serve.template_kwargs={{name: value}}, its variables where a request gives none
  serve.tools=auto|hermes|llama3|mistral|none   how the model writes calls; auto: as its template has them
  serve.reasoning=auto|think|none   markers of what it thinks; auto: those of its template
  serve.batch=8                answers that are generated at once; 1 answers one after another
  serve.batch_tokens=4096      prompt tokens of several requests that are computed at once
  serve.max_tokens=<n>         of prompt and answer, of all answers at once; by default what fits into memory
  serve.itl_s=0.5              seconds after which a prefill is interrupted for a decoding step
  serve.decode_ranks=0|1       1: the last stage only decodes, and the others compute prompts
  serve.prefix_cache_bytes=auto|<n>   most bytes of texts that later prompts reuse; 0 reuses none; auto: half of what
                               the answers leave unused of their memory
  serve.prefix_host_bytes=0    of those in host memory that have no room there
  serve.prefix_folder=<folder> serve.prefix_disk_bytes=68719476736   of those on disk, which later servers find
  serve.handover=<folder>      serve.handover_bytes=17179869184   for prompts that other engines go on with
  serve.prefix_share=false     true: holders of different keys reuse each other's prefixes, and can learn of them
  serve.snapshot_tokens=0          of hybrid models, keep states after every so many tokens of a prompt, too
  cache.tier_bits=8|4|2        of each number in host memory and on disk, of modules too; null: the model's dtype
  serve.max_waiting=64         serve.max_per_client=32     serve.max_ttft_s=<predicted seconds>
  serve.max_body_bytes=4194304 serve.max_header_bytes=16384 serve.max_connections=512
  serve.read_timeout_s=30      serve.write_timeout_s=60    serve.ping_s=10
  serve.schema_tokens=262144   with policy=prompt_cache, of all schemas that requests bring; 0 takes none
  serve.unknown_fields=ignore|refuse   of requests
  serve.drain_s=25             after SIGTERM, for the requests that were taken
  serve.log=true               serve.log_prompts=false
  profile=none|nvtx            names for a profiler around the server, such as Nsight Systems
  model=..., prefill=..., partition=..., ranks=..., cache.bits=..., decode=last|sharded|auto   as launch/infer.py has
                               them (its --help lists them)
{choices("policy", NAMES)}
  generation=greedy|sample|model   and generation.<option>: for requests that do not say otherwise
                               generation.max_new_tokens=512

  torchrun --nproc-per-node=2 launch/serve.py model=smollm2
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{{"messages": [{{"role": "user", "content": "Who wrote Frankenstein?"}}]}}'
"""

SERVE = Program(module="launch.serve", options=ServeRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(SERVE, args, _serve, warnings=warnings, without_ranks=_check_extra)


def _check_extra(run: ServeRun) -> bool:
    """Check that the packages of the extra are there. Raises: ValueError."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; use pip install -e '.[serve]'") from error
    return False


def _serve(run: ServeRun, ranks: Ranks) -> None:
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    from launch.server.serving import serve

    serve(run, ranks)


if __name__ == "__main__":
    leave(main())
