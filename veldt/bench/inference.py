"""Where actions are computed: by each actor for itself, or by one process for all, over shared memory and over gRPC.

    loop        the same batched forward and the same environments in one process of one thread: nothing is sent
    local       each actor has the network, on the CPU (IMPALA)
    shm         central inference (SEED RL), asked over shared memory
    grpc-unix   the same over gRPC, on a Unix socket
    grpc-tcp    the same over TCP on the loopback interface, with a token

A latency is taken in the actor's process, from the first attempt to send a group's step until its actions are there; for
local inference and the loop it is the time of the forward. Bytes are those that leave an actor and those that come to it:
of messages in their packed form (shm), as the gate counts them (gRPC), or of blocks and weights (local, with a learner).
CPU time is that of all processes of the run. The cost is that of the whole machine for as long as the steps take.

With a learner, actors wait where it is slower than they are: under central inference as part of a call, and otherwise with
their blocks, which no latency shows.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from veldt.acting.actor import Actor, send_examples
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.bench.latency import AtOnce, Caller, TimedPolicy, percentiles, thin
from veldt.bench.peers import side_by_side
from veldt.bench.prices import cost, read_prices
from veldt.bench.timing import machine, take_turns
from veldt.bench.window import TABLE, Window, figures
from veldt.counters import Counters
from veldt.envs import is_atari, make_env
from veldt.errors import UserError
from veldt.experiment import recipes, settings
from veldt.experiment.config import Config
from veldt.learning.params import LatestParams
from veldt.machine import core_count
from veldt.nets.torsos import as_float
from veldt.program import CELL, INCARNATION, ROWS, Node, Program
from veldt.records.history import History
from veldt.records.step import EnvSpec
from veldt.records.tree import Tree
from veldt.runtime.grpc.wire import HEADER
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import GateSettings, Messages, messages_of
from veldt.topologies import add_inference, add_learner
from veldt.topologies.stores import add_store

Contender = Literal["loop", "local", "shm", "grpc-unix", "grpc-tcp"]
CENTRAL: tuple[Contender, ...] = ("shm", "grpc-unix", "grpc-tcp")
HIDDEN = 64  # units of each of two layers, times the width
CONVNET = (16, 32, 256)  # channels, channels and units of IMPALA's shallow network, times the width
WIDTHS = (1, 2, 4, 8, 16)
PRICES = Path(__file__).parents[2] / "benchmarks" / "inference" / "prices.yaml"
WARM_STEPS = 100  # of the loop
QUICK, SLOW = "veldt.bench.latency:quick", "veldt.bench.latency:slow"


@dataclasses.dataclass(frozen=True)
class InferenceBench:
    """Local against central inference, over shared memory and gRPC: latency, env steps a second, bytes, CPU and cost."""

    env: str = "CartPole-v1"
    """A Gymnasium id."""
    actors: int = 2
    """Actor processes."""
    envs: int = 8
    """Environments of each actor."""
    groups: int = 2
    """Groups of environments per actor, for central inference."""
    wait_ms: float = 1.0
    """Milliseconds that the first request of a batch may wait for others."""
    widths: tuple[int, ...] = (1, 4, 16)
    """Width factors of the networks: two layers of 64 units; for ALE/... IMPALA's shallow network."""
    contenders: tuple[Contender, ...] = ("loop", "local", "shm", "grpc-unix", "grpc-tcp")
    """Contenders to measure."""
    device: str = "cpu"
    """Device of central inference and of the learner: cpu or cuda. Local inference is on the CPU."""
    learner: bool = False
    """Train too, with store and learner, and leave out the loop; otherwise nothing is recorded."""
    seconds: float = 4.0
    """Seconds of one turn."""
    rounds: int = 3
    """Turns that each contender gets."""
    ratios: bool = True
    """Also measure bare gRPC and a slow environment."""
    slow_actors: int = 4
    """Number of actors, one of them slow, in the measurement with a slow environment."""
    prices: str = ""
    """YAML file with the prices of a core and of GPUs; empty: benchmarks/inference/prices.yaml."""

    def run(self) -> dict[str, Any]:
        prices = read_prices(Path(self.prices) if self.prices else PRICES)
        gpu = self._check()
        before = machine() | ({"gpu": gpu} if gpu else {})
        contenders = [name for name in self.contenders if name != "loop" or not self.learner]
        jobs = [(width, contender) for width in self.widths for contender in contenders]
        found = take_turns(self.rounds, {job: functools.partial(self._turn, *job) for job in jobs})
        for (_, contender), line in found.items():
            hourly = prices.hourly(core_count(), gpu if self._uses_gpu(contender) else "")
            line[f"{prices.currency}_per_1e9_steps"] = cost(line["env_steps_per_s"], hourly)
        results = {f"{self.label(width)}, {contender}": line for (width, contender), line in found.items()}
        table = make_table(results, prices.currency)
        results |= self._compare(found)
        if self.ratios:
            results |= self._call_ratio() | self._slow_ratio()
        return {"machine": before, "results": results, "table": table}

    def _check(self) -> str:
        """The name of the GPU, if one is used."""
        for width in self.widths:
            settings.check(self.config(width))
        if self.slow_actors < 2:
            raise UserError("slow_actors counts the slow one too: it must be at least 2.")
        if self.device == "cpu":
            return ""
        if not self.device.startswith("cuda") or not torch.cuda.is_available():
            raise UserError(f"device {self.device!r} is not available; use cpu{' or cuda' * torch.cuda.is_available()}.")
        return torch.cuda.get_device_name(self.device)

    def _uses_gpu(self, contender: Contender) -> bool:
        return self.device != "cpu" and (self.learner or contender != "local")

    def label(self, width: int) -> str:
        if is_atari(self.env):
            return " - ".join(str(size * width) for size in CONVNET)
        return f"mlp {HIDDEN * width} x {HIDDEN * width}"

    def config(self, width: int, **settings: Any) -> Config:
        """The recipe, with no step limit and no evaluations."""
        network: dict[str, Any] = {"hidden": (HIDDEN * width,) * 2}
        if is_atari(self.env):
            if width not in WIDTHS:
                raise UserError(f"For Atari the widths are {', '.join(map(str, WIDTHS))}, not {width}.")
            network = {"network_from": f"{__name__}:wide_{width}"}
        settings = {
            "env": self.env,
            "steps": 1 << 40,
            "actors": self.actors,
            "envs_per_actor": self.envs,
            "device": self.device,
            "learner.anneal": False,
            "eval.every": 0,
            "central.groups": self.groups,
            "central.wait_ms": self.wait_ms,
            "central.device": self.device,
            **{f"algorithm.{name}": value for name, value in network.items()},
            **settings,
        }
        return recipes.make("seed-vtrace", **settings)

    def _turn(self, width: int, contender: Contender, _: int) -> dict[str, float]:
        if contender == "loop":
            code = f"from veldt.bench.inference import InferenceBench; {self!r}.loop({width})"
            found: dict[str, float] = side_by_side([code], self.seconds)[0]
            return found
        config = self.config(width)
        env = config.env_spec()
        return self._local(config, env) if contender == "local" else self._central(config, env, contender)

    def _local(self, config: Config, env: EnvSpec) -> dict[str, float]:
        program, actors = local_program(config, env, self.learner), actors_of(config)
        names, runtime = ("stream_bytes",) if self.learner else (), Local(queue=config.queue)
        window = Window(runtime, program, self.seconds, actors, names, "local", self.learner)
        blocks = window.per_step("stream_bytes") if self.learner else 0.0
        return window.figures(batch=self.envs, out=blocks, back=window.weights / window.steps())

    def _central(self, config: Config, env: EnvSpec, contender: Contender) -> dict[str, float]:
        program = central_program(config, env, self.learner)
        messages = all_messages(program.nodes["recorder" if self.learner else "inference"])
        gate: GateSettings | None = None
        if contender == "grpc-unix":
            gate = GateSettings()
        elif contender == "grpc-tcp":
            gate = GateSettings(listen=f"127.0.0.1:{free_port()}", token=secrets.token_hex(32), own_listen=True)
        names = () if gate is None else ("gate_bytes_in", "gate_bytes_out")
        runtime = Local(queue=config.queue, gate=gate)
        window = Window(runtime, program, self.seconds, actors_of(config), names, "central", self.learner)
        if gate is not None:
            out, back = (window.per_step(name) for name in names)
        else:
            calls = window.calls / window.steps()
            out, back = (calls * size for size in call_bytes(messages))
        return window.figures(statistics.fmean(window.batches), out, back)

    @torch.inference_mode()
    def loop(self, width: int) -> None:
        """Prints the figures of one process that has all environments and does one forward for all of them."""
        torch.set_num_threads(1)
        config, n, vectors = self.config(width), self.envs // self.groups, self.actors * self.groups
        algorithm, total = config.algorithm, n * vectors
        envs = [config.envs(n) for _ in range(vectors)]
        env, rng, explore = envs[0].spec, np.random.default_rng(0), config.actor.explore(0, total, total)
        net = algorithm.network(env).to(self.device).requires_grad_(False).eval()
        history = History(env, algorithm.window.history, total)
        step = {name: np.zeros((total, *c.shape), c.dtype) for name, c in env.step.items()}
        used = [name for name in step if name in env.observation or algorithm.window.history > 1]
        records = [vector.reset(i) for i, vector in enumerate(envs)]
        times: list[int] = []
        count = applied = 0
        began, cpu = 0.0, 0.0
        while count <= WARM_STEPS or time.perf_counter() - began < self.seconds:
            for i, record in enumerate(records):
                for name in used:
                    step[name][i * n : (i + 1) * n] = record[name]
            asked = time.perf_counter_ns()
            rows = {name: torch.from_numpy(x).to(self.device) for name, x in history.append(step).items()}
            action = algorithm.act(net, rows, {}, explore, rng)[0]["action"]
            times.append(time.perf_counter_ns() - asked)
            records = [vector.step(action[i * n : (i + 1) * n]) for i, vector in enumerate(envs)]
            applied += sum(n - int(np.count_nonzero(record["first"])) for record in records)
            count += 1
            if count == WARM_STEPS:
                began, cpu, applied, times = time.perf_counter(), time.process_time(), 0, []
        rate, cpu_s = applied / (time.perf_counter() - began), time.process_time() - cpu
        latencies = percentiles([(len(times), thin(times))])
        print(json.dumps(figures(latencies, rate, total, 0.0, 0.0, cpu_s / applied)))

    # Ratios.

    def _compare(self, found: dict[tuple[int, Contender], dict[str, float]]) -> dict[str, dict[str, float]]:
        rates = {key: line["env_steps_per_s"] for key, line in found.items()}
        crossover = {
            f"{self.label(width)}, {name}": rate / rates[width, "local"]
            for (width, name), rate in rates.items()
            if name in CENTRAL and (width, "local") in rates
        }
        bare = {
            self.label(width): rates[width, "shm"] / rate
            for (width, name), rate in rates.items()
            if name == "loop" and (width, "shm") in rates
        }
        tables = {"central / local, env steps a second": crossover, "shm / loop, env steps a second": bare}
        return {title: figures for title, figures in tables.items() if figures}

    def _call_ratio(self) -> dict[str, dict[str, float]]:
        """One actor and one group: a call of a policy that replies at once, against the same bytes over bare grpc.aio."""
        config, n = self.config(self.widths[0]), self.envs // self.groups
        env = config.env_spec()
        question, answer = (HEADER.size + size for size in call_bytes(all_messages(call_program(env, n).nodes["policy"])))

        def turn(_: int) -> dict[str, float]:
            window = Window(Local(gate=GateSettings()), call_program(env, n), self.seconds, ["actor/0"])
            times: tuple[float, ...] = percentiles(window.taken) + echo(question, answer, self.seconds)
            times += echo(question, answer, self.seconds, os.environ.get("GRPC_EXPERIMENTS", ""))  # `runtime.grpc` set it
            names = (f"{who}{p}_us" for who in ("", "bare ", "bare, polled like ours, ") for p in ("p50", "p99"))
            return dict(zip(names, times, strict=True))

        found = take_turns(self.rounds, {"": turn})[""]
        found["p50 / bare p50"] = found["p50_us"] / found["bare p50_us"]
        found["p50 / bare p50, polled like ours"] = found["p50_us"] / found["bare, polled like ours, p50_us"]
        return {f"a call over gRPC (Unix socket, {question} bytes there, {answer} back) against bare grpc.aio": found}

    def _slow_ratio(self) -> dict[str, dict[str, float]]:
        """Env steps per second of actors, with and without another actor whose environments are slow."""

        def rate(actors: int, _: int) -> dict[str, float]:
            config = dataclasses.replace(self, env=QUICK).config(1, actors=actors)
            others = actors_of(config)[: self.slow_actors - 1]
            slow = set(actors_of(config)) - set(others)
            program = central_program(config, config.env_spec(), learner=False, slow=slow)
            window = Window(Local(), program, self.seconds, actors_of(config))
            return {"": window.steps(others) / window.elapsed}

        sizes = {"beside a slow one": self.slow_actors, "alone": self.slow_actors - 1}
        turns = take_turns(self.rounds, {name: functools.partial(rate, n) for name, n in sizes.items()})
        found = {name: line[""] for name, line in turns.items()}
        found["beside / alone"] = found["beside a slow one"] / found["alone"]
        return {f"env steps a second of {self.slow_actors - 1} actors": found}


# Networks for images.


class Wide(torch.nn.Module):
    """IMPALA's shallow network for 84 x 84 frames, wider by a factor: [B, history, 84, 84] -> [B, 256 width]."""

    def __init__(self, env: EnvSpec, width: int) -> None:
        super().__init__()
        a, b, units = (size * width for size in CONVNET)
        self.first, self.second = torch.nn.Conv2d(4, a, 8, 4), torch.nn.Conv2d(a, b, 4, 2)
        self.last = torch.nn.Linear(81 * b, units)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.second(self.first(as_float(obs)).relu_()).relu_()
        x = self.last(x.flatten(1)).relu_()
        return x


wide_1, wide_2, wide_4, wide_8, wide_16 = (functools.partial(Wide, width=width) for width in WIDTHS)


# Programs.


def actors_of(config: Config) -> list[str]:
    return [f"actor/{i}" for i in range(config.actors)]


def central_program(config: Config, env: EnvSpec, learner: bool, slow: set[str] | None = None) -> Program:
    """`topologies.seed` with timed policies; without a learner, nothing is recorded."""
    program, central, total = Program(), config.central, config.actors * config.envs_per_actor
    counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
    if learner:
        store = add_store(program, config, config.schema(env))
        add_learner(program, config, env, store, params, counters)
        policy = add_inference(program, config, env, store, params, counters)
    else:
        policy = program.add(
            "inference",
            BatchedPolicy,
            config.algorithm,
            env,
            params,
            counters,
            config.actor.explore(0, total, total),
            config.seed,
            groups=config.actors * central.groups,
            n=config.envs_per_actor // central.groups,
            batch=central.batch or total,
            wait=1e-3 * central.wait_ms,
            together=central.groups,
            device=central.device,
            threads=config.threads,
            examples=send_examples(env, config.envs_per_actor // central.groups),
        )
    for i, name in enumerate(actors_of(config)):
        timed = program.add(f"timed/{i}", TimedPolicy, policy, light=True)
        envs = functools.partial(make_env, SLOW if name in (slow or ()) else config.env, protocol=config.protocol)
        groups = tuple(range(i * central.groups, (i + 1) * central.groups))
        n = config.envs_per_actor // central.groups
        args = (envs, n, timed, counters, config.seed, name, groups, INCARNATION)
        program.add(name, Actor, *args, on=timed, light=True, elsewhere=True)
    return program


class CountingPolicy(LocalPolicy):
    """Counts the bytes of the weights that are pulled."""

    taken = 0

    def send(self, group: int, step: Tree) -> bool:
        before = self.version
        sent = super().send(group, step)
        if self.version != before:
            self.taken += self.vector.nbytes
        return sent

    def take(self) -> int:
        """Bytes since the last call."""
        taken, self.taken = self.taken, 0
        return taken


def local_program(config: Config, env: EnvSpec, learner: bool) -> Program:
    """`topologies.apex` with timed policies; without a learner, nothing is recorded."""
    program, n = Program(), config.envs_per_actor
    counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
    store = None
    if learner:
        store = add_store(program, config, config.schema(env))
        add_learner(program, config, env, store, params, counters)
    for i, name in enumerate(actors_of(config)):
        explore = config.actor.explore(i * n, n, n * config.actors)
        settings = (config.algorithm, env, params, counters, explore, config.seed + i, config.refresh)
        policy = program.add(f"policy/{i}", CountingPolicy, *settings)
        asked = program.add(f"timed/{i}", TimedPolicy, policy, on=policy)
        if store is not None:
            recording = (asked, store, config.algorithm, config.schema(env))
            asked = program.add(f"recorder/{i}", Recorder, *recording, on=policy)
        program.add(name, Actor, config.envs, n, asked, counters, config.seed, name, (0,), INCARNATION, on=policy)
    return program


def call_program(env: EnvSpec, n: int) -> Program:
    """A caller, and a policy that replies immediately."""
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    step = {name: np.zeros((n, *c.shape), c.dtype) for name, c in env.step.items()}
    action, examples = np.zeros((n, *env.action.shape), env.action.dtype), send_examples(env, n)
    policy = program.add("policy", AtOnce, action, light=True, examples=examples)
    timed = program.add("timed/0", TimedPolicy, policy, light=True)
    program.add("actor/0", Caller, timed, step, counters, on=timed, light=True, elsewhere=True)
    return program


def all_messages(node: Node) -> Messages:
    return messages_of(node.name, node.ports, node.examples)


def call_bytes(messages: Messages) -> tuple[int, int]:
    """Bytes of the largest request and of the largest reply."""
    there, back = (max(sum(x.nbytes for x in one.example.values()) for one in kinds) for kinds in messages[1:])
    return there, back


def free_port() -> int:
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def echo(question: int, answer: int, seconds: float, experiments: str = "") -> tuple[float, float]:
    """p50 and p99 in us of calls of a bare grpc.aio server with this many bytes each way, in two fresh processes.

    `experiments` is what gRPC takes as GRPC_EXPERIMENTS; without, it is as it comes.
    """
    with tempfile.TemporaryDirectory(prefix="veldt-") as folder:
        path = f"{folder}/socket"
        module = f"import os; os.environ['GRPC_EXPERIMENTS'] = {experiments!r}; from veldt.bench import latency"
        server = subprocess.Popen([sys.executable, "-c", f"{module}; latency.serve_echo({path!r}, {answer})"])
        try:
            p50, p99 = side_by_side([f"{module}; latency.call_echo({path!r}, {question}, {seconds})"], seconds)[0]
            return p50, p99
        finally:
            server.kill()
            server.wait(10)


def make_table(results: dict[str, dict[str, float]], currency: str) -> list[str]:
    """One line for each network and contender."""
    names = {**TABLE, f"{currency}/1e9": f"{currency}_per_1e9_steps"}
    width = max(map(len, results))
    lines = [f"{'':{width}}" + "".join(f"{column:>12}" for column in names)]
    for title, found in results.items():
        lines.append(f"{title:{width}}" + "".join(f"{found[name]:12,.1f}" for name in names.values()))
    return lines
