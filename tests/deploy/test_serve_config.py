"""The configuration of the application: what --write writes is what Serve reads, what can't be is refused, and how
many replicas the policy chooses. Ray is not started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quire.cli import main
from quire.config import EngineConfig
from quire.deploy import run
from quire.deploy.autoscaling import RoomPolicy
from quire.deploy.serve_config import (
    API,
    ENGINE,
    PREFILL,
    DeployOptions,
    deployment_options,
    replica_resources,
    serve_config,
)
from quire.errors import StartupError
from quire.server.options import ServeOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve"
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on .Field.:DeprecationWarning")  # Ray's
needs_serve = pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed: pip install 'quire[ray-serve]'")


def written(path: Path, *flags: str) -> Any:
    """Return what --write writes."""
    file = path / "serve.yaml"
    assert main(["deploy", "ray", *flags, "--write", str(file)]) == 0
    assert "&id" not in file.read_text(), "no aliases"
    return yaml.safe_load(file.read_text())


@needs_serve
def test_what_is_written_is_what_serve_reads(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = written(tmp_path, "tiny", "--device", "cpu", "--threads", "2", "--max-num-seqs", "8", "--min-replicas",
                     "2", "--max-replicas", "5", "--target-waiting", "3", "--served-model-name", "a", "b",
                     "--shutdown-timeout", "60")  # fmt: skip
    parsed = ServeDeploySchema.model_validate(config)
    assert parsed.proxy_location == "HeadOnly"
    [application] = parsed.applications
    assert application.import_path == "quire.deploy.ray_serve:build_app"
    assert application.args == {
        "engine": {"model": "tiny", "device": "cpu", "threads": 2, "max_num_seqs": 8},
        "serving": {"served_model_name": ["a", "b"], "shutdown_timeout": 60.0},
    }
    by_name = {deployment.name: deployment for deployment in application.deployments}
    assert by_name.keys() == {API, ENGINE}
    scaling: Any = by_name[ENGINE].autoscaling_config
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    assert scaling["policy"]["policy_kwargs"] == {"target_waiting": 3.0, "max_num_seqs": 8}
    assert by_name[ENGINE].graceful_shutdown_timeout_s > 60


@needs_serve
def test_prefill_replicas_are_a_deployment_of_a_fixed_number(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from quire.deploy.ray_serve import bind

    config = written(tmp_path, "tiny", "--device", "cpu", "--min-replicas", "2", "--prefill-replicas", "3")
    [application] = ServeDeploySchema.model_validate(config).applications
    assert application.args == {"engine": {"model": "tiny", "device": "cpu"}, "serving": {}, "has_prefill": True}
    by_name = {deployment.name: deployment for deployment in application.deployments}
    assert by_name.keys() == {API, ENGINE, PREFILL}
    assert by_name[PREFILL].num_replicas == 3
    assert not isinstance(by_name[PREFILL].autoscaling_config, dict)
    assert by_name[PREFILL].ray_actor_options == by_name[ENGINE].ray_actor_options
    assert bind(application.args, {})
    with pytest.raises(StartupError, match="args has engine, prefill"):
        bind({"engine": {}, "prefill": 1}, {})


@needs_serve
def test_the_manifest_has_what_is_written(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    manifest = yaml.safe_load((EXAMPLE / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert config == written(tmp_path, "meta-llama/Llama-3.1-8B-Instruct", "--min-replicas", "2", "--max-replicas", "8",
                             "--http-host", "0.0.0.0")  # fmt: skip
    ServeDeploySchema.model_validate(config)
    cluster = manifest["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    assert {"rayVersion", "headGroupSpec", "workerGroupSpecs"} <= cluster.keys()
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] == 8
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        [container] = template["spec"]["containers"]
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "QUIRE_API_KEY"} <= {one["name"] for one in container["env"]}
    [worker] = group["template"]["spec"]["containers"]
    [engine] = [one for one in config["applications"][0]["deployments"] if one["name"] == ENGINE]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == engine["ray_actor_options"]["num_gpus"]
    assert int(worker["resources"]["limits"]["cpu"]) >= engine["ray_actor_options"]["num_cpus"]


def test_resources() -> None:
    assert replica_resources(EngineConfig(device="cpu")) == {"num_cpus": 1, "num_gpus": 0}
    assert replica_resources(EngineConfig(device="cpu", threads=4, tp=2)) == {"num_cpus": 4, "num_gpus": 0}
    assert replica_resources(EngineConfig(device="cpu", tp=2)) == {"num_cpus": 2, "num_gpus": 0}
    assert replica_resources(EngineConfig(tp=4, pp=2)) == {"num_cpus": 1, "num_gpus": 8}
    fixed = deployment_options(EngineConfig(), ServeOptions(), DeployOptions(min_replicas=3))[ENGINE]
    assert fixed["autoscaling_config"]["max_replicas"] == 3


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--min-replicas", "3", "--max-replicas", "2"),
         "--min-replicas is 3, and --max-replicas is 2. Give --max-replicas 3 or more"),
        (("--min-replicas", "0"), "--min-replicas is 0"),
        (("--target-waiting", "-1"), "--target-waiting is -1"),
        (("--http-port", "70000"), "--http-port is 70000"),
        (("--prefill-replicas", "-1"), "--prefill-replicas is -1"),
        (("--prefill-replicas", "2", "--no-enable-prefix-caching"), "is 2, and prefix caching is off"),
        (("--prefill-replicas", "1", "--tp", "2", "--write", "/dev/null"), "--prefill-replicas is 1, --tp is 2"),
        (("--prefill-replicas", "1", "--swap-gib", "0"), "--prefill-replicas is 1, and --swap-gib is 0"),
        (("--executor", "ray", "--write", "/dev/null"), "--executor is ray, and Ray places the whole engine"),
        (("--write", "/none/serve.yaml"), "--write /none/serve.yaml can't be written: No such file or directory"),
        (("--ray-address", "nowhere"), "--ray-address is 'nowhere', which is not HOST:PORT"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(flags: tuple[str, ...], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "ray", *flags]) == 2
    assert cause in capsys.readouterr().err


def test_without_ray_or_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(run, "import_module", missing)
    with pytest.raises(StartupError, match=r"needs Ray Serve: No module named .* pip install 'quire\[ray-serve\]'"):
        run.import_serve()
    monkeypatch.setattr(run, "import_module", lambda name: SimpleNamespace(__version__="2.54.1"))
    with pytest.raises(StartupError, match=r"Ray is 2\.54\.1, and quire deploy ray needs 2\.60"):
        run.import_serve()


def test_the_last_cause_of_a_failed_start() -> None:
    error = "It failed:\n  File 'a.py', line 3\nquire.errors.StartupError: the model 'x' was not found. Give it\n"
    assert run.last_cause(f"{error}ray.exceptions.RayTaskError: more") == "the model 'x' was not found. Give it"
    assert run.last_cause("ray.exceptions.RayActorError: it died.") == "it died"
    assert run.last_cause("it failed.\n more") == "it failed"


def test_the_policy_starts_replicas_for_what_waits_and_ends_those_without_work() -> None:
    policy = RoomPolicy(target_waiting=2, max_num_seqs=256)
    assert policy.choose(1, 0, 200) == 1, "there is room"
    assert policy.choose(1, 2, 8) == 1, "as many may wait"
    assert policy.choose(1, 22, 8) == 3, "each runs 8, and 2 wait for it"
    assert policy.choose(3, 0, 24) == 3, "each runs as many as it has room for"
    assert policy.choose(3, 1, 16) == 3
    assert policy.choose(3, 0, 16) == 2
    assert policy.choose(3, 0, 0) == 1
    assert policy.choose(1, 0, 12) == 1, "shorter requests have more room"
    assert policy.room == 12


@pytest.mark.parametrize("rate", [0.4, 3.0, 9.7])
def test_the_policy_settles_under_a_steady_load(rate: float) -> None:
    """Requests of 10 seconds arrive at a rate, and a replica runs 8 at once: the number of replicas does not swing."""
    policy, count, requests, counts = RoomPolicy(2, 256), 1, 0.0, list[int]()
    for _ in range(600):
        requests += rate - min(requests, 8 * count) / 10
        running = min(requests, 8 * count)
        count = policy.choose(count, requests - running, running)
        counts.append(count)
    assert len(set(counts[-200:])) == 1
    assert counts[-1] <= rate * 10 / 8 + 2


def test_a_context_of_serve() -> None:
    context = SimpleNamespace(
        aggregated_metrics={"waiting": {"a": 4.0, "b": 5.0}, "running": {"a": 8.0, "b": 8.0}}, current_num_replicas=2
    )
    assert RoomPolicy(2, 256)(context) == (3, {})
    nothing = SimpleNamespace(aggregated_metrics=None, current_num_replicas=0)
    assert RoomPolicy(2, 256)(nothing) == (1, {})


def test_an_address_that_others_reach_has_a_proxy_on_each_node() -> None:
    options = DeployOptions(http_host="0.0.0.0", http_port=80)
    config = serve_config(EngineConfig(), ServeOptions(), options)
    assert config["proxy_location"] == "EveryNode"
    assert config["http_options"] == {"host": "0.0.0.0", "port": 80}
