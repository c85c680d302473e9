"""fccl.hooks: errors of the exchange, misuse, subgroups, copies of models, and what is freed when."""

import copy
import gc
import importlib
import os
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import hooks
from hooks_testing import (
    FORMS,
    HOOKS,
    Steered,
    all_hooks,
    attach,
    backends,
)

# ---- errors of the exchange ----


def pull_the_cable(future):
    raise RuntimeError("the cable was pulled later")


class FlakyGroup(dist.ProcessGroup):
    """Passes collectives on to the default group, unless told to fail."""

    def __init__(self):
        self.inner = dist.distributed_c10d._get_default_group()
        super().__init__(self.inner.rank(), self.inner.size())
        self.failure = ""

    def allreduce(self, tensors, options):
        return self.carry(lambda: self.inner.allreduce(tensors, options))

    def allgather(self, outputs, inputs, options):
        return self.inner.allgather(outputs, inputs, options)

    # The second exchange of a compressing hook, and so one in the middle.
    def alltoall_base(self, output, input, output_splits, input_splits, options):
        return self.carry(
            lambda: self.inner.alltoall_base(output, input, output_splits, input_splits, options)
        )

    all_to_all_single = alltoall_base

    def carry(self, start):
        if self.failure == "at once":
            raise RuntimeError("the cable was pulled at once")
        work = start()
        if self.failure == "later":
            return torch._C._distributed_c10d._create_work_from_future(work.get_future().then(pull_the_cable))
        return work


def failing_exchange(rank, world_size, hook, failure, as_bucket_view):
    group = FlakyGroup()
    ddp = DistributedDataParallel(Steered(torch.zeros(40000)), gradient_as_bucket_view=as_bucket_view)
    native = HOOKS[hook]()._native()
    fccl._extension.load().register_comm_hook(ddp.reducer, group, native)
    wanted = torch.full((40000,), 1.0 + 2 * rank)
    for step in range(4):
        ddp.zero_grad()
        group.failure = failure if step == 1 else ""
        if step == 1:
            with pytest.raises(RuntimeError, match=f"the cable was pulled {failure}"):
                ddp(wanted).sum().backward()
            # No promise about which, but gradients: not the bytes of another format.
            values = ddp.module.parameters_[0].grad.unique().tolist()
            assert set(values) <= {1.0, 2.0, 3.0, 4.0}, values
        else:
            ddp(wanted).sum().backward()
            assert (ddp.module.parameters_[0].grad == 2.0).all(), step


@backends
@all_hooks
@pytest.mark.parametrize("failure", ["at once", "later"])
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_error_is_raised_by_backward_and_the_next_step_works(
    rank_pool, backend, hook, failure, as_bucket_view
):
    rank_pool(2, backend).run(failing_exchange, hook, failure, as_bucket_view)


def python_form_fails(rank, world_size, hook):
    group = FlakyGroup()
    ddp = DistributedDataParallel(Steered(torch.zeros(5)))
    ddp.register_comm_hook(None, HOOKS[hook]().as_python_hook(group))
    for step in range(3):
        ddp.zero_grad()
        group.failure = "at once" if step == 1 else ""
        if step == 1:
            with pytest.raises(RuntimeError, match="the cable was pulled at once"):
                ddp(torch.ones(5)).sum().backward()
        else:
            ddp(torch.ones(5)).sum().backward()
            assert (ddp.module.parameters_[0].grad == 1.0).all()


@all_hooks
def test_error_in_the_python_form(rank_pool, hook):
    rank_pool(2, "gloo").run(python_form_fails, hook)


def mismatched_calls(rank, world_size, hook):
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    attach(ddp, hook)
    ddp(torch.ones(1000)).sum().backward()
    ddp.zero_grad()
    loss = ddp(torch.ones(1000)).sum()  # broadcasts the new buckets
    with pytest.raises(RuntimeError, match=r"all_reduce.*broadcast|broadcast.*all_reduce"):
        if rank == 0:
            loss.backward()
        else:
            dist.broadcast(torch.ones(7), src=0)
    if rank == 0:
        ddp.zero_grad()
        loss = ddp(torch.full((1000,), 3.0)).sum()
    loss.backward()
    assert (ddp.module.parameters_[0].grad == 2.0).all()


@all_hooks
def test_mismatched_call_raises_and_the_group_stays_usable(rank_pool, hook):
    rank_pool(2, "fccl").run(mismatched_calls, hook)


# ---- use and misuse ----


def register_errors(rank, world_size):
    module = nn.Linear(2, 2)
    hook = hooks.AllReduce()
    with pytest.raises(TypeError, match=r"not Linear; wrap the module first"):
        hooks.register(module, hook)
    with pytest.raises(TypeError, match="the class DistributedDataParallel"):
        hooks.register(DistributedDataParallel, hook)

    class LightningModule(nn.Module):
        pass

    with pytest.raises(TypeError, match=r"DDPStrategy\(ddp_comm_hook=...\)"):
        hooks.register(LightningModule(), hook)
    ddp = DistributedDataParallel(module)
    with pytest.raises(TypeError, match="OptimizedModule's attribute '_orig_mod'"):
        hooks.register(torch.compile(ddp), hook)
    with pytest.raises(TypeError, match=r"not AllReduce; the arguments are \(model, hook\)"):
        hooks.register(hook, ddp)
    with pytest.raises(TypeError, match=r"the class: fccl.hooks.AllReduce\(\)"):
        hooks.register(ddp, hooks.AllReduce)
    with pytest.raises(TypeError, match="a Python hook goes to ddp.register_comm_hook"):
        hooks.register(ddp, hook.as_python_hook())
    with pytest.raises(TypeError, match="common base"):
        hooks.GradientHook()

    hooks.register(ddp, hook)  # none of the above registered anything
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        hooks.register(ddp, hooks.BF16Compress())
    assert ddp._get_ddp_logging_data()["comm_hook"] == "fccl.hooks.AllReduce"
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 2))

    with importlib.import_module("torch._dynamo").config.patch(optimize_ddp="python_reducer"):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="python_reducer"):
            hooks.register(ddp, hook)
        ddp.register_comm_hook(None, hook.as_python_hook())
        with pytest.raises(TypeError, match="python_reducer"):
            hook.as_python_hook()(None, (torch.ones(1), torch.ones(1)))


def test_register_says_what_is_wrong(rank_pool):
    rank_pool(1, "gloo").run(register_errors)


def integer_bucket(rank, world_size):
    native = hooks.AllReduce()._native()
    bucket = _bucket_of(torch.ones(3, dtype=torch.int64))
    future = native.run(dist.distributed_c10d._get_default_group(), bucket)
    with pytest.raises(RuntimeError, match="averages floating-point gradients, and this bucket holds Long"):
        future.wait()


def _bucket_of(tensor):
    """A GradBucket around `tensor`; only a reducer makes one, so a recording hook catches it."""
    caught = []

    def catch(state, bucket):
        bucket.set_buffer(tensor)
        caught.append(bucket)
        future = torch.futures.Future()
        future.set_result(torch.zeros(3))
        return future

    ddp = DistributedDataParallel(Steered(torch.zeros(3)))
    ddp.register_comm_hook(None, catch)
    ddp(torch.ones(3)).sum().backward()
    return caught[0]


def test_integers_are_refused_through_the_future(rank_pool):
    rank_pool(1, "gloo").run(integer_bucket)


def one_hook_many_models(rank, world_size):
    hook = hooks.BF16Compress()
    models = [DistributedDataParallel(Steered(torch.zeros(3 + i))) for i in range(3)]
    for ddp in models:
        hooks.register(ddp, hook)
    del hook
    gc.collect()
    with models[0].join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            models[0].zero_grad()
            models[0](torch.full((3,), 4.0)).sum().backward()
            assert (models[0].module.parameters_[0].grad == 4.0).all()
    for i, ddp in enumerate(models[1:], 1):
        ddp(torch.full((3 + i,), 4.0 * rank)).sum().backward()
        assert (ddp.module.parameters_[0].grad == 2.0).all()


@backends
def test_one_hook_serves_many_models(rank_pool, backend):
    rank_pool(2, backend).run(one_hook_many_models)


def subgroups(rank, world_size, hook, form):
    # Ranks 0 and 1, and rank 2 alone.
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[0] if rank < 2 else groups[1]
    ddp = DistributedDataParallel(Steered(torch.zeros(3)), process_group=group)
    hook = HOOKS[hook]()
    if form == "register":
        hooks.register(ddp, hook)
    elif form == "state":
        ddp.register_comm_hook(group, hook.as_python_hook())
    else:
        ddp.register_comm_hook(None, hook.as_python_hook(group))
    ddp(torch.full((3,), 2.0 * rank)).sum().backward()
    assert (ddp.module.parameters_[0].grad == (1.0 if rank < 2 else 4.0)).all()
    dist.barrier()
    # The model first. If it held the last reference to the group, DDP's reducer would join Gloo's threads
    # with the GIL held, and a thread of Gloo's that drops a finished call may just then want the GIL: torch
    # hangs there now and then, hook or no hook.
    del ddp
    dist.destroy_process_group(group)


@backends
@all_hooks
@pytest.mark.parametrize("form", ["register", "state", "argument"])
def test_exchange_is_in_the_models_group(rank_pool, backend, hook, form):
    rank_pool(3, backend).run(subgroups, hook, form)


def copies(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    hooks.register(ddp, hooks.AllReduce())
    for clone in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
        assert "fccl" not in clone._get_ddp_logging_data().get("comm_hook", "")
        hooks.register(clone, hooks.BF16Compress())  # it had none
        for _ in range(2):
            with clone.join(divide_by_initial_world_size=False):
                clone(torch.ones(1, 2)).sum().backward()
        assert torch.equal(clone.module.weight.grad, 2 * torch.ones(2, 2))
    plain = pickle.loads(pickle.dumps(ddp))
    with plain.join():
        plain(torch.ones(1, 2)).sum().backward()
    assert torch.equal(plain.module.weight.grad, torch.ones(2, 2))


def test_copies_of_a_model_have_no_hook(rank_pool):
    rank_pool(1, "gloo").run(copies)


def models_come_and_go(rank, world_size, hook, form):
    def resident_mb():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    gc.collect()
    gc.disable()
    try:
        for i in range(80):
            ddp = DistributedDataParallel(Steered(torch.zeros(1 << 20)))
            attach(ddp, hook, form)
            ddp(torch.ones(1 << 20)).sum().backward()
            gone = weakref.ref(ddp)
            del ddp
            assert gone() is None  # by reference counting alone: its memory must not wait for the collector
            if i == 9:
                before = resident_mb()
        return resident_mb() - before
    finally:
        gc.enable()


@backends
@all_hooks
@pytest.mark.parametrize("form", FORMS)
def test_model_and_hook_are_freed(rank_pool, backend, hook, form):
    """Seventy models with a bucket of 4 MB each: if only the buckets stayed, that were 280 MB.

    Threads that complete Futures free memory into arenas of their own, which may keep some tens of MB.
    """
    for growth in rank_pool(2, backend).run(models_come_and_go, hook, form):
        assert growth < 140


@pytest.mark.parametrize("hook", [hooks.AllReduce(), hooks.BF16Compress()], ids=repr)
def test_hooks_are_pickled_by_what_they_are(hook):
    clone = pickle.loads(pickle.dumps(hook))
    assert type(clone) is type(hook)
    assert repr(clone) == repr(hook) == f"{hook.name}()"
    python_hook = hook.as_python_hook()
    assert python_hook.__qualname__ == hook.name  # Lightning and DDP show it
    assert pickle.loads(pickle.dumps(python_hook)).__qualname__ == hook.name
    assert not callable(hook)
