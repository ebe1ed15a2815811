"""Servers that tests share, placements of their engines, and a brake for models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from asking import openai_of
from echo_service import Placement, Running, Servers
from openai import OpenAI


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture(params=["process", pytest.param("thread", marks=pytest.mark.full)])
def placement(request: pytest.FixtureRequest) -> Placement:
    """Where the engine is. For tests of what is between a server and its engine; others need one placement only."""
    found: Placement = request.param
    return found


@pytest.fixture(scope="session")
def echo(servers: Servers) -> Running:
    return servers(server_info=True, tokenizer_info=True)


@pytest.fixture(scope="session")
def http(echo: Running) -> httpx.Client:
    return echo.http


@pytest.fixture(scope="session")
def client(echo: Running) -> Iterator[OpenAI]:
    with openai_of(echo) as found:
        yield found


@pytest.fixture
def placed(servers: Servers, placement: Placement) -> Running:
    """The server of `echo`, with its engine in either place."""
    return servers(server_info=True, tokenizer_info=True, placement=placement)


@pytest.fixture
def placed_client(placed: Running) -> Iterator[OpenAI]:
    with openai_of(placed) as found:
        yield found


@pytest.fixture(scope="module")
def loose_brake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A brake of a module's servers, which isn't there yet."""
    return tmp_path_factory.mktemp("loose") / "brake"


@pytest.fixture
def brake(tmp_path: Path) -> Path:
    """As long as this file is there, steps of an echo that is told of it are slow: 250 tokens take 50 s."""
    found = tmp_path / "brake"
    found.touch()
    return found
