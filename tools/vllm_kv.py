"""Run vLLM's own KV memory and scheduler for a config.json, on a machine without a GPU, for tools/compare_kv.py.

All rules are vLLM's own. Its EngineArgs makes the settings; its model class makes the layers, on torch's meta device;
the layers make the specs of their caches; and vLLM plans the blocks and schedules requests as in its engine. This
module only replaces what needs the GPU: it has a platform that reports an H200, and empty modules in place of the
compiled kernels, which are never called.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

VERSION = "0.26.0"
REQUIREMENTS = (
    f"vllm=={VERSION}", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "einops",
    "loguru", "msgspec", "openai-harmony", "py-cpuinfo", "pybase64", "pyzmq",
)  # fmt: skip
"""vLLM, and those of its requirements that are imported here and that quire does not have."""
OP_NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_utils")
PER_LAYER_KEYS = ("global_head_dim", "num_global_key_value_heads")
"""Keys of Gemma-4 that vLLM reads, and that later versions of transformers keep in each layer's settings instead."""
SAMPLED = 7  # every sampled token


class NoOp:
    """Stands for any operation of a missing module. Calls return False: asked for support, there is none."""

    def __getattr__(self, name: str) -> NoOp:
        return NoOp()

    def __call__(self, *args: Any, **named: Any) -> bool:
        return False


class EmptyModule(types.ModuleType):
    """A module with any attribute."""

    def __getattr__(self, name: str) -> NoOp:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoOp()


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's compiled modules and its library of grammars, all of them empty."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        last = name.rpartition(".")[2]
        compiled = name.startswith("vllm.") and last.startswith("_") and "_C" in last
        return importlib.machinery.ModuleSpec(name, self) if compiled or name == "xgrammar" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(folder: Path) -> None:
    """Make vLLM importable from `folder` as on an H200. Raise SystemExit with what to install if it isn't there."""
    if not (folder / f"vllm-{VERSION}.dist-info").is_dir():
        raise SystemExit(
            f"vLLM {VERSION} is not in {folder}. Install it there (800 MB), without torch and its other requirements:\n"
            f"    python -m pip install --no-deps --target {folder} {' '.join(REQUIREMENTS)}"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.append(str(folder))  # quire's own packages come first
    sys.meta_path.insert(0, EmptyModules())
    register = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **named: Any) -> Any:
        if isinstance(op, str) and op.partition("::")[0] in OP_NAMESPACES:
            return lambda function: function
        return register(op, *args, **named)

    torch.library.register_fake = register_fake
    for name in OP_NAMESPACES:
        setattr(torch.ops, name, NoOp())

    platforms, cuda, interface = map(_vllm, ("platforms", "platforms.cuda", "platforms.interface"))
    answers: dict[str, Any] = {
        "get_device_capability": interface.DeviceCapability(9, 0), "get_device_name": "NVIDIA H200", "device_count": 1,
        "get_device_total_memory": 140 * 2**30, "current_device": "meta",
    }  # fmt: skip
    methods = {name: classmethod(lambda cls, *args, value=value, **named: value) for name, value in answers.items()}
    platforms._current_platform = type("H200", (cuda.CudaPlatformBase,), methods)()  # before other modules ask for it
    _vllm("utils.torch_utils")._aux_stream = object()  # a CUDA stream, which nothing uses
    registry = _vllm("model_executor.models.registry")
    # vLLM inspects the class in a new process, which would not have the platform above.
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
        lazy.load_model_cls()
    )


def _vllm(name: str) -> Any:
    """Return a module of vLLM."""
    return importlib.import_module(f"vllm.{name}")


class Vllm:
    """vLLM's scheduler over `kv_bytes` of memory for the model of a config.json. `settings` are EngineArgs's."""

    def __init__(self, config: Mapping[str, Any], kv_bytes: int, settings: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_kv_cache_configs,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(
                json.dumps({**config, "allow_global_per_layer_attribute_access": True})
            )
            args = EngineArgs(
                model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
                async_scheduling=False, hf_overrides={key: config[key] for key in PER_LAYER_KEYS if key in config},
                **settings,
            )  # fmt: skip
            self.config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        specs = _cache_specs(self.config)
        [plan] = get_kv_cache_configs(self.config, [specs], [kv_bytes])
        self.kv_config = generate_scheduler_kv_cache_config([plan])
        cache = self.config.cache_config
        cache.num_gpu_blocks = self.kv_config.num_blocks
        cache.block_size = min(group.kv_cache_spec.block_size for group in self.kv_config.kv_cache_groups)
        self.block_bytes = sum(tensor.size for tensor in plan.kv_cache_tensors) // plan.num_blocks
        block_size, hash_size = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config, kv_cache_config=self.kv_config, log_stats=False, block_size=block_size,
            structured_output_manager=StructuredOutputManager(self.config), hash_block_size=hash_size,
        )  # fmt: skip
        self.hasher: Callable[[Any], Any] | None = None
        if cache.enable_prefix_caching:
            hash_function = _vllm("utils.hashing").get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self.hasher = get_request_block_hasher(hash_size, hash_function)
        self.num_requests = 0

    def describe(self) -> dict[str, Any]:
        """Return vLLM's choices: its prefix caching, and for each group of layers the tokens and bytes of a block."""
        cache = self.config.cache_config
        groups = []
        for group in self.kv_config.kv_cache_groups:
            spec = group.kv_cache_spec
            shapes = zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()))
            payload = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes) or spec.real_page_size_bytes
            groups.append({
                "kind": type(spec).__name__, "layers": len(group.layer_names), "block_tokens": spec.block_size,
                "layer_block_bytes": spec.page_size_bytes, "padding": 1 - payload / spec.page_size_bytes,
            })  # fmt: skip
        return {
            "prefix_caching": bool(cache.enable_prefix_caching), "mamba_cache_mode": cache.mamba_cache_mode,
            "blocks": self.kv_config.num_blocks, "block_bytes": self.block_bytes, "groups": groups,
        }  # fmt: skip

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[list[int], int]:
        """Serve all prompts, `output` tokens each. Return the tokens of each that were found in the cache, and the
        bytes in use when all of them ran and had two tokens at least."""
        from vllm import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        requests = {}
        for prompt in prompts:
            self.num_requests += 1
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            request = Request(str(self.num_requests), list(prompt), params, None, block_hasher=self.hasher)
            requests[request.request_id] = request
            self.scheduler.add_request(request)
        taken, hits = 0, {}
        while self.scheduler.has_unfinished_requests():
            plan = self.scheduler.schedule()
            names = list(plan.num_scheduled_tokens)
            assert names, "vLLM has no room for the requests"
            hits.update({data.req_id: data.num_computed_tokens for data in plan.scheduled_new_reqs})
            if not taken and min(request.num_output_tokens for request in requests.values()) >= 2:
                assert len(self.scheduler.running) == len(prompts), "a request ended before all ran"
                pool = self.scheduler.kv_cache_manager.block_pool
                taken = (self.kv_config.num_blocks - 1 - pool.get_num_free_blocks()) * self.block_bytes
            sampled = [
                [SAMPLED] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names
            ]
            indices = {name: index for index, name in enumerate(names)}
            self.scheduler.update_from_output(plan, ModelRunnerOutput(names, indices, sampled))
        return [hits[name] for name in requests], taken


def _cache_specs(config: Any) -> dict[str, Any]:
    """Return the specs of the model's layers, as vLLM's workers report them after they made the model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    dtype = torch.get_default_dtype()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile() as file:
                init_distributed_environment(1, 0, f"file://{file.name}.store", 0, backend="gloo")
        parallel_state.destroy_model_parallel()  # its groups depend on the model
        initialize_model_parallel(1, 1)
        try:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                initialize_model(config)
        finally:
            torch.set_default_dtype(dtype)
        current_platform.update_block_size_for_backend(config)
    return dict(get_kv_cache_spec(config))
