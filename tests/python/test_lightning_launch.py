"""How the Lightning strategies are found, imported, launched and left."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch.distributed as dist

import fccl.hooks
from fccl_testing import free_port, run_ranks
from lightning_testing import NAMESPACES, PRELOAD, data, digest, load, run_lightning, small_model, trainer_of

NAMES = ("fccl", "fccl_spawn", "fccl_fork", "fccl_notebook")
START_METHODS = {"fccl": "popen", "fccl_spawn": "spawn", "fccl_fork": "fork", "fccl_notebook": "fork"}


# ---- found and imported ----


def registered(rank, world, namespace):
    pl, ours = load(namespace)
    registry = importlib.import_module(f"{namespace}.strategies").StrategyRegistry
    stock = set(registry) - {name for name in registry if name.startswith("fccl")}
    assert registry["ddp"]["strategy"] is pl.strategies.DDPStrategy and stock  # left as they were
    for name in NAMES:
        assert registry.get(name)._start_method == START_METHODS[name]
        for unused in (True, False):
            strategy = registry.get(f"{name}_find_unused_parameters_{str(unused).lower()}")
            assert type(strategy) is ours.DDPStrategy and strategy._ddp_kwargs == {
                "find_unused_parameters": unused
            }
    for name in set(registry) - stock:
        assert name == name.lower() and "ddp" not in name and registry[name]["description"]
    importlib.reload(ours)  # registering again is no error
    strategy = pickle.loads(pickle.dumps(ours.DDPStrategy(process_group_backend="gloo", static_graph=True)))
    assert strategy.process_group_backend == "gloo" and strategy._ddp_kwargs == {"static_graph": True}
    with pytest.raises(TypeError, match="nonsense"):
        trainer_of(pl, ours.DDPStrategy(nonsense=1), ".", devices=1).fit(small_model(pl), data())


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_registry(namespace):
    run_lightning(registered, namespace, world=1)


class NoLightning:
    """A finder that finds no Lightning, as if it were not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def imported_without_lightning(rank, world, module, distribution):
    with mock.patch.object(sys, "meta_path", [NoLightning, *sys.meta_path]):
        import fccl

        assert fccl.__name__ == "fccl"  # needs torch only
        with pytest.raises(
            ImportError, match=rf"needs the package '{distribution}'.*pip install 'fccl\[lightning\]'"
        ):
            importlib.import_module(module)
    with (
        mock.patch("importlib.metadata.version", return_value="2.6.2"),
        pytest.raises(ImportError, match=rf"{distribution} 2\.6\.2 is a compromised release"),
    ):
        importlib.import_module(module)


@pytest.mark.parametrize("module", NAMESPACES.values())
def test_import_without_lightning(module):
    distribution = module.removeprefix("fccl.").replace("_", "-")
    run_ranks(imported_without_lightning, 1, module, distribution, backend=None)


# ---- launched ----


def logging_model(pl):
    def training_step(self, batch, batch_idx):
        self.log("ranks", float(dist.get_world_size()))
        self.log(
            "rank_sum", float(self.global_rank), sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=False
        )
        self.log("is_fccl", float(dist.get_backend() == "fccl"), sync_dist=True)
        return self.loss(batch)

    return small_model(pl, training_step=training_step)


def forked(rank, world, folder, strategy):
    pl, _ = load("lightning.pytorch")
    model = logging_model(pl)
    before = digest(model)
    trainer = trainer_of(pl, strategy, folder)
    trainer.fit(model, data())
    assert not dist.is_initialized() and digest(model) != before  # trained in children, brought back
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", ["fccl_fork", "fccl_notebook"])
def test_fork(tmp_path, strategy):
    (metrics,) = run_ranks(forked, 1, str(tmp_path), strategy, backend=None, preload=PRELOAD, timeout=90)
    assert metrics == {"ranks": 2, "rank_sum": 1, "is_fccl": 1}


def under_torchrun(rank, world, folder):
    pl, _ = load("lightning.pytorch")
    model = logging_model(pl)
    trainer = trainer_of(pl, "fccl", folder)
    trainer.fit(model, data())
    assert type(trainer.strategy.cluster_environment).__name__ == "TorchElasticEnvironment"
    return digest(model), {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_torchrun_environment(tmp_path):
    port = str(free_port())

    def env(rank):
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        return {**sizes, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    first, second = run_lightning(under_torchrun, str(tmp_path), env=env)
    assert first == second and first[1] == {"ranks": 2, "rank_sum": 1, "is_fccl": 1}


def spawned(rank, world, folder):
    pl, ours = load("lightning.pytorch")
    from lightning_linear import Linear

    # The hook travels to the children, too.
    strategy = ours.DDPStrategy(start_method="spawn", ddp_comm_hook=fccl.hooks.AllReduce())
    model = Linear()
    trainer = trainer_of(pl, strategy, folder)
    trainer.fit(model, data())
    assert digest(model) != digest(Linear())
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_spawn(tmp_path):
    (metrics,) = run_ranks(spawned, 1, str(tmp_path), backend=None, preload=PRELOAD, timeout=110)
    assert metrics == {"is_fccl": 1, "ranks": 2}


SCRIPT = """
import atexit, json, os, sys

# Both ranks share the pipe, and pieces of print() would mix: one write for each line.
def say(line):
    os.write(1, f"\\n{{line}}\\n".encode())

@atexit.register  # the first to be registered, so the last to run
def at_exit():
    say(f"group at exit: {{torch.distributed.is_initialized()}}")

sys.path.insert(0, {tests!r})
import torch
import lightning.pytorch as pl
import fccl.lightning
from lightning_linear import Linear
from lightning_testing import data, trainer_of

model = Linear()
trainer = trainer_of(pl, "fccl", {folder!r})
trainer.fit(model, data())
metrics = {{name: value.item() for name, value in trainer.callback_metrics.items()}}
weights = model.layer.weight.tolist()
say(json.dumps({{"rank": trainer.global_rank, "metrics": metrics, "weights": weights}}))
"""


def test_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    first, second = sorted(results, key=lambda result: result["rank"])
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["metrics"] == {"is_fccl": 1, "ranks": 2} and first["weights"] == second["weights"]
    # Both ranks left the group while the interpreter was whole.
    assert output.count("group at exit: False") == 2 and "group at exit: True" not in output
    assert "Traceback" not in output and "FutureWarning" not in output
