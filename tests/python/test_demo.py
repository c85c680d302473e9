"""``fccl demo``: its comparison, its failures, and a short run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fccl import _extension, cli
from fccl.demo import command
from fccl.demo.compare import Run, conclusion, differences, summarize, table


def _record(backend: str, rank: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "backend": backend,
        "engine": "shared-memory" if backend == "fccl" else "gloo",
        "why": "",
        "rank": rank,
        "ranks": 2,
        "parameters": 2_476_042,
        "losses": [0x3F800000 + rank, 0x3F000000 + rank, 0x3E800000],
        "step_ms": [10.0, 12.0] if backend == "fccl" else [20.0, 24.0],
        "wait_ms": [1.0, 2.0, 3.0] if backend == "fccl" else [8.0, 8.0, 8.0],
        "collectives": 9,
        "buckets": 2,
        "accuracy": 0.97,
        "weights": "abc",
        "seconds": 1.0,
    }
    return {**values, **changes}


def _run(backend: str, **changes: Any) -> Run:
    return dataclasses.replace(summarize([_record(backend, rank) for rank in range(2)]), **changes)


def test_summary_takes_the_slowest_rank() -> None:
    run = summarize(
        [
            _record("fccl", 0, step_ms=[float(n) for n in range(20)], seconds=3.0),
            _record("fccl", 1, step_ms=[19.0] * 20, seconds=2.0, accuracy=0.96),
        ]
    )
    assert (run.step_ms, run.seconds, run.accuracy, run.steps) == (19.0, 3.0, 0.96, 3)
    assert run.collectives_per_step == 3.0
    with pytest.raises(ValueError, match="different numbers of steps"):
        summarize([_record("fccl", 0), _record("fccl", 1, losses=[1])])


def test_equal_runs_are_right() -> None:
    assert differences(_run("fccl"), _run("gloo"), 0.95) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"losses": [[1, 2, 3], [1, 2, 3]]}, {"losses": [[1, 2, 3], [1, 9, 3]]}, "differ from step 1 on, on rank 1"),
        ({"weights": ["abc", "abd"]}, {}, "final weights of the fccl run differ between its ranks"),
        ({}, {"weights": ["abc", "abd"]}, "final weights of the gloo run differ between its ranks"),
        ({"weights": ["abd", "abd"]}, {}, "final weights of the two runs differ"),
        ({"accuracy": 0.9499}, {}, "accuracy of the fccl run is 0.9499, below 0.95"),
        ({}, {"accuracy": 0.5}, "accuracy of the gloo run is 0.5"),
        ({"engine": "inner", "why": "no memfd"}, {}, "did not run on shared memory.*no memfd"),
        ({"steps": 2}, {}, "made 2 steps, the gloo run 3"),
    ],
)  # fmt: skip
def test_each_difference_is_found(ours: dict[str, Any], theirs: dict[str, Any], words: str) -> None:
    (found,) = differences(_run("fccl", **ours), _run("gloo", **theirs), 0.95)
    assert re.search(words, found), found


def test_the_last_bit_of_a_loss_counts() -> None:
    losses = _run("gloo").losses
    changed = [[*losses[0][:-1], losses[0][-1] ^ 1], losses[1]]
    (found,) = differences(_run("fccl"), _run("gloo", losses=changed), 0.95)
    assert "losses differ from step 2 on, on rank 0" in found


def test_table_and_conclusion() -> None:
    text = table(_run("fccl"), _run("gloo"))
    assert "median step (ms)" in text and "2.00 x" in text and "shared memory" in text
    assert conclusion(_run("fccl", step_ms=10, wait_ms=1), _run("gloo", step_ms=25, wait_ms=8)) == (
        "fccl is faster: a training step with gloo takes 2.50 times as long, and the gradient all-reduce with gloo "
        "takes 8.00 times as long as with fccl."
    )
    slower = conclusion(_run("fccl", step_ms=30, wait_ms=9), _run("gloo", step_ms=20, wait_ms=3))
    assert slower.startswith("gloo is faster: a training step with fccl takes 1.50 times")
    alike = conclusion(_run("fccl", step_ms=20.0, wait_ms=3), _run("gloo", step_ms=20.3, wait_ms=9))
    assert alike.startswith("the training step takes as long with both") and "faster" not in alike
    assert alike.endswith("the gradient all-reduce with gloo takes 3.00 times as long as with fccl.")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"losses": [7, 0x3F000001, 0x3E800000]}, 1),
        ({"weights": "other"}, 1),
        ({"accuracy": 0.5}, 1),
    ],
)
def test_exit_status_follows_the_comparison(
    change: dict[str, Any],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def trained(backend: str, args: argparse.Namespace, stdout: int) -> list[dict[str, Any]]:
        return [_record(backend, 0), _record(backend, 1, **(change if backend == "gloo" else {}))]

    monkeypatch.setattr(command, "train_once", trained)
    monkeypatch.setattr(_extension, "load", lambda: None)
    file = tmp_path / "demo.json"
    assert cli.main(["demo", "--json", str(file)]) == status
    out = capsys.readouterr().out
    assert ("NOT RIGHT" in out) is (status == 1)
    document = json.loads(file.read_text())
    assert bool(document["problems"]) is (status == 1)
    assert set(document["runs"]) == {"fccl", "gloo"}
    assert document["step_ratio"] == 2.0


def test_missing_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "scikit-learn" in error and "pip install 'fccl[demo]'" in error and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--steps", "-1"], ["--batch-size", "0"]])
def test_bad_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *arguments]) == 2
    assert "at least" in capsys.readouterr().err


def _arguments(timeout: float) -> argparse.Namespace:
    return argparse.Namespace(timeout=timeout, epochs=1, steps=1, batch_size=1, seed=1, no_progress=True)


def test_a_failing_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_worker_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(command.RunFailure, match=r"the fccl run failed \(exit status 7\)"):
        command.train_once("fccl", _arguments(30), 2)


def test_a_hanging_run_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(command, "_worker_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(command.RunFailure, match="did not end within 2 s"):
        command.train_once("gloo", _arguments(2), 2)
    child = int(note.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(180)
def test_a_short_demo() -> None:
    """Both runs for real: the same losses to the bit, the right engines, and the whole report."""
    done = subprocess.run(
        [sys.executable, "-m", "fccl", "demo", "--steps", "30", "--min-accuracy", "0.3", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        # Left over from a launcher around the tests, these must not confuse Lightning.
        env={**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "7", "MASTER_ADDR": "nowhere.invalid"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    fccl, gloo = document["runs"]["fccl"], document["runs"]["gloo"]
    assert (fccl["backend"], fccl["engine"]) == ("fccl", "shared-memory")
    assert (gloo["backend"], gloo["engine"]) == ("gloo", "gloo")
    assert fccl["losses"] == gloo["losses"]
    assert [len(losses) for losses in fccl["losses"]] == [30, 30]
    assert len({*fccl["weights"], *gloo["weights"]}) == 1
    assert 2e6 < fccl["parameters"] < 5e6
    for run in (fccl, gloo):
        assert run["step_ms"] > run["wait_ms"] > 0
        assert run["collectives_per_step"] >= run["buckets"] >= 1
    assert "Epoch 1" in done.stderr, "Lightning's progress bar"
    assert "are equal to the bit" in done.stderr
    # Which is faster depends on what else the machine does; that the report says what was measured does not.
    runs = [_run(run["backend"], step_ms=run["step_ms"], wait_ms=run["wait_ms"]) for run in (fccl, gloo)]
    assert conclusion(*runs) in done.stderr
