"""Compiles fccl's CUDA kernels and fails on what a compiler does silently and a GPU pays for.

    check_kernels.py --nvcc nvcc --source csrc [--arch 90 …]

Reads the compiler's resource report: no kernel may spill registers or use a stack frame, on any architecture that
fccl is built for. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Those of cmake/FcclCudaChoice.cmake, as far as the compiler knows them.
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin"]


def known_to(nvcc: str) -> list[str]:
    """The architectures that this compiler can make code for."""
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True, timeout=60)
    known = {line.removeprefix("compute_") for line in done.stdout.split()}
    return [arch for arch in ARCHITECTURES if arch in known]


def report_of(nvcc: str, source: Path, arch: str) -> str:
    """The compiler's report on one file; exits with its errors if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            nvcc,
            *FLAGS,
            f"-arch=sm_{arch}",
            f"-I{source.parents[1]}",
            str(source),
            "-o",
            f"{folder}/out.cubin",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def complaints(report: str) -> tuple[int, list[str]]:
    """How many kernels the report names, and those that use local memory."""
    found = re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        report,
    )
    bad = [row for row in found if row[1:] != ("0", "0", "0")]
    return len(found), [f"{name}: stack {a}, spills {b} and {c} bytes" for name, a, b, c in bad]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--source", type=Path, required=True, help="the folder csrc")
    parser.add_argument(
        "--arch", nargs="*", help="compute capabilities, e.g. 80 90; all of fccl's if not given"
    )
    options = parser.parse_args()
    sources = sorted((options.source / "cuda").glob("*.cu"), reverse=True)
    cases = [(source, arch) for arch in options.arch or known_to(options.nvcc) for source in sources]
    if not cases:
        sys.exit(
            f"no kernels in {options.source}/cuda, or {options.nvcc} knows no architecture of {ARCHITECTURES}"
        )
    failed = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        reports = pool.map(lambda case: report_of(options.nvcc, case[0].resolve(), case[1]), cases)
        for (source, arch), report in zip(cases, reports, strict=True):
            count, bad = complaints(report)
            print(
                f"{source.name}: {count} kernels for sm_{arch}, {len(bad)} of them use local memory",
                flush=True,
            )
            for line in bad:
                print("  " + line)
            failed = failed or bool(bad) or count == 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
