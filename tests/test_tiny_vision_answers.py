"""The bundled model that sees, with its own weights, through the engine and over HTTP: its tokens are transformers';
what was drawn is what is said; a picture that was there is not encoded again; and an embedding or a page that is
another one shows as a wrong word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_service
import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from picture_files import uri, written
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

import quire
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory import encoder_cache
from quire.models.vision.llava import LlavaOneVision
from quire.worker.image_inputs import ImageInputs

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = Path(quire.__file__).parent / "assets" / "tiny-vision"
Patch = pytest.MonkeyPatch
SETTINGS: dict[str, Any] = {"model": "tiny-vision", "dtype": "float32", "threads": 1, "kv_tokens": 2048, "swap_gib": 0}
INKS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (30, 60, 220)}
PENS = {"circle": ImageDraw.ImageDraw.ellipse, "square": ImageDraw.ImageDraw.rectangle}
WHICH, ALL = "What colour and shape is this?", "Describe the picture."


def sketch(*things: tuple[str, str, tuple[int, int, int, int]], side: int = 96) -> Image.Image:
    """A white picture with some (colour, shape, box)."""
    image = Image.new("RGB", (side, side), "white")
    for colour, shape, box in things:
        PENS[shape](ImageDraw.Draw(image), box, fill=INKS[colour])
    return image


def alone(colour: str, shape: str) -> Image.Image:
    return sketch((colour, shape, (24, 24, 72, 72)))


def noise(height: int, width: int, seed: int) -> Image.Image:
    """Few colours in large squares, which differ when they are resized."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


TWO = sketch(("red", "circle", (12, 12, 48, 48)), ("blue", "square", (72, 72, 108, 108)), side=120)
TOLD = "A red circle at the top left and a blue square at the bottom right."


def asked(image: Image.Image, question: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": uri(written(image))}}
    return [*before, {"role": "user", "content": [{"type": "text", "text": question}, picture]}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as made:
        yield made


def say(llm: LLM, *images: Image.Image, question: str = WHICH) -> list[str]:
    """What is said of each picture, all asked at once, with nothing found of before."""
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=40)
    results = llm.chat([asked(image, question) for image in images], greedy, use_tqdm=False)
    return [result.outputs[0].text for result in results]


def test_chats_equal_transformers(llm: LLM) -> None:
    """Token for token, of one picture and of two, beyond the model's own end; noise tells what frames a wide one."""
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(FOLDER)
    model.generation_config.eos_token_id = None
    green = sketch(("green", "square", (9, 9, 40, 30)), side=70)
    for images in ([TWO], [green, TWO], [noise(30, 90, 1), noise(70, 100, 0)]):
        pictures = [{"type": "image_url", "image_url": {"url": uri(written(image))}} for image in images]
        content = [*pictures, {"type": "text", "text": ALL}]
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        [result] = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)
        ids = torch.tensor([result.prompt_token_ids])
        seen = processor([images], return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **seen
            )
        assert result.outputs[0].token_ids == found[0, ids.shape[1] :].tolist()


def test_a_tokenizer_that_means_another_token(tmp_path: Path) -> None:
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = (FOLDER / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"image_token_index": 3072', '"image_token_index": 3071'))
    with pytest.raises(StartupError, match=r"<image> is token 3072 of the tokenizer, and config\.json says 3071"):
        LLM(**{**SETTINGS, "model": str(tmp_path)}, dummy_weights=True)


def pages_of_a_picture_of_that_size(patch: Patch) -> None:
    patch.setattr(encoder_cache, "page_keys", lambda key, count: [bytes(32) + i.to_bytes(4) for i in range(count)])
    patch.setattr(encoder_cache, "encoding_key", lambda g, medium, count: (g, bytes([count])))


def embeddings_of_a_neighbour(patch: Patch) -> None:
    keep, late = ImageInputs._write_embeds, list[Tensor]()

    def swapped(pictures: ImageInputs, entry: Any, rows: Tensor) -> None:
        late.append(rows)
        keep(pictures, entry, next(other for other in late if len(other) == len(rows)))

    patch.setattr(ImageInputs, "_write_embeds", swapped)


def reading_each_page_one_too_far(patch: Patch) -> None:
    cells, at = ImageInputs._embed_positions, ImageInputs.embedding_merger

    def turned(pictures: ImageInputs, place: Any, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        pages, offsets = cells(pictures, place, first, stop)
        return np.roll(pages, 16), np.roll(offsets, 16)

    def reading(pictures: ImageInputs, flat: Any) -> Any:
        with patch.context() as patched:
            patched.setattr(ImageInputs, "_embed_positions", turned)
            return at(pictures, flat)

    patch.setattr(ImageInputs, "embedding_merger", reading)


def tiles_in_another_order(patch: Patch) -> None:
    join = LlavaOneVision.assemble
    patch.setattr(LlavaOneVision, "assemble", lambda eyes, features, grid: join(eyes, features.roll(1, 0), grid))


PLANTED: dict[str, Callable[[Patch], None]] = {
    "pages of a picture of that size": pages_of_a_picture_of_that_size,
    "embeddings of a neighbour": embeddings_of_a_neighbour,
    "reading each page one too far": reading_each_page_one_too_far,
    "tiles in another order": tiles_in_another_order,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_a_wrong_word(llm: LLM, name: str, monkeypatch: Patch) -> None:
    images, right = [alone("red", "circle"), alone("blue", "square"), TWO], ["red circle", "blue square"]
    with monkeypatch.context() as patched:
        PLANTED[name](patched)
        said = [*say(llm, *images[:2]), *say(llm, TWO, question=ALL)]
    assert said != [*(f"This is a {one}." for one in right), TOLD]
    assert all(set(text.split()) & INKS.keys() for text in said), said
    assert [*say(llm, *images[:2]), *say(llm, TWO, question=ALL)] == [*(f"This is a {one}." for one in right), TOLD]


def counts(http: httpx.Client) -> dict[str, float]:
    """What `/metrics` says of pictures, of prefixes, and of bytes by layer type."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            kind = sample.labels.get("layer_type")
            found[f"{sample.name}:{kind}:{sample.labels['category']}" if kind else sample.name] = sample.value
    return found


def test_streamed_over_http_and_not_encoded_again(tmp_path: Path) -> None:
    """Five tiles once. Of the same question again all but 12 tokens are found, the picture's last two among these; with
    another text before it nothing is, but the picture. Another picture is encoded. The example says the same."""
    with (
        echo_service.serving(EngineConfig(**SETTINGS)) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        http = running.http

        def ask(messages: Any) -> str:
            stream = client.chat.completions.create(model="echo", messages=messages, temperature=0, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert len(pieces) > 1, "it comes in pieces, though a fast engine's are few"
            return "".join(pieces)

        circle, told = alone("red", "circle"), []
        before = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}
        question, other = asked(circle, WHICH), asked(alone("blue", "square"), WHICH)
        for messages in (question, question, asked(circle, WHICH, *before), other):
            answer = ask(messages)
            assert running.idle(), "what it counts is told"
            found = counts(http)
            told.append((answer, *(found[f"quire_{name}_total"] for name in ("encoder_runs", "picture_hits"))))
            assert found["quire_encoder_parts_total"] == 5 * found["quire_encoder_runs_total"]
            assert found["quire_kv_layer_bytes:vision:cached"] > 0
            assert found["quire_kv_layer_bytes:full:cached"] > 0
        red, blue = "This is a red circle.", "This is a blue square."
        assert told == [(red, 1, 0), (red, 1, 1), (red, 1, 2), (blue, 2, 2)]
        assert counts(http)["quire_prefix_cache_hits_total"] > 0
        script = tmp_path / "picture.py"
        script.write_text((EXAMPLES / "picture.py").read_text().replace('"tiny-vision"', '"echo"'))
        command = [sys.executable, script, "--url", running.url, "--picture", EXAMPLES / "circle.png"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.count(f"{red}\n") == 2, done.stderr
        assert "quire_encoder_runs_total" in done.stdout
