"""Records of a layer's messages say what became of them."""

from __future__ import annotations

from runahead.ranks.transfer_records import KEPT, TransferRecord, TransferRecords


def record(
    direction: str = "receive", peer: int = 0, layer: int = 2, num_bytes: int = 1000, prefill: int = 1
) -> TransferRecord:
    return TransferRecord(
        direction=direction, peer=peer, layer=layer, start=0, end=8, num_bytes=num_bytes, prefill=prefill
    )


def test_a_message_is_not_posted_then_posted_then_done() -> None:
    records = TransferRecords()
    records.begin()
    assert records.state(1, "receive", 2, {0}, 1000) == "1,000 bytes, receive not posted"
    posted = records.posted(record())
    assert records.state(1, "receive", 2, {0}, 1000) == "1,000 bytes, receive posted"
    posted.done()
    assert records.state(1, "receive", 2, {0}, 1000) == "1,000 bytes, done"


def test_messages_of_a_layer_are_told_apart() -> None:
    records = TransferRecords()
    records.begin()
    records.posted(record(num_bytes=100)).done()
    records.posted(record(num_bytes=30))
    for other in (record(direction="send"), record(peer=1), record(layer=3)):
        records.posted(other)
    assert (
        records.state(1, "receive", 2, {0}, 1130)
        == "1,130 bytes: 1,000 receive not posted, 30 receive posted, 100 done"
    )


def test_an_earlier_prefill_says_nothing_of_this_one() -> None:
    records = TransferRecords()
    records.begin()
    records.posted(record()).done()
    assert records.begin() == 2
    assert records.state(2, "receive", 2, {0}, 1000) == "1,000 bytes, receive not posted"
    assert records.oldest_outstanding(2) == "no transfer is outstanding"


def test_a_prefill_between_two_layers_of_another_leaves_its_messages_to_it() -> None:
    records = TransferRecords()
    outer = records.begin()
    records.posted(record(prefill=outer))
    inner = records.begin()
    records.posted(record(prefill=inner, num_bytes=10)).done()
    assert records.state(inner, "receive", 2, {0}, 10) == "10 bytes, done"
    assert records.state(outer, "receive", 2, {0}, 1000) == "1,000 bytes, receive posted"
    assert records.oldest_outstanding(outer).startswith("outstanding: receive of layer 2 from rank 0, 1,000 bytes")
    assert [each.as_json(0.0)["prefill"] for each in records.all()] == [outer, inner]


def test_the_oldest_that_is_not_over_is_named() -> None:
    records = TransferRecords()
    records.begin()
    records.posted(record(layer=0)).done()
    records.posted(record(direction="send", layer=1, peer=3))
    records.posted(record(layer=2))
    assert records.oldest_outstanding(1).startswith("outstanding: send of layer 1 to rank 3, 1,000 bytes, posted 0.")


def test_a_device_is_asked_until_it_says_that_it_is_over() -> None:
    answers = iter([False, True])
    records = TransferRecords()
    on_device = records.posted(record())
    on_device.has_happened = lambda: next(answers)
    known = []
    for _ in range(4):
        records.ask_device()
        known.append(on_device.is_done)
    assert known == [False, True, True, True]


def test_whoever_describes_transfers_does_not_ask_the_device() -> None:
    """The watcher and the fault report do, and they must not wait for locks of a GPU in trouble."""
    records = TransferRecords()
    records.begin()
    posted = records.posted(record())

    def ask() -> bool:
        raise AssertionError("asked the device")

    posted.has_happened = ask
    assert records.oldest_outstanding(1).startswith("outstanding: receive of layer 2")
    assert records.state(1, "receive", 2, {0}, 1000) == "1,000 bytes, receive posted"
    assert posted.as_json(0.0)["done_s_ago"] is None


def test_the_last_records_are_kept() -> None:
    records = TransferRecords()
    for layer in range(KEPT + 5):
        records.posted(record(layer=layer))
    assert [each.layer for each in records.all()] == list(range(5, KEPT + 5))
