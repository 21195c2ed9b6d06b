"""The live table: every number in its link, at every width, whichever numbers are missing."""

from __future__ import annotations

import io
import re
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from veldt.metrics import FACT, RATE, TOTAL, TROUBLE, Declarations, Metric, declared
from veldt.program import Program
from veldt.watching.links import amount, fill, format_seconds, links, number, percent, short
from veldt.watching.view import View

SENTENCE = "The learner is the bottleneck: it is busy 97 % of its time; lower store.samples_per_insert (now 8)."
FULL: dict[str, Any] = {
    "time_s": 123.4,
    "env_steps": 123_456,
    "learner_steps": 12_345,
    "episodes": 901,
    "evaluations": 4,
    "env_steps_per_s": 4_312.4,
    "learner_steps_per_s": 134.2,
    "blocks_per_s": 269.5,
    "bytes_per_s": 1_234_567.0,
    "inserted_per_s": 4_298.0,
    "sampled_per_s": 34_384.0,
    "published_per_s": 33.5,
    "busy/actor": 0.86,
    "busy/learner": 0.97,
    "busy/evaluator": 0.07,
    "busy/env": 0.31,
    "busy/policy": 0.55,
    "busy/sample": 0.21,
    "wait/actor": 0.12,
    "wait/learner": 0.03,
    "cpu/actor": 0.88,
    "cpu/learner": 1.02,
    "cpu/evaluator": 0.08,
    "cpu/all": 2.91,
    "cores": 4,
    "queue_fill": 0.05,
    "refusing": 0.36,
    "lag_updates": 13.7,
    "lag_s": 0.102,
    "replay_ratio": 7.96,
    "samples_per_insert": 8.0,
    "store_items": 48_211,
    "store_capacity": 50_000,
    "store_bytes": 5_214_000,
    "restarts": 0.0,
    "memory_bytes": 612_000_000,
    "memory_planned": 840_000_000,
    "loss": 0.01234,
    "epsilon": 0.0512,
    "eval_return": 417.25,
    "train_return": 188.04,
    "left_s": 45.0,
    "actors": 2,
    "envs": 16,
    "bottleneck": SENTENCE,
}
OLD: dict[str, Any] = {  # of one process, before links were measured
    "time_s": 1.071,
    "env_steps": 2_006,
    "learner_steps": 856,
    "store_items": 1_931,
    "store_bytes": 139_392,
    "store_inserted": 1_931,
    "store_sampled": 27_392,
    "skipped_updates": 0.0,
    "loss": 2.2138,
    "epsilon": 0.81019,
    "episodes": 90.0,
    "bad_observations": 0.0,
    "train_return": 18.7,
    "eval_return": 9.75,
    "busy/actor": 0.4,
    "busy/learner": 0.55,
    "env_steps_per_s": 1_909.4,
    "learner_steps_per_s": 814.8,
    "replay_ratio": 14.185,
    "left_s": -0.003,
}
CHAIN = ["environments", "policy", "recorder", "store", "learner", "weights"]


def rendered(line: dict[str, Any], width: int = 80, title: str = "apex-dqn on CartPole-v1", steps: int = 200_000) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(View(title, line, steps))
    return console.export_text()


def rows(text: str) -> dict[str, str]:
    """The rows of the chain by name; a wrapped line belongs to the row above."""
    out: dict[str, str] = {}
    name = ""
    below = text[text.index("what else") :].partition("\n")[2]
    for line in re.split(r"\n *\n", below)[0].splitlines():
        if line[:1].strip():
            name, _, rest = line.partition(" ")
            out[name] = rest
        else:
            out[name] += line
    return {name: " ".join(rest.split()) for name, rest in out.items()}


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_number_is_in_its_link(width: int) -> None:
    text = rendered(FULL, width)
    found = rows(text)
    assert list(found) == CHAIN
    for name, parts in {
        "environments": ("4,312 steps/s", "31 %", "16 in 2 actors"),
        "policy": ("4,312 actions/s", "55 %", "epsilon 0.051"),
        "recorder": ("270 blocks/s", "12 %", "1.2 MB/s", "queue 5 % full"),
        "store": ("4,298 items/s", "48,211 of 50,000 items, 5.2 MB", "refuses 36 % of blocks"),
        "learner": ("134 updates/s", "97 %", "3 %", "34,384 items/s; drawing 21 %"),
        "weights": ("34 published/s", "actors 14 updates, 0.1 s behind"),
    }.items():
        for part in parts:
            assert part in found[name], (name, part, found[name])
    assert max(map(len, text.splitlines())) <= min(width, 120)
    plain = " ".join(text.split())
    for part in (
        "apex-dqn on CartPole-v1",
        "time 2:03, left 0:45",
        "123,456 of 200,000 env steps (62 %), 12,345 updates, 901 episodes, 4 evaluations",
        "greedy return 417.2",
        "exploring return 188.0",
        "loss 0.01234",
        "replay ratio 7.96 (asked: 8)",
        "memory 612.0 MB of 840.0 MB planned",
        "restarts 0",
        "CPU 2.91 of 4 cores (actor 0.88, learner 1.02, evaluator 0.08)",
    ):
        assert part in plain, part
    assert plain.endswith(SENTENCE), "the sentence comes last"


def test_at_80_columns_no_row_of_a_usual_run_takes_more_than_two_lines() -> None:
    assert len(rendered(FULL).splitlines()) <= 22, "a terminal of 24 lines has room for it"


def test_at_40_columns_nothing_is_cut_off() -> None:
    text = rendered(FULL, 40)
    assert max(map(len, text.splitlines())) <= 40 and "…" not in text
    said = " ".join(text.split())
    for part in ("environments 4,312 steps/s; busy 31 %; 16 in 2 actors", "waits 12 %", "greedy return 417.2", SENTENCE):
        assert part in said, part
    assert "612.0 MB of 840.0 MB planned" in said and "replay ratio 7.96 (asked: 8)" in said


def test_progress_is_100_percent_at_the_end_and_not_more_or_earlier() -> None:
    for done, says in ((199_999, "(99 %)"), (200_000, "(100 %)"), (200_500, "(100 %)"), (0, "(0 %)")):
        assert says in rendered({"env_steps": done, "episodes": 1})
    assert ", 1 episode\n" in "\n".join(x.rstrip() for x in rendered({"env_steps": 5, "episodes": 1}).splitlines())


def test_there_are_bars_where_there_is_room() -> None:
    assert "━" in rendered(FULL, 120, steps=0) and "━" not in rendered(FULL, 80, steps=0)


def test_large_fractions_of_the_time_are_highlighted() -> None:
    def styled(line: dict[str, Any]) -> str:
        console = Console(file=io.StringIO(), width=80, record=True, force_terminal=True, color_system="standard")
        console.print(View("a run", line))
        return console.export_text(styles=True)

    assert "\x1b[1;33m97 %\x1b[0m" in styled(FULL) and "33m31 %" not in styled(FULL)
    assert "\x1b[1;31m" not in styled(FULL), "no restarts, nothing in red"
    assert re.search(r"\x1b\[1;31m3 *\x1b\[0m", styled(FULL | {"restarts": 3.0}))
    assert f"\x1b[1m{SENTENCE[:40]}" in styled(FULL)


def test_troubles_are_shown_only_if_there_are_any() -> None:
    assert "bad observations" not in rendered(FULL | {"bad_observations": 0.0})
    text = " ".join(rendered(FULL | {"bad_observations": 3.0, "skipped_updates": 2.0}).split())
    assert "bad observations 3" in text and "skipped updates 2" in text
    assert "1,200 (0.75%)" in rendered(FULL | {"bad_observations": 1200.0, "bad_fraction": 0.0075})


@pytest.mark.parametrize("key", [None, *FULL])
def test_any_number_may_be_missing_or_null(key: str | None) -> None:
    lacking = {name: x for name, x in FULL.items() if name != key}
    for line in (lacking, lacking | ({key: None} if key else {})):
        for width in (80, 120):
            text = rendered(line, width)
            assert "None" not in text and "nan" not in text
            assert list(rows(text)) == CHAIN


def test_before_anything_is_known_there_is_no_chain() -> None:
    for line in ({}, {"time_s": 0.0, "env_steps": 0, "learner_steps": 0}):
        text = rendered(line)
        assert "what else" not in text and "of 200,000 env steps" in text and "greedy return" in text
    assert "- of 200,000 env steps" in rendered({})


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_of_an_older_run_has_the_links_that_it_knows(width: int) -> None:
    text = rendered(OLD, width, steps=2_000)
    found = rows(text)
    assert list(found) == ["environments", "policy", "store", "learner"]
    assert "1,909 steps/s" in found["environments"] and "40 % of the time with the policy" in found["environments"]
    assert "1,931 items, 139.4 KB" in found["store"] and "815 updates/s 55 %" in found["learner"]
    assert "epsilon 0.810" in found["policy"]
    assert "2,006 of 2,000 env steps (100 %)" in text and "replay ratio" in text and "CPU" not in text


def test_a_link_without_numbers_is_left_out() -> None:
    assert [link.name for link in links({"blocks_per_s": 3.0})] == ["recorder"]
    assert [link.name for link in links({"wait/actor": 0.0})] == ["recorder"], "0 is a number"
    assert [link.name for link in links({"lag_s": 2.0})] == ["weights"]
    assert links({"lag_s": 2.0})[0].more == ("actors 2.0 s behind",)
    assert links({"busy/policy": 0.5, "env_steps_per_s": 7.0})[1].rate == "7.0 actions/s"
    assert [link.name for link in links({"env_steps_per_s": 7.0})] == ["environments"]
    assert links({"sigma": 0.2})[0].more == ("sigma 0.200",)


def test_an_unlimited_ratio_is_marked_as_free() -> None:
    assert "7.96 (free)" in rendered(FULL | {"samples_per_insert": 0.0})
    assert "7.96 (asked: 0.5)" in rendered(FULL | {"samples_per_insert": 0.5})


@given(
    st.dictionaries(
        st.sampled_from([*FULL, "bad_observations", "sigma"]),
        st.floats() | st.integers(-(10**15), 10**15) | st.none() | st.booleans() | st.text(max_size=20),
    ),
    st.integers(20, 250),
)
def test_whatever_a_line_holds_it_can_be_shown(line: dict[str, Any], width: int) -> None:
    rendered(line, width)
    rendered(FULL | line, width)


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    for terminal in (True, False):
        file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
        console = Console(file=file, width=120, force_terminal=terminal, color_system=None)
        console.print(View("apex-dqn on CartPole-v1", FULL, 200_000))
        file.detach()
    assert b"4,312 steps/s" in raw.getvalue() and SENTENCE.encode() in raw.getvalue()


@pytest.mark.parametrize("text", ["x [bold]y", "x [/b] y", "[red]", "runs/[a]"])
def test_names_and_sentences_are_shown_as_they_are(text: str) -> None:
    assert rendered({**FULL, "bottleneck": f"The end {text}"}, title=text).count(text) == 2


def test_a_long_name_does_not_push_the_clock_out() -> None:
    text = rendered(FULL, title="apex-dqn on a/Very-Long-Name-v0 " * 4)
    assert "left 0:45" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0"),
        (0.01234, "0.012"),
        (0.5, "0.5"),
        (1, "1.0"),
        (9.87, "9.9"),
        (10.4, "10"),
        (1234.5, "1,234"),
        (-3.0, "-3.0"),
    ],
)
def test_short_numbers(x: float, text: str) -> None:
    assert short(x) == text


def test_fractions_and_numbers() -> None:
    assert percent(0.314) == "31 %" and percent(0) == "0 %" and percent(1.0) == "100 %"
    line = {"a": 1, "b": float("nan"), "c": "7", "d": None, "e": float("inf"), "f": 2.5}
    assert [number(line, key) for key in "abcdefg"] == [1.0, None, None, None, None, 2.5, None]


def test_time_left_of_long_runs() -> None:
    assert format_seconds(90_061) == "25:01:01" and format_seconds(float("nan")) == "-"


# Nodes that the package does not know.


class Scout:
    METRICS: ClassVar = (
        Metric("maps", "maps", TOTAL, rate="maps_per_s", column=RATE),
        Metric("ink_used", "bytes", TOTAL),
        Metric("map_age", "s", link="policy", text="maps are {map_age} old[, {map_errors:n} wrong]"),
        Metric("torn_maps", "maps", TOTAL, column=TROUBLE),
        Metric("coverage", "fraction", column=FACT),
    )


SCOUTED = {"maps_per_s": 12.0, "ink_used": 3_000.0, "map_age": 2.0, "busy/scout": 0.95, "wait/scout": 0.02}


def scouting() -> Declarations:
    program = Program()
    program.scope("far").add("scout/0", Scout)
    return declared(program.nodes.values())


def test_a_metric_of_an_unknown_node_class_is_in_the_table() -> None:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(View("a run", FULL | SCOUTED | {"torn_maps": 2.0, "coverage": 0.25}, 200_000, scouting()))
    text = console.export_text()
    found = rows(text)
    assert list(found) == [*CHAIN, "scout"], "after the links of the chain, under the name of the node"
    for part in ("12 maps/s", "95 %", "2 %", "ink used 3.0 KB"):
        assert part in found["scout"], part
    assert "epsilon 0.051; maps are 2.0 s old" in found["policy"] and "wrong" not in found["policy"]
    plain = " ".join(text.split())
    assert "torn maps 2" in plain and "coverage 25 %" in plain
    assert "maps are 2.0 s old, 3 wrong" in links(SCOUTED | {"map_errors": 3}, scouting())[0].more


def test_without_its_declaration_an_unknown_metric_is_left_out() -> None:
    assert rendered(FULL | SCOUTED) == rendered(FULL)


def test_names_of_metrics_are_shown_as_they_are() -> None:
    declarations = declared([])
    declarations.add("[red]node", (Metric("a [/b] {c}", "[x]s"), Metric("d", text="{d:no such format}")))
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(View("a run", {"a [/b] {c}": 2.0, "d": 3.0}, 0, declarations))
    assert "[red]node" in console.export_text(clear=False) and "a [/b] {c} 2 [x]s; 3" in console.export_text()


def test_a_format_does_not_fill_the_ram() -> None:
    assert fill("{d:2000000000f} {d:,.2f}", {"d": 3.0}) == "3 3.00"


def test_a_second_rate_of_a_link_is_beside_the_first() -> None:
    declarations = declared([])
    declarations.add("scout", (Metric(x, x, TOTAL, rate=f"{x}_per_s", column=RATE) for x in ("maps", "notes")))
    (link,) = links({"maps_per_s": 1.0, "notes_per_s": 2.0}, declarations)
    assert link.rate == "1.0 maps/s" and link.more == ("2.0 notes/s",)


@pytest.mark.parametrize(
    ("x", "unit", "text"),
    [
        (1, "actors", "1 actor"),
        (2, "actors", "2 actors"),
        (13.7, "updates", "14 updates"),
        (0.5, "", "0.5"),
        (12_345, "", "12,345"),
        (2, "s", "2.0 s"),
        (0.314, "fraction", "31 %"),
        (1_500, "bytes", "1.5 KB"),
        (1_500, "bytes/s", "1.5 KB/s"),
        (7, "steps/s", "7.0 steps/s"),
    ],
)
def test_amounts(x: float, unit: str, text: str) -> None:
    assert amount(x, unit) == text
