"""Tokenizers, compared with transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from quire.errors import InputError, StartupError
from quire.text import tokenizers_guard
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizers_guard import errors_to_input_error

TEXTS = [
    "", " ", "Hello, world!", "  two spaces\n\nand lines\t", "naïve 日本語 👩‍👩‍👧 e\u0301", "a<s>b</s> <|end|>c<|é|>",
    "x" * 300, "\x00\x7f", "1234567 pages, page's  a", " the  of\r\n the", "I'LL don't 12.5% ² ½",
]  # fmt: skip
KINDS = ["byte_level", "sentencepiece", "metaspace", "wordpiece", "configured"]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_transformers(folders: dict[str, Path], kind: str) -> None:
    ours, theirs = Tokenizer.load(folders[kind]), AutoTokenizer.from_pretrained(folders[kind])
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), (text, add)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids >= set(theirs.all_special_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_decoded_text(folders: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer.load(folders[kind])
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            continue
        joined = tokenizer.first_token_bytes(ids[0]) + b"".join(map(tokenizer.token_bytes, ids[1:]))
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.decode(errors="replace") in (decoded, " " + decoded)


def test_bad_text_and_ids_are_input_errors(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(InputError, match="got int"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    for ids in ([-1], [2**40]):
        with pytest.raises(InputError, match="between 0 and"):
            tokenizer.decode(ids)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    for beyond in (-1, tokenizer.vocab_size, 2**40):
        assert (tokenizer.token_bytes(beyond), tokenizer.token_text(beyond)) == (b"", "")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "absent")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(StartupError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(StartupError, match="not an object"):
        Tokenizer.load(tmp_path)


def _slow_folder(folder: Path, source: Path, **config: object) -> Path:
    """GPT-2's old files, vocab.json and merges.txt, of a byte-level tokenizer."""
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_older_files_are_converted_by_transformers(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _slow_folder(tmp_path, folders["byte_level"], tokenizer_class="GPT2Tokenizer")
    slow, fast = Tokenizer.load(folder), Tokenizer.load(folders["byte_level"])
    for text in TEXTS[:5]:
        assert slow.encode(text) == fast.encode(text)
    assert (slow.bos_id, slow.eos_ids) == (fast.bos_id, fast.eos_ids)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StartupError, match=r"pip install 'quire\[hf\]'"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("files", ["fast", "slow"])
def test_code_in_a_model_folder_never_runs(folders: dict[str, Path], tmp_path: Path, files: str) -> None:
    evil = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    _slow_folder(tmp_path, folders["byte_level"], **evil)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", **evil}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    if files == "fast":
        (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
        assert Tokenizer.load(tmp_path).encode("Hello")
    else:
        with pytest.raises(StartupError, match="no tokenizer that can be loaded"):
            Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("import quire.text.tokenizer", ["transformers", "torch", "jinja2"]),
        ("from quire.text.chat_template import ChatTemplate; ChatTemplate('x', {})", ["jinja2"]),
        ("import quire.llm, quire.text.grammars.compiler, quire.ipc.engine_server", ["llguidance"]),
    ],
)
def test_importing_the_text_plane_is_light(code: str, others: list[str]) -> None:
    """Templates' engine is in their process alone; grammars are loaded with the first."""
    code += f"; import sys; assert not {{*{others}}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _saved(folder: Path, **changes: object) -> Path:
    """A folder with a byte-level tokenizer whose parts are `changes`."""
    made = Backend(models.BPE())
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    state = json.loads(made.to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAA="}),
        (
            "post_processor",
            {
                "type": "TemplateProcessing", "special_tokens": {},
                "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            },
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_panics_is_refused_at_start(
    part: str, value: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the library's own lines about it."""
    with pytest.raises(StartupError, match="tokenizer"):
        Tokenizer.load(_saved(tmp_path, **{part: value}))
    assert capfd.readouterr().err == ""


def test_a_panic_at_a_clients_text_is_an_input_error(tmp_path: Path) -> None:
    """The pattern's search gives up at this text alone."""
    split = {"type": "Split", "pattern": {"Regex": "(a*)*$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.load(_saved(tmp_path, pre_tokenizer=split))
    assert tokenizer.encode("bread")
    with pytest.raises(InputError, match=r"text can't be encoded: .*limit"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("bread")


def test_what_ends_the_program_passes_the_wrapper() -> None:
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), errors_to_input_error("x"):
            raise kind
    with pytest.raises(InputError, match="x: y"), errors_to_input_error("x"):
        raise ValueError("y")


def test_a_tokenizer_that_is_slow_at_a_word_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers_guard, "TEST_SECONDS", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(tokenizers_guard, "encode", lambda *_: ended.wait(10) and [])
    with pytest.raises(StartupError, match=r"takes more than 0\.05 s for a word"):
        Tokenizer.load(folders["byte_level"])
    ended.set()


def test_replacements_of_replacements_are_refused(tmp_path: Path) -> None:
    def steps(kind: str, content: str, count: int) -> dict[str, object]:
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
        return {"type": "Sequence", kind: [step] * count}

    for part, kind in (("normalizer", "normalizers"), ("decoder", "decoders")):
        with pytest.raises(StartupError, match="lengthen a text more than 4096 times"):
            Tokenizer.load(_saved(tmp_path, **{part: steps(kind, "aa", 40)}))
        assert Tokenizer.load(_saved(tmp_path, **{part: steps(kind, "b", 40)}))


def test_many_added_tokens_go_in_at_once(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    entries = {str(1000 + i): {"content": f"<t{i}>", "special": True} for i in range(100_000)}
    config = {"added_tokens_decoder": {**entries, "9" * 5000: {"content": "<last>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    began = time.monotonic()
    tokenizer = Tokenizer.load(folder)
    assert time.monotonic() - began < 60  # one by one it takes many minutes
    assert len(tokenizer.encode("<t0><t99999><last>")) == 3


def test_odd_added_tokens(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    for declared, words in (({"1": {"content": "\ud800"}}, "no valid Unicode"), (["x"], ""), ({"1": 5, "x": {}}, "")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
        if words:
            with pytest.raises(StartupError, match=words):
                Tokenizer.load(folder)
        else:
            assert Tokenizer.load(folder)


def test_a_long_text_leaves_other_threads_running(folders: dict[str, Path]) -> None:
    """The library's `encode` keeps the interpreter for itself until it returns."""
    tokenizer, ticks, done = Tokenizer.load(folders["byte_level"]), 0, threading.Event()
    encoding = threading.Thread(target=lambda: (tokenizer.encode("many pages and quires " * 30_000), done.set()))
    encoding.start()
    while not done.is_set():
        time.sleep(0.001)  # a tick: it ends late where the interpreter is not free
        ticks += 1
    encoding.join()
    assert ticks > 8  # else 2


# Incremental detokenisation, compared with decoding everything at once


characters = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from([*"  \n ab's.,?é日本語한", "👩‍👩‍👧", "👍🏽", "e\u0301", "<s>", "</s>", "▁", " n't"]),
)
texts = st.lists(characters, max_size=25).map("".join)


@pytest.fixture(scope="module", params=KINDS[:4])
def tokenizer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders[request.param])


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise(borders)]
    return [*pieces, detokenizer.flush()]


def singly(ids: list[int]) -> list[int]:
    return list(range(len(ids)))


@given(text=texts, cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, text: str, cuts: list[int], skip: bool) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for chosen in (singly(ids), cuts):
        pieces = stream(Detokenizer(tokenizer, [], skip), ids, chosen)
        assert "".join(pieces) == whole
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@given(prompt=texts, text=texts, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_output_continues_the_prompt(tokenizer: Tokenizer, prompt: str, text: str, skip: bool) -> None:
    head, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    before, whole = (tokenizer.decode(part, skip_special_tokens=skip) for part in (head, head + ids))
    tail = head if len(head) <= 16 else head[-16:]
    if not skip or any(id not in tokenizer.special_ids for id in tail):
        assert before + "".join(stream(Detokenizer(tokenizer, tail, skip), ids, singly(ids))) == whole


def test_random_byte_level_tokens_equal_the_whole(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40), st.lists(st.integers(0, 40)), st.booleans())
    @settings(max_examples=400, deadline=None)
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(Detokenizer(tokenizer, [], skip), ids, cuts)) == whole

    check()


def repaired(data: bytes) -> str:
    """UTF-8 with one U+FFFD for each byte that belongs to no character."""
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))


def test_random_byte_fallback_tokens(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["sentencepiece"])
    zero = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\0")
    letter = tokenizer.encode("xa", add_special_tokens=False)[-1]
    assert (tokenizer.token_bytes(zero + 0xC3), tokenizer.token_text(letter)) == (b"\xc3", "a")

    @given(st.lists(st.one_of(st.binary(max_size=6), characters.map(str.encode)), max_size=8))
    @settings(max_examples=400, deadline=None)
    def check(runs: list[bytes]) -> None:
        ids = [letter]
        for run in runs:
            ids += [*(zero + value for value in run), letter]
        text = "".join(stream(Detokenizer(tokenizer, [], True), ids, singly(ids)))
        assert text == "a" + "".join(repaired(run) + "a" for run in runs)
        broken = [repaired(run) for run in runs if "\ufffd" in repaired(run)]
        if all(set(run) == {"\ufffd"} for run in broken):  # otherwise the library drops good characters too
            assert text == tokenizer.decode(ids)

    check()


def test_half_a_character_is_held_until_the_end(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])
    ids = tokenizer.encode("🜁", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"), True)
    assert [detokenizer.push([id]) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"
    whole = Detokenizer(tokenizer, [*tokenizer.encode("a"), *ids[:2]], True)
    assert whole.push(ids[2:]) == "🜁"  # the prompt's half belongs to the first character
