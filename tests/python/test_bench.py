"""``fccl bench``: its parts, and runs with real ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
from typing import Any

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
from fccl.bench.yardstick import bind_yardstick, check_yardstick

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
    ("op", "two", "four"),
    [
        ("all_reduce", 1.0, 1.5),
        ("all_gather", 0.5, 0.75),
        ("reduce_scatter", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("gather", 0.5, 0.75),
        ("scatter", 0.5, 0.75),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
    ],
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


@pytest.mark.parametrize(
    ("layout", "elements"),
    [(Layout((999,), (0,)), 999), (Layout((3, 6, 9), (1, 2)), 15), (Layout((9, 999), (1,), 600), 600)],
)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_yardsticks_move_the_message(layout: Layout, elements: int, dtype: str) -> None:
    first, second = WorkingSet(layout, getattr(torch, dtype), 2).buffers
    pattern = Pattern(dtype, 2)
    for name, moved in (("memcpy", elements), ("add", elements * 2 // 3)):
        assert check_yardstick(name, pattern, first, second, 4, bind_yardstick(name, first, second)) == 0
        wrong = check_yardstick(name, pattern, first, second, 4, lambda: None)
        # Zeros, and for bool ones, are right here and there.
        assert wrong == moved if (name, dtype) == ("memcpy", "float32") else moved // 3 <= wrong <= moved


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
        (["all_reduce", "--form", "list"], "--form: all_reduce has one form only"),
        (["all_gather", "--form", "ring"], "--form: all_gather has the forms tensor or list"),
        (
            ["all_reduce", "--plot", "picture.doc"],
            "--plot: 'picture.doc' does not end in a kind of picture: .*png",
        ),
        (["train", "--models", "gpt"], "unknown model 'gpt'; there are mlp, cnn, transformer"),
        (["train", "--plot", "picture.png"], "--plot does not apply to train: train has models and steps"),
        (["train", "--begin", "1K"], "--begin does not apply to train"),
        (["train", "--async"], r"--mode \(or --async\) does not apply to train"),
        (["train", "--compare", "memcpy"], "'memcpy' cannot train; here there are fccl, gloo"),
        (["barrier", "--plot", "picture.png"], "--plot does not apply to barrier: barrier moves no data"),
        (["barrier", "--arena"], "--arena does not apply to barrier"),
        (["barrier", "--root", "0"], "--root does not apply to barrier: barrier has no root"),
        (["broadcast", "--op", "sum"], "--op does not apply to broadcast: broadcast reduces nothing"),
        (["all_reduce", "--steps", "9"], "--steps does not apply to all_reduce"),
        (["all_to_all", "--direct"], "--direct: .* not all_to_all --mode sync"),
        (["all_gather", "--direct", "--form", "list"], "--direct: .* not all_gather --form list"),
        (["all_reduce", "--direct", "--async"], "--direct: .* not all_reduce --mode async"),
        (["train", "--ranks", "1"], "one rank has nothing to communicate"),
        (["train", "--compare", "nvlink"], "'nvlink' cannot train"),
        (["send_recv", "--ranks", "1"], "--ranks must be at least 2"),
        (["send_recv", "--form", "pingpong", "--mode", "async"], "pingpong is synchronous"),
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
