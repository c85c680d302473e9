"""Compiles fccl's CUDA kernels and fails on what a compiler does silently and a GPU pays for.

    check_kernels.py --nvcc nvcc --source csrc --arch 90

Reads the compiler's resource report: no kernel may spill registers or use a stack frame. Needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin"]


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
    parser.add_argument("--arch", required=True, help="compute capability, e.g. 90")
    options = parser.parse_args()
    failed = False
    for source in sorted((options.source / "cuda").glob("*.cu")):
        count, bad = complaints(report_of(options.nvcc, source.resolve(), options.arch))
        print(f"{source.name}: {count} kernels for sm_{options.arch}, {len(bad)} of them use local memory")
        for line in bad:
            print("  " + line)
        failed = failed or bool(bad) or count == 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
