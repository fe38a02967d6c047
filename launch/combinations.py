"""Whether options go together, before anything is read: `python -m launch.combinations --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from launch.inputs.options import RunOptions
from launch.inputs.policies import named, names_of, rank_policies
from launch.program.compose import FLAGS_HELP, Program
from launch.program.ending import MISTAKE
from runahead.config import Speculate
from runahead.failures import first_line
from runahead.features.facts import OF_MODEL, OF_RANKS, Setup
from runahead.features.refused import check, others_by_first, undecided

HELP = """\
usage: python -m launch.combinations [name=value ...]     (or: --list)

Says whether options of launch/infer.py go together, by the table that the run itself asks: "yes", or "no" with the
reason and what to do instead. After a yes stands what the model, the number of ranks or the prompt must not be. With
model.path= or model.config= the model's config is read, and no weights. --list prints the table. The exit status is 0
for yes and 2 for no.

  python -m launch.combinations policy=adakv cache.bits=4
  python -m launch.combinations model=hf model.path=Qwen/Qwen3-0.6B policy=snapkv policy.positions=reencoded
"""

COMBINATIONS = Program(module="launch.infer", options=RunOptions, help=HELP)
"""It reads the options of launch/infer.py."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status: 0 for yes, 2 for no or a mistake in the command line."""
    arguments = list(sys.argv[1:] if args is None else args)
    if "--list" in arguments:
        print(table(), end="")
        return 0
    try:
        if any(argument in ("--multirun", "-m") for argument in arguments):
            raise ValueError("--multirun asks for several runs; give one value for each option")
        command = COMBINATIONS.read(arguments)
        if command.to_print is not None:
            print(command.to_print.removesuffix(FLAGS_HELP), end="")
            return 0
        assert command.run is not None
        setup = known_of(command.run)
        check(setup)
        depends = undecided(setup)
    except (ValueError, OSError) as error:
        print(f"no: {first_line(error)}")
        return MISTAKE
    print("yes")
    by_deciding: dict[str, list[str]] = {}
    for facts in depends:
        deciding = [
            name
            for name, group in (("the model", OF_MODEL), ("the ranks and the prompt", OF_RANKS))
            if not group.keys().isdisjoint(facts)
        ]
        by_deciding.setdefault(" and ".join(deciding), []).append(" with ".join(facts))
    for what, refused in by_deciding.items():
        print(f"depends on {what}: not with {'; '.join(refused)}")
    if setup.policies is None or "file" in names_of(command.run.draft.policy):
        print("depends on the policy of a file, which is loaded when a run begins")
    return 0


def known_of(run: RunOptions) -> Setup:
    """Collect the facts that are known of a run before any weight is read. Raises: ValueError, OSError."""
    setup = replace(run.setup, prefixes="", config=_config(run))
    if "file" not in names_of(run.policy):  # whose policies are known once the file is loaded
        setup = replace(setup, policies=rank_policies(run.policy, run.cache))
    if run.generation.speculate is Speculate.policy and "file" not in names_of(run.draft.policy):
        with named("draft.policy"):
            drafting = rank_policies(run.draft.policy, file_option="draft.policy")
            check(Setup(policies=drafting, config=setup.config))
        setup = replace(setup, drafting=drafting)
    return setup


def _config(run: RunOptions) -> object | None:
    """The config of the model that the options name, of its text decoder; None if they name none."""
    if run.model.path is None and run.model.config is None:
        return None
    from runahead.model.loading import load_decoder_config
    from runahead.model.shares import check_shares

    config = load_decoder_config(run.model)
    check_shares(config, run.ranks.tensor)
    return config


def table() -> str:
    """The table for a terminal: a line for what does not go with a fact, below it."""
    return "".join(
        f"{first}\n" + "".join(f"    not with {each}\n" for each in others)
        for first, others in others_by_first().items()
    )


if __name__ == "__main__":
    sys.exit(main())
