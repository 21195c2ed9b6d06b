"""The mutants fit the code as it is; `make test-mutants` runs them."""

from __future__ import annotations

import re

import pytest
from mutants import DOCS, MUTANTS, ROOT, failed, mutate, written


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 35
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_its_file_which_still_compiles(mutant):
    text = mutate(mutant, ROOT / "veldt")  # what it replaces is there once
    assert text != (ROOT / "veldt" / mutant.file).read_text()
    compile(text, mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_it_names_are_there(mutant):
    assert mutant.tests
    for test in mutant.tests:
        path, name = test.split("::")
        name = name.partition("[")[0]
        assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / path).read_text(), re.MULTILINE), test


def test_the_table_in_the_documents_is_up_to_date():
    assert DOCS.read_text() == written(DOCS.read_text()), "python tests/mutants.py --write"


def test_what_pytest_says_is_understood():
    said = "FAILED tests/test_a.py::test_b[1, x - y] - assert 1 == 2\nERROR tests/test_c.py\nFAILED tests/test_d.py::test_e"
    assert failed(said)[1:] == ["tests/test_d.py::test_e"] and failed(said)[0].startswith("tests/test_a.py::test_b[")
