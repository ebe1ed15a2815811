"""Small tokenizers of four kinds, trained here, as model folders; and grammars over the echo model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import echo_service
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.text.grammars.compiler import GrammarCompiler

CORPUS = [
    "The gathering of pages is a quire, isn't it? Hello, world!",
    "Many pages make a book; many words make a page. 12345 67890.",
    "naïve café déjà vu — “quoted” 日本語のテキスト 한국어 😀👍🏽",
] * 4
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = [*SPECIAL.values(), "<|é|>"]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=names, show_progress=False),
    )
    return made


def sentencepiece() -> Tokenizer:
    """As LLaMA's: Metaspace, byte fallback, BOS first."""
    pieces = [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.train_from_iterator(
        [text.split(" ")[0] + " a b" for text in CORPUS] + ["hello world pages page"] * 3,
        trainers.BpeTrainer(vocab_size=330, special_tokens=pieces, show_progress=False),
    )
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary pieces
    made = Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def metaspace() -> Tokenizer:
    """Unigram under a Metaspace decoder, as T5's."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=list(SPECIAL.values()), unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=list(SPECIAL.values()), show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", made.token_to_id("</s>"))]
    )
    return made


MAKERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by kind; "configured" is byte-level with a token that only tokenizer_config.json names."""
    made = {}
    for kind, make in {**MAKERS, "configured": byte_level}.items():
        made[kind] = folder = tmp_path_factory.mktemp(kind)
        backend = make()
        backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        if kind == "configured":
            declared = {"0": "<s>", str(backend.get_vocab_size()): "<|end|>"}
            del config["unk_token"]
            config |= {"add_bos_token": True, "bos_token": {"content": "<s>", "__type": "AddedToken"}}
            config["eos_token"] = "<|end|>"
            config["added_tokens_decoder"] = {
                id: {"content": text, "special": True, "normalized": False} for id, text in declared.items()
            }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(echo_service.tokenizer(), echo_service.VOCAB, (0,))
