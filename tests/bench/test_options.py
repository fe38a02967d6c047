"""Wrong options are told in one sentence, with status 2, before any rank works."""

from __future__ import annotations

import pytest

from benchmarks.ttft.options import BenchRun, Network, ineffective_settings
from benchmarks.ttft.pictures import LOOKS
from benchmarks.ttft.variants import VARIANTS
from launch.bench import BENCH, HELP, main
from runahead.config import PrefillName, PrefillOptions


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("bench.variants=[single,fastest]", "bench.variants has fastest, which is not one of single, kv_runahead"),
        ("bench.variants=[single,single]", "bench.variants=[single,single] must name at least one variant"),
        ("bench.variants=single", "bench.variants=single is not a list of names such as [single,kvr_s]"),
        ("bench.lengths=[]", "bench.lengths=[] must be a list of whole numbers of at least 2"),
        ("bench.lengths=[64,1]", "bench.lengths=[64, 1] must be a list"),
        ("bench.pairs=-1", "bench.pairs=-1 must be at least 0"),
        ("bench.warmup=few", "bench.warmup=few is not a whole number"),
        ("bench.network=wifi", "bench.network=wifi is not one of given, netns, inside"),
        ("bench.network=netns", "bench.network=netns needs link.gbps=<1e9 bits per second> or link.compute_share="),
        ("bench.speed=1", "unknown option bench.speed"),
        ("link.gbps=fast", "link.gbps=fast must be a number above 0, or a list such as [10,1,0.1]"),
        ("link.gbps=[1,0]", "link.gbps=[1, 0] must be a number above 0"),
        ("link.gbps=[1,2]", "link.gbps=[1.0, 2.0]: a given network has one rate; use bench.network=netns"),
        ("link.compute_share=0.5", "link.compute_share is for bench.network=netns"),
        ("link.noise=on", "link.noise=on is for bench.network=netns"),
        ("prefill.layers_in_flight=1", "prefill.layers_in_flight=1 must be at least 2"),
    ],
)
def test_a_wrong_option_is_one_sentence(option: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(says)


def test_both_ways_to_choose_a_rate_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="both choose the rate"):
        BENCH.compose(["bench.network=netns", "link.gbps=1", "link.compute_share=0.5"])


def test_plain_transformers_has_no_place_on_two_hosts() -> None:
    with pytest.raises(ValueError, match="leave it out of bench.variants"):
        BENCH.compose(["bench.network=netns", "link.gbps=1", "bench.variants=[plain_transformers]"])


def test_a_rate_may_be_a_number_or_a_list() -> None:
    assert BENCH.compose(["bench.network=netns", "link.gbps=1"]).link.gbps == [1.0]
    run = BENCH.compose(["bench.network=netns", "link.gbps=[10,0.1]", "link.noise=on"])
    assert (run.link.gbps, run.link.noise, run.bench.network) == ([10.0, 0.1], True, Network.netns)


def test_the_defaults_of_the_file_are_those_of_the_dataclasses() -> None:
    assert BENCH.compose([]) == BenchRun()


def test_settings_without_effect_are_told() -> None:
    split = ["partition=ratios", "partition.ratios=[0.6,0.4]"]
    [sentence] = ineffective_settings(BENCH.compose([*split, "bench.variants=[single,kvr_s]"]))
    assert sentence == "partition=ratios has no effect without kv_runahead among bench.variants"
    assert ineffective_settings(BENCH.compose([*split, "bench.variants=[kv_runahead]"])) == []


def test_every_prefill_has_a_variant_and_every_variant_is_told_and_drawn() -> None:
    names = {variant.prefill["name"] for variant in VARIANTS.values() if variant.prefill is not None}
    assert names >= set(PrefillName.__members__)
    for name, variant in VARIANTS.items():
        assert name in HELP and name in LOOKS
        if variant.prefill is not None and variant.prefill["name"] in PrefillName.__members__:
            PrefillOptions(**variant.prefill)  # type: ignore[arg-type]
