"""The examples and the code in the documents run as they stand, each in a fresh process and an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(directory, *arguments, timeout=120):
    """Runs Python with warnings as errors; returns what it printed."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def first_block(document):
    """The first Python code of a Markdown file."""
    path = ROOT / document
    found = re.search(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{document} has no Python code"
    return found[1]


def parameters(output):
    """The size of the network that was trained."""
    return int(re.search(r"network: \w+, ([\d,]+) parameters", output)[1].replace(",", ""))


def test_custom_env(tmp_path):
    output = run_python(tmp_path, ROOT / "examples" / "custom_env.py", "--steps", "1500")
    assert "obs [2] float32; actions Discrete(3)" in output
    assert float(re.search(r"mean return of 20 greedy episodes: (\S+)", output)[1]) <= 50


def test_custom_network(tmp_path):
    output = run_python(tmp_path, ROOT / "examples" / "custom_network.py", "--steps", "1500")
    assert parameters(output) == 3 * 3 * 16 + 16 + 16 * 10 * 5 * 32 + 32 + 33 * 3, "the example's network, and no other"
    assert -1 <= float(re.search(r"mean return of 100 greedy episodes: (\S+)", output)[1]) <= 1


def test_the_algorithm_of_the_guide_learns(tmp_path):
    (tmp_path / "guide.py").write_text(first_block("docs/add_an_algorithm.md"))
    output = run_python(tmp_path, "guide.py")
    promised = re.search(r"^ *print\(run.evaluate.*# ([\d.]+)", (tmp_path / "guide.py").read_text(), re.MULTILINE)
    assert output.split()[-1] == promised[1], "what the guide says it prints"


def test_the_ten_lines_of_the_readme(tmp_path):
    code = first_block("README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "readme.py").write_text(code.replace("seed=1", "seed=1, steps=20_000"))
    lines = run_python(tmp_path, "readme.py").splitlines()
    weights = Path(lines[-1])
    assert weights.suffix == ".safetensors" and (tmp_path / weights).exists(), "the file it names is there"
    steps = re.match(r"(\d+) [\d.]+", lines[-2])
    assert steps is not None and 20_000 <= int(steps[1]) < 30_000, "the last evaluation is of the last weights"
