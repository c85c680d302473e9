"""The simulated CUDA device (tests/sim_cuda) for tests: builds its library, runs ranks that have it, reads what it saw.

A rank's device memory is memory of the host, its streams are threads, and fccl's kernels run on fibres; torch and
fccl know nothing of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fccl_testing import RankPool, run_ranks

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def library() -> str:
    """The path of the simulation's library, which is built first if that is due."""
    cmake = _tool("cmake")
    include = _cuda_include()
    build = ROOT / "build" / "sim_cuda"
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers come here together
        # Twice if there is a build of elsewhere: CMake will not go on with it.
        for command in (
            [cmake, "-S", str(ROOT / "tests/sim_cuda"), "-B", str(build), "-G", "Ninja",
             f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DFCCL_CUDA_INCLUDE={include}"],
            [cmake, "--build", str(build), "-j2"],
        ):  # fmt: skip
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
            )
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return str(build / "libfccl_sim_cuda.so")


def _tool(name: str) -> str:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    assert found, f"{name} is missing; pip install {name}"
    return found


def _cuda_include() -> str:
    """The folder of the headers of the toolkit that has built fccl's kernels."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc", path=path)
    assert nvcc, "the kernels were built with an nvcc that is no longer in PATH (nor named by CUDACXX)"
    include = Path(nvcc).resolve().parents[1] / "include"
    if not (
        include / "cuda_runtime_api.h"
    ).exists():  # distributions put them elsewhere, or nvcc is a wrapper
        include = Path("/usr/local/cuda/include")
    return str(include)


def has_kernels() -> bool:
    """Whether this build of fccl has CUDA kernels, and no GPU could be taken for the simulation."""
    from fccl import _extension

    return _extension.load().cuda_kernel_count() > 0 and not torch.cuda.is_available()


simulated = pytest.mark.skipif(not has_kernels(), reason="a build without CUDA kernels, or a real GPU")


def environment(extra: Mapping[str, str | None] | None = None) -> Callable[[int], dict[str, str | None]]:
    """Of each rank: a GPU of its own, fccl's kernels and Gloo behind them."""

    def of(rank: int) -> dict[str, str | None]:
        return {
            "FCCL_CUDA_KERNELS": "1",
            "FCCL_CUDA_PROBE": "0",
            "FCCL_CUDA_INNER": "gloo",
            "FCCL_SIM_FIRST_UUID": str(rank),
            **(extra or {}),
        }

    return of


def run_simulated(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """As ``run_ranks``, with a simulated GPU for each rank. ``env``: added to theirs, a mapping or by rank."""
    extra = options.pop("env", None)
    of_all = environment()

    def env(rank: int) -> dict[str, str | None]:
        return {**of_all(rank), **(extra(rank) if callable(extra) else extra or {})}

    return run_ranks(function, world_size, *args, env=env, ld_preload=library(), **options)


def simulated_pool(world_size: int) -> RankPool:
    """As ``RankPool``, with a simulated GPU for each rank."""
    return RankPool(world_size, env=environment(), ld_preload=library())


# ---- in a rank ----


@functools.cache
def _sim() -> ctypes.CDLL:
    sim = ctypes.CDLL(None)
    sim.fccl_sim_take_log.restype = ctypes.c_size_t
    return sim


def take_log() -> list[str]:
    """What the device was asked for since the last time, a line each (see tests/sim_cuda)."""
    sim = _sim()
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        length: int = sim.fccl_sim_take_log(buffer, ctypes.c_size_t(size))
        if length <= size:
            return buffer.raw[:length].decode().splitlines()
        size = 2 * length


def make_fail(function: str, error: int, after: int = 0) -> None:
    """Has a function of CUDA fail after so many more calls; ``error`` 0: no longer."""
    _sim().fccl_sim_fail(function.encode(), error, after)


def counts() -> dict[str, int]:
    """What has been allocated and not been given back, by kind."""
    numbers = (ctypes.c_long * 5)()
    _sim().fccl_sim_counts(numbers)
    return dict(zip(("device", "pinned", "handles", "mappings", "opened"), numbers, strict=True))


def has_context(device: int) -> bool:
    """Whether anything has been done on a device in this process."""
    return bool(_sim().fccl_sim_has_context(device))
