"""The folders show the architecture: who may import whom, how long a file may be, and what every package says of itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import veldt

ROOT = Path(veldt.__file__).parent
ROLES = {"acting", "learning", "algorithms"}
# Package -> the packages that it may import, beside itself and the modules at the top.
MAY_IMPORT = {
    "records": set(),
    "envs": {"records"},
    "nets": {"records"},
    "storing": {"records"},
    **{role: {"records", "envs", "nets", "storing", *ROLES} for role in ROLES},
    "demos": {"records", "envs", "acting"},
    "topologies": {"records", "envs", "storing", "demos", *ROLES},
    "runtime": {"records"},
    "watching": {"records"},
    "experiment": {"records", "envs", "nets", "storing", "demos", "topologies", "runtime", "watching", *ROLES},
}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "bench"}
LONGEST = 400  # lines


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["veldt", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(body: list[ast.stmt], nested: bool) -> Iterator[str]:
    """The modules of the package that are imported; `nested`: also inside of functions."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("veldt"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from imports(getattr(node, part, []), nested)


def package(module: str) -> str:
    """Empty: a module at the top."""
    parts = module.split(".")
    inside = len(parts) > 1 and (ROOT / parts[1]).is_dir()
    return parts[1] if inside else ""


def violations(module: str, source: str) -> list[str]:
    mine = package(module)
    allowed = MAY_IMPORT.get(mine, set())
    targets = set(imports(ast.parse(source).body, nested=True))
    return [other for other in targets if (theirs := package(other)) and theirs != mine and theirs not in allowed]


@pytest.mark.parametrize("module", [name for name in MODULES if package(name) in MAY_IMPORT])
def test_imports_go_one_way(module: str) -> None:
    assert not violations(module, MODULES[module].read_text())


def test_modules_at_the_top_import_each_other_and_arrays_alone() -> None:
    for name, path in MODULES.items():
        if package(name) or name in ("veldt", "veldt.__main__"):
            continue
        outside = {target for target in imports(ast.parse(path.read_text()).body, nested=True) if package(target)}
        assert outside <= {"veldt.records.tree"}, (name, outside)


def test_the_runtime_knows_arrays_and_no_role() -> None:
    for name, path in MODULES.items():
        if package(name) == "runtime":
            found = {x for x in imports(ast.parse(path.read_text()).body, nested=True) if package(x) == "records"}
            assert found <= {"veldt.records.tree"}, (name, found)


def test_a_violation_is_found() -> None:
    assert violations("veldt.runtime.base", "from veldt.learning.learner import Learner") == ["veldt.learning.learner"]
    assert violations("veldt.storing.replay", "def f():\n    from veldt.acting import actor") == ["veldt.acting.actor"]
    assert not violations("veldt.topologies", "from veldt.acting.actor import Actor\nfrom veldt.program import Program")
    assert not violations("veldt.records.block", "if TYPE_CHECKING:\n    from veldt.cli import train")


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: set(imports(ast.parse(path.read_text()).body, nested=False)) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_files_are_short_and_packages_say_what_is_in_them() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert package(name) == "bench" or len(text.splitlines()) <= LONGEST, f"{name} has {len(text.splitlines())} lines"
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(text)), f"{name} has no docstring"


def test_every_fault_names_tests_that_are_there() -> None:
    """docs/faults.md, from F1 to F42."""
    text = (ROOT.parent / "docs" / "faults.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| F\d", line)]
    assert [row[0] for row in rows] == [f"| F{i}" for i in range(1, 43)]
    for number, _, promise, tests in rows:
        cited = re.findall(r"\(\.\./(tests/[a-z_/]+\.py)\) ((?:`\w+`(?:, )?)+)", tests)
        assert promise and cited, number
        for file, names in cited:
            code = (ROOT.parent / file).read_text()
            missing = [name for name in re.findall(r"`(\w+)`", names) if f"def test_{name}(" not in code]
            assert not missing, (number, file, missing)


def test_every_page_of_results_says_which_code_it_comes_from() -> None:
    """And what changed since then."""
    pages = sorted((ROOT.parent / "docs" / "results").glob("*.md"))
    assert pages
    for page in pages:
        third = page.read_text().splitlines()[2]
        assert re.match(r"Code: [0-9a-f]{7,}\b.* \d+ \w+ \d{4}\. \S", third), f"{page.name}: {third}"
