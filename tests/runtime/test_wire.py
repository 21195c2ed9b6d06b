"""Frames: what was sent is what is read, and what is no frame or no message is refused."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.link import Link
from veldt.runtime.grpc.wire import DATA, HEADER, HELLO, KINDS, LZ4, Columns, Formats, Refused, frame, parse
from veldt.runtime.shm.memory import Format

examples = int(os.environ.get("VELDT_EXAMPLES", "1"))
DTYPES = ("|b1", "|u1", "|i1", "<i4", "<i8", "<u2", "<f2", "<f4", "<f8")
columns = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=8),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=5,
    unique_by=lambda column: column[0],
)


def fill(format_: Format, seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.integers(0, 2, shape)).astype(dtype) for name, dtype, shape in format_.columns}


BLOCK = Format([("id", "<i8", (3,)), ("x", "<f4", (20, 2)), ("first", "|b1", (20,)), ("pixels", "|u1", (2, 400))])


@settings(max_examples=100 * examples)
@given(columns, st.integers(0, 2**32), st.booleans(), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_message_comes_as_it_was_sent(parts: Any, seed: int, compress: bool, number: int, ack: int) -> None:
    format_ = Format(parts)
    formats, tree = Formats([BLOCK, format_]), fill(format_, seed)
    which, flags, payload = formats.pack(dict(reversed(tree.items())), compress)
    data = frame(DATA, *payload, channel=7, format_=which, flags=flags, number=number, ack=ack)
    came = parse(data)
    assert came[:6] == (DATA, 7, which, flags, number, ack)
    found = Formats([BLOCK, format_]).unpack(came)
    assert list(found) == list(tree)
    for name, x in tree.items():
        assert found[name].dtype == x.dtype and not found[name].flags.writeable
        np.testing.assert_array_equal(found[name], x)


def read(data: bytes) -> None:
    """Bytes from anywhere: they are refused, or are a message of the format."""
    try:
        tree = Formats([BLOCK]).unpack(parse(data))
    except Refused:
        return
    assert [(name, x.dtype.str, x.shape) for name, x in tree.items()] == BLOCK.columns
    assert (tree["first"].view(np.uint8) < 2).all() and np.isfinite(tree["x"]).all()


@settings(max_examples=300 * examples)
@given(st.data(), st.sampled_from(KINDS), st.booleans())
def test_a_changed_frame_is_refused_or_still_a_message(data: Any, kind: int, compress: bool) -> None:
    which, flags, payload = Formats([BLOCK]).pack(fill(BLOCK, 1), compress)
    bad = bytearray(frame(kind, *payload, channel=1, format_=which, flags=flags, number=5, ack=3))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad) - 1))
        how = data.draw(st.sampled_from(("flip", "cut", "add", "swap")))
        if how == "flip":
            bad[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del bad[at : at + data.draw(st.integers(1, 40))]
        elif how == "add":
            bad[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        else:
            bad[at:] = bad[at:][::-1]
        if not bad:
            break
    read(bytes(bad))


@settings(max_examples=200 * examples)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(Refused):
        Formats([BLOCK]).unpack(parse(noise))


@pytest.mark.parametrize(("kind", "flags"), [(0, 0), (max(KINDS) + 1, 0), (255, 0), (DATA, 2), (DATA, 255)])
def test_a_frame_of_an_unknown_kind_is_refused(kind: int, flags: int) -> None:
    with pytest.raises(Refused, match="unknown kind"):
        parse(frame(kind, flags=flags))
    with pytest.raises(Refused, match="too short"):
        parse(frame(DATA)[:-1])


@settings(max_examples=200 * examples)
@given(st.binary(max_size=2000), st.integers(0, 3), st.integers(0, 255))
def test_a_payload_of_another_size_or_format_is_refused(noise: bytes, flags: int, format_: int) -> None:
    assume(len(noise) != BLOCK.nbytes)
    with pytest.raises(Refused):
        Formats([BLOCK]).unpack(parse(frame(DATA, noise, flags=flags, format_=format_)))


def message(tree: Tree, formats: Formats | None = None) -> Tree:
    formats = formats or Formats([BLOCK])
    which, flags, payload = Formats([BLOCK], finite=False).pack(tree)
    return formats.unpack(parse(frame(DATA, *payload, format_=which, flags=flags)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_that_are_not_finite_are_refused_where_they_are_checked(value: float) -> None:
    tree = fill(BLOCK, 0)
    tree["x"][3, 1] = value
    with pytest.raises(Refused, match="'x' has values that are not finite"):
        message(tree)
    assert message(tree, Formats([BLOCK], finite=False))["x"][3, 1] != 0.5


def test_booleans_that_are_none_are_refused() -> None:
    tree = fill(BLOCK, 0)
    tree["first"].view(np.uint8)[7] = 2
    with pytest.raises(Refused, match="'first' has booleans"):
        message(tree)


def test_a_compressed_message_that_is_larger_or_smaller_than_its_format_is_refused() -> None:
    block = pytest.importorskip("lz4.block")
    formats = Formats([BLOCK])
    size = BLOCK.nbytes
    for nbytes in (0, 1, size - 1, size + 1, 1 << 24):
        payload = block.compress(bytes(nbytes), store_size=False)
        with pytest.raises(Refused):
            formats.unpack(parse(frame(DATA, payload, flags=LZ4)))
    assert formats.unpack(parse(frame(DATA, block.compress(bytes(size), store_size=False), flags=LZ4)))


def test_without_lz4_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "lz4", None)
    with pytest.raises(UserError, match=r"veldt\[lz4\]"):
        Link("unix:/nowhere", compress=True)
    with pytest.raises(Refused, match="not installed"):
        Formats([BLOCK]).unpack(parse(frame(DATA, b"abc", flags=LZ4)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": np.zeros((20, 3), np.float32)}, r"'x': the run expects <f4 \(20, 2\), and this actor has <f4 \(20, 3\)"),
        ({"x": np.zeros((20, 2))}, r"'x': the run expects <f4 \(20, 2\), and this actor has <f8 \(20, 2\)"),
        ({"extra": np.zeros(1)}, r"'extra': the run expects nothing, and this actor has <f8 \(1,\)"),
        ({"first": None}, r"'first': the run expects \|b1 \(20,\), and this actor has nothing"),
    ],
)
def test_a_tree_that_does_not_fit_is_told_which_column(change: dict[str, Any], says: str) -> None:
    tree = {name: x for name, x in (fill(BLOCK, 0) | change).items() if x is not None}
    other = Format([("question", "<i8", (3,))])
    with pytest.raises(UserError, match=says):
        Formats([other, BLOCK]).pack(tree)


@pytest.mark.parametrize(
    "column", [("x", "|O", (2,)), ("x", "<U4", ()), ("x", ">f4", (1,)), ("x", "<M8[s]", ()), ("x", "|u1", (1 << 31,))]
)
def test_only_plain_numbers_of_a_bounded_size_have_a_format(column: Any) -> None:
    with pytest.raises(Refused, match="cannot be sent"):
        Columns(Format([column]))


@pytest.mark.parametrize(
    "described", [3, [[3]], [[["x", "nonsense", [1]]]], [[["x", "<f4", ["y"]]]], [[["x", "<f4", [-1]]]]]
)
def test_what_describes_no_format_is_refused(described: Any) -> None:
    with pytest.raises(Refused):
        Formats(wire.parse_formats(described))


def test_formats_are_described() -> None:
    described = json.loads(json.dumps(Formats([BLOCK, Format([])]).described))
    assert [f.columns for f in wire.parse_formats(described)] == [BLOCK.columns, []]


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"nonsense", b"[" * 100_000, b"\xff", b'{"a": 1' + b"0" * 5000 + b"}", b'"' + b"x" * (1 << 18)]
)
def test_json_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(Refused):
        wire.load_json(memoryview(text))


def load_report(report: dict[str, Any]) -> tuple[list[int], dict[str, float]]:
    return wire.load_report(memoryview(json.dumps(report).encode()))


@pytest.mark.parametrize("counts", [None, 3, [1], *([x] * len(NAMES) for x in ("1", True, 1 << 60, 0.5))])
def test_counts_that_are_none_are_refused(counts: Any) -> None:
    with pytest.raises(Refused):
        load_report({"counts": counts})


@pytest.mark.parametrize("metrics", [3, {"a": "b"}, {"a": float("nan")}, {"a": 1e301}, {"x" * 200: 1.0}, {"a": [1]}])
def test_metrics_that_are_none_are_refused(metrics: Any) -> None:
    counts = list(range(len(NAMES)))
    with pytest.raises(Refused, match="metrics"):
        load_report({"counts": counts, "metrics": metrics})
    assert load_report({"counts": counts, "metrics": {"a": 1, "b": 0.5}}) == (counts, {"a": 1.0, "b": 0.5})
    with pytest.raises(Refused):
        load_report({"counts": counts, "metrics": {str(i): 0.0 for i in range(10_000)}})


def test_versions_may_be_negative() -> None:
    for version in (-1, 0, 5, -(1 << 62), 1 << 62):
        assert parse(frame(HELLO, number=version)).number == version


def test_the_header_is_as_documented() -> None:
    assert HEADER.size == 24
    data = frame(DATA, b"abc", channel=1, format_=2, flags=1, number=3, ack=-4)
    assert data == bytes([DATA, 1, 2, 1, *[0] * 4, 3, *[0] * 7, 252, *[255] * 7]) + b"abc"
