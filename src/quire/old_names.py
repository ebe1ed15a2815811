"""Names that README, docs and examples imported before the package had its present tree; they import as before."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD_NAMES: dict[str, dict[str, str]] = {  # old module -> its old names, each with its present module and name
    "quire.control": {},
    "quire.control.memory": {},
    "quire.control.memory.paged": {"PagedMemory": "quire.memory.paged:PagedMemory"},
    "quire.control.memory.policies": {"POLICIES": "quire.memory.policies:POLICIES"},
    "quire.control.request": {"Sequence": "quire.protocol.sequence:Sequence"},
    "quire.vocabulary": {},
    "quire.vocabulary.method": {
        name: f"quire.protocol.method:{name}" for name in ("Advance", "Branch", "Choice", "Context", "Ending", "Method")
    },
    "quire.vocabulary.params": {
        name: f"quire.protocol.sampling_params:{name}" for name in ("SamplingParams", "StructuredOutputsParams")
    },
    "quire.vocabulary.seeds": {"branch_seed": "quire.protocol.seeds:branch_seed"},
    "quire.vocabulary.specs": {
        "Geometry": "quire.protocol.kv_cache_config:KVCacheConfig",
        "Group": "quire.protocol.kv_cache_config:KVCacheGroup",
        "Layout": "quire.protocol.kv_cache_config:KVCacheLayout",
    },
}


class OldNames(MetaPathFinder, Loader):
    """Import the modules of OLD_NAMES; asked last, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an old module, None for any other name."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in OLD_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with the present objects under their old names."""
        for name, place in OLD_NAMES[module.__name__].items():
            home, _, present = place.partition(":")
            setattr(module, name, getattr(import_module(home), present))
