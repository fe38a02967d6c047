"""A run has the tests that it is asked for, and says what came of them when they failed."""

from __future__ import annotations

import pytest

from tests import needs

OF_PARAMETERS = """
import pytest
@pytest.mark.parametrize("number", range(40))
def test_a(number): pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run the tests of a file with the plugin, and return what came of it."""
    monkeypatch.delenv(needs.REQUIRED, raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeini("[pytest]\nmarkers =\n    sampled(n): x\n    slow: x\n")

    def run(text: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess("-p", "tests.runs", "-p", "no:xdist", *args)

    return run


def test_a_sample_is_the_same_every_time(run) -> None:
    counts = [run(OF_PARAMETERS, "--sample=4").parseoutcomes() for _ in range(2)]
    assert counts[0] == counts[1] and 4 <= counts[0]["passed"] <= 16
    assert counts[0]["passed"] + counts[0]["deselected"] == 40


def test_a_share_of_sampled_sets_is_not_slow(run) -> None:
    text = OF_PARAMETERS.replace("def", "@pytest.mark.sampled(8)\ndef")
    assert run(text, "-m", "not slow").parseoutcomes() == {"passed": 5, "deselected": 35}
    assert run(text, "-m", "slow").parseoutcomes() == {"passed": 35, "deselected": 5}


ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.sampled(2)
def test_fails_once(name):
    file = pathlib.Path(name)
    if not file.exists():
        file.touch()
        assert False
def test_fails():
    assert False
def test_passes():
    pass
"""


def test_what_passes_alone_is_named_and_what_fails_again_fails_the_run(run) -> None:
    assert run(ONCE).ret == pytest.ExitCode.TESTS_FAILED
    again = run(ONCE, "--last-failed", "--again")
    assert again.ret == pytest.ExitCode.TESTS_FAILED
    again.assert_outcomes(passed=2, failed=1)
    named = [line for line in again.outlines if line.startswith("FLAKY")]
    assert [line.partition(": ")[0].rpartition("::")[2] for line in named] == [
        "test_fails_once[a]",
        "test_fails_once[b]",
    ]


def test_a_run_that_stopped_early_is_not_one_of_failed_tests(run) -> None:
    assert run(ONCE, "-x").ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(("required", "outcome"), [("0", "skipped"), ("1", "failed")])
def test_what_a_machine_lacks_fails_where_nothing_may_be_missing(
    run, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv(needs.REQUIRED, required)
    result = run("from tests.needs import missing\ndef test_a(): missing('no command x')", "-rsf")
    assert result.parseoutcomes() == {outcome: 1}
    assert any("no command x" in line for line in result.outlines)
