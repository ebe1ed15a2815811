"""quire serves large language models; its heart is the memory that holds the pages of every request's KV cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import quire` costs nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
