"""Filling a model from safetensors: every parameter once, every broken checkpoint refused with the right words."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mllama_models import Saved
from pictured_models import MODELS
from safetensors.torch import load_file, save_file

from quire.errors import StartupError
from quire.kernels.cpu.library_loader import library
from quire.models import resolve_model_class
from quire.models.named_configs import named_config
from quire.weights.checkpoint_files import read_config
from quire.weights.dummy import fill_dummy_weights
from quire.weights.loader import load_weights

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 24, "vocab_size": 31, "max_position_embeddings": 32, "tie_word_embeddings": False},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31, "n_positions": 32},
    "opt": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24, "vocab_size": 31,
            "max_position_embeddings": 32, "word_embed_proj_dim": 16},
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"


def save(folder: Path, family: str = "llama", **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SMALL[family]))
    model.save_pretrained(folder, **more)
    return model


def save_large(folder: Path, **size: Any) -> transformers.PreTrainedModel:
    """A checkpoint in bf16 whose weights are large enough to be mapped."""
    config = transformers.AutoConfig.for_model("llama", **{**SMALL["llama"], "vocab_size": 1024, **size})
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(folder)
    return model


def built(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = read_config(folder)
    return resolve_model_class(config)(config, dtype, CPU)


def blank(model: Any) -> Any:
    """The model, its parameters NaN, so that one that isn't filled shows."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.view(torch.uint8).fill_(0xFF)
    return model


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """Our parameters after loading."""
    model = blank(built(folder, dtype))
    load_weights(model, folder)
    parameters = dict(model.named_parameters())
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    return parameters


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def put(name: str, value: Any) -> Callable[[Tensors], Any]:
    """For `rewrite`: a tensor, or what becomes of the one that is there."""

    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]) if callable(value) else value

    return change


@pytest.mark.parametrize("family", SMALL)
def test_sharded_equals_single(family: str, tmp_path: Path) -> None:
    save(tmp_path / "one", family)
    save(tmp_path / "many", family, max_shard_size="3KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert same(loaded(tmp_path / "one"), loaded(tmp_path / "many"))


EXTRAS = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"], "opt": ["lm_head.weight"],
    "gpt2": ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias", "lm_head.weight"],
}  # fmt: skip


@pytest.mark.parametrize("family", EXTRAS)
def test_known_extras_are_ignored(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    before = loaded(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({extra: torch.zeros(3) for extra in EXTRAS[family]}))
    assert same(before, loaded(tmp_path))


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", lambda t: t.pop(Q), r"/model\.safetensors lacks layers\.1\.self_attn\.q_proj\.weight"),
        ("llama", lambda t: [t.pop(name) for name in list(t)[:9]], "and 6 more tensors"),
        ("llama", put("model.layers.7.x", torch.zeros(1)), "'model.layers.7.x', which the model has no place for"),
        ("llama", put(Q, torch.zeros(16, 17)), r"q_proj.weight' in .* has shape \[16, 17\], .* \[16, 16\]"),
        ("llama", put(Q, torch.zeros(256)), r"has shape \[256\], but config.json makes it \[16, 16\]"),
        ("llama", put(Q, torch.zeros(16, 16, dtype=torch.int8)), "q_proj.weight' in .* has dtype int8"),
        ("llama", put(Q.removeprefix("model."), torch.zeros(16, 16)), "already loaded"),
        # transposed weights are named as the file has them
        ("gpt2", put("transformer.h.0.mlp.c_fc.weight", torch.zeros(64, 16)), r"\[64, 16\], but .* \[16, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    family: str, change: Callable[[Tensors], Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path, family)
    rewrite(tmp_path, change)
    with pytest.raises(StartupError, match=words) as failure:
        load_weights(built(tmp_path), tmp_path)
    assert failure.value.remedy


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e5])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",  # stays in the mapped file
        "model.layers.0.self_attn.v_proj.weight",  # is copied when its layer is prepared
        "model.norm.weight",  # is copied
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    name: str, number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e5 is finite, but not in fp16."""
    monkeypatch.setattr("quire.weights.loader.MIN_MAPPED_BYTES", 1)
    monkeypatch.setattr("quire.weights.mapped_files.MIN_MAPPED_BYTES", 1)
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors[name].view(-1)[-1:].fill_(number))
    model = built(tmp_path, torch.float16 if number == 1e5 else torch.float32)

    def load() -> None:
        load_weights(model, tmp_path)
        model.prepare()

    with pytest.raises(StartupError, match=f"'{name}' in .*/model.safetensors has a number that isn't finite"):
        load()


def test_a_sum_that_is_infinite_is_no_error(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors[Q].fill_(3e38))
    load_weights(built(tmp_path), tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_files_are_damaged(keep: int, tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StartupError, match=r"model\.safetensors is damaged: .*Copy or download"):
        load_weights(built(tmp_path), tmp_path)


def test_pickled_and_absent_weights(tmp_path: Path) -> None:
    save(tmp_path)
    model = built(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"has no model\.safetensors"):
        load_weights(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"pickled weights only \('pytorch_model.bin'\).*safetensors"):
        load_weights(model, tmp_path)


def test_progress_counts_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    model = built(tmp_path)
    capsys.readouterr()
    load_weights(model, tmp_path, progress=True)
    assert "21/21" in capsys.readouterr().err
    load_weights(model, tmp_path)
    assert capsys.readouterr().err == ""


def test_dummy_weights() -> None:
    config = {**named_config("gpt2"), "vocab_size": 8000, "n_layer": 2}
    first, again, other = (resolve_model_class(config)(config, torch.bfloat16, CPU) for _ in range(3))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        fill_dummy_weights(model, seed)
    for (key, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if "norm" in key:
            assert (a == (1 if key.endswith("weight") else 0)).all()
        elif a.dim() == 2:
            assert not torch.equal(a, c)
            assert a.float().mean().abs() < 1e-3
            assert a.float().std().item() == pytest.approx(0.02, rel=0.02)
            assert not torch.equal(a[0], a[1])


@pytest.mark.skipif(sys.platform != "linux", reason="files are mapped there")
def test_large_weights_that_need_no_change_lie_in_the_file(tmp_path: Path) -> None:
    theirs = save_large(tmp_path, hidden_size=768)
    model, converted = built(tmp_path, torch.bfloat16), built(tmp_path)
    [mapped] = load_weights(model, tmp_path).mapped
    [other] = load_weights(converted, tmp_path).mapped
    inside = {name for name, x in model.named_parameters() if mapped.begin <= x.data_ptr() < mapped.end}
    assert inside == {"embed_tokens.weight", "head.weight", *(f"layers.{i}.attention.out.weight" for i in range(2))}

    assert not any(other.begin <= x.data_ptr() < other.end for x in converted.parameters())
    # The file stays there if all weights were converted: other memory would lose what is in it.
    lines = Path("/proc/self/maps").read_text().splitlines()
    [there] = [line for line in lines if line.startswith(f"{other.begin:x}-{other.end:x} ")]
    assert there.endswith("model.safetensors")
    assert torch.equal(converted.embed_tokens.weight, theirs.model.embed_tokens.weight.float())
    before = resident(mapped.begin)
    assert torch.equal(model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    assert resident(mapped.begin) >= before + model.embed_tokens.weight.nbytes
    mapped.release()
    assert resident(mapped.begin) == 0
    assert torch.equal(model.head.weight, theirs.lm_head.weight), "it is read again"
    converted.prepare(64, mapped_files=[other])


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are said there")
def test_code_that_start_has_read_is_given_back() -> None:
    """Most of torch's; and it runs on."""
    from quire.weights.mapped_files import _code_mappings, trim_memory

    def code() -> int:
        parts = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        found = [re.search(r"Rss: *(\d+) kB", part) for part in parts if re.match(r".* r-xp .*libtorch_cpu", part)]
        return sum(int(one[1]) for one in found if one is not None)

    begin, end = max(_code_mappings(), key=lambda one: one[1] - one[0])
    ctypes.string_at(begin, end - begin)
    read = code()
    assert 1024 * read >= end - begin
    trim_memory()
    assert code() < read / 2
    assert torch.ones(3).sum() == 3


def resident(begin: int) -> int:
    """Bytes of the mapping that begins there which are in memory."""
    mappings = Path("/proc/self/smaps").read_text().split(f"{begin:x}-", 1)[1]
    return 1024 * int(re.search(r"Rss: *(\d+) kB", mappings)[1])  # type: ignore[index]


LOADING = """
import json, sys
from pathlib import Path
import torch
from quire.config import EngineConfig
from quire.startup.build import build
import quire.worker.model_runner, quire.weights.loader

def kib(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

before = kib("VmRSS")
model, dtype = sys.argv[1:]
built = build(EngineConfig(model=model, device="cpu", dtype=dtype, kv_gib=0.01, skip_tokenizer_init=True))
print(json.dumps([1024 * (kib("VmHWM") - before), built.memory_plan.weight_bytes]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files are mapped there")
@pytest.mark.skipif(library() is None, reason="there are no kernels for this CPU (no compiler?)")
def test_a_start_takes_little_more_memory_than_its_weights(tmp_path: Path) -> None:
    """Neither a copy of all weights beside the packed ones, nor all of the file, converted or not."""
    size = {"intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16}
    save_large(tmp_path, hidden_size=1024, torch_dtype="bfloat16", **size)
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        program = [sys.executable, "-c", LOADING, str(tmp_path), dtype]
        taken, weights = json.loads(subprocess.run(program, capture_output=True, text=True, timeout=100).stdout)
        assert weights > itemsize * 75e6
        assert taken < weights + 60e6, f"{taken / 1e6:.0f} MB at most, for {weights / 1e6:.0f} MB in {dtype}"


# Checkpoints of models that see, without what stands between tower and text: refused by name, with what to do.


FAMILIES: dict[str, Callable[[Path], Any]] = {**MODELS, "mllama": Saved}
PROJECTOR = re.compile(r".*(multi_modal_projector|mlp1|img_projection|glb_GN|sub_GN|image_newline|embed_vision)")
EYES = re.compile(rf"{PROJECTOR.pattern}|.*vision_(model|tower|embed)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: FAMILIES[family](tmp_path_factory.mktemp("saved")).folder)


def without(folder: Path, copy: Path, lost: Callable[[str], object]) -> list[str]:
    """A copy of the folder less some tensors, and what it failed with: cause and remedy. Names of what was left out."""
    copy.mkdir()
    shutil.copy(folder / "config.json", copy)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not lost(name)}
    assert len(kept) < len(tensors), "nothing is lost"
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    config = {**read_config(copy), "preprocessor_config": {}}
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"))
    with pytest.raises(StartupError) as caught:
        load_weights(model, copy)
    return [str(caught.value), *sorted(tensors.keys() - kept.keys())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_without_its_projector(saved: Any, tmp_path: Path, family: str) -> None:
    said, *lost = without(saved(family), tmp_path / "blind", PROJECTOR.match)
    assert "has a vision tower without its projector: it lacks " in said
    assert any(name.endswith(re.search(r"lacks ([\w.]+\w)", said)[1]) for name in lost), said  # type: ignore[index]
    assert "put its tensors, under these names" in said
    assert len(said) < 700


@pytest.mark.parametrize(("family", "end"), [("llava", "linear_2.bias"), ("phi3", "glb_GN")])
def test_one_tensor_of_a_projector(saved: Any, tmp_path: Path, family: str, end: str) -> None:
    said, lost = without(saved(family), tmp_path / "torn", lambda name: name.endswith(end))
    assert f"torn/model.safetensors lacks {lost.removeprefix('model.').removeprefix('vision_embed_tokens.')}." in said
    said, *_ = without(saved(family), tmp_path / "blind", EYES.match)
    assert "has no vision tower and no projector: it lacks " in said
