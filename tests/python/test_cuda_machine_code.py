"""The machine code of the CUDA kernels, and that the check of it can fail. Needs nvcc and cuobjdump, no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fccl import _extension

CPP = Path(__file__).parents[1] / "cpp"
CSRC = Path(__file__).parents[2] / "csrc"


def find(name: str, folders: list[Path]) -> str | None:
    """The program `name` on PATH or in one of the folders."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def find_cuobjdump() -> str | None:
    """The toolkit's, or the one in triton's package, which torch's CUDA builds require."""
    folders = [Path("/usr/local/cuda/bin")]
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations if triton else None) or []:
        folders += [tool.parent for tool in sorted(Path(folder).rglob("cuobjdump"))]
    return find("cuobjdump", folders)


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    if not _extension.load().build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")
    found = find_cuobjdump()
    if found is None:
        pytest.skip("no cuobjdump on PATH, in /usr/local/cuda/bin or in the package triton")
    return found


def check(cuobjdump: str, file: Path, arch: str) -> tuple[int, str]:
    command = [sys.executable, str(CPP / "cuda" / "check_sass.py"), "--cuobjdump", cuobjdump, "--arch", arch]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout + done.stderr


def architectures() -> list[str]:
    """Those of the module; one that stands for none, so that a skip is seen."""
    try:
        return str(_extension.load().build_info()["cuda_architectures"]).split() or ["none"]
    except ImportError:
        return ["none"]


@pytest.mark.parametrize("arch", architectures())
def test_every_kernel_of_the_module(cuobjdump: str, arch: str) -> None:
    module = _extension.load()
    code, said = check(cuobjdump, Path(str(module.__file__)), arch)
    assert code == 0, said
    assert f"{module.cuda_kernel_count()} kernels for sm_{arch}, 0 of them not as they should be" in said


FLAWED = {
    "words": {
        "Broadcast": "0 releases of a generation for the whole system, expected 1",
        "TwoShotAllReduce": "0 acquires of a generation for the whole system, expected 2",
    },
    "widths": {
        "EncodeBucket": "accesses of single bytes, expected none",
        "ReduceShard": "0 accesses of 128 bits for stores, expected 1",
    },
}


@pytest.mark.parametrize("name", FLAWED)
def test_flawed_kernels_are_found(cuobjdump: str, tmp_path: Path, name: str) -> None:
    nvcc = find("nvcc", [Path("/usr/local/cuda/bin")])
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in /usr/local/cuda/bin")
    arch = architectures()[0]
    cubin = tmp_path / f"{name}.cubin"
    source = CPP / "cuda" / "bad_kernels" / "sass" / f"{name}.cu"
    flags = ["-std=c++20", "-O3", "-fmad=false", "-cubin", f"-arch=sm_{arch}", f"-I{CSRC}", f"-I{CPP}"]
    subprocess.run([nvcc, *flags, str(source), "-o", str(cubin)], check=True, timeout=110)
    code, said = check(cuobjdump, cubin, arch)
    assert code == 1, said
    for kernel, complaint in FLAWED[name].items():
        assert re.search(rf"^{kernel}<.*{complaint}", said, re.MULTILINE), said
    assert f"2 kernels for sm_{arch}, 2 of them not as they should be" in said
