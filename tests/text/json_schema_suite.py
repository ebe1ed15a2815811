"""JSON Schema's own test suite through the compile path: what is accepted, and why the rest is refused.

    make .venv/.json-schema
    python tests/text/json_schema_suite.py .venv/json-schema/tests/draft2020-12 [--out counts.json]

The suite comes with the source of the package jsonschema; the folder may be any other draft's. For each schema that
compiles, every test's text is matched: one that fulfils the schema and isn't matched, or the reverse, is counted as
wrong and named. Order of members and free space aside: a grammar takes members in the schema's order, so texts are
written so where that is possible.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import echo_service

from quire.errors import InputError
from quire.protocol.structured_output import Structured
from quire.text.grammars.compiler import GrammarCompiler


def matches(grammars: GrammarCompiler, asked: Structured, value: Any) -> bool:
    """Whether the text of a value is of the form."""
    place = grammars.get(asked).new_matcher()
    tokens = echo_service.tokenizer().encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    return all(place.accept(token) == "" for token in (*tokens, 0))


def refusal(message: str) -> dict[str, Any]:
    """Why a schema is refused: keywords that can't be enforced, if that is why; what was said, and of what place."""
    said, _, place = message.removeprefix("json: ").rpartition(", at ")
    why, at = (said, place) if said else (place, "")
    keywords = re.fullmatch(r"Unimplemented keys: (\[.*\])", why)
    return {"keywords": json.loads(keywords[1]) if keywords else [], "why": why, "at": at}


def counted(folder: Path) -> dict[str, Any]:
    """Schemas and tests of a folder's files."""
    grammars = GrammarCompiler(echo_service.tokenizer(), echo_service.VOCAB, (0,))
    schemas, tests, reasons = Counter[str](), Counter[str](), Counter[str]()
    refused: list[dict[str, Any]] = []
    wrong: list[str] = []
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            asked = Structured("json", json.dumps(case["schema"]))
            try:
                grammars.get(asked)
            except InputError as error:
                schemas["refused"] += 1
                refused.append({"file": path.stem, "schema": case["description"], **refusal(str(error))})
                reasons[re.sub(r"'[^']*'|\d+", "", refused[-1]["why"])[:90].strip()] += 1
                continue
            schemas["accepted"] += 1
            for test in case["tests"]:
                right = matches(grammars, asked, test["data"]) == test["valid"]
                kind = "right" if right else "too narrow" if test["valid"] else "too wide"
                tests[kind] += 1
                if not right:
                    wrong.append(f"{path.stem}: {case['description']}: {test['description']}: {kind}")
    return {"schemas": dict(schemas), "tests": dict(tests), "refusals": dict(reasons.most_common()), "wrong": wrong,
            "refused": refused}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="count what of JSON Schema's test suite compiles")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = counted(args.folder)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name] for name in ("schemas", "tests", "refusals")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
