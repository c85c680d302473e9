"""bench/peers: a library beside fccl. With Gloo, which needs no installation; the others are run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "bench" / "peers" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "backends"),
    [
        (("--begin", "64", "--end", "1K", "--factor", "16"), ["fccl-direct", "fccl-arena", "gloo"]),
        (("broadcast", "--root", "1", "--end", "4"), ["fccl-direct", "fccl-arena", "gloo"]),
        (("barrier",), ["fccl-direct", "gloo"]),
    ],
)
def test_a_comparison(arguments, backends):
    done = run("gloo", *arguments, "--iters", "5", "--json", "-")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    names = [row["backend"] for row in document["rows"]]
    assert names == backends * (len(names) // len(backends)) and names
    assert all(row["wrong"] == 0 and row["median_us"] > 0 for row in document["rows"])
    assert document["meta"]["library"].startswith("Gloo of torch")
    assert "all results right" in done.stderr


def patched_run(patch: str) -> subprocess.CompletedProcess[str]:
    """A comparison with Gloo whose ranks execute ``patch`` before rank.py."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); sys.argv[1:] = sys.argv[2:]\n"
        f"import libraries\n{patch}import rank; rank.main()\n"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(RUN.parent)!r})\n"
        "import run\n"
        "start = run.subprocess.Popen\n"
        "def popen(command, **kwargs):\n"
        f"    return start([command[0], '-c', {code!r}, {str(RUN.parent)!r}, *command[2:]], **kwargs)\n"
        "run.subprocess.Popen = popen\n"
        "sys.argv = ['run.py', 'gloo', '--end', '4', '--iters', '3']\n"
        "sys.exit(run.main())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )


def test_wrong_results_are_found():
    """A library whose calls do nothing."""
    done = patched_run("libraries._Gloo.bind = lambda *_: lambda: None\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "# WRONG results from gloo" in done.stdout


def test_a_rank_that_fails_ends_the_others():
    """The library fails on one rank; the other waits for it."""
    patch = (
        "bind = libraries._Gloo.bind\n"
        "def failing(*arguments):\n"
        "    if os.environ['RANK'] == '1': raise ValueError('not today')\n"
        "    return bind(*arguments)\n"
        "libraries._Gloo.bind = failing\n"
    )
    done = patched_run(patch)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rank 1: ValueError: not today" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gloo", "scatter"), "gloo is compared in all_reduce, broadcast, barrier, not in scatter"),
        (("gloo", "--compare", "memcpy"), "--compare is an option of `fccl bench` only"),
        (("gloo", "--op", "max"), "--op is an option of `fccl bench` only"),
        (("gloo", "--begin", "1M", "--end", "1K"), "is above --end"),
    ],
)
def test_bad_arguments(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
