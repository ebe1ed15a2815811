"""Flags that only a process shows: TLS, a root path's curl line, logs, the names of metrics, a file of settings."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from test_process import pasted, process

from quire.errors import StartupError
from quire.server.tls import check_certificate

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
        assert f"{server.url}/deep/er/v1/chat/completions" in server.lines[-1]
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
