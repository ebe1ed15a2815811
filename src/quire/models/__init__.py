"""The models. Torch is imported only when a model's class is resolved."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.models.architectures import (
    ARCHITECTURES,
    FAMILIES,
    architecture_of,
    read_model_config,
    read_spec,
    uses_transformers,
)

if TYPE_CHECKING:
    from quire.models.decoder import Decoder
    from quire.models.speculation_heads import SpeculationHead

    Model: TypeAlias = Decoder | SpeculationHead

__all__ = ["ARCHITECTURES", "FAMILIES", "read_model_config", "read_spec", "resolve_model_class", "uses_transformers"]


def resolve_model_class(config: dict[str, Any]) -> type[Model]:
    """Return the model class. Raise StartupError for an architecture that is not supported."""
    module, _, name = architecture_of(config).model.partition(":")
    model_class: type[Model] = getattr(import_module(f"quire.models.{module}"), name)
    return model_class
