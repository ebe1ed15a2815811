"""One echo server for the tests that don't break it, and a brake for those of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import echo_service
import pytest
from echo_service import Running
from openai import OpenAI


@pytest.fixture(scope="session")
def echo() -> Iterator[Running]:
    with echo_service.serving(server_info=True, tokenizer_info=True) as running:
        yield running


@pytest.fixture(scope="session")
def client(echo: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{echo.url}/v1", api_key="unused", max_retries=0, timeout=20) as found:
        yield found


@pytest.fixture
def brake(tmp_path: Path) -> Path:
    """As long as this file is there, steps of an echo that is told of it are slow: 250 tokens take 50 s."""
    found = tmp_path / "brake"
    found.touch()
    return found
