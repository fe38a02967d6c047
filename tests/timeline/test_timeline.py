"""A timeline is a trace that viewers open and a picture of the prefill."""

import json
from itertools import pairwise

import matplotlib.image
import numpy as np
import pytest

from runahead.timeline.picture import timeline_png, write_timeline
from runahead.timeline.trace import TraceSpan, picture_path, trace_json


def span(kind: str, start_s: float, end_s: float, layer: int | None = 0, detail: str = "") -> TraceSpan:
    return TraceSpan(kind=kind, layer=layer, start_s=start_s, end_s=end_s, detail=detail)


TWO_RANKS = [
    [span("compute", 0.0, 0.4), span("compute", 0.4, 0.8, 1), span("send", 0.1, 0.3), span("send", 0.2, 0.5, 1)],
    [span("wait", 0.0, 0.3), span("compute", 0.3, 0.6), span("compute", 0.6, 1.0, 1), span("compute", 1.0, 1.1, None)],
]


def events_of(text: str, phase: str) -> list[dict]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_shifting_moves_both_ends():
    moved = span("wait", 1.0, 2.5, 3, "prefix").shifted(-1.0)
    assert moved == span("wait", 0.0, 1.5, 3, "prefix")


def test_trace_has_every_span_in_microseconds_and_names_the_ranks():
    text = trace_json(TWO_RANKS, ttft_s=1.1)
    spans = events_of(text, "X")
    assert len(spans) == 8
    first_of_rank_1 = next(event for event in spans if event["pid"] == 1 and event["cat"] == "compute")
    assert (first_of_rank_1["ts"], first_of_rank_1["dur"]) == (300000.0, 300000.0)
    assert first_of_rank_1["args"]["layer"] == 0
    names = {event["pid"]: event["args"]["name"] for event in events_of(text, "M") if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    [first_token] = events_of(text, "i")
    assert (first_token["name"], first_token["ts"]) == ("first token", 1100000.0)


def test_spans_of_one_lane_do_not_overlap():
    spans = events_of(trace_json(TWO_RANKS), "X")
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for ends in lanes.values():
        ends.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert len({tid for pid, tid in lanes if pid == 0}) == 3  # compute, and two lanes of overlapping sends


def test_trace_has_no_time_before_zero():
    spans = events_of(trace_json([[span("compute", -0.001, 0.5)], [span("compute", 0.0, 0.5)]]), "X")
    assert [event["ts"] for event in spans] == [0.0, 1000.0]


def test_timeline_is_written_with_a_picture_beside_it(tmp_path):
    write_timeline(tmp_path / "trace.json", TWO_RANKS, ttft_s=1.1, subject="tiny, 10 tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.png"]
    json.loads((tmp_path / "trace.json").read_text())
    image = matplotlib.image.imread(tmp_path / "trace.png")
    assert image.shape[1] > 1000
    assert np.unique(image.reshape(-1, image.shape[-1]), axis=0).shape[0] > 100  # not a blank page


def test_layers_have_colours_of_their_own(tmp_path):
    one = [[span("compute", 0.0, 1.0, 0), span("compute", 1.0, 2.0, 1)]]
    same = [[span("compute", 0.0, 1.0, 0), span("compute", 1.0, 2.0, 0)], []]
    assert timeline_png(one) != timeline_png(same[:1])


def test_decoding_is_left_out_of_the_picture():
    # Layers in both, for the colour bar to be the same.
    prefill = [[span("compute", 0.0, 0.5, 0), span("compute", 0.5, 1.0, 1)]]
    with_decoding = [[*prefill[0], span("compute", 1.0, 9.0, 0)]]
    assert timeline_png(prefill, ttft_s=1.0) == timeline_png(with_decoding, ttft_s=1.0)


@pytest.mark.parametrize("spans", [[], [[]], [[], []], [[span("wait", 0.0, 0.0)]], [TWO_RANKS[0], [], TWO_RANKS[1]]])
def test_picture_of_idle_ranks(spans):
    assert timeline_png(spans, ttft_s=0.5).startswith(b"\x89PNG")
    json.loads(trace_json(spans))


def test_a_trace_cannot_have_the_pictures_name():
    assert str(picture_path("a/b.json")) == "a/b.png"
    assert str(picture_path("trace")) == "trace.png"
    with pytest.raises(ValueError, match="use .json"):
        picture_path("a/b.png")
