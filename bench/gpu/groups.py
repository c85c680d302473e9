"""The stages with process groups: fccl's backend, hooks and DDP, all ranks on one GPU."""

from __future__ import annotations

import importlib.util

import build
from stage import REPOSITORY, Outcome, Setting, Verdict, fail, skip

# NCCL refuses two ranks on one GPU.
SHARED = {
    "FCCL_CUDA_KERNELS": "1",
    "FCCL_CUDA_INNER": "gloo",
    "FCCL_CUDA_SHARED_GPU": "1",
    "FCCL_CUDA_PROBE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what torch's deterministic algorithms ask for
}
ALONE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def _run_ranks(setting: Setting, case: str, world: int, extra: dict[str, str]) -> str:
    """Returns the case's note."""
    build.require_fccl(setting)
    ranks = REPOSITORY / "bench" / "gpu" / "ranks.py"
    return setting.run_program([setting.python, ranks, case, str(world)], extra).last_line


def _run_all(setting: Setting, runs: list[tuple[str, int, dict[str, str]]]) -> Outcome:
    return Outcome(Verdict.PASSED, "; ".join(_run_ranks(setting, *one) for one in runs))


def collectives(setting: Setting) -> Outcome:
    """2 and 4 processes, which take turns on the GPU; the first time with the trial of the links."""
    probed = {**SHARED, "FCCL_CUDA_PROBE": "1", "XDG_CACHE_HOME": str(setting.work / "cache")}
    return _run_all(setting, [("collectives", 2, probed), ("collectives", 4, SHARED)])


def hooks(setting: Setting) -> Outcome:
    """The hooks, in two processes."""
    return _run_all(setting, [("hooks", 2, SHARED)])


def ddp(setting: Setting) -> Outcome:
    """One rank over NCCL, two and four over Gloo, with and without the kernels."""
    without = {**SHARED, "FCCL_CUDA_KERNELS": "0"}
    return _run_all(setting, [("ddp", 1, ALONE), ("ddp", 2, without), ("ddp", 2, SHARED), ("ddp", 4, SHARED)])


def graphs(setting: Setting) -> Outcome:
    """CUDA graphs of two ranks."""
    return _run_all(setting, [("graphs", 2, SHARED)])


def failures(setting: Setting) -> Outcome:
    """A killed rank, and one that does not come."""
    return _run_all(setting, [("killed", 2, SHARED), ("absent", 2, SHARED)])


def python_tests(setting: Setting) -> Outcome:
    """The tests of CUDA in tests/python; those that a GPU makes needless skip themselves."""
    if importlib.util.find_spec("pytest") is None:
        raise skip(f"{setting.python} has no pytest")
    for module in ("hypothesis", "psutil"):
        if importlib.util.find_spec(module) is None:
            raise skip(f"{setting.python} has no {module}, which the tests need")
    build.require_fccl(setting)
    tests = sorted((REPOSITORY / "tests" / "python").glob("test_cuda*.py"))
    done = setting.run(
        # (pyproject.toml's options want plugins that may not be there.)
        [
            setting.python,
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            "-k",
            "cuda",
            *tests,
        ]
    )
    if done.code != 0:
        raise fail(f"exit status {done.code}: {done.last_line}")
    return Outcome(Verdict.PASSED, done.last_line)
