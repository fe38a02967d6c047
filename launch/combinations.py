"""Check of whether options go together, before anything is read: `python -m launch.combinations --help`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from launch.inputs.options import DraftOptions, RunOptions
from launch.inputs.policies import named, names_of, rank_policies
from launch.program.compose import FLAGS_HELP, Program
from launch.program.ending import MISTAKE
from launch.server.options import ServeRun
from runahead.config import Speculate
from runahead.failures import first_line
from runahead.features.combination import Combination, others_by_first, undecided
from runahead.features.facts import OF_MODEL, OF_RANKS
from runahead.features.refused import REFUSED, check
from runahead.features.setup import Setup
from runahead.features.slower import SLOWER, slower

HELP = """\
usage: python -m launch.combinations [--serve] [name=value ...]     (or: --list)

Says whether options of launch/infer.py go together, by the tables that the run itself asks: "yes", "slower" with what
is not done in the faster way and why, or "no" with the reason and what to do instead. Below stands what the model, the
ranks or the prompt must not be, and with what of these it is slower. --serve takes the options of launch/serve.py. With
model.path= or model.config= the model's config is read, and no weights. --list prints the tables. The exit status is 0
for yes and slower, and 2 for no.

  python -m launch.combinations policy=adakv cache.bits=4
  python -m launch.combinations --serve policy=snapkv ranks.device=cuda
  python -m launch.combinations model=hf model.path=Qwen/Qwen3-0.6B policy=snapkv policy.positions=reencoded
"""

COMBINATIONS = Program(module="launch.infer", options=RunOptions, help=HELP)
SERVED = Program(module="launch.serve", options=ServeRun, help=HELP)
"""They read the options of launch/infer.py and of launch/serve.py."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status: 0 for yes or slower, 2 for no or a mistake in the command line."""
    arguments = list(sys.argv[1:] if args is None else args)
    if "--list" in arguments:
        print(table(), end="")
        return 0
    try:
        if any(argument in ("--multirun", "-m") for argument in arguments):
            raise ValueError("--multirun asks for several runs; give one value for each option")
        program: Program[Any] = SERVED if "--serve" in arguments else COMBINATIONS
        command = program.read([argument for argument in arguments if argument != "--serve"])
        if command.to_print is not None:
            print(command.to_print.removesuffix(FLAGS_HELP), end="")
            return 0
        assert command.run is not None
        setup = known_of(command.run)
        check(setup)
        sentences = slower(setup)
    except (ValueError, OSError) as error:
        print(f"no: {first_line(error)}")
        return MISTAKE
    print("\n".join(f"slower: {sentence}" for sentence in sentences.values()) or "yes")
    # Rows of which something is asked for: the others hold for any options.
    refused = [facts for row, facts in undecided(REFUSED, setup) if len(facts) < len(row.facts)]
    for what, others in _by_deciding(refused).items():
        print(f"depends on {what}: not with {'; '.join(others)}")
    may_be_slower = [
        facts for row, facts in undecided(SLOWER, setup) if row.way not in sentences and len(facts) < len(row.facts)
    ]
    for what, others in _by_deciding(may_be_slower).items():
        print(f"depends on {what}: slower with {'; '.join(others)}")
    if setup.policies is None or "file" in names_of(_draft(command.run).policy):
        print("depends on the policy of a file, which is loaded when a run begins")
    return 0


def _by_deciding(rows: Iterable[tuple[str, ...]]) -> dict[str, list[str]]:
    """Facts that are not known yet in words, by what decides them."""
    found: dict[str, list[str]] = {}
    for facts in dict.fromkeys(rows):
        deciding = [
            name
            for name, group in (("the model", OF_MODEL), ("the ranks and the prompt", OF_RANKS))
            if not group.keys().isdisjoint(facts)
        ]
        found.setdefault(" and ".join(deciding), []).append(" with ".join(facts))
    return found


def _draft(run: RunOptions | ServeRun) -> DraftOptions:
    """The options of what drafts, of which a server has none."""
    return run.draft if isinstance(run, RunOptions) else DraftOptions()


def known_of(run: RunOptions | ServeRun) -> Setup:
    """Collect the facts that are known of a run before any weight is read. Raises: ValueError, OSError."""
    setup = replace(run.setup, prefixes=run.setup.prefixes or "", config=_config(run))
    if "file" not in names_of(run.policy):  # whose policies are known once the file is loaded
        setup = replace(setup, policies=rank_policies(run.policy, run.cache))
    draft = _draft(run).policy
    if run.generation.speculate is Speculate.policy and "file" not in names_of(draft):
        with named("draft.policy"):
            drafting = rank_policies(draft, file_option="draft.policy")
            check(Setup(policies=drafting, config=setup.config))
        setup = replace(setup, drafting=drafting)
    return setup


def _config(run: RunOptions | ServeRun) -> object | None:
    """The config of the model that the options name, of its text decoder; None if they name none."""
    if run.model.path is None and run.model.config is None:
        return None
    from runahead.model.loading import load_decoder_config
    from runahead.model.shares import check_shares

    config = load_decoder_config(run.model)
    check_shares(config, run.ranks.tensor)
    return config


def table() -> str:
    """The tables for a terminal: a line for what does not go with a fact, or is slower with it, below it."""

    def lines(rows: Sequence[Combination], word: str) -> Iterator[str]:
        for first, others in others_by_first(rows).items():
            yield f"{first}\n"
            yield from (f"    {word} with {each}\n" for each in others)

    return "".join([*lines(REFUSED, "not"), *lines(SLOWER, "slower")])


if __name__ == "__main__":
    sys.exit(main())
