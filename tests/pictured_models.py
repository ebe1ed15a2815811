"""Tiny random models of transformers whose text has pictures' rows in place of tokens' embeddings, saved as they are
published, and what they say of tokens and pictures. Pictures are bytes already cut into tiles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import transformers
from internlm2_files import INTERNLM2
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.models import read_model_config
from quire.models.vision import VisionSettings
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels

VOCAB, TOKEN, SIDE = 67, 61, 28
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 7,
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
GEMMA2 = {
    **TEXT, "model_type": "gemma2", "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 9,
    "query_pre_attn_scalar": 8,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2,
    "model_type": "gemma3_text",
    "sliding_window": 3,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
}
GEMMA4 = {
    **GEMMA2, "model_type": "gemma4_text", "global_head_dim": 16, "sliding_window": 3, "pad_token_id": 7,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": SIDE // 2, "pooling_kernel_size": 2,
    "position_embedding_size": 560, "standardize": True,
}  # fmt: skip
PHI3_ROPE = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.2, 2.0, 3.0, 5.0], "type": "su"}


class Shown(NamedTuple):
    """A picture: what an engine gets, and what stands for it."""

    pixels: ImagePixels
    grid: TileGrid
    rows: int
    parts: int

    @property
    def tiles(self) -> Tensor:
        return torch.from_numpy(np.frombuffer(self.pixels.data, np.uint8).reshape(self.pixels.shape).copy())


class Prompt(NamedTuple):
    """Token ids, and the pictures among them with where each stands."""

    tokens: list[int]
    media: tuple[ImageItem, ...]
    pictures: tuple[Shown, ...]


class Projection(nn.Module):
    """Phi-3-Vision's connector as it was published with the weights: reshapes, 2 x 2 merge, separators, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.img_projection = nn.Sequential(nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32))
        self.glb_GN, self.sub_GN = nn.Parameter(torch.zeros(1, 1, 128)), nn.Parameter(torch.zeros(1, 1, 1, 128))

    def forward(self, features: Tensor, h: int, w: int) -> Tensor:
        def squares(x: Tensor) -> Tensor:
            return x.reshape(-1, 2, 2, 2, 2, 32).permute(0, 1, 3, 2, 4, 5).reshape(len(x), 4, 128)

        whole = squares(features[:1]).reshape(1, 2, 2, 128)
        whole = torch.cat([whole, self.sub_GN.repeat(1, 2, 1, 1)], dim=2).reshape(1, -1, 128)
        tiles = squares(features[1:]).reshape(1, h, w, 2, 2, 128).permute(0, 1, 3, 2, 4, 5)
        tiles = tiles.reshape(1, h * 2, w * 2, 128)
        tiles = torch.cat([tiles, self.sub_GN.repeat(1, h * 2, 1, 1)], dim=2).reshape(1, -1, 128)
        return self.img_projection(torch.cat([tiles, self.glb_GN, whole], dim=1))[0]


def randomised(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 * ("norm" in name), 0.1 if parameter.dim() == 1 else 0.3)
    return model.float().eval()


class Model:
    """One of transformers', its folder, and our settings of its encoder."""

    vision: VisionSettings
    settings: ClassVar[dict[str, Any]] = {"kv_tokens": 2048, "max_model_len": 1024}

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.make()
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def make(self) -> None:
        raise NotImplementedError

    def built(self, family: str, **options: Any) -> nn.Module:
        config = transformers.AutoConfig.for_model(family, **options)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        return randomised(model)

    def saved(self, preprocessor: dict[str, Any], **save: Any) -> None:
        self.model.save_pretrained(self.folder, **save)
        self.finish(json.loads((self.folder / "config.json").read_text()), preprocessor)

    def finish(self, config: dict[str, Any], preprocessor: dict[str, Any]) -> None:
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        vision = read_model_config({**config, "preprocessor_config": preprocessor}).vision
        assert vision is not None
        self.vision = vision

    def shown(self, height: int, width: int, seed: int = 0, alone: bool = True) -> Shown:
        """A picture of that size, of noise."""
        tiling = self.vision.tiling
        grid = tiling.choose_grid(height, width, alone)
        shape = self.tiles(grid), SIDE, SIDE, 3
        data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
        key = hashlib.sha256(data).digest()
        return Shown(ImagePixels(key, shape, data, tuple(grid)), grid, tiling.num_embeds(grid), tiling.num_parts(grid))

    def tiles(self, grid: TileGrid) -> int:
        return self.vision.tiling.num_parts(grid)

    def prompt(self, *pieces: list[int] | Shown) -> Prompt:
        tokens, media, pictures = list[int](), list[ImageItem](), list[Shown]()
        for piece in pieces:
            if isinstance(piece, Shown):
                media.append(ImageItem(piece.pixels.key, len(tokens), piece.rows, piece.rows, piece.parts))
                pictures.append(piece)
                tokens += [TOKEN] * piece.rows
            else:
                tokens += piece
        return Prompt(tokens, tuple(media), tuple(pictures))

    def normalised(self, tiles: Tensor) -> Tensor:
        normal = self.vision.normalization
        mean, std = torch.tensor(normal.mean), torch.tensor(normal.std)
        return ((tiles * normal.scale - mean) / std).permute(0, 3, 1, 2)

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        """What transformers' model is given of a prompt's pictures."""
        return {"pixel_values": torch.cat([self.normalised(one.tiles) for one in prompt.pictures])}

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, more: list[int]) -> Tensor:
        """[1 + len(more), V]: of what follows the prompt, and each of `more`."""
        key = (*prompt.tokens, -1, *(int.from_bytes(m.key[:7]) for m in prompt.media), -1, *more)
        if key not in self.kept:
            self.kept[key] = self.logits(prompt, more)[len(prompt.tokens) - 1 :].log_softmax(-1)
        return self.kept[key]

    def following(self, prompt: Prompt, tokens: list[int]) -> Tensor:
        """[len(tokens), V]: of each of these tokens behind a prompt."""
        return self.logprobs(prompt, tokens)[:-1]

    def logits(self, prompt: Prompt, more: list[int]) -> Tensor:
        ids = torch.tensor([prompt.tokens + more])
        return self.model(input_ids=ids, **(self.inputs(prompt) if prompt.media else {})).logits[0]

    @torch.inference_mode()
    def generate(self, prompt: Prompt, count: int) -> list[int]:
        """Greedy tokens, none of which is TOKEN: Gemma-4's class would take that for a picture's."""
        ids = torch.tensor([prompt.tokens])
        more = self.inputs(prompt) if prompt.media else {}
        found = self.model.generate(
            input_ids=ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids),
            suppress_tokens=[TOKEN], **more,
        )  # fmt: skip
        return found[0, len(prompt.tokens) :].tolist()


class Llava(Model):
    def make(self) -> None:
        sizes = [[SIDE * rows, SIDE * columns] for rows in (1, 2) for columns in (1, 2, 3)]
        self.model = self.built(
            "llava_onevision", vision_config=SIGLIP, text_config={**TEXT, "model_type": "qwen2"},
            image_grid_pinpoints=sizes, vision_aspect_ratio="anyres_max_2", image_token_index=TOKEN,
            tie_word_embeddings=True,
        )  # fmt: skip
        self.saved({"size": {"height": SIDE, "width": SIDE}})

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        count = len(prompt.pictures)
        tiles = [self.normalised(one.tiles) for one in prompt.pictures]
        most = max(map(len, tiles))
        padded = torch.stack([torch.cat([x, torch.zeros(most - len(x), *x.shape[1:])]) for x in tiles])
        sizes = torch.tensor([one.grid[2:] for one in prompt.pictures])
        return {"pixel_values": padded, "image_sizes": sizes, "batch_num_images": torch.tensor([count])}


class InternVL(Model):
    text = "qwen2"

    def make(self) -> None:
        tower = {**TOWER, "image_size": [SIDE, SIDE], "patch_size": [7, 7]}
        text = {**TEXT, "model_type": self.text}
        tied = self.text == "qwen2"
        self.model = self.built(
            "internvl", vision_config=tower, text_config=text, image_token_id=TOKEN, tie_word_embeddings=tied
        )
        self.saved({"size": {"height": SIDE, "width": SIDE}, "max_patches": 3})


class InternVLChat(InternVL):
    """InternVL on a Llama, as an InternVLChatModel on InternLM2 is published."""

    text = "llama"
    VISION: ClassVar = {
        "model.vision_tower.": "vision_model.", "vision_tower.": "vision_model.", "cls_token": "class_embedding",
        "position_embeddings": "position_embedding", "patch_embeddings.projection": "patch_embedding",
        "encoder.layer.": "encoder.layers.", "attention.projection_layer": "attn.proj", "attention.": "attn.",
        "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_": "ls",
        "model.multi_modal_projector.": "multi_modal_projector.", "multi_modal_projector.layer_norm": "mlp1.0",
        "multi_modal_projector.linear_1": "mlp1.1", "multi_modal_projector.linear_2": "mlp1.3",
    }  # fmt: skip
    LANGUAGE: ClassVar = {"model.language_model.": "", "language_model.": "", "model.": "", **INTERNLM2}

    def make(self) -> None:
        super().make()
        path = self.folder / "model.safetensors"
        save_file(dict(self._published(load_file(path))), path)
        llm = self.model.config.text_config.to_dict()
        del llm["rope_parameters"], llm["dtype"]
        llm |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False}
        config = {
            "architectures": ["InternVLChatModel"],
            "vision_config": {**TOWER, "norm_type": "layer_norm", "qkv_bias": False, "qk_normalization": False},
            "llm_config": llm, "force_image_size": SIDE, "downsample_ratio": 0.5, "ps_version": "v2",
            "use_thumbnail": True, "max_dynamic_patch": 3,
        }  # fmt: skip
        self.finish(config, {"size": SIDE})

    def _published(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        renamed = {}
        for name, tensor in tensors.items():
            language = "language_model" in name or name.startswith("lm_head")
            for old, new in (self.LANGUAGE if language else self.VISION).items():
                name = name.replace(old, new)
            if language:
                name = f"language_model.{name}" if name == "output.weight" else f"language_model.model.{name}"
            renamed[name] = tensor
        for name in [name for name in renamed if "q_proj.weight" in name]:
            q, k, v = (renamed.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
            if "language" in name:
                groups = (q.view(2, 2, 8, 32), k.view(2, 1, 8, 32), v.view(2, 1, 8, 32))
                yield name.replace("self_attn.q_proj", "attention.wqkv"), torch.cat(groups, 1).reshape(-1, 32)
            else:
                yield name.replace("q_proj", "qkv"), torch.cat((q, k, v))
        yield from renamed.items()


class PaliGemma(Model):
    def make(self) -> None:
        self.model = self.built(
            "paligemma", vision_config=SIGLIP, text_config=GEMMA2, projection_dim=32, image_token_index=TOKEN
        )
        self.saved({"size": {"height": SIDE, "width": SIDE}})

    def logits(self, prompt: Prompt, more: list[int]) -> Tensor:
        ids = torch.tensor([prompt.tokens + more])
        types = torch.tensor([[0] * len(prompt.tokens) + [1] * len(more)])
        pictures = self.inputs(prompt) if prompt.media else {}
        return self.model(input_ids=ids, token_type_ids=types, **pictures).logits[0]

    def generate(self, prompt: Prompt, count: int) -> list[int]:
        tokens = list[int]()
        for _ in range(count):
            last = self.logprobs(prompt, tokens)[-1]
            tokens.append(int(last.index_fill(0, torch.tensor([TOKEN]), -torch.inf).argmax()))
        return tokens


class Gemma3(PaliGemma):
    """A window is shorter than an image. The text ends a run of image tokens."""

    def make(self) -> None:
        self.model = self.built(
            "gemma3", vision_config=SIGLIP, text_config=GEMMA3, mm_tokens_per_image=4, image_token_id=TOKEN
        )
        self.saved({"size": {"height": SIDE, "width": SIDE}})

    def logits(self, prompt: Prompt, more: list[int]) -> Tensor:
        ids = torch.tensor([prompt.tokens + more])
        pictures = self.inputs(prompt) if prompt.media else {}
        return self.model(input_ids=ids, token_type_ids=(ids == TOKEN).long(), **pictures).logits[0]


class Gemma4(Gemma3):
    """Images of up to 6 tokens, which attend to one another both ways in layers with a window."""

    text: ClassVar[dict[str, Any]] = {**GEMMA4, "use_bidirectional_attention": "vision"}
    clipped = False

    def make(self) -> None:
        vision = {**GEMMA4_VISION, "use_clipped_linears": self.clipped}
        self.model = self.built("gemma4", vision_config=vision, text_config=self.text, image_token_id=TOKEN)
        for name, buffer in self.model.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.fill_(-2.0 if name.endswith("_min") else 3.0)
            if name.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.linspace(0.2, 1, len(buffer)))
        self.saved({"max_soft_tokens": 6})

    def tiles(self, grid: TileGrid) -> int:
        return grid.rows * grid.columns

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        patch, side = SIDE // 2, 2
        values = torch.zeros(len(prompt.pictures), 6 * side**2, 3 * patch**2)
        positions = torch.full((*values.shape[:2], 2), -1)
        for i, one in enumerate(prompt.pictures):
            rows, columns = one.grid[:2]
            lines = one.tiles.view(rows, columns, side, patch, side, patch, 3).permute(0, 2, 1, 4, 3, 5, 6)
            lines = lines.reshape(rows * side * columns * side, -1)
            values[i, : len(lines)] = lines / 255
            at = torch.arange(len(lines))
            positions[i, : len(lines)] = torch.stack((at % (columns * side), at // (columns * side)), 1)
        return {"pixel_values": values, "image_position_ids": positions}

    def logits(self, prompt: Prompt, more: list[int]) -> Tensor:
        ids = torch.tensor([prompt.tokens + more])
        pictures = self.inputs(prompt) if prompt.media else {}
        return self.model(input_ids=ids, mm_token_type_ids=(ids == TOKEN).long(), **pictures).logits[0]


class Gemma4PerLayerInputs(Gemma4):
    """All attention is causal. A token of an image has the per-layer input of padding."""

    text: ClassVar[dict[str, Any]] = {
        **GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
    }  # fmt: skip
    clipped = True


class Phi3Vision(Model):
    """transformers' CLIP and Phi-3, and a connector of ours."""

    generate = PaliGemma.generate

    def make(self) -> None:
        clip = transformers.CLIPVisionConfig(**TOWER)
        self.clip = randomised(transformers.CLIPVisionModel(clip))
        self.projection = randomised(Projection())
        text = {**TEXT, "num_key_value_heads": 4, "rope_scaling": PHI3_ROPE, "original_max_position_embeddings": 1024}
        rope = {**PHI3_ROPE, "original_max_position_embeddings": 1024}
        config = transformers.Phi3Config(**text | {"rope_scaling": rope})
        self.model = randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        root = "model.vision_embed_tokens."
        tensors = {f"{root}img_processor.vision_model.{k}": v for k, v in self.clip.state_dict().items()}
        tensors |= {f"{root}{k}": v for k, v in self.projection.state_dict().items()}
        save_file(tensors | self.model.state_dict(), self.folder / "model.safetensors")
        image = {"name": "clip_vision_model", "image_dim_out": 32, "layer_idx": -2, "vision_config": TOWER}
        layer = {"projection_cls": "mlp", "use_hd_transform": True, "with_learnable_separator": True,
                 "hd_transform_order": "sub_glb"}  # fmt: skip
        stored = {"architectures": ["Phi3VForCausalLM"], **text, "img_processor": image, "embd_layer": layer}
        self.finish({**stored, "rms_norm_eps": config.rms_norm_eps}, {"num_crops": 4})

    def finish(self, config: dict[str, Any], preprocessor: dict[str, Any]) -> None:
        from quire.models.vision import settings

        settings.PHI3_IMAGE_TOKEN = TOKEN
        super().finish(config, preprocessor)

    def tiles(self, grid: TileGrid) -> int:
        return grid.rows * grid.columns

    def logits(self, prompt: Prompt, more: list[int]) -> Tensor:
        ids = torch.tensor([prompt.tokens + more])
        x = self.model.get_input_embeddings()(ids)
        for medium, shown in zip(prompt.media, prompt.pictures):
            x[0, medium.start : medium.end] = self.rows(shown)
        return self.model(inputs_embeds=x).logits[0]

    def rows(self, shown: Shown) -> Tensor:
        tiles, grid = self.normalised(shown.tiles.float()), shown.grid
        whole = tiles.reshape(grid.rows, grid.columns, 3, SIDE, SIDE).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, 3, grid.rows * SIDE, grid.columns * SIDE)
        whole = nn.functional.interpolate(whole, (SIDE, SIDE), mode="bicubic")
        hidden = self.clip(torch.cat((whole, tiles)), output_hidden_states=True).hidden_states[-2][:, 1:]
        return self.projection(hidden, grid.rows, grid.columns)


MODELS: dict[str, type[Model]] = {
    "llava": Llava, "internvl": InternVL, "internvl published": InternVLChat, "phi3": Phi3Vision,
    "paligemma": PaliGemma, "gemma3": Gemma3, "gemma4": Gemma4, "gemma4 per-layer inputs": Gemma4PerLayerInputs,
}  # fmt: skip
