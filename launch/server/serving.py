"""A server from its options to its end: model and engine on all ranks, HTTP on rank 0."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch.inputs.engine import arrange, load, make_engine
from launch.inputs.generation import check_generation
from launch.inputs.options import AUTO
from launch.inputs.partitions import partitioner
from launch.inputs.policies import prompt_cache_options, rank_policies
from launch.inputs.policy_file import load_files
from launch.inputs.prefixes import in_the_way
from launch.inputs.prompt_cache import read_schemas
from launch.inputs.prompts import use_template
from launch.program.ending import end_with, say
from launch.program.signals import Terminated, first_signal
from launch.server.api import API
from launch.server.handover import prompt_files
from launch.server.http import HTTPServer, bound_socket
from launch.server.key_file import KeyFile
from launch.server.keys import Keys, secret_in
from launch.server.options import ServeRun
from launch.server.page.state import setup_json
from policies.prompt_cache.schemas import Schemas
from runahead.config import DecodeName, GenerationOptions
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.engine import Engine
from runahead.features.refused import check
from runahead.model import loading
from runahead.model.loading.memory import available_bytes, free_bytes
from runahead.model.memory import row_state_bytes, token_bytes
from runahead.model.model import Model
from runahead.model.shares import check_shares
from runahead.ranks.mesh import Mesh
from runahead.ranks.ranks import Ranks
from runahead.report import package_version
from runahead.reuse.handover import HandoverFolder, HandoverPlace
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import SegmentStore, StoreLimits, model_key
from runahead.serving.arrangement import chunks
from runahead.serving.estimate import PrefillTimes, TimeEstimate
from runahead.serving.executor import Executor
from runahead.serving.follower import follow
from runahead.serving.items import Generate, Inbox, Item, Part, PrefillItem, Report, Tokens
from runahead.serving.limits import QueueLimits
from runahead.serving.room import MEMORY_SHARE, Room
from runahead.serving.scheduler import Scheduler
from runahead.thinning.rank_policies import RankPolicies

STORE_SHARE = 0.25
"""Most of the free memory that the store of encoded modules takes where its size is not given."""

EVERYWHERE = ("0.0.0.0", "::")
"""Hosts that are all addresses of this one, which clients know by its name."""

WARM_UP_TOKENS = (64, 512)
"""Lengths of the prompts before the first request, from which the first predictions of TTFT come."""

SHORT_TOKENS = 8
"""Length of one that a stage computes alone: it tells what a prefill takes that has hardly a token."""

SAVE_S = 20.0
"""Seconds in which prefixes are written to their folder after the last answer; what is left then is forgotten."""

LAST_ANSWERS_S = 5.0
LAST_ERRORS_S = 2.0
"""Seconds in which clients are told that the server has failed; its own end begins 3 s after a failure is known."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Rank 0's side of the clients: the bound address, keys, the model's tokenizer, and schemas with segments."""

    bound: socket.socket
    keys: Keys
    tokenizer: Any
    schemas: Schemas | None


def serve(run: ServeRun, ranks: Ranks) -> None:
    """Serve until SIGTERM or Ctrl-C. Every rank makes the same call.

    Raises:
        ValueError, OSError: for a user's mistakes.
        SharedError: for mistakes that rank 0 reports.
        PeerFailure: another rank is gone or silent; waiting clients were told.
    """
    arrange(run, ranks)
    load_files(run.policy, ranks)
    policies = ranks.on_rank_0("the policies", lambda: rank_policies(run.policy, run.cache))
    partition = partitioner(run.partition, ranks)
    front = list[Front]()
    ranks.on_rank_0("the address", lambda: front.append(_prepare(run, policies, ranks.mesh)))
    # Rank 0 checks schemas for the stage that decodes.
    guided = {"llguidance": package_version("llguidance") or "not installed"}
    ranks.require_same(guided, "install the same version on all hosts")
    model = load(run, ranks, partition, serves=True)
    store = made_store(run, model, ranks)
    no_tree = None if run.serve.prefixes is not None else in_the_way(run.setup, model, ranks, policies)
    tree = None if no_tree is not None else _tree(run, ranks)

    handover = _handover(run, model, ranks)

    def check_options(engine: Engine) -> None:
        engine.check_speculation([run.generation.resolved(model.module.generation_config)], [])
        if store is not None:
            engine.check_reuse(blends=prompt_cache_options(run.policy).recompute > 0)

    engine, told = make_engine(
        run, model, ranks, check_options, partition=partition, policies=policies, store=store, tree=tree, serves=True
    )
    if ranks.rank == 0 and model.weights_in_words:
        say(f"weights: {model.weights_in_words}")
    if ranks.rank == 0 and run.serve.snapshot_tokens and model.held is None:
        option = f"serve.snapshot_tokens={run.serve.snapshot_tokens}"
        say(f"warning: {option} has no effect: no layer of model {model.name} holds a state")
    if engine.may_shard or ranks.stage == ranks.num_stages - 1:
        with ranks.busy():
            model.grammars.warm_up()
    with nullcontext() if tree is None else tree.nothing_stored():
        estimate = _warm_up(engine)
    # Measured once: ranks of one host share a clock, and NTP keeps those of several hosts in step.
    clock_offset_s = ranks.clock_offset_s()
    room = _room(run, engine, store, tree)

    def work(asked: threading.Event) -> None:
        if ranks.rank == 0:
            _serve_clients(run, engine, estimate, room, front[0], told, asked, handover, no_tree=no_tree)
        else:
            follow(engine, run.serve, asked.is_set, clock_offset_s=clock_offset_s, room=room, handover=handover[0])
        with ranks.busy():
            if tree is not None and run.serve.prefix_folder is not None:
                tree.save(SAVE_S)
            if store is not None:
                store.wait_for_copies(SAVE_S)

    _to_the_end(ranks, work)


def _to_the_end(ranks: Ranks, work: Callable[[threading.Event], object]) -> None:
    """Do a rank's part until the event says that a signal has asked for the end, and leave the job with the others.

    torchrun signals its ranks one after another: the last one may hear of the end from the first before its own signal,
    and have left the job when that comes.
    """
    asked = threading.Event()
    with first_signal(asked.set, is_last=True):
        work(asked)
        ranks.close()


def _prepare(run: ServeRun, policies: RankPolicies, mesh: Mesh) -> Front:
    """Make all that can fail before the weights are loaded: address, keys, tokenizer, schemas. Rank 0 calls it."""
    folder, salted = run.serve.prefix_folder, dict[str, Any](share=run.serve.prefix_share)
    if folder is not None:
        salted["secret"] = secret_in(folder, "serve.prefix_folder")
    keys = Keys(**salted)
    if run.serve.api_key_file is not None:
        KeyFile(run.serve.api_key_file, keys).watch()
    bound = bound_socket(run.serve.host, run.serve.port)
    config = loading.load_decoder_config(run.model, progress=True)
    check_shares(config, mesh.num_shares)
    policies.require_files()
    check(replace(run.setup, policies=policies, config=config, num_stages=mesh.num_stages))
    tokenizer = loading.load_tokenizer(run.model)
    use_template(tokenizer, run.serve.chat_template, "serve.chat_template")
    check_generation(run.generation, tokenizer, config)
    schemas = None
    if run.policy["name"] == "prompt_cache":
        policy = prompt_cache_options(run.policy)
        schemas = read_schemas(policy, tokenizer, config, max_tokens=run.serve.schema_tokens)
    return Front(bound=bound, keys=keys, tokenizer=tokenizer, schemas=schemas)


def _warm_up(engine: Engine) -> TimeEstimate:
    """Times of prompts without meaning, computed by one stage and by all. Every rank makes the same call."""
    estimate, ranks, reports = TimeEstimate(), engine.ranks, list[Report]()
    executor = Executor(engine, Inbox(), reports.append, QueueLimits(itl_s=1e9), reuses=False)
    most = engine.model.max_positions or max(WARM_UP_TOKENS)
    options = [GenerationOptions(max_new_tokens=2 if most > 2 else 1, ignore_eos=True)]
    has_alone = engine.takes_stage_alone and not engine.may_shard
    for length in (SHORT_TOKENS, *WARM_UP_TOKENS) if has_alone else WARM_UP_TOKENS:
        prompts = [[number % engine.model.vocab_size for number in range(max(1, min(length, most - 2)))]]
        ways: list[tuple[list[PrefillTimes], Item]] = []
        if engine.may_shard:
            ways = [([estimate.chain], Generate(number=0, prompts=prompts, options=options))]
        else:
            num_tokens = len(prompts[0])
            splits: dict[tuple[int, ...], list[PrefillTimes]] = {}  # on one rank both are the same
            if length != SHORT_TOKENS:
                chain = ranks.on_rank_0("the split", partial(chunks, engine, num_tokens, 1.0, (0.0, 0.0))).boundaries
                splits.setdefault(tuple(chain), []).append(estimate.chain)
            if engine.takes_stage_alone:
                splits.setdefault((0,) * ranks.num_stages + (num_tokens,), []).append(estimate.alone)
            for split, told in splits.items():
                ways.append((told, PrefillItem(number=0, prompts=prompts, options=options, boundaries=split)))
        for told, item in ways:
            for _ in range(2):  # the first of a length may set things up
                reports.clear()
                ranks.barrier("all ranks to be warm")
                with ranks.announcing_failure():
                    executor.carry_out(item)
                    executor.decode_all()
            found = [each for of_rank in ranks.gather(reports, "the warm-up") for each in of_rank]
            ranks.on_rank_0("the warm-up", partial(_check_numbers, found))
            # Of a chain, the rank that has the first token takes longest.
            seconds = max(each.prefill_s for each in found if isinstance(each, Part))
            for times in told:
                times.learn([len(prompts[0])], seconds)
            for each in found:
                if isinstance(each, Tokens) and each.step_s is not None:
                    estimate.learn_step(each.step_s)
    return estimate


def _check_numbers(reports: Sequence[Report]) -> None:
    """Check that the model gives numbers. Raises: ValueError: it gives none."""
    if any(NOT_NUMBERS in each.ended.values() for each in reports if isinstance(each, Tokens)):
        raise ValueError(NOT_NUMBERS)


def made_store(run: ServeRun, model: Model, ranks: Ranks) -> SegmentStore | None:
    """The store of encoded modules with policy=prompt_cache. Its limits are the same on all ranks.

    Raises:
        ValueError: the folder of policy.store cannot be created or written to.
    """
    if run.policy["name"] != "prompt_cache":
        return None
    host = min(ranks.gather(available_bytes() / ranks.local_size, "the free memory of hosts"))
    device = min(ranks.gather(free_bytes(ranks.device, ranks.local_size), "the free memory"))
    most = {"host_bytes": int(STORE_SHARE * host), "device_bytes": int(STORE_SHARE * device)}
    default = StoreLimits()
    sizes = {name: min(getattr(default, name), size) for name, size in most.items()}
    policy = prompt_cache_options(run.policy)
    limits, bits = StoreLimits(**(sizes | policy.limits)), run.cache.tier_bits
    return ranks.on_all_ranks("the store", lambda: SegmentStore(model, policy.store, limits, bits=bits))


def _tree(run: ServeRun, ranks: Ranks) -> PrefixTree | None:
    """The texts that the last stage keeps, or with sharded decoding each stage its part of them.

    Where the last stage keeps all, other ranks only know that it does.
    """
    options, is_last = run.serve, ranks.stage == ranks.num_stages - 1
    size = options.prefix_cache_bytes
    if not size:
        return None
    if isinstance(size, str):  # until it is known what the rows leave of it
        size = int(MEMORY_SHARE * min(ranks.gather(free_bytes(ranks.device, ranks.local_size), "the free memory"))) // 2
    if run.decode.name is DecodeName.last and not is_last:
        return PrefixTree(size, snapshot_tokens=options.snapshot_tokens)
    folder = options.prefix_folder
    if folder is not None and not is_last:
        folder = str(Path(folder) / f"stage-{ranks.stage}-of-{ranks.num_stages}")
    return PrefixTree(
        size,
        host_bytes=options.prefix_host_bytes,
        folder=folder,
        disk_bytes=options.prefix_disk_bytes,
        option="serve.prefix_folder",
        bits=run.cache.tier_bits,
        snapshot_tokens=options.snapshot_tokens,
    )


def _room(run: ServeRun, engine: Engine, store: SegmentStore | None, tree: PrefixTree | None) -> Room:
    """The room for the tokens of rows, as far as no option fixes it, and for a tree that has what these leave.

    Raises:
        ValueError: as `room_in_memory`.
    """
    options, shares_memory = run.serve, tree is not None and run.serve.prefix_cache_bytes == AUTO
    if options.max_tokens is not None and not shares_memory:
        return Room(max_tokens=options.max_tokens)
    kept_bytes = options.prefix_cache_bytes if isinstance(options.prefix_cache_bytes, int) else 0
    if engine.ranks.device.type == "cpu":  # where all memory is the host's
        kept_bytes += options.prefix_host_bytes
    room = room_in_memory(
        engine.model,
        engine.ranks,
        store,
        kept_bytes,
        keeps_parts=engine.may_shard,
        drafts=run.generation.asks_for_drafts,
        tree=tree,
        max_tokens=options.max_tokens,
        shares_memory=shares_memory,
    )
    if tree is not None and shares_memory:
        tree.limit_bytes = room.left_for_prefixes(0, 0)
    return room


def room_in_memory(
    model: Model,
    ranks: Ranks,
    store: SegmentStore | None,
    kept_bytes: int,
    *,
    keeps_parts: bool,
    drafts: bool = False,
    tree: PrefixTree | None = None,
    max_tokens: int | None = None,
    shares_memory: bool = False,
) -> Room:
    """The room for tokens whose keys, values and activations fit into every rank's free memory, all computed at once.

    A row has states as of `row_state_bytes`. With a tree there are on the last stage those inside of prompts, in a
    chain twice, too: at most as many as the tree could take, of a prompt and of a short one that is computed inside it.

    Args:
        kept_bytes: of the last stage, for prefixes.
        keeps_parts: of every stage.
        drafts: rows may have drafts.
        tree: of the prefixes.
        max_tokens: that were chosen, whatever the memory is, and count tokens alone; None: those that fit.
        shares_memory: the tree has what rows leave unused.

    Raises:
        ValueError: there is no room beside the store or the prefixes.
    """
    free, kept = max(0, free_bytes(ranks.device, ranks.local_size) - model.kernel_bytes()), 0
    if store is not None:
        kept = store.limits.device_bytes if ranks.device.type == "cuda" else store.limits.host_bytes
    is_last = ranks.stage == ranks.num_stages - 1
    if keeps_parts or is_last:
        kept += kept_bytes
    per_token = token_bytes(model)
    state_bytes = row_state_bytes(model)
    row_bytes = row_state_bytes(model, in_chain=ranks.num_stages > 1, drafts=drafts, stores=tree is not None)
    left_bytes = MEMORY_SHARE * free - kept
    most_tokens, with_states = left_bytes / per_token, float(per_token)
    if is_last and tree is not None and tree.snapshot_tokens and state_bytes:
        copies = 2 if ranks.num_stages > 1 else 1
        with_states += copies * state_bytes / tree.snapshot_tokens
        beside_tree = 0.0 if shares_memory else most_tokens - (copies + 1) * tree.limit_bytes / per_token
        most_tokens = max(left_bytes / with_states, beside_tree)
    shared = dict[str, Any]()
    if shares_memory:
        found = ranks.gather((left_bytes, with_states, row_bytes, keeps_parts or is_last), "the free memory")
        kept_on = [each for *each, keeps in found if keeps]
        left, of_token, of_row = zip(*kept_on, strict=True)
        shared |= {"shared_bytes": int(min(left)), "token_bytes": max(of_token), "row_bytes": max(of_row)}
    if max_tokens is not None:
        return Room(max_tokens=max_tokens, **shared)
    num_tokens = min(ranks.gather(int(most_tokens), "the free memory"))
    if store is not None and num_tokens < 1:
        tier = "device_bytes" if ranks.device.type == "cuda" else "host_bytes"
        raise ValueError(f"policy.{tier}={kept} leaves no memory for prompts on some rank; lower it")
    if kept_bytes and num_tokens < 1:
        raise ValueError(f"serve.prefix_cache_bytes={kept_bytes} leaves no memory for prompts; use less")
    room = Room(max_tokens=num_tokens, row_tokens=math.ceil(row_bytes / per_token), **shared)
    if row_bytes and room.row_tokens >= num_tokens:
        states = f"the states of one answer, {row_bytes:,} bytes, leave no memory for its tokens"
        remedy = "a smaller serve.prefix_cache_bytes" if kept_bytes else "a device with more free memory"
        remedy = f"serve.prefix_cache_bytes=0, {remedy}" if shares_memory else remedy
        raise ValueError(f"{states}; use {remedy}, or a smaller model.dtype")
    return room


def _handover(run: ServeRun, model: Model, ranks: Ranks) -> tuple[HandoverFolder | None, HandoverPlace | None]:
    """The folder of handed-over prompts on the last rank, and on rank 0 of the same host; where it is.

    Raises:
        ValueError: the folder cannot be created or written to, or this model's prompts cannot be handed over.
    """
    name, is_last = run.serve.handover, ranks.rank == ranks.size - 1
    if name is None:
        return None, None
    setup = replace(run.setup, model=model, num_stages=ranks.num_stages, num_shares=ranks.num_shares)
    is_here = is_last or (ranks.rank == 0 and ranks.local_size == ranks.size)

    def made() -> HandoverFolder | None:
        check(setup)
        return HandoverFolder(name, run.serve.handover_bytes, model_key(model)) if is_here else None

    folder = ranks.on_all_ranks("the folder of serve.handover", made)
    own = None if folder is None else folder.place
    return folder, ranks.gather(own, "the folder of serve.handover")[-1]


def _about_prefixes(engine: Engine, room: Room, no_tree: str | None) -> str:
    """The sentence of the start about the reuse of prefixes."""
    if engine.prefixes is None:
        return "prefixes are not reused" + (f": {no_tree}" if no_tree is not None else "")
    if room.shared_bytes is None:
        return f"prefixes are kept in {engine.prefixes.tree.limit_bytes:,} bytes"
    return f"prefixes are kept in half of what these leave of {room.shared_bytes:,.0f} bytes"


def _serve_clients(
    run: ServeRun,
    engine: Engine,
    estimate: TimeEstimate,
    room: Room,
    front: Front,
    slower: Sequence[str],
    asked: threading.Event,
    of_handover: tuple[HandoverFolder | None, HandoverPlace | None],
    *,
    no_tree: str | None,
) -> None:
    """Answer requests on rank 0 until a signal, which `asked` says if it came before, and the last answer.

    Args:
        slower: the faster ways that are not taken, for the state.
        of_handover: as of `_handover`.
        no_tree: why no prefixes are reused, where they would be; None if they are, or are not to be.
    """
    options, model, (handover, place) = run.serve, engine.model, of_handover
    # A thread, as the main one may be in a long call.
    end = threading.Timer(options.drain_s, lambda: end_with(Terminated(signal.SIGTERM), engine.ranks))
    end.daemon = True

    def when_draining() -> None:
        counts = f"{scheduler.num_running} running, {scheduler.num_waiting} waiting"
        os.write(2, f"draining: {counts}, {options.drain_s:g} s at most\n".encode())  # print() is not reentrant
        end.start()

    limits = replace(options, max_tokens=room.max_tokens)
    scheduler = Scheduler(engine, limits, estimate, room=room, when_draining=when_draining, handover=handover)
    files = None
    if place is not None:
        source = loading.FINDERS[run.model.name](run.model, weights=True, progress=False)
        files = prompt_files(model, handover, place, source, num_stages=engine.ranks.num_stages)
    api = API(
        scheduler,
        tokenizer=front.tokenizer,
        eos_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        names=[options.model_name or model.name, model.name, run.model.name.name],
        adapters=model.adapter_names,
        options=options,
        defaults=run.generation.resolved(model.module.generation_config),
        keys=front.keys,
        schemas=front.schemas,
        slower=slower,
        setup=setup_json(run),
        files=files,
    )
    http = HTTPServer(api.app, front.bound, options, on_failure=scheduler.fail)
    with first_signal(scheduler.drain):
        if asked.is_set():
            scheduler.drain()
        http.start()
        host = socket.gethostname() if options.host in EVERYWHERE else options.host
        address = f"{host}:{front.bound.getsockname()[1]}"
        say(f"serving {api.model} on http://{address}, at most {room}; {_about_prefixes(engine, room, no_tree)}")
        try:
            scheduler.run()
        except BaseException:
            http.stop(LAST_ERRORS_S)
            raise
        end.cancel()
        with engine.ranks.busy():  # the other ranks wait for this one meanwhile
            http.stop(LAST_ANSWERS_S)
