"""What this machine has: a GPU, torch, the CUDA toolkit's programs."""

from __future__ import annotations

import os
import shutil

import processes

_ASK_DRIVER = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit("no CUDA device: there is no driver")
count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
if code or not count.value:
    raise SystemExit(f"no CUDA device: the driver says {code or 'that it has none'}")
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDeviceGetName(name, 100, device)
print(name.value.decode())
"""

_ASK_TORCH = """
import torch
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
"""


def find_gpu(python: str) -> tuple[str, str]:
    """The first GPU's name, and if it is empty, why.

    Args:
        python: an interpreter. It is asked in a process of its own: a driver that was asked stays in a process.
    """
    done = processes.run([python, "-c", _ASK_DRIVER], timeout=60)
    if done.code == 0:
        return done.last_line, ""
    return "", done.last_line if done.code == 1 else "no CUDA device: the driver did not answer"


def facts(python: str) -> list[str]:
    """Versions that a reader of the table wants to know.

    Args:
        python: the interpreter whose torch is used.
    """
    done = processes.run([python, "-c", _ASK_TORCH], timeout=120)
    return [done.last_line if done.code == 0 else f"no torch: {done.last_line}"]


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit, on PATH or where toolkits usually are.

    Args:
        name: e.g. "compute-sanitizer".
    """
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    path = os.pathsep.join(os.path.join(folder, "bin") for folder in folders if folder)
    return shutil.which(name) or shutil.which(name, path=path)
