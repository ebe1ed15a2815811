"""Which library a machine gets: never one with instructions that it lacks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from quire.errors import StartupError
from quire.kernels.cpu import library_loader, variants

X86 = variants.VARIANTS["x86_64"]
ALL = frozenset.union(*(variant.needs for variant in X86))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of x86's variants, on a machine of that kind, whose system refuses nothing."""
    for variant in X86:
        (tmp_path / f"{variant.name}.so").touch()
    (tmp_path / "sources").write_text(variants.source_digest())
    monkeypatch.setattr(library_loader, "BUILT", tmp_path)
    monkeypatch.setattr(library_loader, "machine_variants", lambda: X86)
    monkeypatch.setattr(library_loader, "_tiles_allowed", lambda: True)
    monkeypatch.delenv("QUIRE_CPU_KERNELS", raising=False)
    return tmp_path


def test_the_best_comes_first(built: Path) -> None:
    assert [variant.name for variant in X86] == ["amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2"]
    has = ALL
    for variant, worse in zip(X86, [*X86[1:], None]):
        assert library_loader.find_library(has=has) == built / f"{variant.name}.so"
        has = worse.needs if worse is not None else frozenset()
    assert library_loader.find_library(has=has) is None


@pytest.mark.parametrize("only", ["", *(variant.name for variant in X86)])
def test_no_instruction_is_missing(built: Path, only: str) -> None:
    """Each feature masked alone, each two together, and each of a machine's generations without one."""
    needs = {variant.name: variant.needs for variant in X86}
    masks = [frozenset(), *(frozenset(names) for many in (1, 2) for names in combinations(sorted(ALL), many))]
    for has in {ALL - mask for mask in masks} | {variant.needs - mask for variant in X86 for mask in masks}:
        found = library_loader.find_library(only, has)
        if found is not None:
            assert needs[found.stem] <= has
            assert only in ("", found.stem)
        else:
            assert not any(need <= has for name, need in needs.items() if only in ("", name))


def test_tiles_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (True, False):
        monkeypatch.setattr(library_loader, "_tiles_allowed", lambda allowed=allowed: allowed)
        assert library_loader.usable_features({"avx2", "amx_tile", "amx_bf16"}) == ALL & (
            {"avx2", "amx_tile", "amx_bf16"} if allowed else {"avx2"}
        )
    monkeypatch.setattr(library_loader, "_tiles_allowed", lambda: pytest.fail("a machine without AMX isn't asked"))
    assert library_loader.usable_features({"avx2"}) == {"avx2"}


def test_features_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all cores: what one lacks no kernel may use, as it may run there."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(variants, "CPUINFO", path)
    assert variants.cpu_features() == frozenset()
    for line in ("flags\t\t: fpu avx2 amx_tile", "Features\t: fpu avx2 amx_tile"):
        path.write_text(f"processor\t: 0\nvmx flags\t: vnmi\n{line}\n\nprocessor\t: 1\n")
        assert variants.cpu_features() == {"fpu", "avx2", "amx_tile"}
    path.write_text("Features\t: asimd asimdhp asimddp\n\nFeatures\t: asimd asimdhp\n")
    assert variants.cpu_features() == {"asimd", "asimdhp"}


def test_a_variant_is_named(built: Path) -> None:
    assert library_loader.find_library("avx2", ALL) == built / "avx2.so"
    assert library_loader.find_library("off", ALL) is None
    with pytest.raises(StartupError, match="QUIRE_CPU_KERNELS is 'sse'") as caught:
        library_loader.find_library("sse", ALL)
    assert "amx, avx512bf16, avx512vnni, avx512, avxvnni, avx2, off" in str(caught.value)


def test_libraries_of_other_sources_are_left_alone(built: Path) -> None:
    (built / "sources").write_text("others")
    assert library_loader.find_library(has=ALL) is None
    (built / "sources").unlink()
    assert library_loader.find_library(has=ALL) is None


def test_what_does_not_load_is_left_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_loader, "cpu_features", lambda: ALL)
    assert library_loader.find_library() is not None
    assert library_loader.library.__wrapped__() is None, "an empty file is no library"


def test_what_is_missing_is_said(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_loader, "library", lambda: None)
    monkeypatch.setattr(library_loader, "cpu_features", lambda: ALL - {"fma"})
    assert library_loader.missing_reason() == "this CPU lacks fma"
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    assert library_loader.describe().endswith(": QUIRE_CPU_KERNELS is off")
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "amx")
    monkeypatch.setattr(library_loader, "cpu_features", lambda: X86[-1].needs)
    assert "QUIRE_CPU_KERNELS is 'amx', which" in library_loader.missing_reason()
    monkeypatch.delenv("QUIRE_CPU_KERNELS")
    assert "for another system" in library_loader.missing_reason(), "it doesn't load, as this one is empty"
    (built / "sources").write_text("others")
    assert "from other sources" in library_loader.missing_reason()
    for path in built.iterdir():
        path.unlink()
    assert "install a C++ compiler" in library_loader.describe()
    monkeypatch.setattr(library_loader, "cpu_features", lambda: X86[-1].needs - {"fma"})
    assert library_loader.missing_reason() == "this CPU lacks fma", "so none were built"
    monkeypatch.setattr(library_loader, "machine_variants", lambda: ())
    assert "quire has no kernels for" in library_loader.missing_reason()
