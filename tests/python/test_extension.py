"""Loading the compiled module: what does not fit is told before it is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fccl import _build

LOAD = """
import sys, types
import torch
import fccl._extension as extension

build = types.ModuleType("fccl._build")
build.TORCH_VERSION = sys.argv[1]
sys.modules["fccl._build"] = build
assert "fccl._C" not in sys.modules, "importing torch and fccl loads the module already"
try:
    extension.load()
except ImportError as error:
    print(error)
print("loaded" if "fccl._C" in sys.modules else "not loaded")
"""


def load_with_build_for(version: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, version], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("version", ["2.10.0+cpu", "2.99.0", "3.0.1+cu999"])
def test_another_torch_is_told_before_the_module_is_loaded(version: str) -> None:
    said = load_with_build_for(version)
    assert f"built for torch {version}" in said
    assert f"torch {torch.__version__} is installed" in said
    assert "pip install --no-build-isolation" in said
    assert said.endswith("not loaded\n")


def test_a_patch_release_fits() -> None:
    major, minor = torch.__version__.split(".")[:2]
    assert load_with_build_for(f"{major}.{minor}.99") == "loaded\n"


def test_the_build_records_the_torch_it_was_built_for() -> None:
    assert torch.__version__ == _build.TORCH_VERSION
