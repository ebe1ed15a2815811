"""quire serves large language models, with a paged KV cache."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.old_names import OldNames

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.llm import LLM, BeamSearchParams
    from quire.pool import Pool
    from quire.protocol.sampling_params import SamplingParams
    from quire.text.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (plain sorted order)
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "Logprob",
    "Pool",
    "RequestOutput",
    "SamplingParams",
]

_MODULES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "BeamSearchOutput": "quire.text.outputs",
    "BeamSearchParams": "quire.llm",
    "BeamSearchSequence": "quire.text.outputs",
    "CompletionOutput": "quire.text.outputs",
    "EngineConfig": "quire.config",
    "Pool": "quire.pool",
    "Logprob": "quire.text.outputs",
    "RequestOutput": "quire.text.outputs",
    "SamplingParams": "quire.protocol.sampling_params",
}

sys.meta_path.append(OldNames())


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `import quire` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
