"""bench/gpu/check.sh where there is no GPU: what it says then, and that a stage which hangs or fails is seen.

The programs that it runs are tried on fibres by the C++ tests (bench/gpu/programs/CMakeLists.txt).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "bench" / "gpu" / "check.sh"
STAGES = [
    "build",
    "programs",
    "buckets",
    "pack",
    "collectives",
    "sanitizer",
    "bandwidth",
    "latency",
    "processes",
]
STAGES += ["hooks", "ddp", "graphs", "failures", "pytest"]

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def check(tmp_path: Path, *arguments: str, out: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the script from a folder that is not the repository."""
    command = [str(SCRIPT), "--work", str(tmp_path / "work"), *arguments]
    if out:
        command += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "from-variable")}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)


def rows_of(markdown: str) -> dict[str, list[str]]:
    """The first table's rows, by stage."""
    table = markdown.split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def test_list(tmp_path: Path) -> None:
    done = check(tmp_path, "--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == STAGES
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "bandwith")
    assert done.returncode == 2
    assert "there is no stage 'bandwith'" in done.stderr and "bandwidth" in done.stderr


@no_gpu
def test_without_a_gpu_every_stage_that_needs_one_says_so(tmp_path: Path) -> None:
    chosen = [name for name in STAGES if name not in ("build", "programs", "pytest")]
    done = check(tmp_path, *(word for name in chosen for word in ("--only", name)), out=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "from-variable" / "gpu-check.md").read_text()  # the folder that $OUT names
    rows = rows_of(page)
    assert list(rows) == chosen
    for result, _, why in rows.values():
        assert result == "skipped"
        assert why.startswith("no CUDA device: ")
    assert done.stdout.endswith(page + "\n")  # the table comes last
    # … and each row before it, as its stage ended.
    assert [line.split()[0] for line in done.stdout.split("\n\n")[0].splitlines()[2:]] == chosen


def test_a_stage_without_a_build_fails_and_says_what_to_do(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "pytest")
    assert done.returncode == 1
    row = rows_of((tmp_path / "out" / "gpu-check.md").read_text())["pytest"]
    assert row[0] == "FAILED" and "run the stage 'build'" in row[2]


# ---- stages of its own ----

OTHER = """
import sys
from stage import Outcome, Stage, Verdict, fail, passed_with_rows, skip

def says(code, words="fine"):
    def body(setting):
        command = [sys.executable, "-c", f"print({words!r}); raise SystemExit({code})"]
        return Outcome(Verdict.PASSED, setting.run_program(command).last_line)
    return body

def hangs(setting):
    # A grandchild that holds the output open, and its parent that ignores a polite end.
    script = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    script += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']);"
    script += "print('pids', os.getpid(), p.pid, flush=True); time.sleep(1000)"
    setting.run([sys.executable, "-c", script])

def table(setting):
    return passed_with_rows("ROW | size | GB/s |\\nROW | 25 MiB | 3 |\\nmeasured\\n")

def broken(setting):
    raise KeyError("no such thing")

STAGES = [
    Stage("good", "passes", 20, says(0), needs_gpu=False),
    Stage("table", "has a table of its own", 20, table, needs_gpu=False),
    Stage("hangs", "never ends", 3, hangs, needs_gpu=False),
    Stage("bad", "fails", 20, says(3, "it went wrong"), needs_gpu=False),
    Stage("wrong", "names what is wrong", 20, says(1, "WRONG: bit 7\\nlast"), needs_gpu=False),
    Stage("nothing", "finds no device", 20, says(77, "no such thing here"), needs_gpu=False),
    Stage("broken", "is itself at fault", 20, broken, needs_gpu=False),
    Stage("after", "runs all the same", 20, says(0, "still here"), needs_gpu=False),
]
"""


@pytest.fixture
def other(tmp_path: Path) -> str:
    file = tmp_path / "other_stages.py"
    file.write_text(OTHER)
    return str(file)


def test_failures_and_hangs_are_seen_and_end_nothing_else(tmp_path: Path, other: str) -> None:
    started = time.monotonic()
    done = check(tmp_path, "--stages", other)
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - started < 60
    page = (tmp_path / "out" / "gpu-check.md").read_text()
    rows = rows_of(page)
    assert {name: row[0] for name, row in rows.items()} == {
        "good": "passed",
        "table": "passed",
        "hangs": "TIMED OUT",
        "bad": "FAILED",
        "wrong": "FAILED",
        "nothing": "skipped",
        "broken": "FAILED",
        "after": "passed",
    }
    assert 3 <= float(rows["hangs"][1]) < 10
    assert "it went wrong" in rows["bad"][2] and "exit status 3" in rows["bad"][2]
    assert rows["wrong"][2] == "WRONG: bit 7"
    assert rows["nothing"][2] == "no such thing here"
    assert "KeyError" in rows["broken"][2]
    assert rows["after"][2] == "still here"
    assert "## table" in page and "| 25 MiB | 3 |" in page
    log = (tmp_path / "out" / "gpu-check.log").read_text()
    assert "time was up" in log and "it went wrong" in log
    # Nothing of the stage that hung is left, its grandchild included.
    pids = [int(pid) for pid in re.findall(r"^pids (\d+) (\d+)$", log, re.MULTILINE)[0]]
    assert len(pids) == 2 and not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_stages_that_pass_give_status_0_and_time_limits_can_be_stretched(tmp_path: Path, other: str) -> None:
    done = check(tmp_path, "--stages", other, "--only", "after", "--only", "good", "--patience", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(rows_of((tmp_path / "out" / "gpu-check.md").read_text())) == ["good", "after"]


def test_an_interrupted_run_ends_what_it_has_started_and_keeps_what_it_knows(
    tmp_path: Path, other: str
) -> None:
    command = [str(SCRIPT), "--stages", other, "--only", "good", "--only", "hangs", "--patience", "30"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("good"):
            assert process.poll() is None
        deadline = time.monotonic() + 30
        children: list[psutil.Process] = []
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + 15
    assert not any(runs(child.pid) for child in children)
    assert list(rows_of((tmp_path / "out" / "gpu-check.md").read_text())) == ["good"]
