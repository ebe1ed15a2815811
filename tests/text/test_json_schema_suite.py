"""JSON Schema's own test suite (json_schema_suite.py): what is accepted lets nothing through that it shouldn't."""

from __future__ import annotations

import json
from pathlib import Path

import json_schema_suite
import pytest

SUITE = Path(__file__).parents[2] / ".venv" / "json-schema" / "tests"
# Its schemas don't say their draft, so what stands beside a $ref counts, as it does in 2020-12.
WIDE = {"draft7": ["ref: $ref prevents a sibling $id from changing the base uri: $ref resolves to "
                   "/definitions/base_foo, data does not validate: too wide"]}  # fmt: skip
CASES = [
    {"description": "a list", "schema": {"type": "array", "items": {"const": 1}}, "tests": [
        {"description": "ones", "data": [1, 1], "valid": True}, {"description": "a two", "data": [2], "valid": False},
        {"description": "a one of another spelling", "data": [1.0], "valid": True}]},
    {"description": "unlike", "schema": {"properties": {"a": {"uniqueItems": True, "minContains": 1}}}, "tests": []},
    {"description": "elsewhere", "schema": {"items": {"$ref": "https://example.com/x"}}, "tests": []},
]  # fmt: skip


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(CASES))
    found = json_schema_suite.counted(tmp_path)
    assert (found["schemas"], found["tests"]) == ({"accepted": 1, "refused": 2}, {"right": 2, "too narrow": 1})
    assert found["wrong"] == ["own: a list: a one of another spelling: too narrow"]
    unlike, elsewhere = found["refused"]
    assert unlike == {"file": "own", "schema": "unlike", "keywords": ["minContains", "uniqueItems"],
                      "why": 'Unimplemented keys: ["minContains", "uniqueItems"]',
                      "at": "#/properties/a/uniqueItems"}  # fmt: skip
    assert (elsewhere["keywords"], elsewhere["at"]) == ([], "#/items/$ref")


@pytest.mark.soak
@pytest.mark.parametrize("draft", ["draft4", "draft7", "draft2019-09", "draft2020-12"])
def test_the_suite(draft: str) -> None:
    found = json_schema_suite.counted(SUITE / draft)
    assert found["schemas"]["accepted"] >= 100
    assert [one for one in found["wrong"] if one.endswith("too wide")] == WIDE.get(draft, [])
    assert found["tests"]["too narrow"] <= 0.05 * sum(found["tests"].values()), found["wrong"]
    assert all(one["why"] for one in found["refused"])
