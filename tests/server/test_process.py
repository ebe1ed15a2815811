"""The server as a process: signals, exit statuses, the port, the lines that it prints, TLS, and a file of settings."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_process import Served, served
from waiting import wait_until

from quire.errors import StartupError
from quire.server.options import check_certificate

TESTS = Path(__file__).parent.parent
PROGRAM = """
import asyncio, sys, time, types
sys.path.insert(0, {tests!r})
import echo_service

class Echo(echo_service.Echo):
    def submit(self, plan):
        if not self.submitted:
            print("a first step", flush=True)
        return super().submit(plan)
{more}
stand_in = types.ModuleType("quire.startup.build")
stand_in.build = lambda config, progress=False: echo_service.built(
    Echo(pause={pause}, brake={brake!r}), max_num_seqs=4, prefix_tokens=config.prefix_tokens,
    max_num_batched_tokens=config.with_device_defaults("cpu").max_num_batched_tokens)
sys.modules["quire.startup.build"] = stand_in
from quire.cli import main
sys.exit(main(["serve", "--port", "0", "--engine-process", "off", *sys.argv[1:]]))
"""


JSON = {"Content-Type": "application/json"}


class Process(Served):
    """A server of an echo, which has written its curl line when it is ready."""

    LISTENS = r"(?s)(https?://127\.0\.0\.1:\d+).*\ncurl [^\n]*\n"

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """Exit status, and all that was written."""
        return self.child.wait(seconds), self.text


@contextlib.contextmanager
def process(
    *flags: str, pause: float = 0.02, brake: Path | None = None, more: str = "", shell: str = 'exec "$@"',
    ready: bool = True,
) -> Iterator[Process]:  # fmt: skip
    """`more` is code that may change what there is before it serves; unless `ready` it isn't waited for."""
    program = PROGRAM.format(tests=str(TESTS), pause=pause, brake=brake and str(brake), more=more)
    command, env = ("bash", "-c", shell, "bash", sys.executable, "-c", program), {"QUIRE_API_KEY": ""}
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), *flags, command=command, env=env, kind=Process) as found,
    ):
        if ready:
            found.ready()
        yield found


def ask(url: str, tokens: int) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def in_background(url: str, tokens: int) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def work() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(ask(url, tokens))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: httpx.get(f"{url}/load").json()["server_load"], "a request runs")
    return thread, answers


def terminated(server: Process) -> None:
    """By a signal, of which it knows when this returns."""
    server.child.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "the server drains")


def test_sigterm_drains_and_exits_0(brake: Path) -> None:
    with process(brake=brake) as server:
        assert "quire serves echo at http://127.0.0.1:" in server.text
        thread, answers = in_background(server.url, 100)
        terminated(server)
        late = ask(server.url, 1)
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        brake.unlink()
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 100
        status, error = server.end()
        assert status == 0, error
        assert "Traceback" not in error


def test_a_closed_stderr() -> None:
    with process(shell='exec "$@" 2>&-') as server:
        assert ask(server.url, 2).status_code == 200
        server.child.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


def pasted(server: Process) -> str:
    [line] = re.findall(r"(?m)^curl .*", server.text)
    line = f"{line.strip()} -s -m 60"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100).stdout


def test_integers_of_many_digits_are_not_read() -> None:
    """Reading one costs the square of its digits, and holds everything up meanwhile."""
    with process(pause=0) as server:
        for digits, told in ((640, "prompt token 0 is"), (641, "parsing the body")):
            content = f'{{"prompt":[{"1" * digits}]}}'
            answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 400
            assert told in answer.json()["error"]["message"], answer.text


def test_drain_ends_at_its_timeout(brake: Path) -> None:
    with process("--shutdown-timeout", "0.2", brake=brake) as server:
        thread, answers = in_background(server.url, 250)
        server.child.send_signal(signal.SIGTERM)
        status, error = server.end(20)  # without the flag it is 30 s
        thread.join()
        assert status == 0, error
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


def test_prefixes_are_there_before_the_port_answers(tmp_path: Path) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps({"rules": {"token_ids": list(range(100, 122))}, "b": {"text": "once"}}))
    (tmp_path / "admin").write_text("secret-admin\n")
    flags = ("--prefixes", str(file), "--prefix-tokens", "64", "--admin-key-file", str(tmp_path / "admin"))
    with process(*flags) as server:
        assert re.search("(?m)^2 prefixes registered", server.text)
        assert "secret-admin" not in server.text
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [*range(100, 122), 1], "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 22
        assert httpx.get(f"{server.url}/v1/prefixes").status_code == 403
        listed = httpx.get(f"{server.url}/v1/prefixes", headers={"Authorization": "Bearer secret-admin"}).json()
        assert [(entry["id"], entry["status"]) for entry in listed["data"]] == [("rules", "ready"), ("b", "ready")]


def test_sigterm_while_prefixes_are_computed(tmp_path: Path, brake: Path) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps({f"p{i}": {"token_ids": [i] * 100} for i in range(1, 5)}))
    flags = ("--prefixes", str(file), "--prefix-tokens", "500", "--max-num-batched-tokens", "1", "--access-log")
    with process(*flags, brake=brake, ready=False) as server:
        wait_until(lambda: "a first step" in server.text, "a prefix is computed")
        server.child.send_signal(signal.SIGTERM)
        status, text = server.end(40)  # the prefixes take 80 s
    assert status == 0
    assert "quire serves" not in text


def test_a_second_sigterm_is_immediate(brake: Path) -> None:
    with process(brake=brake) as server:
        thread, answers = in_background(server.url, 250)
        terminated(server)
        server.child.send_signal(signal.SIGTERM)
        assert server.end(20)[0] == -signal.SIGTERM  # draining ends after 30 s
        thread.join()
        assert not answers


def test_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-X", "importtime", "-m", "quire", "serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"quire: error: can't listen on 127.0.0.1:{port}: Address already in use. ")
        assert not re.search(r"\| +torch$", done.stderr, re.M)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefixes", "FILE", "--prefix-tokens", "16"], "'rules' can't be registered: a prefix of 22 tokens"),
        (["--host", "no.such.host.invalid"], "not an address"),
        (["--port", "70000"], "--port is 70000"),
        (["--api-key-file", "/nonexistent/keys"], "can't be read"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        (["--shutdown-timeout", "1e10"], "--shutdown-timeout is 10000000000.0. It must be between 0 and 86400"),
        (["--chat-template", "/nonexistent/template"], "no chat template"),
    ],
)
def test_bad_server_flags(flags: list[str], words: str, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps({"rules": {"token_ids": [*range(22)]}}))
    with process(*(str(file) if flag == "FILE" else flag for flag in flags), ready=False) as server:
        status, text = server.end()
    assert status == 2
    assert re.search(f"(?m)^quire: error: .*{re.escape(words)}", text), text
    assert "Traceback" not in text


OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")


def certificate(folder: Path, name: str = "server", *options: str) -> tuple[str, str]:
    """A key and a certificate for 127.0.0.1 that it signed itself."""
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    assert OPENSSL is not None
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
         *(options or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(key), str(cert)


@needs_openssl
def test_tls(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    with process("--ssl-keyfile", key, "--ssl-certfile", cert, pause=0) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")  # a certificate that nobody signed
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
        assert '"role":"assistant"' in pasted(server)
        asked = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True}
        streamed = httpx.post(f"{server.url}/v1/completions", json=asked, verify=trusted).text
        assert streamed.endswith('"finish_reason":"length","stop_reason":null}]}\n\ndata: [DONE]\n\n')
        server.child.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


@needs_openssl
def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    other, _ = certificate(tmp_path, "other")
    locked, its = certificate(tmp_path, "locked", "-passout", "pass:secret")
    words = tmp_path / "words"
    words.write_text("no key")
    check_certificate(None, None)
    check_certificate(key, cert)
    for wrong_key, wrong_cert, said in (
        (None, cert, "--ssl-certfile is given without --ssl-keyfile. Give both, or none"),
        (key, None, "--ssl-keyfile is given without --ssl-certfile"),
        (str(tmp_path / "none"), cert, "--ssl-keyfile .*none' can't be read"),
        (key, str(tmp_path), "--ssl-certfile .* can't be read"),
        (key, "a\0b", "--ssl-certfile .* can't be read"),
        (str(words), cert, "can't be used together"),
        (key, str(words), "can't be used together"),
        (other, cert, "can't be used together"),
        (locked, its, "--ssl-keyfile .* is encrypted. Give a key without a password"),
    ):
        with pytest.raises(StartupError, match=said) as error:
            check_certificate(wrong_key, wrong_cert)
        assert "secret" not in str(error.value)


def test_the_curl_line_of_a_root_path_works() -> None:
    with process("--root-path", "/deep/er/", pause=0) as server:
        assert f"curl {server.url}/deep/er/v1/chat/completions" in server.text
        assert '"role":"assistant"' in pasted(server)
        for prefix in ("", "/deep/er"):
            assert httpx.get(f"{server.url}{prefix}/v1/models").status_code == 200


def test_settings_from_a_file_reach_the_server(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "metrics-prefix: vllm\nenable-log-requests: true\nenable-chunked-prefill: true\nserved-model-name: [one, two]\n"
        "allowed-origins: ['https://app.example']\nuvicorn-log-level: info\ngpu-memory-utilization: 0.5\n"
    )
    with process("--config", str(file), pause=0) as server:
        text = httpx.get(f"{server.url}/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="one"} 0.0' in text
        assert 'gpu_memory_utilization="0.5"' in text
        body = {"prompt": "secret words", "max_tokens": 1}
        headers = {"Origin": "https://app.example", "X-Request-Id": "mine"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        server.child.send_signal(signal.SIGTERM)
        status, error = server.end()
    assert status == 0
    assert "--enable-chunked-prefill changes nothing" in error
    assert f"request {answer.json()['id']} (X-Request-Id mine)" in error
    assert "Started server process" in error, "uvicorn's own lines"
    assert "secret words" not in error


def test_a_server_that_all_can_reach_says_so(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    for flags, warned in (((), True), (("--api-key-file", str(tmp_path / "keys")), False)):
        with process("--host", "0.0.0.0", *flags, pause=0) as server:
            found = "anyone who reaches 0.0.0.0 can use this server: set QUIRE_API_KEY" in server.text
            assert found == warned
