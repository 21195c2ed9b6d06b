"""Ray: a run on a cluster. Ray places, restarts and finds; it carries no step, no block and no weights.

    driver (veldt train ... --runtime ray) ──> Head, a detached actor on the driver's host: owns `veldt train` as a process
                                                 │ one Site for each other host, for as long as that is in the cluster
                                                 └──> Site: owns `veldt actor --actors N` as a process, which joins the run

`veldt train` is a process, and not code in a Ray actor: it handles signals, needs the main thread, and its children die
with it by the kernel's own means, none of which a Ray worker leaves alone. What the head starts dies with the head. Sites
are placed by a loop that looks at the cluster's hosts every two seconds: a host that joins gets one.

Only this module imports Ray, and only `--runtime ray` imports this module. It knows commands, and no role.
"""

import contextlib
import datetime
import importlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from veldt.errors import ProcessFailed, UserError
from veldt.runtime.local.zygote import interpreter

NAMESPACE = "veldt"
LOOK_S = 2.0  # between two looks at the cluster's hosts
ANSWER_S = 10.0  # for a site to say how it is
FIRST_S = 120.0  # for the head to be placed, and for its process to be able to take actors
KEPT_LINES = 2_000  # of output, for a driver that comes later
UNWATCHED_S = 60.0  # that the head of an ended run waits for somebody to ask how it ended
VALID_DAYS = 365
# The first argument is the parent's pid: the kernel kills the command when the parent dies, and its children after it. A
# worker of Ray has blocked signals, which a command needs.
CODE = (
    "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from veldt.runtime.local.zygote import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from veldt.__main__ import main; raise SystemExit(main(sys.argv[2:]))"
)

log = logging.getLogger("veldt")


@dataclass(frozen=True)
class ClusterRun:
    """What the head needs to know."""

    directory: str  # of the run, on the head's host
    command: tuple[str, ...]  # of `veldt`, without where it listens
    cwd: str  # of the command
    join: tuple[str, ...] = ()  # what every `veldt actor` is allowed
    actors: int = 0  # at each other host; 0: as many as it has CPUs
    seats: int = 0  # at most, at all other hosts together; 0: the run takes no actors from there


class Status(NamedTuple):
    code: int | None  # how the run's process ended; None: it has not
    lines: list[str]  # of output, since the number that was asked for
    ever: int  # lines
    sites: dict[str, int]  # actors by host


class Output:
    """The newest lines that a command has printed. A line and its number appear at once, so that each is heard once."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._count, self._lock = 0, threading.Lock()

    def read(self, stream: Iterable[str]) -> None:
        for line in stream:
            self.add(line.rstrip("\n"))

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)
            self._count += 1

    def since(self, count: int) -> tuple[list[str], int]:
        """The lines after the first `count`, and how many there have been."""
        with self._lock:
            lines = list(self._lines)
            return lines[max(0, len(lines) - max(0, self._count - count)) :], self._count

    def last(self) -> str:
        with self._lock:
            return self._lines[-1] if self._lines else ""


class Child:
    """A `veldt` command that dies with this process. The main thread starts it: the kernel watches the thread that did."""

    def __init__(
        self, arguments: tuple[str, ...], secret: Mapping[str, bytes] = MappingProxyType({}), cwd: str | None = None
    ) -> None:
        """`secret`: by flag, what a file without a name holds: only the command can open it, and nothing is left."""
        fds = {flag: sealed(data) for flag, data in secret.items()}
        arguments += tuple(word for flag, fd in fds.items() for word in (flag, f"/proc/self/fd/{fd}"))
        command, environment = interpreter(CODE, str(os.getpid()), *arguments)
        environment.pop("OMP_NUM_THREADS", None)  # Ray's
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        how |= {"env": environment, "cwd": cwd, "text": True, "errors": "replace", "start_new_session": True}
        self.process = subprocess.Popen(command, pass_fds=list(fds.values()), **how)
        for fd in fds.values():
            os.close(fd)
        self.output = Output()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.output.read(stream)

    @property
    def code(self) -> int | None:
        """Once all of its output is here."""
        code: int | None = self.process.poll()
        if code is not None:
            self._reader.join(1.0)
        return code


class Site:
    """One host's share of the run."""

    def __init__(self, address: str, token: str, certificate: bytes, actors: int, join: tuple[str, ...]) -> None:
        self.actors, self._due, self.restarts = actors, 0.0, 0
        self._secret = {"--token-file": token.encode(), "--certificate": certificate}
        self._command = ("actor", "--connect", address, "--actors", str(actors), *join)
        self._child = Child(self._command, self._secret)

    def poll(self) -> tuple[int, str]:
        """(actors, why there are none); starts the command again if it failed: the run may have been away."""
        code = self._child.code
        if code not in (None, 0) and not self._due:
            self._due = time.monotonic() + min(30.0, 2.0 ** min(5, self.restarts))
        if self._due and time.monotonic() > self._due:
            self._due, self.restarts, self._child = 0.0, self.restarts + 1, Child(self._command, self._secret)
        return (self.actors, "") if self._child.code is None else (0, self._child.output.last() if self._due else "")


class Head:
    """Owns the run. Its name is that of the run's directory, by which a later driver finds it."""

    def __init__(self, run: ClusterRun) -> None:
        ray = load()
        self.run, self._sites = run, dict[str, tuple[Any, int]]()  # by the id of a host: its site and actors
        self._acting: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # by host: the last line of its site, if that failed
        self._asked = time.monotonic()
        self._context = ray.get_runtime_context()
        command, secret, self.address, self.certificate = run.command, dict[str, bytes](), "", b""
        if run.seats:
            host = ray.util.get_node_ip_address()
            self.address, (key, self.certificate) = f"{host}:{free_port(host)}", make_certificate(host)
            secret = {"--gate.key": key, "--gate.certificate": self.certificate}
            command = (*command, "--gate.listen", self.address, "--gate.seats", str(run.seats))
        self._child = Child((*command, "--run", run.directory), secret, run.cwd)
        threading.Thread(target=self._follow, daemon=True).start()

    def poll(self, count: int) -> Status:
        self._asked = time.monotonic()
        return Status(self._child.code, *self._child.output.since(count), dict(self._acting))

    def same(self, run: ClusterRun) -> bool:
        return run == self.run

    def pid(self) -> int:
        return int(self._child.process.pid)

    def stop(self, number: int = signal.SIGINT) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.process.send_signal(number)

    # In its own thread: where the run's actors are.

    def _follow(self) -> None:
        ray = load()
        while self._child.code is None or time.monotonic() - self._asked < UNWATCHED_S:
            try:
                self._reconcile()
            except Exception as error:  # the cluster's own service may be restarting
                log.warning("the cluster's hosts are not known at the moment: %s", error)
            time.sleep(LOOK_S)
        ray.kill(self._context.current_actor)  # for good

    def _reconcile(self) -> None:
        ray = load()
        path = Path(self.run.directory) / "token"
        token = path.read_text().strip() if self.run.seats and path.exists() else ""  # empty while the run writes it
        if not token or self._child.code is not None:
            return
        hosts = {x["NodeID"]: int(x["Resources"].get("CPU", 0)) for x in ray.nodes() if x["Alive"]}
        hosts.pop(self._context.get_node_id())
        self._ask_sites(hosts)
        taken = {host: actors for host, (_, actors) in self._sites.items()}
        for host, actors in sites_to_add(hosts, taken, self.run.actors, self.run.seats).items():
            how = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(host, soft=False)
            made = ray.remote(Site).options(num_cpus=min(actors, hosts[host]), scheduling_strategy=how)
            arguments = (self.address, token, self.certificate, actors, self.run.join)
            self._sites[host] = made.remote(*arguments), actors

    def _ask_sites(self, hosts: Mapping[str, int]) -> None:
        ray = load()
        for host, (site, _) in list(self._sites.items()):
            try:
                self._acting[host], why = ray.get(site.poll.remote(), timeout=ANSWER_S)
                if why and why != self._failed.get(host):
                    self._failed[host] = why
                    self._child.output.add(f"the site of host {host[:8]} failed, and is started again: {why}")
            except ray.exceptions.GetTimeoutError:
                self._acting[host] = 0  # it waits for its CPUs, or the host cannot be reached
            except ray.exceptions.RayError:
                hosts = {other: n for other, n in hosts.items() if other != host}
            if host not in hosts:
                del self._sites[host]
                self._acting.pop(host, None)


def load(module: str = "ray") -> Any:
    """An optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--runtime ray needs Ray ({error}): pip install 'veldt[ray]'") from None


def sites_to_add(hosts: Mapping[str, int], taken: Mapping[str, int], actors: int, seats: int) -> dict[str, int]:
    """The actors of new sites, by host. `hosts`: their CPUs; `taken`: the actors of sites that are there."""
    found: dict[str, int] = {}
    for host in sorted(hosts.keys() - taken.keys()):
        n = min(actors or hosts[host], seats - sum(taken.values()) - sum(found.values()))
        if n > 0 and hosts[host] > 0:
            found[host] = n
    return found


def write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def sealed(data: bytes) -> int:
    """The descriptor of a file without a name, which others cannot read."""
    fd = os.memfd_create("veldt secret")
    os.fchmod(fd, 0o600)
    with open(os.dup(fd), "wb") as file:
        file.write(data)
    os.set_inheritable(fd, True)
    return fd


def free_port(host: str) -> int:
    """Chosen once: a gate that is restarted has to listen where the sites know it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def make_certificate(host: str) -> tuple[bytes, bytes]:
    """A key and a certificate for this address, signed by itself."""
    x509, hashes = load("cryptography.x509"), load("cryptography.hazmat.primitives.hashes")
    serialization = load("cryptography.hazmat.primitives.serialization")
    ec = load("cryptography.hazmat.primitives.asymmetric.ec")

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "veldt")])
    now, days = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - days).not_valid_after(now + VALID_DAYS * days)
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
    form, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(form, kind, serialization.NoEncryption())
    certificate: bytes = made.sign(key, hashes.SHA256()).public_bytes(form)
    return private, certificate


# The driver.


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to this cluster; without an address, to one that is started here and ends with it."""
    with tempfile.TemporaryDirectory(prefix="veldt-") as folder:
        if not address and "RAY_AUTH_MODE" not in os.environ:  # read when Ray is imported
            write_private(Path(folder) / "ray_token", secrets.token_hex(32).encode())
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/ray_token"}
        yield from _connected(load(), address)


def _connected(ray: Any, address: str) -> Iterator[Any]:
    how: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **how)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"The Ray cluster at {address or 'this host'} cannot be used: {str(error)[:300]}") from None
    if address and os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning("this Ray cluster is used without a token: whoever reaches its ports can run code on its hosts")
    try:
        yield ray
    finally:
        ray.shutdown()


def drive(run: ClusterRun, address: str, gpus: int, say: Callable[[str], None], stopped: Callable[[], int]) -> int:
    """Runs it until it ends; the exit code of `veldt train`. `stopped`: the signal that came, or 0."""
    with connected(address) as ray:
        here = ray.get_runtime_context().get_node_id()
        how = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        has = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
        name = f"veldt{run.directory}"
        options = {"name": name, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1}
        options |= {"num_cpus": 1, "num_gpus": min(gpus, int(has.get("GPU", 0))), "scheduling_strategy": how}
        found = _exists(ray, name)
        head = ray.remote(Head).options(**options).remote(run)
        try:
            if not ray.get(head.same.remote(run), timeout=FIRST_S):
                raise UserError(f"{run.directory} is being trained on this cluster with other flags; stop that run first.")
        except ray.exceptions.RayError as error:
            if not found:
                ray.kill(head)  # it would start the run as soon as it is placed, when nobody expects that
            if isinstance(error, ray.exceptions.GetTimeoutError):
                needs = f"1 free CPU and {options['num_gpus']} free GPUs on this host"
                raise ProcessFailed(f"The run's head did not start in {FIRST_S:.0f} s; it needs {needs}.") from None
            raise ProcessFailed(f"The run's head did not start: ...{str(error)[-500:]}") from None
        return _watch(ray, head, say, stopped)


def _exists(ray: Any, name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def _watch(ray: Any, head: Any, say: Callable[[str], None], stopped: Callable[[], int]) -> int:
    count, told, sites, away = 0, False, dict[str, int](), 0.0
    while True:
        try:
            status = ray.get(head.poll.remote(count), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:  # it is being restarted
            away = away or time.monotonic()
            if time.monotonic() - away > FIRST_S:
                raise ProcessFailed(f"The run's head does not answer: {str(error)[:300]}") from None
            time.sleep(0.5)
            continue
        if status.ever < count:  # a new head counts from the beginning, and was not told to stop
            count, told, away = 0, False, 0.0
        else:
            count, away = status.ever, 0.0
        for line in status.lines:
            say(line)
        if status.sites != sites:
            sites = status.sites
            say(f"other hosts: {len(sites)}, with {sum(sites.values())} actors")
        if status.code is not None:
            ray.kill(head)
            return int(status.code if status.code >= 0 else 128 - status.code)
        if stopped() and not told:
            told = True
            head.stop.remote(stopped())
        time.sleep(0.2)
