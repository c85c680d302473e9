"""``fccl bench`` with real ranks: results, output, interruption, death."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROW_KEYS = [
    "op", "backend", "mode", "ranks", "dtype", "bytes", "median_us", "min_us", "algbw_gbps", "busbw_gbps", "wrong",
]  # fmt: skip


# ---- real runs ----


def _bench(*arguments: str, timeout: float = 90, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Runs ``fccl bench`` and returns exit status, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "fccl", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "mode", "bytes_"),
    [
        (["all_reduce", "--begin", "4", "--end", "64K", "--factor", "256"], "sync", [4, 1024]),
        (
            ["all_reduce", "--begin", "2M", "--end", "2M", "--working-set", "32M", "--dtype", "bf16"],
            "sync",
            [2 << 20],
        ),
        (
            ["all_reduce", "--begin", "1K", "--end", "1K", "--mode", "async", "--check", "every"],
            "async",
            [1024],
        ),
        (["all_gather", "--begin", "1000", "--end", "100K", "--factor", "64"], "sync:tensor", [992, 64000]),
        (["all_gather", "--form", "list", "--begin", "4K", "--end", "4K"], "sync:list", [4096]),
        (["broadcast", "--root", "1", "--begin", "4", "--end", "64K", "--factor", "1024"], "sync", [4, 4096]),
        (
            ["reduce", "--root", "1", "--begin", "4", "--end", "256K", "--factor", "65536"],
            "sync",
            [4, 1 << 18],
        ),
        (["reduce_scatter", "--begin", "1K", "--end", "256K", "--factor", "256"], "sync", [1024, 1 << 18]),
        (["all_to_all", "--begin", "1K", "--end", "256K", "--factor", "256"], "sync", [1024, 1 << 18]),
        (
            ["gather", "--root", "1", "--begin", "1K", "--end", "256K", "--factor", "256"],
            "sync",
            [1024, 1 << 18],
        ),
        (["scatter", "--begin", "1K", "--end", "256K", "--factor", "256"], "sync", [1024, 1 << 18]),
        (["send_recv", "--begin", "4", "--end", "256K", "--factor", "65536"], "sync:ring", [4, 1 << 18]),
        (["send_recv", "--begin", "1K", "--end", "1K", "--mode", "async"], "async:ring", [1024]),
        (["send_recv", "--form", "pingpong", "--begin", "1K", "--end", "1K"], "sync:pingpong", [1024]),
        (["barrier"], "sync", [0]),
    ],
)
def test_two_ranks(arguments: list[str], mode: str, bytes_: list[int], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    code, out, err = _bench(*arguments, "--iters", "12", "--warmup", "1", "--json", str(file))
    assert code == 0, out + err
    assert "# all results right" in out and "#wrong" in out
    document = json.loads(file.read_text())
    assert list(document) == ["meta", "rows"]
    backends = ["fccl", "gloo"] if arguments[0] == "barrier" else ["fccl", "gloo", "memcpy"]
    rows = document["rows"]
    assert [(row["bytes"], row["backend"]) for row in rows] == [
        (b, name) for b in bytes_ for name in backends
    ]
    for row in rows:
        assert list(row) == ROW_KEYS
        assert (row["op"], row["mode"], row["ranks"], row["wrong"]) == (arguments[0], mode, 2, 0)
        assert 0 < row["min_us"] <= row["median_us"]
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["median_us"] / 1000, abs=1e-3, rel=1e-2)
    meta = document["meta"]
    assert meta["engines"] == {"fccl": "shared-memory", "gloo": "gloo"}
    assert [size["bytes"] for size in meta["sizes"]] == bytes_
    for size in meta["sizes"]:
        assert size["iterations"] == 12
        assert all(checked >= 2 * size["buffers_per_rank"] for checked in size["checked_calls"].values())
    assert {"fccl", "torch", "cpu", "cores", "date", "command_line", "last_level_cache_bytes"} <= set(meta)


def test_more_ranks_than_cores_and_json_on_standard_output() -> None:
    code, out, err = _bench(
        "all_reduce", "--ranks", "4", "--begin", "4K", "--end", "4K", "--op", "max", "--dtype", "int32",
        "--iters", "5", "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["ranks"] for row in rows] == [4, 4, 4]
    assert "busbw" in err and "# all results right" in err


def test_in_the_arena_and_beside_an_add() -> None:
    code, out, err = _bench(
        "all_reduce", "--arena", "--compare", "gloo,memcpy,add", "--begin", "1M", "--end", "1M", "--iters", "5",
        "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["backend"] for row in rows] == ["fccl", "fccl-arena", "gloo", "memcpy", "add"]


def test_training() -> None:
    code, out, err = _bench("train", "--models", "mlp,cnn", "--steps", "3", "--warmup", "1", "--json", "-")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["model"], row["backend"]) for row in rows] == [
        (model, name) for model in ("mlp", "cnn") for name in ("fccl", "fccl-arena", "gloo", "nothing")
    ]
    for row in rows:
        assert (
            row["step_us"] > row["forward_us"] > 0 and row["backward_us"] > 0 and row["parameters"] > 10_000
        )
        assert (row["exposed_us"] == 0) == (row["backend"] == "nothing")
    assert "same to the bit on all ranks, and of every backend" in err


def test_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    code, out, err = _bench(
        "all_reduce", "--begin", "64", "--end", "4K", "--factor", "8", "--iters", "3", "--async",
        "--plot", str(picture),
    )  # fmt: skip
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG") and f"# drawn: {picture}" in out
    assert "async" in out


def test_one_rank() -> None:
    code, out, err = _bench("all_gather", "--ranks", "1", "--end", "4K", "--iters", "3", "--json", "-")
    assert code == 0, err
    assert {row["busbw_gbps"] for row in json.loads(out)["rows"] if row["backend"] != "memcpy"} == {0}
    assert "load average" in err and "numbers are Gloo's" not in err


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("all_reduce", "fccl"),
        ("all_gather", "gloo"),
        ("broadcast", "memcpy"),
        ("reduce", "fccl"),
        ("reduce_scatter", "fccl"),
        ("all_to_all", "fccl"),
        ("gather", "fccl"),
        ("scatter", "fccl"),
        ("send_recv", "gloo"),
        ("barrier", "fccl"),
        ("all_reduce", "fccl-direct"),
        ("all_gather", "fccl-direct"),
        ("broadcast", "fccl-direct"),
        ("barrier", "fccl-direct"),
    ],
)
def test_a_wrong_result_is_found(op: str, backend: str) -> None:
    """The negative control: one damaged element per call, and only of this backend, is counted."""
    sizes = [] if op == "barrier" else ["--begin", "4K", "--end", "4K"]
    direct = ["--direct"] if backend == "fccl-direct" else []
    code, out, err = _bench(op, *sizes, *direct, "--iters", "3", "--corrupt", backend, "--json", "-")
    assert code == 1, out + err
    document = json.loads(out)
    checked = document["meta"]["sizes"][0]["checked_calls"]
    wrong = {row["backend"]: row["wrong"] for row in document["rows"]}
    assert wrong[backend] > 0
    if op != "barrier":
        assert wrong[backend] == checked[backend], "one element of one rank in each checked call"
    assert all(count == 0 for name, count in wrong.items() if name != backend)
    assert f"wrong elements from {backend}" in err


def test_what_gloo_cannot_do_is_left_out() -> None:
    code, out, err = _bench(
        "all_reduce", "--dtype", "int16", "--begin", "64", "--end", "64", "--iters", "3", "--json", "-"
    )
    assert code == 0, err
    document = json.loads(out)
    assert [row["backend"] for row in document["rows"]] == ["fccl", "memcpy"]
    assert list(document["meta"]["dropped"]) == ["gloo"]
    assert "gloo does not do this" in err


def test_it_is_said_loudly_if_fccl_does_not_run_on_shared_memory() -> None:
    code, out, err = _bench(
        "all_reduce", "--begin", "64", "--end", "64", "--iters", "3", "--json", "-", env={"FCCL_SHM": "0"}
    )
    assert code == 0, err
    assert json.loads(out)["meta"]["engines"]["fccl"] == "inner"
    assert err.count("fccl did NOT run on shared memory") == 2


def _long_run() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts a run that would go on for a minute; returns it and its ranks once they have printed a first row."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fccl",
            "bench",
            "all_reduce",
            "--begin",
            "1K",
            "--factor",
            "2",
            "--min-time",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(r"\s+1024\s+256\s+float32", line):
            break
    ranks = [
        p for p in psutil.Process(process.pid).children() if "fccl.bench.worker" in " ".join(p.cmdline())
    ]
    assert len(ranks) == 2
    return process, sorted(ranks, key=lambda rank: int(rank.cmdline()[rank.cmdline().index("--rank") + 1]))


def test_a_dying_rank_ends_the_run() -> None:
    process, ranks = _long_run()
    ranks[1].kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL", err), err
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_ends_the_run(number: signal.Signals) -> None:
    process, ranks = _long_run()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []


def test_ranks_do_not_outlive_a_killed_parent() -> None:
    process, ranks = _long_run()
    process.kill()
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []
