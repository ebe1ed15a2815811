"""`quire bench structured`: four results of the bundled model, and a made-up vocabulary of the asked size."""

from __future__ import annotations

from pathlib import Path

from benching import results

from quire.bench.structured import made_up
from quire.control import matching


def test_structured(tmp_path: Path) -> None:
    least = matching.JUMP
    given = ["--rows", "2", "--tokens", "8", "--repeat", "1", "--vocabulary", "1500", "--max-model-len", "160"]
    rows, one, forced, masks = results(tmp_path, "structured", *given, "--max-num-seqs", "2")
    assert (rows["held"], one["held"]) == (2, 1)
    assert set(rows["tokens_per_second"]) == set(one["tokens_per_second"]) == {"free", "schema"}
    assert forced["times"] > 0
    assert all(masks[name]["mask_us"]["p50"] <= masks[name]["mask_us"]["p99"] for name in ("text", "record", "counted"))
    assert least == matching.JUMP


def test_made_up_vocabularies() -> None:
    tokenizer = made_up(2000, 7)
    assert tokenizer.vocab_size == 2000
    assert tokenizer.eos_ids == (7,)
    assert {tokenizer.token_bytes(id) for id in range(2000) if id != 7} >= {bytes([byte]) for byte in range(256)}
