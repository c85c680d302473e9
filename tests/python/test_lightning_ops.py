"""What the strategies do with tensors and objects, without Lightning: means, gathers, broadcasts.

Each case runs over fccl and over Gloo: a strategy with another backend must be right, too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fccl import _object_broadcast as ob
from fccl import _tensor_ops, direct
from fccl_testing import run_ranks

CPU = torch.device("cpu")
BACKENDS = ("fccl", "gloo")
GATHER = "all_gather_into_tensor"


@contextlib.contextmanager
def counted_collectives():
    """Counts calls of collectives by name, as ``{"all_reduce": 1}``: torch's, and fccl's own beneath them."""
    counts: dict[str, int] = {}
    depth = 0  # a direct call that goes through torch is one call
    with contextlib.ExitStack() as stack:
        names = (
            "all_reduce",
            "broadcast",
            "all_gather",
            "all_gather_single",
            "all_gather_into_tensor",
            "barrier",
        )
        for module, name in itertools.product((dist, direct), names):
            original = getattr(module, name, None)
            if original is None:
                continue

            def counting(*args, _name=name, _original=original, **kwargs):
                nonlocal depth
                if depth == 0:
                    counts[_name] = counts.get(_name, 0) + 1
                depth += 1
                try:
                    return _original(*args, **kwargs)
                finally:
                    depth -= 1

            stack.enter_context(mock.patch.object(module, name, counting))
        yield counts


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# ---- reduce ----


def reduce_floats(rank, world):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op, wanted in (
            ("mean", (world + 1) / 2),
            ("AVG", (world + 1) / 2),
            ("sum", world * (world + 1) / 2),
        ):
            value = torch.full((3, 2), float(rank + 1), dtype=dtype)
            with counted_collectives() as counts:
                result = _tensor_ops.reduce(value, None, op)
            assert result is value and counts == {"all_reduce": 1}  # in place, and no barrier
            assert same(value, torch.full((3, 2), wanted, dtype=dtype)), (dtype, op, value)
    value = torch.tensor(float(rank))
    assert _tensor_ops.reduce(value, None, dist.ReduceOp.AVG).item() == (world - 1) / 2
    assert _tensor_ops.reduce(torch.tensor(float(rank)), None, dist.ReduceOp.MAX).item() == world - 1
    assert _tensor_ops.reduce(torch.tensor(float(rank)), None, "min").item() == 0
    assert _tensor_ops.reduce(torch.tensor(rank + 1), None, "Product").item() == math.factorial(world)
    assert _tensor_ops.reduce(torch.tensor([1.0]), None, None).item() == world  # None is a sum


def reduce_16_bit(rank, world):
    # 60000 + 60000 overflows float16; 256 + 1 + 1 is 256 if bfloat16 rounds after each step.
    assert _tensor_ops.reduce(torch.tensor([60000.0], dtype=torch.float16), None, "mean").item() == 60000
    value = torch.tensor([[768.0, 3.0, 3.0][rank]], dtype=torch.bfloat16)
    assert _tensor_ops.reduce(value, None, "mean").item() == 258


def reduce_integers(rank, world):
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16):
        value = torch.tensor([rank, 100 + rank], dtype=dtype)
        with counted_collectives() as counts:
            result = _tensor_ops.reduce(value, None, "mean")
        mean = (world - 1) / 2
        assert counts == {"all_reduce": 1}
        assert same(result, torch.tensor([mean, 100 + mean])), result
        assert value.tolist() == [rank, 100 + rank]  # a mean does not fit in it
    assert same(
        _tensor_ops.reduce(torch.tensor([rank == 0, True]), None, "mean"), torch.tensor([1 / world, 1.0])
    )
    big = torch.tensor([2**62 + 2**61])  # the sum does not fit in int64
    assert _tensor_ops.reduce(big, None, dist.ReduceOp.AVG).item() == float(2**62 + 2**61)
    assert (
        _tensor_ops.reduce(torch.tensor([rank], dtype=torch.int64), None, "sum").item()
        == world * (world - 1) // 2
    )
    bools = _tensor_ops.reduce(torch.tensor([True, rank == 0, False]), None, "sum")
    assert bools.tolist() == [True, True, False] and bools.view(torch.uint8).max() == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert _tensor_ops.reduce(torch.tensor([rank]), None, "mean").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def reduce_layouts(rank, world):
    whole = torch.arange(24.0).reshape(4, 6) * (rank + 1)
    factor = (world + 1) / 2
    for op, scale in (("mean", factor), ("sum", factor * world), ("max", world)):
        for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 2:5]):
            tensor = whole.clone()
            part = view(tensor)
            result = _tensor_ops.reduce(part, None, op)
            assert result is part
            expected = whole.clone()
            view(expected).copy_(view(torch.arange(24.0).reshape(4, 6)) * scale)
            assert torch.equal(tensor, expected), (op, tensor, expected)
    assert _tensor_ops.reduce(torch.empty(0), None, "mean").numel() == 0
    leaf = torch.full((2,), float(rank), requires_grad=True)
    assert _tensor_ops.reduce(leaf, None, "mean").tolist() == [(world - 1) / 2] * 2
    with torch.inference_mode():
        value = torch.full((2,), float(rank))
        assert _tensor_ops.reduce(value, None, "mean").tolist() == [(world - 1) / 2] * 2
        assert _tensor_ops.reduce(torch.tensor(rank), None, "mean").item() == (world - 1) / 2
    value = torch.full((2,), 1 + 1j) * rank
    assert _tensor_ops.reduce(value, None, "mean").tolist() == [(1 + 1j) * (world - 1) / 2] * 2


def reduce_subgroup(rank, world):
    group = dist.new_group([1, 2])
    value = torch.tensor([float(rank), 5.0])
    result = _tensor_ops.reduce(value, group, "mean")
    assert result is value
    assert value.tolist() == ([1.5, 5.0] if rank else [0.0, 5.0])  # rank 0 is no member
    if rank:
        assert _tensor_ops.all_gather(value + rank, group).tolist() == [[2.5, 6.0], [3.5, 7.0]]
    else:
        with pytest.raises(ValueError, match="rank 0 is not a member"):
            _tensor_ops.all_gather(value, group)


def reduce_bad_op(rank, world):
    with pytest.raises(ValueError, match="reduce_op is 'average'; expected 'mean' or one of"):
        _tensor_ops.reduce(torch.ones(1), None, "average")


# ---- all_gather ----


def gather(rank, world):
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int16,
        torch.bool,
        torch.complex64,
    )
    for dtype in dtypes:
        for shape in ((), (3,), (2, 3), (0, 4)):
            value = torch.full(shape, rank).to(dtype)
            with counted_collectives() as counts:
                result = _tensor_ops.all_gather(value)
            assert counts == ({GATHER: 1} if value.numel() else {})
            assert same(result, torch.stack([torch.full(shape, r).to(dtype) for r in range(world)]))
            assert result.is_contiguous()
    strided = torch.arange(12.0).reshape(3, 4).t()[::2] + 100 * rank
    assert torch.equal(_tensor_ops.all_gather(strided)[-1], strided + 100 * (world - 1 - rank))
    tracked = torch.ones(2, requires_grad=True)
    assert not _tensor_ops.all_gather(tracked).requires_grad
    with torch.inference_mode():
        assert _tensor_ops.all_gather(torch.tensor(rank)).tolist() == list(range(world))


def gather_gradients(rank, world):
    with mock.patch("warnings.warn", side_effect=AssertionError("a warning")):
        for shape in ((3,), (), (2, 3)):
            value = torch.full(shape, float(rank + 1), requires_grad=True)
            gathered = _tensor_ops.all_gather(value * 1, sync_grads=True)
            # The loss of rank r is (r + 1) * sum over s of (s + 1) * x_s, so that rank s gets (s + 1) * sum.
            scale = torch.arange(1.0, world + 1).reshape(-1, *[1] * len(shape))
            (gathered * scale * (rank + 1)).sum().backward()
            total = world * (world + 1) / 2
            assert torch.equal(value.grad, torch.full(shape, (rank + 1) * total))
    # Twice differentiable: the penalty on a gradient.
    value = torch.full((2,), float(rank + 1), requires_grad=True)
    loss = (_tensor_ops.all_gather(value, sync_grads=True) ** 2).sum()
    (grad,) = torch.autograd.grad(loss, value, create_graph=True)
    assert torch.equal(grad, torch.full((2,), 2.0 * world * (rank + 1)))
    grad.sum().backward()
    assert torch.equal(value.grad, torch.full((2,), 2.0 * world))
    # The transposed view of a parameter, with a gradient that is not dense.
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    _tensor_ops.all_gather(weight.t(), sync_grads=True).permute(2, 1, 0).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), float(world)))
    assert _tensor_ops.all_gather(torch.tensor([rank]), sync_grads=True).tolist() == [
        [r] for r in range(world)
    ]


# ---- broadcast ----


def broadcast(obj, src):
    return ob.broadcast_object(obj, src, CPU, CPU)


def broadcast_scalars(rank, world):
    objects = [
        None,
        True,
        False,
        0,
        -(2**80),
        1.5,
        math.inf,
        "",
        "checkpoints/é/last.ckpt",
        pathlib.Path("/a/b"),
        (1, "two"),
        {"a": [1, 2]},
        b"x" * 700,
    ]
    for src in range(world):
        for obj in objects:
            with counted_collectives() as counts:
                result = broadcast(obj if rank == src else "something else", src)
            assert result == obj and type(result) is type(obj)
            assert counts == {"broadcast": 1}
            assert (result is obj) == (rank == src) or obj in (None, True, False, 0, "")
    big = list(range(5000))
    with counted_collectives() as counts:
        assert broadcast(big if rank == 0 else None, 0) == big
    assert counts == {"broadcast": 2}
    nested = broadcast({"weights": torch.arange(5) if rank == 0 else None}, 0)
    assert nested["weights"].tolist() == [0, 1, 2, 3, 4]


def broadcast_tensors(rank, world):
    no_pickle = mock.Mock(side_effect=AssertionError("a tensor was pickled"))
    tensors = [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.arange(5, dtype=torch.int16),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t()[::2],
        torch.arange(100_000, dtype=torch.float64).reshape(100, 10, 100),
        torch.ones(3, dtype=torch.complex64).conj() * 1j,
        torch.randn(300, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        torch.zeros(4).to(torch.float8_e4m3fn).view(torch.uint8).add(56).view(torch.float8_e4m3fn),
        torch.zeros([1] * 8),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0, requires_grad=True),
    ]
    with mock.patch("pickle.dumps", no_pickle), mock.patch("pickle.loads", no_pickle):
        for tensor in tensors:
            with counted_collectives() as counts:
                result = broadcast(tensor if rank == world - 1 else None, world - 1)
            assert counts == {"broadcast": 1 if tensor.nbytes <= ob._INLINE_BYTES else 2}
            assert (
                type(result) is type(tensor) and result.dtype == tensor.dtype and result.shape == tensor.shape
            )
            assert result.requires_grad == tensor.requires_grad
            assert result.device.type == "cpu"
            a, b = (
                t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (result, tensor)
            )
            assert torch.equal(a, b)
        with torch.inference_mode():
            assert broadcast(torch.ones(3) if rank == 0 else None, 0).tolist() == [1, 1, 1]
    # What has no plain bytes is pickled, as torch would.
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(broadcast(sparse if rank == 0 else None, 0).to_dense(), torch.eye(3))
    assert broadcast(torch.zeros([1] * 9) if rank == 0 else None, 0).ndim == 9


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this holds a lock")


def broadcast_fails_on_all_ranks(rank, world):
    if rank == 1:
        with pytest.raises(TypeError, match="this holds a lock"):
            broadcast(Unpicklable(), 1)
    else:
        with pytest.raises(
            RuntimeError, match=r"rank 1 could not pickle its object \(TypeError: this holds a lock"
        ):
            broadcast(None, 1)
    assert broadcast(rank, 0) == 0  # the group goes on


def broadcast_meets_another_call(rank, world):
    if rank == 0:
        dist.broadcast(torch.arange(ob._HEADER_BYTES).to(torch.uint8), 0)
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 does not start a broadcast of fccl's strategy"):
            broadcast(None, 0)


CASES = {
    1: [reduce_floats, reduce_integers, reduce_layouts, gather, gather_gradients, broadcast_scalars],
    2: [
        reduce_floats,
        reduce_integers,
        reduce_layouts,
        reduce_bad_op,
        gather,
        gather_gradients,
        broadcast_scalars,
        broadcast_tensors,
        broadcast_fails_on_all_ranks,
        broadcast_meets_another_call,
    ],
    3: [
        reduce_floats,
        reduce_16_bit,
        reduce_integers,
        reduce_layouts,
        reduce_subgroup,
        gather,
        gather_gradients,
        broadcast_scalars,
        broadcast_tensors,
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world", "case"), [(w, c) for w, cases in CASES.items() for c in cases])
def test_on_ranks(rank_pool, backend, world, case):
    rank_pool(world, backend).run(case)


def uneven_shapes(rank, world):
    for call in (_tensor_ops.all_gather, lambda value: _tensor_ops.reduce(value, None, "mean")):
        with pytest.raises(RuntimeError, match=rf"rank {rank} of 2.*the number of elements differs"):
            call(torch.ones(2 + rank))
    assert _tensor_ops.all_gather(torch.tensor(rank)).tolist() == [0, 1]  # the group goes on


def test_uneven_shapes_raise_on_all_ranks(rank_pool):
    rank_pool(2).run(uneven_shapes)


def all_cases(rank, world):
    for case in CASES[world]:
        case(rank, world)


def test_without_shared_memory():
    # fccl hands everything to its inner engine then, and all promises stay.
    run_ranks(all_cases, 3, env={"FCCL_SHM": "0"})


# ---- the header ----


def a_header(**changes):
    fields = {
        "magic": ob._MAGIC,
        "kind": ob._TENSOR,
        "ndim": 2,
        "flags": 0,
        "nbytes": 24,
        "dtype": b"float32",
    }
    fields |= {"shape": (2, 3), **changes}
    shape = tuple(fields["shape"]) + (0,) * (8 - len(fields["shape"]))
    data = bytearray(ob._HEADER_BYTES)
    values = [fields[name] for name in ("magic", "kind", "ndim", "flags", "nbytes", "dtype")]
    ob._LAYOUT.pack_into(data, 0, *values, *shape)
    return data


def test_header_round_trip():
    header = ob._Header.unpack(a_header(), src=0)
    assert header == ob._Header(ob._TENSOR, 24, 0, "float32", (2, 3))
    assert header.pack(torch.zeros(24, dtype=torch.uint8)) == a_header()


def test_where_a_body_travels():
    gpu = torch.device("cuda", 1)
    on_gpu = ob._Header(ob._TENSOR, 24, ob._ACCELERATOR, "float32", (2, 3))
    on_cpu = ob._Header(ob._TENSOR, 5000, 0, "float32", (1250,))
    assert not on_gpu.is_inline and not on_cpu.is_inline  # small, but its bytes are not on the host
    assert ob._wire_device(on_gpu, CPU, gpu) == ob._wire_device(on_gpu, gpu, gpu) == gpu
    assert ob._wire_device(on_cpu, CPU, gpu) == CPU
    assert ob._wire_device(on_cpu, gpu, gpu) == gpu  # a group with no CPU support


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"none"},
        {"kind": 0},
        {"kind": 9},
        {"flags": 128},
        {"ndim": 9},
        {"nbytes": 25},
        {"nbytes": 2**63},
        {"kind": ob._PICKLE, "nbytes": 2**41},
        {"kind": ob._ERROR, "nbytes": 5000},
        {"dtype": b"float33"},
        {"dtype": b"load"},
        {"dtype": b"\xff\xfe"},
        {"shape": (-2, -3)},
        {"shape": (2**40, 2**40), "nbytes": 0},
    ],
    ids=str,
)
def test_damaged_header_is_refused_before_anything_is_allocated(changes):
    with (
        mock.patch.object(dist, "get_rank", return_value=1),
        mock.patch.object(torch, "empty", side_effect=AssertionError("allocated")),
        pytest.raises(RuntimeError, match="broadcast on rank 1: the message from rank 0"),
    ):
        ob._Header.unpack(a_header(**changes), src=0)


def test_every_dtype_of_torch_has_a_name_that_fits():
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        assert len(name) <= 24 and getattr(torch, name) is dtype


def test_other_objects_are_pickled():
    header, body = ob._encode([1, 2])
    assert header.kind == ob._PICKLE and pickle.loads(bytes(body.tolist())) == [1, 2]
