"""veldt bench: measures Veldt on this machine, against its limits and against other libraries."""

import json
from pkgutil import resolve_name
from typing import Any

import tyro

from veldt.errors import UserError, did_you_mean

NAMES = ("learner", "dqn", "replay", "apex", "impala", "scaling", "inference", "transport")
BENCHES = {name: f"veldt.bench.{name}:{name.capitalize()}Bench" for name in NAMES}


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: veldt bench NAME [--json] [OPTIONS]\n\nExample: veldt bench learner --json\n")
        for name, bench in BENCHES.items():
            print(f"  {name:10} {(resolve_name(bench).__doc__ or '').strip()}")
        return 0
    name, flags = argv[0], [word for word in argv[1:] if word != "--json"]
    if name not in BENCHES:
        raise UserError(f"There is no benchmark {name!r}.{did_you_mean(name, BENCHES, BENCHES)}")
    kind: Any = resolve_name(BENCHES[name])
    example = f"{kind.__doc__}\n\n--json prints one JSON object on the last line.\n\nExample: veldt bench {name} --json"
    bench = tyro.cli(kind, args=flags, prog=f"veldt bench {name}", description=example)
    for setting, value in vars(bench).items():
        if type(value) is int and value < 1:
            raise UserError(f"{setting} must be greater than 0, not {value}.")
    report = bench.run()
    machine = report["machine"]
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if machine["load"] > 1.0:
        print("note: the machine was busy at the start; ratios are more reliable than absolute figures")
    for title, figures in report["results"].items():
        print(f"\n{title}")
        for key, value in figures.items():
            print(f"  {key:28} {value:12,.2f}")
    if "table" in report:
        print("", *report["table"], sep="\n")
    if len(flags) != len(argv) - 1:
        print(json.dumps(report))
    return 0
