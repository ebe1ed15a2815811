"""A folder of a model that sees, as it is published, random: pictures from users, through the text plane, the engine
and the server, give transformers' tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import echo_service
import tiny_vision_model as vision
from picture_files import uri, written

from quire import LLM, SamplingParams
from quire.build import build
from quire.config import EngineConfig
from quire.errors import InputError, StartupError

NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


class Folder:
    """A random model with the bundled one's settings, and what transformers says."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, vision.build(0).eval()
        for name, parameter in self.model.named_parameters():
            parameter.data.normal_(1.0 * ("norm" in name), 0.1 if parameter.dim() == 1 else 0.15)
        self.model.to(torch.bfloat16).float()  # as it is saved
        vision.save(self.model, path)

    @torch.inference_mode()
    def greedy(self, ids: list[int], images: list[Image.Image]) -> list[int]:
        seen = LlavaOnevisionImageProcessorPil.from_pretrained(self.path)([images], return_tensors="pt")
        given, mask = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)
        self.model.generation_config.eos_token_id = None
        found = self.model.generate(input_ids=given, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **seen)
        return found[0, len(ids) :].tolist()


def noise(height: int, width: int, seed: int) -> Image.Image:
    """Few colours in large squares, which differ when they are resized."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def asked(*images: Image.Image) -> list[dict[str, Any]]:
    pictures = [{"type": "image_url", "image_url": {"url": uri(written(image))}} for image in images]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": "Which colour is it?"}]}]


SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_tokens": 4096, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def llm(folder: Folder) -> Iterator[LLM]:
    with LLM(str(folder.path), **SETTINGS) as made:
        yield made


def test_chats_equal_transformers(folder: Folder, llm: LLM) -> None:
    image = noise(70, 100, 0)
    for images in ([image], [noise(30, 90, 1), image]):
        result = llm.chat(asked(*images), GREEDY, use_tqdm=False)[0]
        ids, tokens = result.prompt_token_ids, result.outputs[0].token_ids
        assert ids is not None
        assert tokens == folder.greedy(ids, images)
        assert len(set(tokens)) > 2
    other = llm.chat(asked(noise(70, 100, 5)), GREEDY, use_tqdm=False)[0]
    assert other.outputs[0].token_ids != llm.chat(asked(image), GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_prompts_with_pictures_of_python(folder: Folder, llm: LLM) -> None:
    image = noise(49, 51, 2)
    kinds: list[Any] = [image, np.asarray(image), written(image)]
    prompts = [{"prompt": "<image>It is", "multi_modal_data": {"image": kind}} for kind in kinds]
    results = llm.generate([*prompts, "It is"], GREEDY, use_tqdm=False)
    ids = results[0].prompt_token_ids
    assert ids is not None
    answers = [result.outputs[0].token_ids for result in results]
    assert answers[0] == answers[1] == answers[2] == folder.greedy(ids, [image])
    assert answers[3] != answers[0]
    with pytest.raises(InputError, match="0 places for pictures"):
        llm.generate({"prompt": "It is", "multi_modal_data": {"image": image}}, GREEDY, use_tqdm=False)


def test_a_picture_over_http(folder: Folder, llm: LLM) -> None:
    expected = llm.chat(asked(noise(70, 100, 0)), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    built = build(EngineConfig(model=str(folder.path), **SETTINGS))
    body = {
        "messages": asked(noise(70, 100, 0)), "temperature": 0, "max_tokens": NEW, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    with echo_service.serving(built) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) > 100
        assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"] == expected


def test_a_tokenizer_that_means_another_token(folder: Folder, tmp_path: Path) -> None:
    config = (folder.path / "config.json").read_text()
    for name in ("generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder.path / name).read_bytes())
    (tmp_path / "model.safetensors").symlink_to(folder.path / "model.safetensors")
    (tmp_path / "config.json").write_text(config.replace('"image_token_index": 3072', '"image_token_index": 3071'))
    with pytest.raises(StartupError, match=r"<image> is token 3072 of the tokenizer, and config\.json says 3071"):
        LLM(str(tmp_path), dummy_weights=True, **SETTINGS)
