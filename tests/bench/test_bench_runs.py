"""`quire bench` on a model of two layers, and against a server of a known pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benching
import pytest
import torch
from paced import Paced, serving

from quire.bench import all_groups, main
from quire.bench.client import Asking, Client
from quire.bench.drive import Load
from quire.bench.workloads import parse
from quire.errors import QuireError, StartupError
from quire.models.named_configs import named_config

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DOCUMENT = {"name", "command", "machine", "date", "real", "results"}
MACHINE = {
    "cpu", "flags", "cores", "logical_cores", "threads", "memory_bytes", "gpu", "torch", "python", "quire", "revision",
}  # fmt: skip
SPREAD = {"mean", "p50", "p90", "p99"}


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Flags of an engine for a tiny shape with dummy weights."""
    shape = {**named_config("llama-125m"), **SMALL, "intermediate_size": 64, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return [str(tmp_path), "--dummy-weights", "--skip-tokenizer-init", "--dtype", "float32", "--threads", "1",
            "--kv-tokens", "4096"]  # fmt: skip


def bench(tmp_path: Path, *args: str) -> list[dict[str, Any]]:
    content = benching.bench(tmp_path, *args)
    assert set(content) == DOCUMENT
    assert set(content["machine"]) == MACHINE
    assert content["machine"]["cpu"]
    assert content["machine"]["memory_bytes"] > 2**20
    assert content["real"] is True
    assert content["command"].startswith(f"quire bench {args[0]}")
    results: list[dict[str, Any]] = content["results"]
    return results


def served(tmp_path: Path, workload: str, *args: str) -> dict[str, Any]:
    """The result of one run of `serve`."""
    [result] = bench(tmp_path, "serve", *args, "--workload", workload, "--repeat", "1", "--warmup", "0")
    return result


def test_throughput_adds_up(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = parse("alpaca@12").lengths()
    workloads = ("--workload", "alpaca@12", "--workload", "shared:64:8:4@5")
    alpaca, shared = bench(tmp_path, "throughput", *model, *workloads, "--repeat", "2", "--retention", "slack")
    assert "alpaca@12, run 2 of 2" in capsys.readouterr().err
    assert (alpaca["config"]["kv_tokens"], alpaca["config"]["retention"]) == (4096, "slack")
    assert alpaca["peak_rss_bytes"] > 10 * 2**20
    assert 0 < alpaca["start_up_s"] < 24 * 3600
    assert len(alpaca["runs"]) == 2
    assert alpaca["median"] in alpaca["runs"]
    for run in alpaca["runs"]:
        prompt, output = sum(a for a, _ in lengths), sum(b for _, b in lengths)
        assert (run["requests"], run["prompt_tokens"], run["output_tokens"]) == (12, prompt, output)
        # A row is a prompt or a token computed: prompts fit into one step, and a request's last token isn't computed.
        assert run["mean_batch"] * run["steps"] == pytest.approx(output)
        assert run["steps"] == max(output for _, output in lengths)
        assert run["mean_running"] == pytest.approx(output / run["steps"])
        assert run["preemptions"] == 0
        assert run["prefix_hit_tokens"] == 0
        rates = [run[f"{name}_per_s"] * run["seconds"] for name in ("requests", "output_tokens", "total_tokens")]
        assert rates == pytest.approx([12, output, prompt + output])
        for name in ("ttft_s", "inter_token_s", "e2e_s", "normalised_s"):
            assert set(run[name]) == SPREAD
        assert run["ttft_s"]["mean"] <= run["e2e_s"]["mean"] <= run["seconds"]
        assert sum(run["memory_bytes"].values()) == pytest.approx(4096 * 2 * 2 * 2 * 8 * 4)
    [alone] = bench(tmp_path, "latency", *model, "--workload", "shared:64:8:5@4", "--repeat", "1", "--warmup", "0")
    run = alone["median"]
    assert (run["steps"], run["mean_batch"], run["mean_running"]) == (4 * 5, 1, 1), "one behind the other"
    assert run["prefix_hit_tokens"] == 3 * 64  # every request but the first
    # The prefix cache is emptied between runs, so both find the same: what the first computes, the others wait for.
    assert [run["prefix_hit_tokens"] for run in shared["runs"]] == [4 * 64, 4 * 64]


def test_arrivals_of_serve(model: list[str], tmp_path: Path) -> None:
    """So many under way, at a rate, and all at once."""
    run = served(tmp_path, "fixed:8:6@9", *model, "--concurrency", "3")["median"]
    assert (run["steps"], run["mean_running"]) == (3 * 6, 3)
    run = served(tmp_path, "fixed:8:2@20", *model, "--rate", "50")["median"]
    assert run["seconds"] >= 0.2  # the arrivals alone take about 0.4 s
    assert run["output_tokens"] == 40
    run = served(tmp_path, "range:8:4:0@20", *model, "--rate", "inf")["median"]
    assert (run["steps"], run["mean_running"], run["output_tokens"]) == (4, 20, 80)


def test_accepted_drafts_are_recorded(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is its own draft model is always right."""
    given = [*model, "--workload", "fixed:8:14@2", "--repeat", "1", "--warmup", "0"]
    config = f'{{"model": "{model[0]}", "num_speculative_tokens": 3}}'
    drafts = ["--speculative-config", config, "--no-adaptive-speculation"]
    for name in ("latency", "throughput", "serve"):
        [result] = bench(tmp_path, name, *given, *drafts)
        run = result["median"]  # the prompt's token, one more, and three runs of three drafts and one more
        assert (run["num_drafts"], run["draft_tokens"], run["accepted_tokens"]) == (2 * 3, 2 * 9, 2 * 9)
        assert (run["acceptance_rate"], run["mean_accepted_length"]) == (1, 4)
        assert "100.0% of 18 draft tokens accepted, mean accepted length 4.00" in capsys.readouterr().out
    [result] = bench(tmp_path, "latency", *given)
    assert "acceptance_rate" not in result["median"]
    assert "draft tokens" not in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert shown in capsys.readouterr().out
    head, *groups = shown.split("\n\n")
    assert head.split() == ["name", "takes", "needs", "what"]
    purposes = {line.split()[0]: purpose for purpose, *lines in map(str.splitlines, groups) for line in lines}
    assert set(purposes) == {name for group in all_groups().values() for name in group}
    assert purposes["throughput"] == purposes["serve"] == "Serve requests"
    assert purposes["control"] == "Measure parts of the engine"
    assert "profile     minutes  GPU" in shown


def test_control(tmp_path: Path) -> None:
    found = bench(tmp_path, "control", "--sequences", "1", "4", "--contexts", "20", "--steps", "40")
    assert [(result["sequences"], result["context"]) for result in found] == [(1, 20), (4, 20)]
    for result in found:
        for part in ("schedule_us", "update_us", "step_us"):
            assert set(result[part]) == SPREAD
        both = result["schedule_us"]["mean"] + result["update_us"]["mean"]
        assert result["step_us"]["mean"] == pytest.approx(both)


def test_serve_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paced = Paced(together=2)
    with serving(paced) as url:
        text = served(tmp_path, "fixed:5:4@3", "--url", url, "--prompts", "text")
    assert text["prompts"] == "text"  # the bundled model's tokenizer decodes them
    assert [type(body["prompt"]) for body in paced.asked] == [str] * 3
    assert text["median"]["prompt_tokens"] == 3 * 7  # as the server counts them
    with serving(paced) as url:
        [result] = bench(tmp_path, "serve", "--url", url + "/v1", "--workload", "fixed:5:4@6", "--repeat", "1")
    run = result["median"]
    assert result["model"] == "paced"
    assert result["prompts"] == "ids"
    assert (run["output_tokens"], run["requests"], run["attempted"], run["chunks"]) == (24, 6, 6, 12)
    assert run["inter_token_from"] == "mean tokens a chunk"
    assert (run["refused"], run["failed"], run["other_lengths"], run["server"]) == ({}, {}, 0, None)
    assert len(run["clients"]) == 1
    assert "6 of 6 requests" in capsys.readouterr().out


def test_memory_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'quire_num_requests_running 2\nquire_kv_layer_bytes{layer_type="state",category="used"} 3221225472\n'
    with serving(Paced(metrics=text.encode())) as url:
        memory = served(tmp_path, "fixed:5:4@2", "--url", url, "--watch-memory", "0.1")["median"]["server"]["memory"]
    assert memory.pop("samples") >= 1
    assert memory == {"running": 2, "layers": {"state": {"used": 3 * 2**30}}}
    assert "state: used 3.00 GiB" in capsys.readouterr().out
    with pytest.raises(StartupError, match=r"--watch-memory is 0.0.*0.1 to 3600 seconds"):
        Client(url, watch=0.0)


def test_bodies_ask_for_exactly_the_jobs() -> None:
    jobs = parse("fixed:5:4@6").jobs(100)
    with serving(Paced()) as url, Client(url, asking=Asking(0.5, chunk_usage=True)) as client:
        client.run(jobs, Load(concurrency=2))
        bodies = [json.loads(client.body(job)) for job in jobs]
    assert [body["prompt"] for body in bodies] == [job.prompt for job in jobs]
    assert bodies[0] == {
        "model": "paced", "prompt": jobs[0].prompt, "max_tokens": 4, "temperature": 0.5, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip


@pytest.mark.parametrize(("key", "sent"), [("secret", b"Bearer secret"), ("", b"")])
def test_the_key_is_sent_if_there_is_one(key: str, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", key)
    paced = Paced()
    with serving(paced) as url, Client(url) as client:
        client.run(parse("fixed:5:4@2").jobs(100), Load(concurrency=1))
    assert paced.keys == {sent}


@pytest.mark.parametrize(("model", "sees"), [("tiny-vision", True), ("tiny", False)])
def test_a_server_whose_model_sees_gets_pictures(tmp_path: Path, model: str, sees: bool) -> None:
    paced = Paced()
    with serving(paced) as url:
        result, asked = served(tmp_path, "mmmu-pro@3", model, "--url", url), paced.asked
    assert result["prompts"] == ("text" if sees else "ids")
    assert {body.pop("path") for body in asked} == {"/v1/chat/completions" if sees else "/v1/completions"}
    assert ["messages" in body for body in asked] == ["prompt" not in body for body in asked] == [sees] * 3
    for [message] in [body["messages"] for body in asked if sees]:
        picture, text = message["content"]
        assert (message["role"], picture["type"], text["type"]) == ("user", "image_url", "text")
        assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
        assert 8 < len(text["text"]) < 2000
    assert len({json.dumps(body) for body in asked}) == 3


def test_a_refusal_is_shown() -> None:
    with (
        serving(Paced(every=1)) as url,
        pytest.raises(QuireError, match=r"503.*the queue is full"),
        Client(url) as client,
    ):
        client.run(parse("fixed:5:4@1").jobs(100), Load(concurrency=1))


def test_refusals_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Paced(every=3)) as url:
        run = served(tmp_path, "fixed:5:4@9", "--url", url)["median"]
    assert (run["attempted"], run["requests"], run["refused"], run["failed"]) == (9, 6, {"503": 3}, {})
    assert run["as_vllm"]["failed"] == 3
    said = capsys.readouterr()
    assert "3 requests refused" in said.err
    assert "6 of 9 requests" in said.out
    assert "3 requests without an answer: 503" in said.out


RANK = "kernels --model-config llama3-70b"
URL = "serve --url http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("throughput --repeat 0", "--repeat is 0"),
        ("throughput --workload fixed:4000:200@1 --kv-tokens 4096", "4200 tokens, but sequences may have"),
        ("throughput --n 3 --best-of 2", "best_of must be at least n"),
        ("throughput --beam-width 65", "beam_width must be between 1 and 64"),
        ("serve --rate -1", "--rate is -1.0"),
        ("serve --concurrency 0", "--concurrency is 0"),
        (f"{URL} --clients 0", "--clients is 0"),
        (f"{URL} --clients 65", "--clients is 65"),
        (f"{URL} --n 2", "Measure those in this process"),
        (f"{URL} --beam-width 1", "Measure those in this process"),
        (URL, "Start one with: quire serve"),
        ("serve --url ftp://x", "Expected http://HOST:PORT"),
        ("control --sequences 0", "--sequences is 0"),
        ("control --sequences 65536 --contexts 1000000", "tokens in all"),
        ("control --beams 3", "even number"),
        ("beams --beam-width 0", "between 1 and 64"),
        ("beams --repeat 0", "at least 1"),
        ("histories --beam-width 37", "between 1 and 36"),
        ("histories --prompts 0", "below 1"),
        ("histories --steps 0", "below 1"),
        ("allocator --repeats 0", "--repeats is 0"),
        ("memory --device cpu --max-model-len 1", r"no room for an output.*--max-model-len"),
        ("parallel --minutes 0", "--minutes is 0"),
        ("parallel --ranks 2 64", r"--ranks is \[2, 64\]. Give numbers between 1 and 63"),
        *((f"preemption --compare --load {load}", "there is no")
          for load in ("fixed:20:30@6", "fixed:20:30@6/", "fixed:20:30@6/x", "fixed:20@6/100", "/100")),
        ("wire --repeat 0", "--repeat is 0"),
        ("wire --ranks 64", "Give numbers between 1 and 63"),
        ("kernels --family norms", r"no family 'norms'.*copies"),
        (f"{RANK} --tp 3", "--tp is 3, which doesn't divide the model"),
        (f"{RANK} --tp 0", "--tp is 0"),
        (f"{RANK} --tp 2 --family copies", r"no family of --tp and --model-config 'copies'.*decodes, linears"),
        (f"{RANK} --tp 2 --family kv", r"no family of --tp and --model-config 'kv'.*decodes, linears"),
        ("kernels --model-config opt-13b", "products aren't those of a LlamaForCausalLM"),
        ("kernels --model-config llama", "there is no model config 'llama'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(flags: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        main(flags.split())


@pytest.mark.parametrize(
    ("entry", "message"),
    [("kernels", r"kernels measures a GPU.*Run it beside a GPU"), ("profile", "finds none"), ("mixed", "finds none")],
)
def test_what_needs_a_gpu_says_so(entry: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=message):
        main([entry])
