"""Stores that are not torch's own, and what stands in them: bytes from another process."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import run_ranks


class PlainStore(dist.Store):
    """A Store written in Python. It has no ``clone()``, which torch's documentation does not ask for."""

    def __init__(self, path, world_size, change=None):
        super().__init__()
        self.inner = dist.FileStore(path, world_size)
        self.change = change or (lambda key, value: value)

    def set(self, key, value):
        self.inner.set(key, self.change(key, bytes(value)))

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, amount):
        return self.inner.add(key, amount)

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, timeout=None):
        self.inner.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key):
        return self.inner.delete_key(key)


def over_a_plain_store(rank, world_size, folder):
    store = PlainStore(f"{folder}/store", world_size)
    with pytest.raises(RuntimeError):
        store.clone()
    dist.init_process_group("fccl", store=store, rank=rank, world_size=world_size)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    assert fccl.backend_of().engine == "shared-memory"


@pytest.mark.timeout(60)
def test_a_store_without_clone(tmp_path):
    run_ranks(over_a_plain_store, 2, str(tmp_path), backend=None, timeout=40)


def ending_while_it_is_set_up(rank, world_size, folder, step):
    def change(key, value):
        if rank == 1 and key.endswith(step):
            os._exit(7)
        return value

    store = PlainStore(f"{folder}/store", world_size, change)
    start = time.monotonic()
    with pytest.raises(
        dist.DistNetworkError, match=r"rank 1 ended while the group was set up.*output says why"
    ):
        dist.init_process_group("fccl", store=store, rank=rank, world_size=world_size)
    assert time.monotonic() - start < 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", ["ready/1", "mapped/1"])
def test_a_rank_that_ends_while_the_group_is_set_up(step, tmp_path):
    run_ranks(ending_while_it_is_set_up, 3, str(tmp_path), step, backend=None, timeout=40, expect_exit={1: 7})


def not_set_up_on_one_rank(rank, world_size, folder):
    if rank == 1:
        return
    with pytest.raises(
        dist.DistBackendError, match="timed out after 1000 ms while the group.*rank 1 did not come"
    ):
        dist.init_process_group(
            "fccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=1),
        )


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_come_to_the_set_up(tmp_path):
    run_ranks(not_set_up_on_one_rank, 2, str(tmp_path), backend=None, timeout=40)


def over_a_garbled_store(rank, world_size, folder, junk):
    """Rank 1's word on the set-up is not what fccl writes there."""

    def change(key, value):
        return junk if rank == 1 and key.endswith("ready/1") else value

    store = PlainStore(f"{folder}/store", world_size, change)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist.init_process_group("fccl", store=store, rank=rank, world_size=world_size)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    backend = fccl.backend_of()
    assert backend.engine == "inner"
    assert rank == 1 or any("does not use shared memory" in str(each.message) for each in told)
    return backend.why_inner


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("junk", "shown"),
    [
        (b"\xff\xfe trouble \xc3", "?? trouble ?"),
        (b"two\nlines \x1b[31mred", "two?lines ?[31mred"),
        (b"\xed\xa0\x80 surrogate", "??? surrogate"),
        (b"", ""),
        (b"long " * 100_000, "long "),
    ],
    ids=["not UTF-8", "control characters", "surrogate", "empty", "long"],
)
def test_words_of_others_are_made_printable(junk, shown, tmp_path):
    for why in run_ranks(over_a_garbled_store, 2, str(tmp_path), junk, backend=None, timeout=40):
        assert why.startswith(f"rank 1: {shown}")
        assert why.isprintable() and len(why) < 500
