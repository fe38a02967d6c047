"""Answer prompts on the ranks that torchrun started, or on one rank: `python launch/infer.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.inputs.options import RunOptions, ineffective_settings
from launch.inputs.policies import NAMES
from launch.inputs.policy_help import choices, policy_help
from launch.program.compose import Program, model_help
from launch.program.ending import leave, say
from launch.program.run import run_program

if TYPE_CHECKING:
    from launch.inputs.prompts import Prompts
    from launch.outputs.answers import AnswerWriter
    from launch.outputs.answers_file import AnswersFile
    from policies.reuse import GivenPrompt
    from runahead.context import Partitioner
    from runahead.engine import Engine
    from runahead.model.model import Model
    from runahead.ranks.mesh import Mesh
    from runahead.ranks.ranks import Ranks
    from runahead.report import GenerationBatch
    from runahead.reuse.store import SegmentStore
    from runahead.thinning.rank_policies import RankPolicies


HELP = f"""\
usage: torchrun --nproc-per-node=N launch/infer.py [name=value ...]     (or: python launch/infer.py ..., one
rank)

Reads a long prompt on several ranks with KV-Runahead and streams the answer to standard output.

{model_help(31)}
  one of                       prompt.text=...   prompt.file=<path, .jsonl or ->   prompt.ids_file=<json>
                               prompt.random_tokens=<n>
  and                          prompt.question=...   prompt.chat=auto|true|false   prompt.batch=1
                               prompt.skip_invalid=false   prompt.chat_template=<jinja>
                               prompt.prefix_cache_bytes=auto|<n, of prompts that later ones reuse>
  prefill=kv_runahead|single   prefill.transfer=relay|direct   prefill.layers_in_flight=3
          tsp|zigzag|tensor|pipeline  prefill.carrier=backend|copy|auto
                               prefill.attention=causal|dense|xattention|streaming_heads
                               prefill.exchange=all_gather|ring|direct
                               prefill.threshold=0.99 or prefill.density=<share>, prefill.stride=16, of xattention
                               prefill.exact_layers=[<numbers, which attend to all keys beside xattention>]
                               prefill.chunk_tokens=<n, on one rank>   prefill.row_tokens=<n, in a layer; 0: all>
                               prefill.speculative=none|layers|model, the draft that chooses what is computed
                               prefill.speculative_share=0.25   prefill.speculative_chunk=32
                               prefill.speculative_ahead=8   prefill.speculative_layers=<n>
                               prefill.wire_bits=8|4, of keys and values between the ranks of a chain
  partition=auto|even|ratios   partition.learn=true        partition.ratios=[0.6,0.4]
            |table             partition.table=<json>      partition.force=false      partition.alone=true
  ranks=auto|cpu|cuda          ranks.tensor=<ranks that share one model, a stage of the chain>
                               ranks.backend=auto|nccl|gloo   ranks.device=auto|cuda|cpu
                               ranks.timeout_s=60   ranks.threads=<n>   ranks.fault_report=<json, one per rank>
{choices("policy", NAMES)}
                               policy.positions=original|reencoded, and options of its own, which
                               policy=<name> --help lists: policy=snapkv policy.budget=0.2
  cache.bits=8|4|2             of stored keys and values, but for the last tokens:
                               cache.residual=128   cache.residual_bits=16, or null for the model's dtype
  cache.tier_bits=8|4|2        of modules in host memory and in policy.store, with policy=prompt_cache
  decode=auto|last|sharded     while decoding: the KV cache on the last rank, on each rank that of its chunk, or
                               whichever is faster
  generation=greedy|sample|model   generation.max_new_tokens=64   generation.do_sample=false
                               generation.of_model=<true: sampling options of the checkpoint; as generation=model>
                               generation.temperature=1   generation.top_p=1   generation.top_k=0   generation.min_p=0
                               generation.repetition_penalty=1   generation.presence_penalty=0
                               generation.frequency_penalty=0   generation.logit_bias={{<id>:<bias>}}
                               generation.seed=0   generation.logprobs=<n, into the report>
                               generation.min_new_tokens=0   generation.stop_token_ids=<[ids]>
                               generation.include_stop=false   generation.skip_special_tokens=true
                               generation.stop=<text or [list]>   generation.ignore_eos=false
                               generation.json_schema=<JSON that answers follow; needs the extra guided>
                               generation.grammar=<Lark, as llguidance reads it, that answers follow>
                               generation.free_part=<[begin,end] of what may come before>
                               generation.kept_tokens=<[special tokens that texts have]>
                               generation.speculate=none|lookup|policy|model   generation.speculate_tokens=8
                               generation.speculate_match=2   generation.speculate_always=false
  draft.model=<folder, hub id or .gguf>   draft.policy='{{name:snapkv,budget:0.1}}', of generation.speculate
  draft.speculate=none|lookup|model, which drafts for these
  draft.overrides={{<key of the config of draft.model>:<value>}}
  experiment=<name>            report=<json>   timeline=<json>   profile=none|nvtx|torch   warmup=0
  answers=<jsonl>              of several prompts, in place of standard output; started again, a run goes on with it

prompt.text=, prompt.question=, generation.stop=, generation.json_schema= and generation.grammar= take everything after
the first "=" as it is; generation.stop=[a,b] is a list.
--layout prints where the modules of policy.schema stand.

  torchrun --nproc-per-node=2 launch/infer.py prompt.file=book.txt prompt.question="Who tells the story?"
  torchrun --nproc-per-node=2 launch/infer.py model=hf model.path=Qwen/Qwen3-0.6B prompt.file=book.txt \\
      report=run.json timeline=trace.json
  cat notes.txt | python launch/infer.py prompt.file=- prompt.question="What is to be done?"
  generation.stop=END
"""


def help_on_policy(overrides: Sequence[str]) -> str | None:
    """Help on the policy that `overrides` choose, or None."""
    named = [value for option, _, value in (override.partition("=") for override in overrides) if option == "policy"]
    return policy_help(named[-1]) if named and named[-1] in NAMES else None


INFER = Program(module="launch.infer", options=RunOptions, help=HELP, help_on=help_on_policy, has_layout=True)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(INFER, args, _answer, warnings=ineffective_settings, print_layout=_print_layout)


def _print_layout(run: RunOptions) -> None:
    from launch.inputs.prompt_cache import print_layout

    print_layout(run)


def _answer(run: RunOptions, ranks: Ranks) -> None:
    from launch.inputs.partitions import partitioner
    from launch.inputs.policies import rank_policies
    from launch.inputs.policy_file import load_files

    load_files(run.policy, ranks)
    policies = ranks.on_rank_0("the policies", lambda: rank_policies(run.policy, run.cache))
    infer(run, ranks, partitioner(run.partition, ranks), policies)


def infer(
    run: RunOptions, ranks: Ranks, partition: Partitioner, policies: RankPolicies | None = None
) -> list[GenerationBatch]:
    """Answer the prompts of `run` on standard output and write its files. Every rank makes the same call.

    Raises:
        ValueError, OSError: for a user's mistakes.
        SharedError: for mistakes that rank 0 reports.
    """
    from launch.inputs.draft import draft_of
    from launch.inputs.engine import arrange, load, make_engine
    from launch.outputs.summary import dtype_hint, summary
    from runahead.thinning.rank_policies import RankPolicies

    policies = policies or RankPolicies()
    arrange(run, ranks)
    tokenizers = list[Any]()
    prompts = ranks.on_rank_0("the prompts", lambda: _prepare(run, partition, policies, ranks.mesh, tokenizers))
    starts = list(range(0, len(prompts.ids), run.prompt.batch))
    kept = ranks.on_rank_0("the answers", lambda: _kept_answers(run, policies, prompts, ranks.num_stages))
    if kept is not None:
        starts = [start for start in starts if kept.missing(prompts.places[start : start + run.prompt.batch])]
        if not starts:
            ranks.on_rank_0("the answers", lambda: kept.answers(None).finish())
            files = [f"{option}=" for option in ("report", "timeline") if getattr(run, option) is not None]
            unwritten = f" ({' and '.join(files)} not written)" if files else ""
            say(f"nothing to do: {kept.path} answers all prompts; remove it to answer them again{unwritten}")
            return []
    draft = draft_of(run, ranks)
    model = load(run, ranks, partition, tokenizers[0] if tokenizers else None)
    store = _store(run, model, ranks)
    kept_texts = None
    if prompts.reusing is None and len(starts) > 1:
        from launch.inputs.prefixes import kept_prefixes

        batches_of_ids = [prompts.ids[start : start + run.prompt.batch] for start in starts]
        kept_texts = kept_prefixes(run, model, ranks, policies, batches_of_ids)
    tree = None if kept_texts is None else kept_texts.tree

    def calls_of(engine: Engine) -> list[range]:
        """The prompts of each call of the engine; those that cannot run at once have calls of their own."""
        found = list[range]()
        for start in starts:
            lengths = [len(ids) for ids in prompts.ids[start : start + run.prompt.batch]]
            runs = engine.prompt_limits.together(lengths, run.generation.max_new_tokens)
            found += [range(start + each.start, start + each.stop) for each in runs]
        return found

    def check_prompts(engine: Engine) -> None:
        for call in calls_of(engine):
            engine.check(prompts.asked[call.start : call.stop], [run.generation] * len(call))

    engine, _ = make_engine(
        run, model, ranks, check_prompts, partition=partition, policies=policies, store=store, tree=tree, draft=draft
    )
    answers = _writer(prompts, kept, model, ranks)
    calls = calls_of(engine)
    with nullcontext() if tree is None else tree.nothing_stored():
        for _ in range(run.warmup):
            few_tokens = replace(run.generation, max_new_tokens=min(2, run.generation.max_new_tokens))
            engine.generate(prompts.asked[calls[0].start : calls[0].stop], few_tokens)
    batches: list[GenerationBatch] = []
    for call in calls:
        if kept_texts is not None:
            kept_texts.make_way(prompts.ids[call.start : call.stop], run.generation.max_new_tokens)
        # Of several calls the last one is recorded, which is warm.
        is_recorded = run.timeline is not None and call is calls[-1]
        batches.append(_answered(run, engine, prompts, call, answers, is_recorded=is_recorded))
    if ranks.rank == 0:
        answers.finish()
    ranks.on_rank_0("the report", lambda: _write_files(run, batches, calls, prompts, model, ranks, partition))
    if run.report is not None and kept is not None and kept.answered:
        num_reported = sum(len(batch.generations) for batch in batches)
        say(f"report={run.report} has {num_reported:,} of {len(prompts.places):,} prompts: those of this run")
    if ranks.rank == 0:
        hint = dtype_hint(run.model.dtype, model.dtype, model.device)
        sys.stderr.write(summary(batches, skipped=prompts.skipped, dtype=hint, weights=model.weights_in_words))
    return batches


def _store(run: RunOptions, model: Model, ranks: Ranks) -> SegmentStore | None:
    """The store of policy=prompt_cache; None with other policies. Every rank calls this."""
    if run.policy["name"] != "prompt_cache":
        return None
    from launch.inputs.policies import prompt_cache_options
    from runahead.reuse.store import SegmentStore, StoreLimits

    policy = prompt_cache_options(run.policy)
    limits = StoreLimits(**policy.limits)
    return ranks.on_all_ranks("the store", lambda: SegmentStore(model, policy.store, limits, bits=run.cache.tier_bits))


def _writer(prompts: Prompts, kept: AnswersFile | None, model: Model, ranks: Ranks) -> AnswerWriter:
    """The writer of answers to standard output, or to the file of answers=. Every rank calls this."""
    from launch.outputs.answers import AnswerWriter

    if kept is None:
        return AnswerWriter(skipped=prompts.skipped)
    weights, opened = model.fingerprint, list[AnswerWriter]()
    ranks.on_rank_0("the answers", lambda: opened.append(kept.answers(weights)))
    if kept.answered:
        say(f"{len(kept.answered):,} of {len(prompts.places) + len(prompts.skipped):,} prompts are in {kept.path}")
    return opened[0] if opened else AnswerWriter(skipped=prompts.skipped)


def _answered(
    run: RunOptions, engine: Engine, prompts: Prompts, call: range, answers: AnswerWriter, *, is_recorded: bool
) -> GenerationBatch:
    """Answer the prompts of one call of the engine; rank 0 writes the answers. Every rank calls this."""
    from launch.outputs.answers import AnswerStream

    stream, model, rank = None, engine.model, engine.ranks.rank
    if prompts.one_text and rank == 0:
        stream = AnswerStream(answers, model.tokenizer, run.generation, eos_ids=model.eos_token_ids)
    batch = engine.generate(
        prompts.asked[call.start : call.stop],
        run.generation,
        on_tokens=stream.on_tokens if stream else None,
        record_timeline=is_recorded,
        first_index=call.start,
    )
    if stream:
        stream.finish()
    elif rank == 0:
        for place, generation in zip(prompts.places[call.start : call.stop], batch.generations, strict=True):
            answers.write_line(place, generation)
    return batch


def _prepare(
    run: RunOptions, partition: Partitioner, policies: RankPolicies, mesh: Mesh, tokenizers: list[Any]
) -> Prompts:
    """Read the prompts and check whatever can be checked before the weights are loaded. Rank 0 calls it.

    Args:
        tokenizers: gets the model's tokenizer.
    """
    from launch.inputs.generation import check_generation
    from launch.inputs.policies import prompt_cache_options
    from launch.inputs.prompts import read_prompts, use_template
    from launch.program.written_files import ensure_outputs
    from runahead.context import LearningPartitioner, even
    from runahead.features.refused import check
    from runahead.model import loading
    from runahead.model.shares import check_shares
    from runahead.prefill.prompt_check import PromptLimits, check_prompts
    from runahead.ranks.fault_report import fault_path
    from runahead.timeline.trace import picture_path

    timeline: list[str | Path] = [] if run.timeline is None else [run.timeline, picture_path(run.timeline)]
    faults = run.ranks.fault_report
    ensure_outputs(
        run,
        {
            "answers": [run.answers],
            "report": [run.report],
            "timeline": timeline,
            "ranks.fault_report": [] if faults is None else [fault_path(faults, rank) for rank in range(mesh.size)],
        },
    )
    config = loading.load_decoder_config(run.model, progress=True)
    check_shares(config, mesh.num_shares)
    tokenizer = loading.load_tokenizer(run.model)
    tokenizers.append(tokenizer)
    use_template(tokenizer, run.prompt.chat_template, "prompt.chat_template")
    check_generation(run.generation, tokenizer, config)
    policies.require_files()
    setup = replace(run.setup, policies=policies, config=config, num_stages=mesh.num_stages)
    check(setup)
    limits = PromptLimits.of_config(config, policies, run.prefill, mesh.num_stages)
    if run.policy["name"] == "prompt_cache":
        from launch.inputs.prompt_cache import read_prompt_cache, read_reusing_prompts

        schema = read_prompt_cache(prompt_cache_options(run.policy), tokenizer, config)
        prompts = read_reusing_prompts(run.prompt, schema)
    else:
        prompts = read_prompts(run.prompt, tokenizer=tokenizer, vocab_size=config.vocab_size, seed=run.model.seed)

    def check_texts(prompts: Sequence[GivenPrompt]) -> None:
        names = [f"prompt {number}" for number in range(1, len(prompts) + 1)] if len(prompts) > 1 else ["the prompt"]
        for prompt, name in zip(prompts, names, strict=True):
            check_prompts([prompt], limits, num_new=run.generation.max_new_tokens, names=[name])

    if run.prompt.skip_invalid:
        prompts.skip(lambda prompt: check_texts([prompt]))
    else:
        check_texts(prompts.asked)
    if run.prefill.takes_partition and prompts.reusing is None:
        split = even if isinstance(partition, LearningPartitioner) else partition  # which asks all ranks
        check(replace(setup, num_chunks=len(split(len(prompts.ids[0]), mesh.num_stages).chain)))
    return prompts


def _kept_answers(run: RunOptions, policies: RankPolicies, prompts: Prompts, num_stages: int) -> AnswersFile | None:
    """The file of answers=, read and checked; None without the option. Rank 0 calls it. Raises: ValueError."""
    from launch.inputs.policies import prompt_cache_options
    from launch.inputs.policy_file import policy_files

    if run.answers is None:
        return None
    from launch.outputs.answers_file import AnswersFile, prompt_digest, settings_of

    if prompts.one_text:
        raise ValueError(
            f"answers={run.answers} is for several prompts, as of prompt.file=<.jsonl>; leave it out, since the answer "
            "to one prompt goes to standard output"
        )
    files = [policy.reads for policy in (*policies.last, *policies.others) if policy.reads is not None]
    files += policy_files(run.policy)
    if run.policy["name"] == "prompt_cache":
        files += prompt_cache_options(run.policy).schemas
    depends_on_split = policies.by_chunk(run.decode) or run.prefill.wire_bits is not None
    num_chunks = num_stages if depends_on_split else None
    if num_chunks is not None and run.partition.table is not None:
        files.append(run.partition.table)
    settings = settings_of(run, RunOptions(), files, num_chunks=num_chunks)
    digests = dict(zip(prompts.places, map(prompt_digest, prompts.ids), strict=True))
    kept = AnswersFile(path=run.answers, settings=settings, prompts=digests, skipped=dict(prompts.skipped))
    kept.read()
    return kept


def _write_files(
    run: RunOptions,
    batches: list[GenerationBatch],
    calls: list[range],
    prompts: Prompts,
    model: Model,
    ranks: Ranks,
    partition: Partitioner,
) -> None:
    """Write report= and timeline=. Rank 0 calls it. Raises: OSError."""
    from launch.inputs.partitions import kvr_name
    from launch.inputs.policies import reported
    from runahead.files import write_whole
    from runahead.report import report_json

    dtype = str(model.dtype).removeprefix("torch.")
    places = [prompts.places[number] for call in calls for number in call]
    if run.report is not None:
        text = report_json(
            batches,
            prefill=run.prefill,
            partition=run.partition.name.name,
            policy=reported(run.policy),
            cache=run.cache,
            generation=run.generation.resolved(model.module.generation_config),
            warmup=run.warmup,
            model=model.name,
            dtype=dtype,
            device=str(ranks.device),
            world_size=ranks.size,
            kvr_names=[kvr_name(run, partition, batch.boundaries) for batch in batches],
            places=places if len(places) < len(prompts.ids) + len(prompts.skipped) else (),
            skipped=prompts.skipped,
            model_check=model.check,
            weights=model.weights_in_words,
        )
        write_whole(run.report, text)
    if run.timeline is not None:
        from runahead.timeline.picture import write_timeline

        batch = batches[-1]
        method = run.prefill.name.name
        if run.prefill.takes_partition:
            method += f", {run.prefill.transfer.name}"
        subject = f"{model.name}, {dtype} on {ranks.device.type}: {batch.chunks}, {method}"
        names = [ranks.name(rank) for rank in range(ranks.size)]
        write_timeline(
            run.timeline,
            batch.spans,
            names=names,
            ttft_s=batch.ttft_s,
            subject=subject,
            recordings=batch.recordings,
        )


if __name__ == "__main__":
    leave(main())
