"""Transcripts in docs/ say what their commands print: those of the bundled model, made anew and compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import transcripts  # noqa: E402

DOCUMENT = """Text.

<!-- transcript -->
    $ echo two; echo three >&2
    stale
<!-- end -->

<!-- transcript cut=1,1 -->
    $ seq 9
<!-- end -->

<!-- transcript slow -->
    $ exit 3
<!-- end -->

<!-- transcript -->
```python
print("four")
```
<!-- end -->
"""
PRINTED = {
    "    $ echo two; echo three >&2\n": "    two\n    three\n",
    "    $ seq 9\n": "    1\n    ...\n    9\n",
    'print("four")\n```\n': "\n    four\n",
}


@pytest.mark.timeout(300)
def test_transcripts_are_what_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    status = transcripts.main(["--check", "--quick"])
    assert status == 0, "run `python tools/transcripts.py`\n" + capfd.readouterr().out


def test_every_transcript_has_a_document_and_an_end() -> None:
    marked = [path.name for path in transcripts.DOCUMENTS if "<!-- transcript" in path.read_text(encoding="utf-8")]
    assert marked == ["memories.md", "parallel.md", "plan-log.md", "serving.md", "tiny-model.md"]
    for path in transcripts.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert len(transcripts.MARKED.findall(text)) == text.count("<!-- transcript") == text.count("<!-- end -->")


def test_output_is_written_below_its_command(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(DOCUMENT, encoding="utf-8")
    assert transcripts.main([str(path), "--check", "--quick"]) == 1
    assert path.read_text(encoding="utf-8") == DOCUMENT, "a check writes nothing"
    assert transcripts.main([str(path), "--quick"]) == 0
    made = DOCUMENT.replace("    stale\n", "")
    for command, output in PRINTED.items():
        made = made.replace(command, command + output)
    assert path.read_text(encoding="utf-8") == made
    assert transcripts.main([str(path), "--check", "--quick"]) == 0
    with pytest.raises(SystemExit, match="exit 3 ended with 3"):
        transcripts.main([str(path), "--check"])


@pytest.mark.timeout(300)
def test_the_bundled_models_story_is_what_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    """The others that are slow are plans, and those have a test of their own."""
    status = transcripts.main([str(ROOT / "docs" / "tiny-model.md"), "--check"])
    assert status == 0, "run `python tools/transcripts.py`\n" + capfd.readouterr().out
