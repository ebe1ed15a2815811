"""Several fronts are one server: what clients and the operator see, and what becomes of it when a part is gone."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_process import COMMAND, Served, served
from waiting import wait_until

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.ipc.child_process import ChildProcess
from quire.server.api_server import serve
from quire.server.frontend_manager import FrontendManager
from quire.server.options import ServeOptions

pytestmark = pytest.mark.xdist_group(name="fronts")

KEY = "a-key-that-nobody-sees"
ADMIN = "an-admin-key-that-nobody-sees"
FRONTS = 3
TOKENS = "quire_generation_tokens_total,engine=0"
LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}


class Server(Served):
    """`quire serve` with three fronts and the bundled model."""

    def ready(self) -> Server:
        super().ready()
        self.port = int(self.url.rpartition(":")[2])
        self.parts = self.processes()
        self.fronts = [part for part in self.parts if "quire.server.frontend_worker" in part.cmdline()]
        [self.engine] = [part for part in self.parts if "quire.startup.engine_program" in part.cmdline()]
        return self

    def spread(self) -> list[int]:
        return [
            [(one.laddr.port, one.status) for one in front.net_connections("tcp")].count((self.port, "ESTABLISHED"))
            for front in (self.process, *self.fronts)
        ]

    def end(self, seconds: float = 60) -> int:
        """Wait for it; its exit status. All of its processes are gone, or will be at once."""
        self.child.wait(seconds)
        wait_until(lambda: not any(alive(part) for part in self.parts), lambda: f"all of {self.parts} have ended")
        return self.child.returncode


def alive(part: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return part.is_running() and part.status() != psutil.STATUS_ZOMBIE
    return False


def stop(part: psutil.Process) -> None:
    """All of its threads stand still when this returns: a signal takes a moment to arrive."""

    def states() -> set[str]:
        found = set()
        for task in Path(f"/proc/{part.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    part.suspend()
    wait_until(lambda: states() == {"T"}, lambda: f"all threads are stopped: {states()}")


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    secrets = {"QUIRE_API_KEY": KEY, "QUIRE_ADMIN_KEY": ADMIN, "OMP_NUM_THREADS": "1"}
    with served(folder, "--fronts", str(FRONTS), "--prefix-tokens", "64", *flags, env=secrets, kind=Server) as found:
        yield found.ready()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("fronts")) as found:
        yield found


@contextlib.contextmanager
def clients(server: Server, key: str = KEY) -> Iterator[list[httpx.Client]]:
    """Clients that keep their connections: further ones, until each front has got one of them."""
    there, many = server.spread(), []
    with contextlib.ExitStack() as stack:
        while not all(now > before for now, before in zip(server.spread(), there)):
            assert len(many) < 10 * FRONTS, server.spread()
            headers = {"Authorization": f"Bearer {key}"}
            many.append(stack.enter_context(httpx.Client(base_url=server.url, headers=headers, timeout=30)))
            many[-1].get("/health")
        yield many


def counters(client: httpx.Client) -> dict[str, float]:
    """What must never fall: counters, and the buckets and sums of histograms."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith(("_total", "_bucket", "_count", "_sum")):
                own = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"]
                found[",".join([sample.name, *own])] = sample.value
    return found


def settled(many: list[httpx.Client]) -> float:
    """The tokens that all fronts count, once none come any more: a step's counts reach them within 0.25 s."""

    def told() -> set[float]:
        return {counters(client)[TOKENS] for client in many}

    def same() -> bool:
        before = told()
        time.sleep(0.3)  # in which a step's counts reach all fronts
        return len(before) == 1 and told() == before

    wait_until(same, "all fronts count the same")
    return told().pop()


def test_any_front_answers_for_all(server: Server) -> None:
    """Counters are what was asked for, whoever is asked, and never fall from one scrape to the next."""
    asked = 12
    with clients(server) as many:
        settled(many)
        before, scrapes = counters(many[0]), []
        done = threading.Event()

        def load() -> None:
            with contextlib.ExitStack() as stack:
                for i in range(asked):
                    client = stack.enter_context(httpx.Client(base_url=server.url, headers=many[0].headers, timeout=30))
                    body = {"prompt": [50 + i] * 4, "max_tokens": 20, "ignore_eos": True}
                    assert client.post("/v1/completions", json=body).status_code == 200
                    assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
            done.set()

        loader = threading.Thread(target=load)
        loader.start()
        while not done.is_set():
            scrapes += [counters(client) for client in many]
        loader.join()
        assert settled(many) - before[TOKENS] == 20 * asked
        last = [counters(client) for client in many]
    for earlier, later in zip([before, *scrapes], [*scrapes, *last]):
        assert earlier.keys() <= later.keys()
        assert [name for name in earlier if later[name] < earlier[name]] == []
    expected = {
        "quire_generation_tokens_total,engine=0": 20 * asked,
        "quire_prompt_tokens_total,engine=0": 4 * asked,
        "quire_request_success_total,engine=0,finished_reason=length": asked,
        "quire_invalid_requests_total,engine=0": asked,
        "quire_request_generation_tokens_sum,engine=0": 20 * asked,
        "quire_e2e_request_latency_seconds_count,engine=0": asked,
        "quire_time_to_first_token_seconds_count,engine=0": asked,
        "quire_inter_token_latency_seconds_count,engine=0": 19 * asked,
        "quire_http_requests_total,engine=0,handler=/v1/completions,method=POST,status=2xx": asked,
        "quire_http_requests_total,engine=0,handler=/v1/completions,method=POST,status=4xx": asked,
        "quire_http_request_duration_seconds_count,engine=0,handler=/v1/completions,method=POST": 2 * asked,
    }
    for found in last:
        assert {name: found[name] - before.get(name, 0) for name in expected} == expected
    used = "quire_process_cpu_seconds_total,engine=0,process=front"
    assert last[0][used] <= sum(sum(front.cpu_times()[:2]) for front in (server.process, *server.fronts)) + 0.1


def test_one_server_to_clients_and_the_operator(server: Server) -> None:
    assert sum(line.startswith("quire serves tiny") for line in server.text.splitlines()) == 1
    with clients(server, key=ADMIN) as many:
        assert len({client.get("/v1/models").text for client in many}) == 1
        made = many[0].post("/v1/prefixes", json={"name": "rules", "token_ids": list(range(100, 120))})
        assert made.status_code == 200, made.text
        for client in many:
            assert [entry["id"] for entry in client.get("/v1/prefixes").json()["data"]] == ["rules"]
            assert client.post("/v1/prefixes", json={"name": "rules", "token_ids": [5] * 20}).status_code == 409
        assert many[1].delete("/v1/prefixes/rules").status_code == 200
        assert [client.delete("/v1/prefixes/rules").status_code for client in many] == [404] * len(many)
        with contextlib.ExitStack() as stack:
            held = []
            for client in many:
                held.append(stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)).iter_lines())
                next(held[-1])
            with clients(server) as others:
                assert [client.get("/load").json()["server_load"] for client in others] == [len(many)] * len(others)
    with clients(server, key="another") as many:
        assert [client.get("/v1/models").status_code for client in many] == [401] * len(many)
    for part in (server.process, *server.parts):
        assert KEY not in (shown := f"{part.cmdline()} {part.environ()}")
        assert ADMIN not in shown


def test_a_stopped_front_is_named_and_not_well(server: Server) -> None:
    def health() -> set[int]:
        return {httpx.get(f"{server.url}/health").status_code for _ in range(4)}

    wait_until(lambda: health() == {200}, "all fronts are well")
    stop(server.fronts[0])
    try:
        wait_until(lambda: "the engine's client 1 has not been heard of" in server.text, "the stopped front is named")
        wait_until(lambda: health() == {503}, "no front is well")
    finally:
        server.fronts[0].resume()
    wait_until(lambda: health() == {200}, "all fronts are well again")


def test_without_the_first_front_others_tell_of_the_engine(server: Server) -> None:
    """A front's own part of a sum would look like counters that began anew: it is left out, and it says so."""
    with clients(server) as many:
        before = settled(many)
        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        assert many[0].post("/v1/completions", json=body).status_code == 200
        wait_until(
            lambda: all(counters(client)[TOKENS] == before + 3 for client in many), "all fronts count the tokens"
        )
        whole = counters(many[0])

        stop(server.process)
        with ThreadPoolExecutor(len(many)) as pool:
            try:
                asked = [pool.submit(client.get, "/metrics", timeout=60) for client in many]
                wait_until(
                    lambda: sum(one.done() for one in asked) >= FRONTS - 1, "all but the stopped front have answered"
                )
                time.sleep(1)  # for the others of these fronts: how many connections the first one has is not known
                answers = [one.result() for one in asked if one.done()]
            finally:
                server.process.resume()
        wait_until(lambda: counters(many[0]).keys() >= whole.keys(), "the first front answers for all again")
    assert FRONTS - 1 <= len(answers) < len(many)
    assert {answer.status_code for answer in answers} == {200}
    for text in [answer.text for answer in answers]:
        assert text.startswith("# The first frontend doesn't answer: counters of frontends ")
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        [generated] = families["quire_generation_tokens"]
        assert generated.value == whole[TOKENS]
        assert {"quire_num_requests_running", "quire_kv_bytes", "quire_preemptions"} <= families.keys()
        assert not {"quire_request_success", "quire_http_requests", "quire_process_cpu_seconds"} & families.keys()
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "the server is well again")


def streams(server: Server, many: list[httpx.Client], body: dict[str, object]) -> list[list[str]]:
    """The lines of a stream on each front, up to their end, however that comes; begun before this returns."""
    begun = threading.Barrier(len(many) + 1)
    found: list[list[str]] = [[] for _ in many]

    def read(at: int) -> None:
        with contextlib.suppress(httpx.TransportError), many[at].stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not found[at]:
                    begun.wait(60)
                if line:
                    found[at].append(line)
        found[at].append("end")

    for at in range(len(many)):
        threading.Thread(target=read, args=(at,), daemon=True).start()
    begun.wait(60)
    return found


@pytest.mark.parametrize(
    ("victim", "status", "said"),
    [
        ("front", 1, "frontend 2 was ended by signal 9 (SIGKILL): the server ends"),
        ("first", -signal.SIGKILL, "frontend 1: the first frontend is gone: the server ends"),
        ("engine", 1, "the engine stopped: its process was ended by signal 9 (SIGKILL)"),
    ],
)
def test_without_a_part_the_server_ends(victim: str, status: int, said: str, tmp_path: Path) -> None:
    with serving(tmp_path) as server, clients(server) as many:
        found = streams(server, many, LONG)
        {"front": server.fronts[1], "first": server.process, "engine": server.engine}[victim].kill()
        wait_until(lambda: all(lines[-1:] == ["end"] for lines in found), "all streams have ended")
        assert not any("[DONE]" in line for lines in found for line in lines)
        assert any("the engine stopped" in lines[-2] for lines in found)  # those whose front is there to say it
        assert server.end() == status, server.text
        assert said in server.text
        assert len(re.findall(r"(?m)^[\d:]+ .*ended by signal", server.text)) == (victim != "first")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")


def test_all_fronts_drain(tmp_path: Path) -> None:
    with serving(tmp_path) as server, clients(server) as many:
        found = streams(server, many, {**LONG, "max_tokens": 400})
        for part in (server.process, server.engine, *server.fronts):  # as a service manager or a terminal does
            part.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "the server drains")
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=many[0].headers)
        assert (late.status_code, "shutting down" in late.text) == (503, True)
        wait_until(lambda: all(lines[-1:] == ["end"] for lines in found), "all streams have ended", 30)
        assert [lines[-2] for lines in found] == ["data: [DONE]"] * len(many)
        assert server.end() == 0, server.text
        assert f"shutting down: {len(many)} requests have 30 s to end" in server.text


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os._exit(7)", "frontend 1 ended with status 7 at start. What it wrote"),
        (
            "import socket, sys; from quire.server.control_channel import receive_blocking, send_blocking; "
            "s = socket.socket(fileno=int(sys.argv[1])); receive_blocking(s); "
            "send_blocking(s, 'failed', {'text': 'no ' + sys.argv[2], 'remedy': 'Mend it'})",
            r"frontend 1 can't start: no \d+. Mend it",
        ),
        ("import time; time.sleep(60)", "frontend 1 was not ready within 0.5 s"),
    ],
)
def test_a_front_that_cannot_start_is_named(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.frontend_manager.WORKER_PROGRAM", ("-c", program))
    if "sleep" in program:
        monkeypatch.setattr("quire.server.frontend_manager.START_SECONDS", 0.5)
    monkeypatch.setattr("quire.server.frontend_manager.KILL_SECONDS", 0.1)
    closed: list[None] = []
    llm = SimpleNamespace(close=lambda: closed.append(None))
    engine = ChildProcess(2, ("-c", ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fronts = FrontendManager(2, listener, {})
        try:
            fronts.start_workers(engine)
            with pytest.raises(StartupError, match=said):
                fronts.wait_ready(llm)  # type: ignore[arg-type]
        finally:
            fronts.close()
            engine.wait_or_kill(5)
            engine.connections[0].close()
    assert all(other.process.has_exited() for other in fronts.workers)
    assert closed == [None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fronts": 0}, "--fronts is 0. It must be between 1 and 64"),
        ({"fronts": 65}, "--fronts is 65. It must be between 1 and 64"),
        ({"fronts": 2, "engine_process": "off"}, "--fronts is 2, and --engine-process is off"),
    ],
)
def test_what_cannot_be_served(options: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=re.escape(said)):
        serve(EngineConfig(), ServeOptions(**options), print)  # type: ignore[arg-type]


# Any number of fronts and ranks

SINGLE = "Only an engine with one frontend can be started again"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("death", ["exit", "restart"])
@pytest.mark.parametrize("fronts", [1, 2])
def test_every_combination(fronts: int, death: str, tp: int, tmp_path: Path) -> None:
    flags = ("--fronts", str(fronts), "--on-engine-death", death, "--tp", str(tp))
    if fronts > 1 and death == "restart":
        refused = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=120, check=False)
        assert (refused.returncode, SINGLE in refused.stderr) == (2, True), refused.stderr
        return
    with served(tmp_path, *flags, env={"OMP_NUM_THREADS": "1"}) as server:
        assert server.ready().complete().startswith(", there")
