"""vLLM's flags: the same meaning, a notice, or a reason; and hints that help or aren't there."""

from __future__ import annotations

import argparse

import pytest

from quire.cli import main, parse_arguments
from quire.cli.flags import config_from
from quire.cli.serve import options_from
from quire.cli.vllm_flags import (
    NO_EFFECT_FLAGS,
    NO_EFFECT_SETTINGS,
    SINGLE_VALUE_FLAGS,
    no_effect_notices,
    parse_size,
)
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.server.options import ServeOptions


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan"])
@pytest.mark.parametrize(
    ("given", "same"),
    [
        (["--model", "a/b"], ["a/b"]),
        (["a/b", "--model", "a/b"], ["a/b"]),
        (["--enforce-eager"], ["--no-cuda-graphs"]),
        (["--load-format", "dummy"], ["--dummy-weights"]),
        (["--load-format", "auto"], []),
        (["--kv-cache-memory-bytes", "1610612736"], ["--kv-gib", "1.5"]),
        (["--kv-cache-memory-bytes", "2G"], ["--kv-gib", "2"]),
        (["--attention-backend", "TORCH_SDPA"], ["--attention", "sdpa"]),
        (["--attention-backend", "TRITON_ATTN"], ["--attention", "triton"]),
        (["--attention-backend", "reference"], ["--attention", "reference"]),
        (["--distributed-executor-backend", "mp", "--tp", "2"], ["--executor", "process", "--tp", "2"]),
        (["--distributed-executor-backend", "uni"], ["--executor", "inline"]),
        (["--distributed-executor-backend", "ray"], ["--executor", "ray"]),
        (["-tp", "2", "--enable-expert-parallel"], ["--tp", "2", "--expert-parallel"]),
        (["-tp", "2", "-ep"], ["--tp", "2", "--expert-parallel"]),
        (["--generation-config", "vllm"], ["--no-generation-config"]),
        (["--block-size", "32"], ["--page-size", "32"]),
        (["--swap-space", "2"], ["--swap-gib", "2"]),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--dtype", "float"], ["--dtype", "float32"]),
        (["--max_model_len=2k"], ["--max-model-len", "2000"]),
        (
            ["--max-model-len", "2K", "--max_num_batched_tokens", "8k"],
            ["--max-model-len", "2048", "--max-num-batched-tokens", "8000"],
        ),
        (["--max-model-len", "auto"], []),
        (["--no_enable_prefix_caching", "--enforce_eager"], ["--no-enable-prefix-caching", "--no-cuda-graphs"]),
        (
            ["--speculative_config", '{"model": "a/b", "num_speculative_tokens": 5, "method": "draft_model"}'],
            ["--speculative-model", "a/b", "--num-speculative-tokens", "5", "--speculative-method", "draft"],
        ),
        (
            ["-sc", '{"model": "a/b", "method": null, "draft_tensor_parallel_size": 2}', "-tp", "2"],
            ["--speculative-model", "a/b", "-tp", "2"],
        ),
        (
            ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}'],
            ["--speculative-method", "ngram", "--prompt-lookup-max", "4", "--prompt-lookup-min", "1"],
        ),
        (
            ["--speculative-config", '{"model": "[ngram]", "prompt_lookup_max": 4}'],
            ["--speculative-method", "ngram", "--prompt-lookup-max", "4", "--prompt-lookup-min", "4"],
        ),
    ],
)
def test_the_same_settings(command: str, given: list[str], same: list[str]) -> None:
    assert config_from(parse_arguments([command, *given])) == config_from(parse_arguments([command, *same]))


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("1", 1), ("25.6k", 25_600), ("1K", 1024), ("3m", 3 * 10**6), ("3M", 3 << 20), ("2g", 2 * 10**9), ("1T", 1 << 40)],
)
def test_sizes(text: str, bytes: int) -> None:
    assert parse_size(text) == bytes


@pytest.mark.parametrize("text", ["", "1GiB", "-1", "1e9", "G", "1 G", "9" * 19, "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a", "--model", "b"], "--model is 'b', and MODEL is 'a'"),
        (["--kv-gib", "1", "--kv-cache-memory-bytes", "1G"], "--kv-cache-memory-bytes and --kv-gib are both given"),
        (["--kv-cache-memory-bytes", "0"], "--kv-cache-memory-bytes is 0. It must be above 0"),
        (["--attention", "sdpa", "--attention-backend", "sdpa"], "They set the same"),
        (["--attention-backend", "FLASH_ATTN"], "'FLASH_ATTN' is not in quire. Choose one of: auto, native,"),
        (["--distributed-executor-backend", "k8s"], "'k8s' is not in quire. Choose one of: mp, uni, ray"),
        (["--distributed-executor-backend", "uni", "-tp", "2"], "--executor is inline, and --tp is 2: each rank is"),
        (["--distributed-executor-backend", "mp", "--executor", "process"], "They set the same"),
        (["--load-format", "auto", "--dummy-weights"], "--load-format is auto, and --dummy-weights is given"),
        (["--load-format", "pt"], "invalid choice: 'pt'"),
        (["--enforce-eager", "--cuda-graphs"], "contradict each other"),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 0}'], "--prompt-lookup-max is 0"),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 65}'], "--prompt-lookup-min is 65"),
        (["--override-generation-config", "{"], "'{' is not JSON"),
        (["--override-generation-config", "[1]"], "'[1]' is no JSON object"),
        (["--override-generation-config", '{"max_new_tokens": 3}'], "has 'max_new_tokens'. It may set: temperature"),
        (["--override-generation-config", '{"temperature": -1}'], "-generation-config can't be used: temperature"),
        (["--generation-config", "/nonexistent"], "has no generation_config.json. Give auto, vllm or a folder"),
        (["--revision", "v1"], "--revision is given, and tiny is the bundled model"),
        (["--revision", "../x", "a/b"], "--revision is '../x'"),
        (["--revision", "v1", "."], "--revision is given, and '.' is a local folder"),
        (["--revision", "v1", "--model-config", "opt-125m"], "--revision and --model-config are both given"),
        (["--trust-remote-code"], "Not supported by quire: no code of a model's folder ever runs"),
        (["--data-parallel-size", "2"], "--data-parallel-size is '2', and quire has only 1. --tp divides a model"),
        (["--pipeline-parallel-size", "64"], "--pp is 64. It must be between 1 and 63"),
        (["--tp", "64"], "--tp is 64. It must be between 1 and 63"),
        (["--rank-timeout", "0"], "--rank-timeout is 0.0. It must be between 0.1 and 86400"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: invalid choice: 'fp8' (choose from 'auto', 'int8')"),
        (["--calculate-kv-scales"], "every head and token has a scale of its own"),
        (["-sc", "{}"], "names neither a method nor a model. It may have: method, model, num_speculative_tokens,"),
        (["-sc", '{"method": "eagle3"}'], "--speculative-method is eagle3, and there is no head. Give the folder"),
        (["-sc", '{"method": "mtp", "model": "a/b"}', "c/d"], "is mtp, and --speculative-model is given. Leave it out"),
        (["-sc", '{"method": "eagle", "model": "a/b"}'], "has method 'eagle', which is not supported yet. Choose"),
        (["-sc", '{"method": "deepseek_mtp"}'], "has method 'deepseek_mtp', which is not supported yet. Choose one"),
        (["-sc", '{"method": "guess"}'], "has method 'guess'. Choose one of: draft_model, draft, ngram, both"),
        (["-sc", '{"method": 3}'], "has method '3'. It must be a string"),
        (["-sc", '{"model": "a", "quantization": "fp8"}'], "has 'quantization'. It may have: method, model, num_spec"),
        (["-sc", '{"method": "draft_model"}'], "--speculative-method is draft, and there is no draft model. Give"),
        (["-sc", '{"method": "ngram", "model": "a"}'], "is ngram, and --speculative-model is given. Leave one out"),
        (["-sc", '{"model": "a", "num_speculative_tokens": "3"}'], "tokens is '3'. It must be a whole number between"),
        (["-sc", '{"model": "a", "num_speculative_tokens": 17}'], "tokens is 17. It must be between 1 and 16"),
        (["-sc", '{"model": "a", "draft_tensor_parallel_size": 1}', "-tp", "2"], "size 1, and --tp is 2. Leave it out"),
        (["-sc", '{"model": "a"}', "--speculative-model", "a"], "They set the same: give one of them"),
        (["-sc", "ngram"], "'ngram' is not JSON"),
        (["--speculative-model", ""], "--speculative-model is ''. Name a model"),
        (["--speculative-method", "both"], "--speculative-method is both, and there is no draft model"),
        (["--prompt-lookup-min", "6"], "--prompt-lookup-min is 6, and --prompt-lookup-max 5. The first must not be"),
        (["--speculative-method", "ngram", "--memory", "ft"], "--memory is ft, and speculative decoding is on. Use"),
        (
            ["--speculative-model", "tiny-draft", "--pp", "2"],
            "--pp is 2, and drafts come from a model or a head. Use --tp",
        ),
    ],
)
def test_contradictions_and_refusals(capsys: pytest.CaptureFixture[str], given: list[str], words: str) -> None:
    try:
        status = main(["plan", *given])
    except SystemExit as end:
        status = int(end.code or 0)
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    last = error.strip().splitlines()[-1]
    assert last.startswith("quire: error: ")
    assert words in last


# Flags of vLLM that aren't ours, each with what is said of it: a hint, or the beginning of a reason.
FOREIGN = {
    "--data-parallel-sizes": "--tp divides a model among ranks",
    "-dp": "--tp divides a model among ranks",
    "--enable-lora": "merge adapters",
    "--speculative-max-model-len": "see --speculative-config",
    "--ngram-prompt-lookup-max": "see --speculative-config",
    "--guided-decoding-backend": "llguidance makes all grammars",
    "--limit-mm-per-prompt": "see --max-images",
    "--code-revision": "no code of a model's folder ever runs",
    "--api-key": "keys never come from the command line",
    "--hf-token": "set HF_TOKEN",
    "--no-async-scheduling": "--depth 1 plans a step",
    "--task": "it runs models that generate text",
    "--ssl-ca-certs": "TLS has a key and a certificate",
    "--uds": "it listens on TCP",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks",
}
HINTS = {
    "--max_model_length": "--max-model-len", "--gpu_memory_utilisation": "--gpu-memory-utilization",
    "--preemption-mode": "--preemption", "--max-num-seq": "--max-num-seqs", "--ssl-keyfil": "--ssl-keyfile",
    "--served-model-names": "--served-model-name", "--allowed-origin": "--allowed-origins",
    "--enforce-eager-mode": "--enforce-eager", "--kv-cache-memory": "--kv-cache-memory-bytes",
}  # fmt: skip
NEITHER = ("--response-role", "--disable-fastapi-docs", "--size", "-x",
           "--log-config-file", "--collect-detailed-traces", "--seeds-of-doubt",
           "cpu-offload-gb")  # fmt: skip


def said_of(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "a/model", flag, "value"])  # of which nothing is said: the first is named
    start = f"quire: error: Unknown argument {flag!r}. "
    said = capsys.readouterr().err.strip()
    assert said.startswith(start)
    return said.removeprefix(start)


def test_unknown_flags_have_a_hint_that_helps_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, words in FOREIGN.items():
        assert said_of(flag, capsys).startswith(f"Not supported by quire: {words}"), flag
    for flag, meant in HINTS.items():
        assert said_of(flag, capsys) == f"Did you mean {meant}?", flag
    for flag in NEITHER:
        assert said_of(flag, capsys) == "See quire serve --help", flag


def test_what_changes_nothing_says_so() -> None:
    only = [text for flag, values in SINGLE_VALUE_FLAGS.items() for text in (flag, values[0])]
    settings = ["-O3", "-cc", "{}", "--optimization_level=2", "--compilation-config", '{"mode": 3}']
    args = parse_arguments(["serve", *NO_EFFECT_FLAGS, *settings, *only])
    assert config_from(args) == EngineConfig()
    assert options_from(args) == ServeOptions()
    lines = no_effect_notices(args)
    assert len(lines) == len(NO_EFFECT_FLAGS) + len(NO_EFFECT_SETTINGS) + len(SINGLE_VALUE_FLAGS)
    assert '--compilation-config {"mode": 3} changes nothing: see --cuda-graphs and --warm-up' in lines
    assert "-O 3 changes nothing: see --cuda-graphs and --warm-up" in lines
    assert all(" changes nothing: " in line for line in lines)
    assert no_effect_notices(parse_arguments(["serve"])) == []
    for flag in SINGLE_VALUE_FLAGS:
        with pytest.raises(StartupError, match=flag):
            no_effect_notices(parse_arguments(["serve", flag, "another"]))


def test_notices_are_printed_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model-config", "opt-125m", "--kv-tokens", "4096", "--enable-chunked-prefill"]
    assert main([*plan, "--data-parallel-size", "1"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "--enable-chunked-prefill changes nothing: prompts are always computed in chunks",
        "--data-parallel-size 1 changes nothing: it is never anything else",
    ]


def test_underscores_of_values_are_kept() -> None:
    args = parse_arguments(["serve", "--served_model_name=a_b", "my_org/my_model", "--root_path", "/a_b"])
    assert (args.model, args.served_model_name, args.root_path) == ("my_org/my_model", ["a_b"], "/a_b")
    assert parse_arguments(["generate", "--prompt", "--max_tokens are few"]).prompt == ["--max_tokens are few"]


def test_server_flags() -> None:
    given = {
        "--root-path": "/api/v2/", "--max-connections": "100", "--max-logprobs": "5", "--metrics-prefix": "vllm",
        "--ssl-keyfile": "key.pem", "--ssl-certfile": "cert.pem", "--port": "9",
    }  # fmt: skip
    flags = [text for pair in given.items() for text in pair]
    found = options_from(parse_arguments(["serve", *flags, "--strict", "--enable-log-requests"]))
    assert found == ServeOptions(
        root_path="/api/v2", max_connections=100, max_logprobs=5, metrics_prefix="vllm", ssl_keyfile="key.pem",
        ssl_certfile="cert.pem", port=9, strict=True, log_requests=True,
    )  # fmt: skip
    for level in ("critical", "error", "warning", "info", "debug"):
        assert options_from(parse_arguments(["serve", "--uvicorn-log-level", level])).uvicorn_log_level == level
    for said in (["https://a.example", "http://b:81"], ['["https://a.example", "http://b:81"]']):
        found = options_from(parse_arguments(["serve", "--allowed-origins", *said]))
        assert found.allowed_origins == ("https://a.example", "http://b:81")
    assert options_from(parse_arguments(["serve", "--allowed-origins", '["*"]'])).allowed_origins == ("*",)
    for fronts in (["--fronts", "3"], ["--api-server-count", "3"]):
        assert options_from(parse_arguments(["serve", *fronts])).fronts == 3


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-logprobs", "21", "--max-logprobs is 21. It must be between 0 and 20"),
        ("--max-logprobs", "-1", "--max-logprobs is -1. It must be between 0 and 20"),
        ("--max-connections", "0", "--max-connections is 0. It must be between 1 and"),
        ("--root-path", "api", "--root-path is 'api'. Give a path that begins with /"),
        ("--root-path", "/a b", "--root-path is '/a b'"),
        ("--root-path", "/a'$(id)", "--root-path"),
        ("--root-path", "//evil", "--root-path"),
        ("--root-path", "/v1", "--root-path is '/v1', where routes begin"),
        ("--root-path", "/v1/models/", "where routes begin"),
        ("--allowed-origins", "app.example", "--allowed-origins has 'app.example'. Give https://HOST"),
        ("--allowed-origins", "https://a.example/path", "--allowed-origins has"),
        ("--allowed-origins", "[1]", "--allowed-origins has '1'"),
        ("--allowed-origins", '["*"', "It is no JSON list"),
    ],
)
def test_server_flags_that_cannot_be(flag: str, value: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        options_from(parse_arguments(["serve", f"{flag}={value}"]))


def test_help_has_groups_and_no_flag_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "--help-all"])
    text = capsys.readouterr().out
    for group in (
        "engine:",
        "experiments:",
        "vLLM's names for settings of the engine:",
        "server:",
        "requests:",
        "logs and metrics:",
    ):
        assert f"\n{group}\n" in text
    assert "-tp N, --tensor-parallel-size N" in text
    assert "--data-parallel-size" not in text
    assert not [line for line in text.splitlines() if len(line) > 120]
