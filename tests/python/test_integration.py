"""What stands on c10d works over fccl: meshes, DTensor, FSDP, ZeRO-style averages, profiler, launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fccl
from fccl_testing import RankError, run_ranks


def test_registration_needs_no_compiled_module():
    code = (
        "import sys, fccl, torch.distributed as d; assert 'fccl' in d.Backend.backend_list; "
        "print('fccl._C' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_backend_of_explains_itself():
    with pytest.raises(ValueError, match="init_process_group"):
        fccl.backend_of()


def backend_of_gloo(rank, world_size):
    with pytest.raises(ValueError, match="gloo"):
        fccl.backend_of()


def test_backend_of_another_backend():
    run_ranks(backend_of_gloo, 1, backend="gloo")


# ---- meshes and what is built on them ----


def mesh(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name, members in (
        ("rows", (rank % 2, rank % 2 + 2)),
        ("columns", (rank // 2 * 2, rank // 2 * 2 + 1)),
    ):
        group = grid.get_group(name)
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(sum(members)).all()
        assert fccl.backend_of(group).engine == "shared-memory"

    line = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(8.0 * 6).view(8, 6)
    sharded = distribute_tensor(whole, line, [Shard(0)])
    assert torch.equal(sharded.to_local(), whole[2 * rank : 2 * rank + 2])
    assert torch.equal(sharded.full_tensor(), whole)
    columns = sharded.redistribute(line, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = sharded.redistribute(line, [Replicate()]).t() @ sharded
    assert torch.equal(product.full_tensor(), whole.t() @ whole)
    assert sharded.sum().full_tensor().item() == whole.sum().item()


def test_device_mesh_and_dtensor():
    run_ranks(mesh, 4)


def fully_sharded(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def test_fsdp_equals_gloo():
    ours = run_ranks(fully_sharded, 2, timeout=100)
    theirs = run_ranks(fully_sharded, 2, backend="gloo", timeout=100)
    for (our_losses, our_weights), (their_losses, their_weights) in zip(ours, theirs, strict=True):
        assert our_losses == their_losses
        assert all(map(torch.equal, our_weights, their_weights))


def zero_redundancy(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(5)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(6, 30)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    states = len(optimizer.state_dict()["state"]) if rank == 0 else 0
    return states, [p.detach().clone() for p in ddp.parameters()]


def test_zero_redundancy_optimizer_equals_gloo():
    ours = run_ranks(zero_redundancy, 3, timeout=100)
    theirs = run_ranks(zero_redundancy, 3, backend="gloo", timeout=100)
    for (our_states, our_weights), (their_states, their_weights) in zip(ours, theirs, strict=True):
        assert our_states == their_states
        # Gloo adds in another order.
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(our_weights, their_weights, strict=True))
        assert all(map(torch.equal, our_weights, ours[0][1])), "ranks differ"


def checkpointed(rank, world_size, folder):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
        fully_shard(model)
        return model

    saved = make(1)
    checkpoint.save({"model": saved.state_dict(), "step": 7}, checkpoint_id=folder)
    loaded = make(2)
    state = {"model": loaded.state_dict(), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state["model"])
    assert state["step"] == 7
    for a, b in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert a.full_tensor().equal(b.full_tensor())


def test_distributed_checkpoint(tmp_path):
    run_ranks(checkpointed, 3, str(tmp_path / "checkpoint"), timeout=100)


def compiled(rank, world_size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def step(tensor):
        total = functional.all_reduce(tensor * 2, "sum", group)
        gathered = functional.all_gather_tensor(total + rank, 0, group)
        return functional.reduce_scatter_tensor(gathered, "sum", 0, group) - 1

    tensor = torch.arange(6.0)
    expected = step(tensor)
    # In rank r's piece: world_size times (the sum over ranks, plus the piece's rank).
    assert expected.equal(world_size * (2 * world_size * tensor + rank) - 1)
    assert torch.compile(step, backend="aot_eager", fullgraph=True)(tensor).equal(expected)


def test_functional_collectives_under_compile():
    run_ranks(compiled, 2, timeout=100)


def differentiable(rank, world_size):
    from torch.distributed.nn import functional as nnf

    tensor = torch.full((3,), float(rank + 1), requires_grad=True)
    total = nnf.all_reduce(tensor * tensor)
    total.sum().backward()
    assert total.eq(5).all() and tensor.grad.eq(2 * (rank + 1) * world_size).all()


def test_differentiable_collectives():
    run_ranks(differentiable, 2)


# ---- seeing and checking ----


def profiled(rank, world_size):
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(123))
        dist.broadcast(torch.ones(45), src=0)
        dist.all_reduce(torch.ones(7), async_op=True).wait()
        dist.all_gather_into_tensor(torch.ones(2 * world_size), torch.ones(2))
    return [(event.name, event.input_shapes) for event in profiler.events() if event.name.startswith("fccl:")]


def test_profiler_shows_collectives_by_name_and_size():
    for events in run_ranks(profiled, 2):
        names = [name for name, _ in events]
        assert names.count("fccl:all_reduce") == 2, events
        assert "fccl:broadcast" in names and any("gather" in name for name in names), events
        assert any([123] in shapes for name, shapes in events if name == "fccl:all_reduce"), events


def detailed(rank, world_size):
    assert "Wrapper" in type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()
    outputs = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(outputs, torch.full((2,), float(rank)))
    dist.broadcast(tensor, src=0)
    dist.barrier()
    assert fccl.backend_of().engine == "shared-memory"
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(5 + rank))


def test_debug_detail():
    run_ranks(detailed, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def monitored(rank, world_size):
    from datetime import timedelta

    # torch.distributed.monitored_barrier() itself refuses every backend not named gloo.
    group = dist.distributed_c10d._get_default_group()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=False)
    dist.barrier()
    if rank != 1:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier" if rank == 0 else ""):
            group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=False)


def test_monitored_barrier():
    run_ranks(monitored, 3)


def counted(rank, world_size):
    backend = fccl.backend_of()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    first = backend.collective_counts()
    assert first["all_reduce"] == 3 and first["barrier"] == 1
    dist.broadcast(torch.ones(2), src=0)
    assert backend.collective_counts()["broadcast"] == first.get("broadcast", 0) + 1


def test_collective_counts():
    run_ranks(counted, 2)


def wrong_options(rank, world_size):
    pass


def test_wrong_process_group_options():
    with pytest.raises(RankError, match="pg_options"):
        run_ranks(wrong_options, 1, init_kwargs={"pg_options": object()})


def named_for_both_devices(rank, world_size):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()
    assert fccl.backend_of().engine == "shared-memory"


def test_backend_named_per_device():
    run_ranks(named_for_both_devices, 2, backend="cpu:fccl,cuda:fccl")


# ---- futures ----


def futures(rank, world_size):
    done = []

    def then(future):
        done.append(future.value()[0].sum().item())
        inner = torch.ones(4)
        dist.all_reduce(inner, async_op=True).get_future().wait()  # blocks on a further collective
        return inner

    for i in range(5):
        future = dist.all_reduce(torch.full((10,), float(i)), async_op=True).get_future().then(then)
        value = future.wait()
        assert value.eq(world_size).all()
    assert done == [10.0 * i * world_size for i in range(5)]


def test_callbacks_may_issue_and_block_on_collectives():
    run_ranks(futures, 2)


# ---- launchers ----

PROGRAM = """
import sys, torch, torch.distributed as dist
for i in range(int(sys.argv[1])):
    dist.init_process_group("fccl")  # without `import fccl`: through the entry point
    tensor = torch.full((1000,), float(dist.get_rank() + i))
    dist.all_reduce(tensor)
    assert tensor.eq(2 * i + 1).all()
    import fccl
    assert fccl.backend_of().engine == "shared-memory"
    dist.destroy_process_group()
print("fine")
"""


def test_torchrun_with_ten_rounds(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
            "10",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stdout + done.stderr


def spawned(rank, folder):
    # fccl is known here because importing this module, or torch itself, has registered it.
    dist.init_process_group("fccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


@pytest.mark.parametrize("method", ("spawn", "fork"))
def test_multiprocessing(method, tmp_path):
    if method == "fork":  # from a process without threads of its own
        code = (
            f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_integration as t; "
            f"import torch.multiprocessing as mp; "
            f"mp.start_processes(t.spawned, args=({str(tmp_path)!r},), nprocs=2, start_method='fork')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    else:
        torch.multiprocessing.start_processes(spawned, args=(str(tmp_path),), nprocs=2, start_method=method)
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
