"""A wheel of quire with its kernels for CPUs prebuilt, for machines like this one that have no compiler:

python tools/build_wheel.py --out dist
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent


def wheel(out: Path) -> Path:
    """The wheel, in `out`; made from a copy, so that nothing from before gets into it. Exits where the kernels can't be
    built."""
    with TemporaryDirectory() as folder:
        away = ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "built", "dist", "tests", "docs")
        source = copytree(ROOT, Path(folder) / "source", ignore=away)
        made = Path(folder) / "made"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*command, "--wheel-dir", str(made), str(source)], check=True)
        [path] = made.glob("*.whl")
        with ZipFile(path) as files:
            built = [name for name in files.namelist() if name.endswith(".so")]
        if not built:
            sys.exit("the kernels weren't built: a C++ compiler (g++ or clang++) is missing, or refused them")
        out.mkdir(parents=True, exist_ok=True)
        return Path(copy(path, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    print(wheel(parser.parse_args().out))


if __name__ == "__main__":
    main()
