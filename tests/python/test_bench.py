"""``fccl bench``: its parts, and runs with real ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fccl import cli
from fccl.bench import sizes
from fccl.bench.board import Board, BoardStopped, board_bytes
from fccl.bench.buffers import MIN_BUFFERS, SMALL_BUFFERS, Layout, WorkingSet, planned_buffers
from fccl.bench.cases import CASES, Barrier
from fccl.bench.config import BenchConfig, SizeOutcome, SizePlan
from fccl.bench.pattern import PERIOD, REDUCE_OPS, Pattern, check_op, count_wrong, fill
from fccl.bench.report import make_rows
from fccl.bench.runner import combine
from fccl.bench.yardstick import bind_copy, check_copy

ROW_KEYS = [
    "op", "backend", "mode", "ranks", "dtype", "bytes", "median_us", "min_us", "algbw_gbps", "busbw_gbps", "wrong",
]  # fmt: skip


# ---- sizes ----


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("1K", 1024), ("1k", 1024), ("64M", 64 << 20), ("2GiB", 2 << 30), ("8 B", 8), ("3KB", 3072)],
)
def test_parse_size(text: str, size: int) -> None:
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-4", "1.5M", "4T", "0x10", "4 4"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        sizes.parse_size(text)


@given(st.integers(1, 1 << 40))
def test_format_size_keeps_the_magnitude(size: int) -> None:
    number, unit = sizes.format_size(size).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert float(number) * scale == pytest.approx(size, rel=1e-3)


def test_sweep() -> None:
    assert sizes.sweep(4, 64 << 20, 4) == [4 ** (n + 1) for n in range(13)]
    assert sizes.sweep(8, 8, 2) == [8]
    for bad in ((0, 8, 2), (8, 4, 2), (4, 8, 1)):
        with pytest.raises(ValueError, match="--"):
            sizes.sweep(*bad)


def test_dtypes() -> None:
    assert {sizes.parse_dtype(name) for name in ("half", "fp16", "torch.float16", "FLOAT16")} == {"float16"}
    for name, size in sizes.ITEM_SIZE.items():
        assert getattr(torch, name).itemsize == size
    with pytest.raises(ValueError, match="unknown dtype 'complex64'.*bfloat16"):
        sizes.parse_dtype("complex64")


# ---- predictable data ----


def _combinations() -> list[tuple[str, str]]:
    found = []
    for dtype in sizes.ITEM_SIZE:
        for op in REDUCE_OPS:
            try:
                check_op(dtype, op)
            except ValueError:
                continue
            found.append((dtype, op))
    return found


@pytest.mark.parametrize(("dtype", "op"), _combinations())
def test_every_order_of_reducing_gives_the_expected_result(dtype: str, op: str) -> None:
    """Whatever order a backend adds in, and if it rounds at every hop: the data is exact throughout."""
    for ranks in (1, 2, 3, 4, 7):
        pattern = Pattern(dtype, ranks, op)
        inputs = [pattern.source(rank, 5, PERIOD) for rank in range(ranks)]
        for order in (range(ranks), reversed(range(ranks))):
            total: Any = None
            for rank in order:
                value = inputs[rank]
                if total is None:
                    total = value.clone()
                elif op in ("sum", "avg"):
                    # Integers are averaged over a wide sum.
                    wide = op == "avg" and not value.dtype.is_floating_point
                    total = total.long() + value if wide else total + value
                else:
                    total = {
                        "prod": torch.mul, "min": torch.minimum, "max": torch.maximum, "band": torch.bitwise_and,
                        "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
                    }[op](total, value)  # fmt: skip
            if op == "avg":
                total = total / ranks if total.dtype.is_floating_point else total // ranks
            assert count_wrong(total.to(getattr(torch, dtype)), pattern.reduced(5, PERIOD)) == 0, (
                ranks,
                order,
            )


@pytest.mark.parametrize("dtype", sizes.ITEM_SIZE)
def test_data_differs_between_ranks_calls_and_shifts(dtype: str) -> None:
    pattern = Pattern(dtype, 4)
    count = 1024
    tensor = torch.empty(count, dtype=getattr(torch, dtype))
    fill(tensor, pattern.source(1, 7, count))
    assert count_wrong(tensor, pattern.source(1, 7, count)) == 0
    assert count_wrong(tensor, pattern.source(2, 7, count)) > 0, "another rank's data"
    assert count_wrong(tensor, pattern.source(1, 8, count)) > 0, "another call's data"
    for shift in (1, 2, 4, 64, 256, 512):
        assert count_wrong(tensor.roll(shift), pattern.source(1, 7, count)) > 0, shift


@pytest.mark.parametrize("count", [1, 250, 251, 252, 64_256, 64_257, 300_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_every_wrong_element_is_counted(dtype: str, count: int) -> None:
    pattern = Pattern(dtype, 2, "sum")
    tensor = torch.empty(count, dtype=getattr(torch, dtype))
    tile = pattern.reduced(3, count)
    fill(tensor, tile)
    assert count_wrong(tensor, tile) == 0
    damaged = sorted({0, count // 2, count - 1})
    for index in damaged:
        tensor[index] = float("nan") if tensor.dtype.is_floating_point else 255 - int(tensor[index])
    assert count_wrong(tensor, tile) == len(damaged)


@pytest.mark.parametrize(
    ("dtype", "op", "words"),
    [
        ("float32", "bxor", "bxor works on the bits"),
        ("bool", "avg", "no average"),
        ("int8", "mul", "unknown reduce"),
    ],
)
def test_meaningless_reductions_are_refused(dtype: str, op: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_op(dtype, op)


# ---- cases, working set, board, report ----


@pytest.mark.parametrize(
    ("op", "two", "four"), [("all_reduce", 1.0, 1.5), ("all_gather", 0.5, 0.75), ("broadcast", 1.0, 1.0)]
)
def test_busbw_factors_of_nccl_tests(op: str, two: float, four: float) -> None:
    assert (CASES[op].busbw_factor(2), CASES[op].busbw_factor(4)) == (two, four)


def test_sizes_are_rounded_down() -> None:
    assert CASES["all_reduce"].count_for(10, 4, 2) == 2
    gather = CASES["all_gather"]
    assert gather.count_for(100, 4, 2) == 12  # 50 bytes a rank, down to 48
    assert gather.size_for(12, 4, 2) == 96
    assert gather.count_for(31, 4, 2) == 0


def test_working_set_rules() -> None:
    def plan(bytes_: int, working_set: int | None = None, memory: int = 1 << 34) -> int:
        return planned_buffers(bytes_, bytes_, 2, cache=32 << 20, memory=memory, working_set=working_set)

    assert plan(1 << 20) == SMALL_BUFFERS
    assert plan(4 << 20) == 16  # 4 times 32 MiB over two ranks
    assert plan(64 << 20) == MIN_BUFFERS
    assert plan(4 << 20, memory=48 << 20) == 6
    assert plan(1 << 20, working_set=64 << 20) == 32
    with pytest.raises(ValueError, match="lower --end"):
        plan(64 << 20, memory=256 << 20)


def test_working_set_tensors_do_not_overlap() -> None:
    working_set = WorkingSet(Layout((3, 5000), (1,)), torch.float32, 4)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for buffer in working_set.buffers
        for tensor in buffer.tensors
    )
    assert len(spans) == 8
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)
    assert [len(tensor) for tensor in working_set.buffers[0].message] == [5000]


@pytest.mark.parametrize("layout", [Layout((999,), (0,)), Layout((3, 5, 7), (1, 2))])
def test_memcpy_copies_the_message(layout: Layout) -> None:
    first, second = WorkingSet(layout, torch.float32, 2).buffers
    pattern = Pattern("float32", 2)
    assert check_copy(pattern, first, second, 4, bind_copy(first, second)) == 0
    elements = sum(layout.tensors[index] for index in layout.message)
    assert check_copy(pattern, first, second, 4, lambda: None) == elements


def _boards(ranks: int, timeout: float) -> list[Board]:
    descriptor = os.memfd_create("test-board")
    os.ftruncate(descriptor, board_bytes(ranks))
    boards = [Board(descriptor, ranks, rank, timeout) for rank in range(-1, ranks)]
    os.close(descriptor)
    return boards


def test_board_aligns_and_shares() -> None:
    _, *boards = _boards(3, 20)
    log: list[tuple[int, int, int]] = []

    def rank(me: int) -> None:
        board = boards[me]
        for step in range(50):
            value = board.share(step * 10 + me)
            flagged = board.any_rank(me == 2 and step % 2 == 0)
            log.append((step, value, int(flagged)))

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(log) == sorted(
        (step, step * 10, int(step % 2 == 0)) for step in range(50) for _ in range(3)
    )


def test_board_names_the_missing_rank() -> None:
    parent, first, second, _ = _boards(3, 0.2)

    def align_second() -> None:
        with contextlib.suppress(BoardStopped):
            second.align()

    thread = threading.Thread(target=align_second)
    thread.start()
    with pytest.raises(BoardStopped, match=r"ranks \[2\] did not come"):
        first.align()
    thread.join(10)
    parent.stop()
    with pytest.raises(BoardStopped, match="stopped by the parent"):
        first.wait_turn(1)


def test_barrier_check_sees_a_rank_that_leaves_early() -> None:
    _, early, late = _boards(2, 5)
    case = Barrier(rank=0, ranks=2, dtype="float32", op="sum", root=0, form="", board=early)
    buffer = WorkingSet(Layout((), ()), torch.float32, 1).buffers[0]
    case.prepare(buffer, 1)
    assert case.count_wrong(buffer, 1) == 1
    late.enter(1)
    assert case.count_wrong(buffer, 1) == 0


def _config(**changes: Any) -> BenchConfig:
    values: dict[str, Any] = {
        "op": "all_gather", "form": "list", "ranks": 4, "dtype": "float32", "redop": "sum", "root": 0,
        "backends": ["fccl", "gloo", "memcpy"], "mode": "sync", "plans": [SizePlan(4000, 250, 8, 1)],
    }  # fmt: skip
    return BenchConfig(**{**values, **changes})


def test_config_survives_json() -> None:
    config = _config(corrupt="gloo", iterations=7)
    assert BenchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    def part(times: list[int], wrong: int, engine: str) -> dict[str, Any]:
        return {
            "times": {"fccl": times}, "wrong": {"fccl": wrong}, "checked": {"fccl": 2}, "dropped": {},
            "engines": {"fccl": {"engine": engine, "why": ""}},
        }  # fmt: skip

    outcome = combine([part([1, 9, 3], 0, "shared-memory"), part([5, 2, 4], 3, "inner")])
    assert outcome.times == {"fccl": [5, 9, 4]}
    assert outcome.wrong == {"fccl": 3}
    assert outcome.engines["fccl"]["engine"] == "inner"


def test_rows() -> None:
    config = _config()
    outcome = SizeOutcome(
        times={"fccl": [3000, 1000, 2000], "memcpy": [1000]}, wrong={"fccl": 0, "memcpy": 1}, checked={}
    )
    fccl, memcpy = make_rows(config, config.plans[0], outcome, 0.75)
    assert (fccl.median_us, fccl.min_us, fccl.algbw_gbps, fccl.busbw_gbps) == (2.0, 1.0, 2.0, 1.5)
    assert (fccl.mode, fccl.bytes, fccl.wrong) == ("sync:list", 4000, 0)
    assert (memcpy.algbw_gbps, memcpy.busbw_gbps, memcpy.wrong) == (4.0, 4.0, 1)


# ---- what the command refuses ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_reduce", "--ranks", "0"], "--ranks must be at least 1"),
        (["all_reduce", "--compare", "gloo,nvlink"], "unknown backend 'nvlink'.*fccl, gloo.*memcpy"),
        (["all_reduce", "--backend", "memcpy"], "unknown backend 'memcpy'"),
        (["all_reduce", "--dtype", "float16", "--op", "band"], "band works on the bits"),
        (["all_reduce", "--op", "median"], "unknown reduce operation 'median'.*sum, avg"),
        (["all_reduce", "--begin", "1M", "--end", "1K"], "is above --end"),
        (["all_reduce", "--form", "list"], "--form is for all_gather"),
        (["all_gather", "--end", "16"], "needs at least 32"),
        (["broadcast", "--root", "2"], "--root must be a rank, 0 to 1"),
        (["all_reduce", "--iters", "0"], "--iters must be at least 1"),
        (["all_reduce", "--corrupt", "mpi"], "not among the measured backends"),
        (["all_reduce", "--begin", "4096G", "--end", "4096G"], "lower --end or --ranks"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert re.search(words, said.err) and said.err.startswith("fccl bench: ")
    assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--dtype", "complex64"], "unknown dtype 'complex64'"), (["--end", "64X"], "'64X' is not a size")],
)
def test_bad_values(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "all_reduce", *arguments])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


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


def test_one_rank() -> None:
    code, out, err = _bench("all_gather", "--ranks", "1", "--end", "4K", "--iters", "3", "--json", "-")
    assert code == 0, err
    assert {row["busbw_gbps"] for row in json.loads(out)["rows"] if row["backend"] != "memcpy"} == {0}


@pytest.mark.parametrize(
    ("op", "backend"),
    [("all_reduce", "fccl"), ("all_gather", "gloo"), ("broadcast", "memcpy"), ("barrier", "fccl")],
)
def test_a_wrong_result_is_found(op: str, backend: str) -> None:
    """The negative control: one damaged element per call, and only of this backend, is counted."""
    code, out, err = _bench(
        op, "--begin", "4K", "--end", "4K", "--iters", "3", "--corrupt", backend, "--json", "-"
    )  # fmt: skip
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
