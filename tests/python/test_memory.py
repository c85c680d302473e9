"""Tensors in shared memory (`fccl.memory`): ordinary in every respect, and collectives on them copy nothing."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl_testing import run_ranks

COUNT = 70_001  # too many bytes for the path of small messages


def value(rank, count=COUNT):
    return torch.arange(count, dtype=torch.float32) % 1000 + rank


def total(world_size, count=COUNT):
    return sum(value(rank, count) for rank in range(world_size))


def without_copies(call):
    """Makes a call; returns how many collectives went without copies in it."""
    before = fccl.backend_of().zero_copy_count
    call()
    return fccl.backend_of().zero_copy_count - before


# ---- tensors ----


def test_tensors_are_like_others():
    stats = fccl.memory_stats()
    assert stats["why_none"] == ""
    a = fccl.empty(3, 5)
    assert a.shape == (3, 5) and a.dtype == torch.float32 and a.device.type == "cpu" and a.is_contiguous()
    assert not a.requires_grad and fccl.is_shared(a) and fccl.is_shared(a[1:, 2:].t())
    assert not fccl.is_shared(torch.empty(3))
    b = fccl.zeros((2, 3), dtype=torch.int64, requires_grad=False)
    assert b.shape == (2, 3) and b.dtype == torch.int64 and b.eq(0).all()
    c = fccl.empty_like(torch.empty(4, 1, dtype=torch.bfloat16), requires_grad=True)
    assert c.shape == (4, 1) and c.dtype == torch.bfloat16 and c.requires_grad and c.is_leaf
    d = fccl.zeros(4, requires_grad=True)
    (d * 2).sum().backward()
    assert d.grad is not None and d.grad.eq(2).all()
    assert fccl.empty(()).shape == () and fccl.empty(0, 3).numel() == 0
    with pytest.raises(RuntimeError, match="negative"):
        fccl.empty(-1)
    # What copies a tensor copies it into ordinary memory.
    assert not fccl.is_shared(a.clone()) and not fccl.is_shared(copy.deepcopy(a))
    assert pickle.loads(pickle.dumps(b)).equal(b)


def test_memory_is_given_back():
    gc.collect()
    before = fccl.memory_stats()
    a = fccl.empty(1 << 20, dtype=torch.uint8)
    view = a[100:]
    assert fccl.memory_stats()["in_use"] == before["in_use"] + (1 << 20)
    assert fccl.memory_stats()["by_owner"]["fccl.empty"] >= 1 << 20
    del a
    assert fccl.memory_stats()["tensors"] == before["tensors"] + 1
    del view
    assert fccl.memory_stats()["in_use"] == before["in_use"]
    assert fccl.memory_stats()["cached"] >= 1 << 20
    fccl.release_cached()
    assert fccl.memory_stats()["cached"] == 0
    # A storage may be freed and made again, as FSDP does.
    b = fccl.empty(1 << 18)
    b.untyped_storage().resize_(0)
    assert fccl.memory_stats()["in_use"] == before["in_use"]
    b.untyped_storage().resize_(4 << 18)
    assert fccl.is_shared(b)
    b.resize_(2 << 18)
    assert fccl.is_shared(b) and fccl.memory_stats()["in_use"] == before["in_use"] + (8 << 18)
    b.set_(torch.zeros(3))
    assert not fccl.is_shared(b) and fccl.memory_stats()["in_use"] == before["in_use"]


def no_arena(rank, world_size, why, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [fccl.empty(COUNT) for _ in range(2)]
    # No word where somebody wanted none; else one, at the line that asked.
    assert len(caught) == told, [str(each.message) for each in caught]
    assert all(why in str(each.message) and each.filename == __file__ for each in caught), caught
    assert not fccl.is_shared(tensors[0])
    tensors[0].copy_(value(rank))
    dist.all_reduce(tensors[0])
    assert tensors[0].equal(total(world_size))
    backend = fccl.backend_of()
    assert backend.engine == "shared-memory" and backend.zero_copy_count == 0
    assert why in backend.why_no_zero_copy and why in fccl.memory_stats()["why_none"]
    with fccl.shared_buckets():
        DistributedDataParallel(nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    "size, why, told",
    [("0", "FCCL_ARENA_SIZE turns it off", 0), ("much", "FCCL_ARENA_SIZE is 'much', expected", 1)],
)
def test_without_an_arena(size, why, told):
    run_ranks(no_arena, 2, why, told, env={"FCCL_ARENA_SIZE": size})


def test_arguments_as_torch_takes_them():
    assert (
        fccl.empty(2, 3, device="cpu").shape == fccl.empty((2, 3), device=torch.device("cpu")).shape == (2, 3)
    )
    assert fccl.empty(torch.tensor(3)).shape == (3,)
    for bad in ("a", 1.5, None):
        with pytest.raises(TypeError):
            fccl.empty(bad)
    with pytest.raises(RuntimeError, match="negative"):
        fccl.empty(-1)
    for make in (
        fccl.empty,
        fccl.zeros,
        lambda size, device: fccl.empty_like(torch.ones(size), device=device),
    ):
        with pytest.raises(ValueError, match="device is cuda; the memory that ranks share is the CPU's"):
            make(3, device="cuda")


def small_arena(rank, world_size):
    fits, too_large = fccl.empty(COUNT), None
    with pytest.warns(UserWarning, match=r"no shared memory for 4000000 bytes .*memory_stats"):
        too_large = fccl.empty(1_000_000)
    assert fccl.is_shared(fits) and not fccl.is_shared(too_large)
    assert fccl.memory_stats()["refused"] == 1 and fccl.memory_stats()["capacity"] == 1 << 20
    for tensor, copies in ((fits, 1), (too_large, 0)):
        tensor.copy_(value(rank, tensor.numel()))
        assert without_copies(lambda tensor=tensor: dist.all_reduce(tensor)) == copies
        assert tensor.equal(total(world_size, tensor.numel()))


def test_its_size_is_bounded():
    run_ranks(small_arena, 2, env={"FCCL_ARENA_SIZE": "1M"})


# ---- collectives ----


def collectives(rank, world_size):
    data = fccl.empty(COUNT)

    def all_reduce(tensor):
        tensor.copy_(value(rank, tensor.numel()))
        dist.all_reduce(tensor)
        assert tensor.equal(total(world_size, tensor.numel()))

    assert without_copies(lambda: all_reduce(data)) == 1
    assert without_copies(lambda: all_reduce(data[100:60_000])) == 1, "a view"
    with torch.inference_mode():
        inferred = fccl.empty(COUNT)
        assert without_copies(lambda: all_reduce(inferred)) == 1
    strided = fccl.empty(COUNT, 2)[:, 0]
    assert without_copies(lambda: all_reduce(strided)) == 0, "a private copy of a strided one"
    # Some ranks only.
    mixed = data if rank == 0 else torch.empty(COUNT)
    assert without_copies(lambda: all_reduce(mixed)) == 0
    # Asynchronous, and freed at once: the work keeps it.
    temporary = fccl.empty(COUNT).copy_(value(rank))
    expected = total(world_size)
    work = dist.all_reduce(temporary, async_op=True)
    del temporary
    work.wait()
    assert work.result()[0].equal(expected)

    data.copy_(value(rank))
    gathered = torch.empty(world_size * COUNT)
    assert without_copies(lambda: dist.all_gather_into_tensor(gathered, data)) == 1
    pieces = [torch.empty(COUNT) for _ in range(world_size)]
    assert without_copies(lambda: dist.all_gather(pieces, data)) == 1
    for peer in range(world_size):
        assert gathered[peer * COUNT : (peer + 1) * COUNT].equal(value(peer)) and pieces[peer].equal(
            value(peer)
        )
    # In place, as FSDP gathers.
    whole = fccl.empty(world_size, COUNT)
    whole[rank] = value(rank)
    assert without_copies(lambda: dist.all_gather_into_tensor(whole.view(-1), whole[rank])) == 1
    assert all(whole[peer].equal(value(peer)) for peer in range(world_size))

    for root in range(world_size):
        message = fccl.empty(COUNT) if rank == root else torch.empty(COUNT)
        message.copy_(value(rank))
        assert without_copies(lambda root=root, message=message: dist.broadcast(message, root)) == 1
        assert message.equal(value(root))

    # Reductions to one rank, or a piece for each.
    everywhere = fccl.empty(world_size * COUNT).copy_(value(rank, world_size * COUNT))
    piece = torch.empty(COUNT)
    assert without_copies(lambda: dist.reduce_scatter_tensor(piece, everywhere)) == 1
    assert piece.equal(total(world_size, world_size * COUNT)[rank * COUNT : (rank + 1) * COUNT])
    mine = fccl.empty(COUNT).copy_(value(rank)) if rank != 1 else value(rank)
    assert without_copies(lambda: dist.reduce(mine, 1)) == 1, "the root's may lie anywhere"
    assert mine.equal(total(world_size) if rank == 1 else value(rank))

    # Pieces: each by itself, where its sender has it.
    expected = torch.cat(
        [value(peer, world_size * COUNT)[rank * COUNT : (rank + 1) * COUNT] for peer in range(world_size)]
    )
    received = torch.empty(world_size * COUNT)
    for sender in (everywhere, everywhere if rank == 0 else everywhere.clone()):
        received.fill_(-1)
        assert without_copies(lambda sender=sender: dist.all_to_all_single(received, sender)) == 1
        assert received.equal(expected)
    pieces = [torch.empty(COUNT) for _ in range(world_size)] if rank == 0 else None
    assert without_copies(lambda: dist.gather(data.copy_(value(rank)), pieces)) == 1
    assert rank != 0 or all(pieces[peer].equal(value(peer)) for peer in range(world_size))
    pieces = list(everywhere.chunk(world_size)) if rank == 1 else None
    assert without_copies(lambda: dist.scatter(piece, pieces, src=1)) == 1
    assert piece.equal(value(1, world_size * COUNT)[rank * COUNT : (rank + 1) * COUNT])

    dist.barrier()
    assert set(fccl.memory_stats()["by_owner"]) == {"fccl.empty"}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_without_copies(world_size):
    run_ranks(collectives, world_size)


def reuse(rank, world_size):
    """Tensors come and go and are written to at once, with ranks early and late in turn."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(60):
        count = 20_000 + 4_096 * (step % 5)
        tensor = fccl.empty(count).copy_(value(rank + step, count))
        if int(torch.randint(3, (), generator=generator)) == 0:
            time.sleep(0.003)
        if step % 2:
            dist.all_reduce(tensor)
            assert tensor.equal(sum(value(peer + step, count) for peer in range(world_size)))
        else:
            out = torch.empty(world_size, count)
            dist.all_gather_into_tensor(out.view(-1), tensor)
            tensor.fill_(-1)
            assert all(out[peer].equal(value(peer + step, count)) for peer in range(world_size))
        del tensor
    assert fccl.memory_stats()["in_use"] == 0


def test_memory_is_reused_at_once():
    run_ranks(reuse, 3)


def groups(rank, world_size):
    """One arena for all groups: memory asked of one, reduced over another, and kept beyond both."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, first = pairs[rank // 2], rank // 2 * 2
    backend = fccl.backend_of(pair)
    dist.all_reduce(torch.ones(1), group=pair)
    device = torch.device("cpu")
    assert pair._get_backend(device).supports_tensor_alloc(device)
    tensor = pair._get_backend(device).allocate_tensor(COUNT, dtype=torch.float32, device=device)
    assert fccl.is_shared(tensor) and list(fccl.memory_stats()["by_owner"]) == [f"group {pair.group_name}"]
    tensor.copy_(value(rank))
    dist.all_reduce(tensor, group=pair)
    assert tensor.equal(value(first) + value(first + 1)) and backend.zero_copy_count == 1
    tensor.copy_(value(rank))
    assert without_copies(lambda: dist.all_reduce(tensor)) == 1
    assert tensor.equal(total(world_size))
    return tensor[:10].clone()


def rounds(rank, world_size, init):
    kept = fccl.empty(COUNT)
    for step in range(3):
        dist.init_process_group("fccl", init_method=f"{init}{step}", rank=rank, world_size=world_size)
        kept.copy_(value(rank))
        assert without_copies(lambda: dist.all_reduce(kept)) == 1
        assert kept.equal(total(world_size))
        dist.destroy_process_group()
        assert kept.equal(total(world_size))


def test_one_arena_for_all_groups(tmp_path):
    run_ranks(groups, 4)
    run_ranks(rounds, 2, f"file://{tmp_path}/store", backend=None)


def forks(rank, world_size):
    tensor = fccl.zeros(COUNT)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # As after share_memory_(): one memory. The child's own tensors are its own.
            tensor[0] = 5
            own = fccl.zeros(COUNT)
            own[0] = 7
            stats = fccl.memory_stats()
            shared = fccl.is_shared(own) and not fccl.is_shared(tensor)
            del tensor
            gc.collect()
            status = (
                0 if shared and stats["in_use"] == own.untyped_storage().nbytes() // 4096 * 4096 + 4096 else 2
            )
            os.write(writer, b"x")
        finally:
            os._exit(status)
    os.read(reader, 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert tensor[0] == 5 and fccl.memory_stats()["tensors"] == 1
    tensor.copy_(value(rank))
    assert without_copies(lambda: dist.all_reduce(tensor)) == 1
    assert tensor.equal(total(world_size))


def test_forked_children():
    run_ranks(forks, 2)


def killed(rank, world_size):
    tensor = fccl.empty(COUNT).copy_(value(rank))
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(dist.DistError, match="rank 1"):
        dist.all_reduce(tensor)
    del tensor
    assert fccl.memory_stats()["quarantined"] == 0
    assert fccl.is_shared(fccl.empty(COUNT))


def test_a_rank_that_dies_holds_no_memory():
    run_ranks(killed, 2, expect_exit={1: -9})


# ---- DistributedDataParallel and FSDP ----


def training(rank, world_size, shared, options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    make = fccl.shared_buckets() if shared else warnings.catch_warnings()
    with make:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.2, **options)
    assert "DDP_DISABLE_COMM_MEM" not in os.environ
    used = []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        torch.manual_seed(100 * step + rank)
        before = fccl.backend_of().zero_copy_count
        ddp(torch.randn(8, 200)).square().mean().backward()
        used.append(fccl.backend_of().zero_copy_count - before)
        optimizer.step()
        optimizer.zero_grad()
        assert "DDP_DISABLE_COMM_MEM" not in os.environ
    stats = fccl.memory_stats()["by_owner"]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    copy.deepcopy(model)
    del ddp, optimizer, model
    gc.collect()
    assert fccl.memory_stats()["by_owner"] == {}, "the buckets are gone with the model"
    return weights, used, sum(stats.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_buckets_in_shared_memory(options):
    plain = run_ranks(training, 2, False, options)
    shared = run_ranks(training, 2, True, options)
    for rank in range(2):
        assert plain[rank][0].equal(shared[rank][0]), "weights differ"
        assert plain[rank][1] == [0] * 5 and plain[rank][2] == 0
        # From the first step on, before and after the buckets were rebuilt.
        assert all(count >= 1 for count in shared[rank][1]), shared[rank][1]
        assert shared[rank][2] >= 120_000 * 4


def two_models(rank, world_size):
    torch.manual_seed(2)
    with fccl.shared_buckets():
        models = [
            DistributedDataParallel(nn.Linear(300, 300), gradient_as_bucket_view=True) for _ in range(2)
        ]
    for step in range(4):
        for index, model in enumerate(models):
            model(torch.full((1, 300), float(rank + index + step))).sum().backward()
        for index, model in enumerate(models):
            expected = sum(peer + index + step for peer in range(world_size)) / world_size
            assert model.module.weight.grad.eq(expected).all(), (step, index)
            model.zero_grad(set_to_none=step % 2 == 0)


def test_two_models_on_one_group():
    run_ranks(two_models, 2)


def overridden(rank, world_size):
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "1"
    with fccl.shared_buckets():
        model = DistributedDataParallel(nn.Linear(300, 300))
    model(torch.ones(1, 300)).sum().backward()
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "1" and fccl.memory_stats()["in_use"] == 0


def test_your_own_setting_of_the_switch_holds():
    run_ranks(overridden, 2, env={"DDP_DISABLE_COMM_MEM": "1"})


def fsdp(rank, world_size, shared):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    fully_shard(model)
    if shared:
        model.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    return weights, fccl.backend_of().zero_copy_count


def test_fsdp_in_shared_memory():
    plain = run_ranks(fsdp, 2, False, timeout=100)
    shared = run_ranks(fsdp, 2, True, timeout=100)
    for rank in range(2):
        assert plain[rank][0].equal(shared[rank][0])
        # In each step at least an all_gather and a reduce_scatter.
        assert plain[rank][1] == 0 and shared[rank][1] >= 6
