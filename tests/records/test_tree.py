"""Layout: one record for small columns, one array for each large one, and no byte lost between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples

from veldt.records.tree import PACKED, SMALL, Layout, namespace, read_only, spec

DTYPES = [np.bool_, np.uint8, np.int16, np.int64, np.float32, np.float64]
SPECS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(spec, st.lists(st.integers(1, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
)


@settings(max_examples=examples(60), deadline=None)
@given(SPECS, st.lists(st.integers(1, 4), max_size=2))
def test_a_storage_holds_every_column_apart(columns, leading):
    layout = Layout(columns)
    views = layout.columns(layout.zeros(*leading))
    assert list(views) == list(columns)
    for number, (name, view) in enumerate(views.items()):
        assert view.shape == (*leading, *columns[name].shape) and view.dtype == columns[name].dtype
        view[...] = number % 2 if view.dtype == np.bool_ else number + 1
    for number, view in enumerate(views.values()):
        assert (view == (number % 2 if view.dtype == np.bool_ else number + 1)).all()


@settings(max_examples=examples(60), deadline=None)
@given(SPECS)
def test_bytes_of_a_row_are_those_it_takes(columns):
    layout = Layout(columns)
    assert sum(x.nbytes for x in layout.zeros(7).values()) == 7 * layout.nbytes
    assert layout.nbytes >= sum(c.nbytes for c in columns.values())
    assert set(layout.large) == {name for name, c in columns.items() if c.nbytes > SMALL}


@settings(max_examples=examples(30), deadline=None)
@given(SPECS)
def test_torch_can_view_every_column_in_place(columns):
    views = Layout(columns).columns(Layout(columns).zeros(3))
    for view in views.values():
        torch.from_numpy(view)[...] = 1
        assert (view == 1).all()


def test_a_layout_may_be_empty():
    layout = Layout({})
    storage = layout.zeros(5)
    assert layout.nbytes == 0 and sum(x.nbytes for x in storage.values()) == 0 and layout.columns(storage) == {}


def test_read_only_arrays_and_their_views_refuse_writes():
    storage = read_only(Layout({"a": spec((), np.float32), "b": spec((99,), np.uint8)}).zeros(2))
    for array in (storage[PACKED], storage[PACKED]["a"], storage["b"], storage["b"][0]):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


def test_namespace_is_the_library_that_made_the_array():
    assert namespace(np.zeros(1)) is np and namespace(torch.zeros(1)) is torch
