"""Plants changes in the package's source as Python imports it, in child processes too. The files stay as they are.

With this folder on PYTHONPATH Python imports this module at its start. TEST_PLANTED names a JSON file of modules'
paths and the source to compile in place of each; TEST_PROBES names the folder of code that probes.py prepared."""

import os

PLANTED = os.environ.get("TEST_PLANTED")
PROBED = os.environ.get("TEST_PROBES")

if PLANTED or PROBED:
    import importlib.machinery
    import importlib.util
    import json
    import sys
    from collections.abc import Sequence
    from pathlib import Path
    from types import CodeType, ModuleType

    class Loader(importlib.machinery.SourceFileLoader):
        """Runs other code than the file holds, and caches nothing."""

        def __init__(self, name: str, path: str, code: CodeType) -> None:
            super().__init__(name, path)
            self.code = code

        def get_code(self, fullname: str) -> CodeType:
            return self.code

    class Finder:
        """Finds a module where Python would, and gives it the loader above where its source is changed."""

        def __init__(self) -> None:
            self.sources: dict[str, str] = json.loads(Path(PLANTED).read_text()) if PLANTED else {}

        def find_spec(
            self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if name != "quire" and not name.startswith("quire."):
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is None or spec.origin is None:
                return None
            code = None
            if spec.origin in self.sources:
                code = compile(self.sources[spec.origin], spec.origin, "exec", dont_inherit=True)
            elif PROBED:
                from probes import probed

                code = probed(spec.origin)
            if code is not None:
                spec.loader = Loader(name, spec.origin, code)
            return spec

    sys.meta_path.insert(0, Finder())
