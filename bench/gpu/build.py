"""Builds fccl with its kernels, and the standalone programs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import machine
from stage import REPOSITORY, Outcome, Setting, Verdict, fail, skip

_SAY = """
import fccl, fccl._extension
module = fccl._extension.load()
info = module.build_info()
print(fccl.__file__)
print(f"{module.cuda_kernel_count()} kernels for {info['cuda_architectures']}, torch {info['torch_version']}")
raise SystemExit(0 if module.cuda_kernel_count() else 1)
"""


def build_fccl(setting: Setting) -> Outcome:
    """With pip, into a folder of its own: the interpreter's packages stay as they are."""
    if setting.installed:
        done = setting.run_program([setting.python, "-c", _SAY])
        return Outcome(Verdict.PASSED, f"not built (--installed): {done.last_line}")
    if machine.find_tool("nvcc") is None:
        raise skip("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    for module in ("torch", "scikit_build_core"):
        if importlib.util.find_spec(module) is None:
            raise skip(f"{setting.python} has no {module}")
    settings = {
        "build-dir": str(setting.work / "fccl"),
        "cmake.define.FCCL_CUDA": "ON",
        "cmake.define.FCCL_CUDA_ARCHITECTURES": setting.architectures,
        "cmake.define.FCCL_GPU_PROGRAMS": "ON",
    }
    setting.run_program(
        [
            *(setting.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-build-isolation"),
            *("--no-deps", "--upgrade", "--target", setting.site),
            *(f"--config-settings={key}={value}" for key, value in settings.items()),
            REPOSITORY,
        ],
        {"CMAKE_BUILD_PARALLEL_LEVEL": str(setting.jobs)},
    )
    done = setting.run_program([setting.python, "-c", _SAY])
    file = next((line for line in done.output.splitlines() if line.endswith("__init__.py")), "")
    if not Path(file).is_relative_to(setting.site):
        raise fail(
            f"Python finds another fccl, {file}: uninstall it (an editable one comes first), or use --installed"
        )
    return Outcome(Verdict.PASSED, done.last_line)


def require_fccl(setting: Setting) -> None:
    """Fails where there is no fccl to run.

    Args:
        setting: where.

    Raises:
        StageEndedError: fccl is not built.
    """
    if not setting.installed and not (setting.site / "fccl" / "__init__.py").exists():
        raise fail("fccl is not built: run the stage 'build' before, or use --installed")


def programs_folder(setting: Setting) -> Path:
    """Where the standalone programs are, once they are built.

    Args:
        setting: where.
    """
    with_fccl = setting.work / "fccl" / "bench" / "gpu" / "programs"
    if not setting.installed and (with_fccl / "measure_kernels").exists():
        return with_fccl
    return setting.work / "programs" / "bench" / "gpu" / "programs"


def program(setting: Setting, name: str) -> Path:
    """One of them.

    Args:
        setting: where.
        name: of the program.

    Raises:
        StageEndedError: it is not built.
    """
    file = programs_folder(setting) / name
    if not file.exists():
        raise fail(f"{file} is not built: run the stage 'programs' before")
    return file


def build_programs(setting: Setting) -> Outcome:
    """Those that the build of fccl has left, or by themselves, without torch; tried on fibres."""
    if machine.find_tool("nvcc") is None:
        raise skip("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    how = "built with fccl"
    if not (programs_folder(setting) / "measure_kernels").exists() or setting.installed:
        how = "built by themselves"
        folder = setting.work / "programs"
        defines = {
            "FCCL_PYTHON": "OFF",
            "FCCL_CUDA": "ON",
            "FCCL_GPU_PROGRAMS": "ON",
            "FCCL_CUDA_ARCHITECTURES": setting.architectures,
        }
        setting.run_program(
            [
                "cmake",
                "-S",
                REPOSITORY,
                "-B",
                folder,
                "-G",
                "Ninja",
                *(f"-D{k}={v}" for k, v in defines.items()),
            ]
        )
        setting.run_program(["cmake", "--build", folder, "-j", str(setting.jobs)])
    # Whether they would notice: the same cases on a CPU, right and with one wrong bit.
    on_host = program(setting, "check_kernels_on_host")
    for what in ("buckets", "pack", "collectives"):
        setting.run_program([on_host, what])
        if setting.run([on_host, what, "--machine-flip=3"]).code != 1:
            raise fail(f"check_kernels_on_host {what} did not notice a wrong bit")
    return Outcome(Verdict.PASSED, f"{how}; on fibres they pass, and find one wrong bit")
