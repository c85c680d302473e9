"""The build with CUDA kernels: when it is chosen, and what the module that comes of it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fccl import _extension

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    """A build tool of this environment or of the system; skips the test where there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


# ---- When ----

FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  --list-gpu-arch) for one in {architectures}; do echo compute_$one; done ;;
  *) [ "{compiles}" = yes ] || {{ echo "error: unsupported GNU version" >&2; exit 1; }} ;;
esac
"""


def fake_nvcc(
    folder: Path, version: str = "13.0", architectures: str = "75 80 90 100", compiles: bool = True
) -> Path:
    nvcc = folder / "nvcc"
    text = FAKE_NVCC.format(
        version=version, architectures=architectures, compiles="yes" if compiles else "no"
    )
    nvcc.write_text(text)
    nvcc.chmod(0o755)
    return nvcc


def choose(
    folder: Path, choice: str, nvcc: Path | None, torch_cuda: str = "13.0", **more: str
) -> tuple[bool, str]:
    """Whether the configuration goes on, and what it says: the outcome is printed last."""
    variables = {
        "FCCL_CUDA": choice,
        "FCCL_TORCH_VERSION": "2.99.0",
        "FCCL_TORCH_CUDA": torch_cuda,
        "CMAKE_CXX_COMPILER": "c++",
        "FCCL_CUDA_ROOT": str(folder / "nowhere"),
        **more,
    }
    script = folder / "choose.cmake"
    script.write_text(
        "".join(f'set({name} "{value}")\n' for name, value in variables.items())
        + f"include({ROOT}/cmake/FcclCudaChoice.cmake)\n"
        + 'message("enabled: ${FCCL_CUDA_ENABLED}; for: ${FCCL_CUDA_ARCHITECTURES}; by: ${FCCL_NVCC}")\n'
    )
    environment = {"PATH": str(nvcc.parent if nvcc else folder / "nowhere")}
    done = subprocess.run(
        [tool("cmake"), "-P", str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    return done.returncode == 0, re.sub(r"\s+", " ", said)  # CMake breaks lines where it likes


@pytest.mark.parametrize("choice", ["AUTO", "ON"])
def test_the_architectures_that_the_compiler_knows(tmp_path: Path, choice: str) -> None:
    nvcc = fake_nvcc(tmp_path)
    went_on, said = choose(tmp_path, choice, nvcc)
    assert went_on, said
    assert f"enabled: ON; for: 80-real;90-real;100; by: {nvcc}" in said  # PTX of the last one only


@pytest.mark.parametrize("variable", ["FCCL_CUDA_ARCHITECTURES", "CMAKE_CUDA_ARCHITECTURES"])
def test_architectures_can_be_given(tmp_path: Path, variable: str) -> None:
    went_on, said = choose(tmp_path, "ON", fake_nvcc(tmp_path), **{variable: "90"})
    assert went_on, said
    assert "enabled: ON; for: 90; by" in said


REASONS = {
    "no nvcc": ({}, ["there is no nvcc on PATH", "CMAKE_CUDA_COMPILER"]),
    "older toolkit": ({"version": "12.8"}, ["of CUDA 12.8", "torch 2.99.0 of CUDA 13.0", "the same"]),
    "newer toolkit": ({"version": "14.1"}, ["of CUDA 14.1", "torch 2.99.0 of CUDA 13.0", "the same"]),
    "nothing it knows": ({"architectures": "50 60"}, ["none of the architectures", "compute_50"]),
    "host compiler": ({"compiles": False}, ["cannot compile", "unsupported GNU version"]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_in_the_way_is_told(tmp_path: Path, reason: str) -> None:
    how, words = REASONS[reason]
    nvcc = fake_nvcc(tmp_path, **how) if how else None
    went_on, said = choose(tmp_path, "ON", nvcc)
    assert not went_on
    for word in ["FCCL_CUDA=ON", *words]:
        assert word in said
    went_on, said = choose(tmp_path, "AUTO", nvcc)
    assert went_on, said
    for word in ["built without its CUDA kernels", *words, "enabled: OFF"]:
        assert word in said


def test_a_torch_without_cuda(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    went_on, said = choose(tmp_path, "ON", nvcc, torch_cuda="")
    assert not went_on
    assert "torch 2.99.0 is a build without CUDA" in said
    went_on, said = choose(tmp_path, "AUTO", nvcc, torch_cuda="")
    assert went_on and "torch has no CUDA" in said and "enabled: OFF" in said
    assert "Warning" not in said  # the usual case, and nothing is wrong


def test_off_looks_for_nothing(tmp_path: Path) -> None:
    went_on, said = choose(tmp_path, "OFF", tmp_path / "nvcc")
    assert went_on and said.strip() == "enabled: OFF; for: ; by:"


def test_another_word_is_refused(tmp_path: Path) -> None:
    went_on, said = choose(tmp_path, "MAYBE", fake_nvcc(tmp_path))
    assert not went_on and "FCCL_CUDA=MAYBE: expected AUTO, ON or OFF" in said


# ---- What comes of it ----


def built_with_cuda() -> bool:
    return bool(_extension.load().build_info()["cuda"])


def test_the_kernels_are_linked_in_exactly_in_a_build_with_cuda() -> None:
    module = _extension.load()
    architectures = str(module.build_info()["cuda_architectures"]).split()
    if built_with_cuda():
        assert torch.version.cuda is not None
        assert module.cuda_kernel_count() == 126
        assert architectures and all(re.fullmatch(r"\d+[af]?", one) for one in architectures)
    else:
        assert module.cuda_kernel_count() == 0
        assert architectures == []


def dynamic_section() -> str:
    path = str(_extension.load().__file__)
    return subprocess.run([tool("readelf"), "-dW", path], capture_output=True, text=True, check=True).stdout


def test_the_module_needs_no_driver_and_knows_no_folders() -> None:
    section = dynamic_section()
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", section)
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert not any(name.startswith("libcuda.so") for name in needed)  # the driver's
    # torch has loaded what is needed by then; a path would be one of the machine that built it.
    assert "RPATH" not in section and "RUNPATH" not in section
    of_cuda = [name for name in needed if "cuda" in name]
    if built_with_cuda():
        major = str(torch.version.cuda).split(".")[0]
        assert f"libcudart.so.{major}" in of_cuda
    else:
        assert of_cuda == []


# Linkers leave every undefined symbol of a module to the interpreter, because Python's own are found there.
def test_nothing_but_python_is_left_undefined() -> None:
    path = str(_extension.load().__file__)
    site = Path(torch.__file__).parents[1]
    folders = [site / "torch" / "lib", *sorted(site.glob("nvidia/*/lib"))]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run([tool("ldd"), "-r", path], env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "not found" not in said, said
    undefined = re.findall(r"undefined symbol: (\S+?),?\s+\((.*?)\)", said)
    of_module = {name for name, where in undefined if Path(where).name == Path(path).name}
    assert any(name.startswith("Py") for name in of_module), said
    assert {name for name in of_module if not re.match(r"_?Py", name)} == set()


def test_a_build_without_cuda_asks_for_no_symbol_of_it() -> None:
    if built_with_cuda():
        pytest.skip("this build has CUDA kernels")
    path = str(_extension.load().__file__)
    command = [tool("nm"), "-D", "--undefined-only", path]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in symbols if re.match(r"(__)?cuda|cu[A-Z]|_ZNK?(2at|3c10)4cuda", name)] == []
