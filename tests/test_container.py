"""The example of containers: what its files name exists, and their parts name each other. No container is built."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from quire.cli import parse_arguments

FOLDER = Path(__file__).parents[1] / "examples" / "container"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_parts_of_the_composition_name_each_other() -> None:
    services = read("compose.yaml")["services"]
    build = services["quire"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Containerfile")
    for service in services.values():
        for volume in service.get("volumes", ()):
            source, _, mode = volume.split(":")
            assert (FOLDER / source).exists(), source
            assert mode == "ro"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "no port is open to other machines"
    [scrape] = read("prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["quire:8000"]
    [source] = read("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read("grafana/dashboards.yaml")["providers"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    assert list((FOLDER / mounted[provider["options"]["path"]]).glob("*.json"))


def test_the_commands_are_quires() -> None:
    [line] = [line for line in (FOLDER / "Containerfile").read_text().splitlines() if line.startswith("CMD ")]
    for command in (
        json.loads(line.removeprefix("CMD ")),
        shlex.split(read("compose.yaml")["services"]["quire"]["command"]),
    ):
        assert parse_arguments(command).host == "0.0.0.0"
