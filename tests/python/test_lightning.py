"""The Lightning strategies in real fits, validations, tests and predictions on two processes."""

from __future__ import annotations

import importlib
import os
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import direct
from lightning_testing import (
    NAMESPACES,
    data,
    digest,
    load,
    recording,
    run_lightning,
    small_model,
    trainer_of,
)

PL = "lightning.pytorch"

# Everything that Lightning documents of a strategy and that a run calls.
SURFACE = (
    *("all_gather", "backward", "barrier", "batch_to_device", "broadcast", "connect"),
    *("lightning_module_state_dict", "model_sharded_context", "model_to_device"),
    *(
        f"on_{stage}_{when}"
        for stage in ("train", "validation", "test", "predict")
        for when in ("start", "end")
    ),
    *("on_train_batch_start", "optimizer_state", "optimizer_step", "post_backward", "pre_backward"),
    *("process_dataloader", "training_step", "validation_step", "test_step", "predict_step", "reduce"),
    *("reduce_boolean_decision", "remove_checkpoint", "save_checkpoint", "setup", "setup_environment"),
    *("setup_optimizers", "setup_precision_plugin", "teardown", "tensor_init_context"),
)
RESUMING = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")


# ---- the whole surface ----


def surface_model(pl, seen):
    def configure_model(self):
        if len(self.layers) == 4:
            strategy = self.trainer.strategy
            with strategy.model_sharded_context(), strategy.tensor_init_context():
                torch.manual_seed(2)
                self.layers.append(nn.Linear(1, 1))

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        seen["forward_dtype"] = out.dtype
        seen["model"] = type(self.trainer.model)
        seen["bucket_view"] = self.trainer.model.gradient_as_bucket_view
        loss = nn.functional.mse_loss(out.float(), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(
            "count", torch.tensor(batch_idx), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max"
        )
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        seen["gathered"] = self.all_gather({"rank": self.global_rank, "loss": loss})
        seen["mean_of_gathered"] = seen["gathered"]["loss"].mean().item()
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch, batch_idx):
        seen["inference"] = torch.is_inference_mode_enabled()
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    return small_model(
        pl,
        configure_model=configure_model,
        training_step=training_step,
        validation_step=validation_step,
        test_step=test_step,
        predict_step=predict_step,
    )


def surface(rank, world, namespace, folder, backend):
    pl, ours = load(namespace)

    class CheckpointIO(pl.plugins.TorchCheckpointIO):
        saved = removed = 0

        def save_checkpoint(self, *args, **kwargs):
            self.saved += 1
            super().save_checkpoint(*args, **kwargs)

        def remove_checkpoint(self, *args, **kwargs):
            self.removed += 1
            super().remove_checkpoint(*args, **kwargs)

    io = CheckpointIO()
    environment = importlib.import_module(f"{namespace}.plugins.environments").LightningEnvironment()
    strategy = recording(ours.DDPStrategy, SURFACE)(
        accelerator=pl.accelerators.CPUAccelerator(),
        cluster_environment=environment,
        checkpoint_io=io,
        precision_plugin=pl.plugins.MixedPrecision("bf16-mixed", "cpu"),
        process_group_backend=backend,
        timeout=timedelta(seconds=47),
        start_method="popen",
        gradient_as_bucket_view=True,
    )
    assert isinstance(strategy, pl.strategies.DDPStrategy)
    seen: dict = {}
    model = surface_model(pl, seen)
    best = pl.callbacks.ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1)
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=9)
    trainer = trainer_of(
        pl,
        strategy,
        folder,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=10.0,
        enable_checkpointing=True,
        callbacks=[best, stopping],
    )
    assert trainer.strategy is strategy and strategy.lightning_restore_optimizer
    assert not strategy.handles_gradient_accumulation and not strategy.restore_checkpoint_after_setup

    with mock.patch.object(dist, "init_process_group", wraps=dist.init_process_group) as init:
        trainer.fit(model, data(), data(batches=4, seed=6))
    assert init.call_args.args[0] == backend and init.call_args.kwargs["timeout"] == timedelta(seconds=47)
    assert dist.get_backend() == backend == strategy.process_group_backend
    assert strategy.cluster_environment is environment and strategy.checkpoint_io is io
    assert strategy.is_distributed and strategy.is_global_zero == (rank == 0)
    assert strategy.root_device == torch.device("cpu")
    assert strategy.lightning_module is model and strategy.model is model  # teardown unwrapped it
    assert (io.saved > 0, io.removed > 0) == ((True, True) if rank == 0 else (False, False))
    assert os.path.exists(best.best_model_path)
    assert seen["forward_dtype"] == torch.bfloat16 and seen["model"] is DistributedDataParallel
    assert seen["bucket_view"] and trainer.global_step == 3 * 8 // world // 2
    assert seen["gathered"]["rank"].tolist() == list(range(world)) and seen["gathered"]["loss"].shape == (
        world,
    )
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["count"] == 8 / world - 1

    test = trainer.test(model, data(batches=4, seed=7), verbose=False)
    assert seen["inference"] == (backend != "gloo")  # Lightning trusts any backend but Gloo with it
    weights = digest(model)
    predictions = torch.cat(trainer.predict(model, data(batches=4, seed=8), return_predictions=True))
    missing = [name for name in SURFACE if not strategy.calls[name]]
    assert not missing, missing
    if backend == "fccl":
        used = fccl.backend_of()
        assert used.engine == "shared-memory", used.why_inner
        counts = used.collective_counts()
        assert all(counts[name] > 0 for name in ("all_reduce", "broadcast", "all_gather", "barrier")), counts
    return weights, metrics, test, best.best_model_path, predictions


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_whole_surface(namespace, tmp_path):
    ours = run_lightning(surface, namespace, str(tmp_path / "fccl"), "fccl")
    (weights, metrics, test, path, predictions), other = ours
    assert (weights, metrics, test, path) == other[:4]
    assert predictions.shape == other[4].shape == (8, 1) and not torch.equal(predictions, other[4])
    if namespace == PL:
        gloo = run_lightning(surface, namespace, str(tmp_path / "gloo"), "gloo")
        assert gloo[0][0] == weights  # a sum of two floats has one value
        assert gloo[0][1] == pytest.approx(metrics)


# ---- checkpoints ----


def resume(rank, world, folder):
    pl, ours = load(PL)

    def fit(epochs, path=None):
        strategy = recording(ours.DDPStrategy, RESUMING)(parallel_devices=[torch.device("cpu")] * world)
        trainer = trainer_of(pl, strategy, folder, max_epochs=epochs)
        model = small_model(pl)
        trainer.fit(model, data(), ckpt_path=path)
        return trainer, model

    straight = digest(fit(2)[1])
    trainer, model = fit(1)
    half = digest(model)
    path = os.path.join(folder, "half.ckpt")
    trainer.save_checkpoint(path)
    trainer, model = fit(2, path)
    assert all(trainer.strategy.calls[name] for name in RESUMING)
    assert trainer.current_epoch == 2 and half != straight
    trainer.strategy.barrier("before removal")
    trainer.strategy.remove_checkpoint(path)
    trainer.strategy.barrier("after removal")
    assert not os.path.exists(path)
    return straight, digest(model)


def test_resumed_run_equals_straight_run(tmp_path):
    results = run_lightning(resume, str(tmp_path))
    assert len({weights for pair in results for weights in pair}) == 1


# ---- metrics ----


def metrics(rank, world, folder, backend):
    pl, ours = load(PL)
    import torchmetrics

    def training_step(self, batch, batch_idx):
        # Rank 0 logs 4 values of 2.0, rank 1 logs 3 of 1.0: 11 / 7 = 1.571.
        if batch_idx < 4 - self.global_rank:
            self.log(
                "mean",
                torch.tensor(2.0 - self.global_rank),
                on_epoch=True,
                on_step=False,
                sync_dist=True,
                batch_size=1,
            )
        self.log("sum", torch.tensor(1), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
        self.log("step", torch.tensor(float(self.global_rank)), on_epoch=False, on_step=True, sync_dist=True)
        self.accuracy(batch[1].reshape(-1) > 0, torch.ones(len(batch[1]), dtype=torch.bool))
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        seen.append(self.trainer.callback_metrics.get("step"))
        return self.loss(batch)

    seen: list = []
    model = small_model(pl, training_step=training_step)
    model.accuracy = torchmetrics.classification.BinaryAccuracy()
    trainer = trainer_of(pl, ours.DDPStrategy(process_group_backend=backend), folder)
    with mock.patch.object(direct, "barrier", wraps=direct.barrier) as barrier:
        trainer.fit(model, data())
        in_fit = barrier.call_count
        before = mock.Mock(wraps=direct.all_reduce)
        with mock.patch.object(direct, "all_reduce", before):
            for _ in range(5):
                trainer.strategy.reduce(torch.ones(3), reduce_op="mean")
                trainer.strategy.reduce(torch.ones(3, dtype=torch.int64), reduce_op="mean")
                assert trainer.strategy.reduce("not a tensor") == "not a tensor"
                assert not trainer.strategy.reduce_boolean_decision(rank == 0)
                assert trainer.strategy.reduce_boolean_decision(rank == 0, all=False)
                assert trainer.strategy.reduce_boolean_decision(True)
                assert not trainer.strategy.reduce_boolean_decision(False, all=False)
        assert before.call_count == 5 * 6 and barrier.call_count == in_fit
        trainer.strategy.barrier("mine")
        assert barrier.call_count == in_fit + 1
        sent = trainer.strategy.broadcast({"rank": rank}, src=1)
        assert sent == {"rank": 1}
        with mock.patch("pickle.dumps", side_effect=AssertionError("pickled")):
            assert trainer.strategy.broadcast(torch.full((5000,), rank), src=1).sum() == 5000
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("backend", ["fccl", "gloo"])
def test_metrics_are_true_means(tmp_path, backend):
    first, second = run_lightning(metrics, str(tmp_path), backend)
    assert first == second
    assert first["mean"] == pytest.approx(11 / 7) and first["sum"] == 8 and first["step"] == 0.5
    targets = torch.cat([batch[1] for batch in data()])
    assert first["accuracy"] == pytest.approx((targets > 0).float().mean().item())


# ---- exceptions and plugins ----


def failing_step(rank, world, folder):
    pl, ours = load(PL)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("in the step")
        return self.loss(batch)

    strategy = recording(ours.DDPStrategy, ("on_exception", "teardown"))()
    path = os.path.join(folder, "saved")
    saver = pl.callbacks.ModelCheckpoint(dirpath=path, save_on_exception=True, every_n_epochs=10)
    trainer = trainer_of(pl, strategy, folder, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(KeyError, match="in the step"):
        trainer.fit(small_model(pl, training_step=training_step), data())
    assert strategy.calls == {"on_exception": 1, "teardown": 1}
    model = small_model(pl)  # the process group has survived
    trainer_of(pl, "fccl", folder).fit(model, data())
    return digest(model), os.listdir(path)


def test_exception_on_all_ranks(tmp_path):
    first, second = run_lightning(failing_step, str(tmp_path))
    assert first == second and len(first[1]) == 1


def layer_sync(rank, world, folder):
    pl, _ = load(PL)
    called = []

    class Halve(pl.plugins.LayerSync):
        def apply(self, model):
            called.append("apply")
            model.layers[0].weight.data.mul_(0.5)
            return model

        def revert(self, model):
            called.append("revert")
            return model

    model = small_model(pl)
    trainer_of(pl, "fccl", folder, plugins=[Halve()]).fit(model, data())
    assert called == ["apply", "revert"]
    # torch itself has no SyncBatchNorm for the CPU.
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        trainer_of(pl, "fccl", folder, sync_batchnorm=True).fit(small_model(pl), data())
    return digest(model)


def test_layer_sync_plugins(tmp_path):
    first, second = run_lightning(layer_sync, str(tmp_path))
    assert first == second


# ---- the process group ----


def other_backend(rank, world, folder):
    pl, ours = load(PL)
    trainer = trainer_of(pl, ours.DDPStrategy(process_group_backend="gloo"), folder)
    trainer.fit(small_model(pl), data())
    assert dist.get_backend() == "gloo" == trainer.strategy.process_group_backend
    second = ours.DDPStrategy()
    assert second.process_group_backend == "fccl"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = small_model(pl)
        trainer_of(pl, second, folder).fit(model, data())
    told = [str(w.message) for w in caught if "exists already in this process" in str(w.message)]
    assert second.process_group_backend == "gloo"
    return digest(model), told


def test_second_trainer_says_which_backend_it_got(tmp_path):
    (first, told), (second, told_on_1) = run_lightning(other_backend, str(tmp_path))
    assert first == second and len(told) == 1 and not told_on_1
    assert "process_group_backend='fccl'" in told[0] and "backend 'gloo' exists already" in told[0]


def without_a_group(rank, world):
    pl, ours = load(PL)
    strategy = ours.DDPStrategy(parallel_devices=[torch.device("cpu")])
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor and strategy.all_gather(tensor) is tensor
    assert strategy.broadcast(tensor) is tensor and strategy.barrier() is None
    assert strategy.reduce_boolean_decision(True) and not strategy.reduce_boolean_decision(False, all=False)
    assert ours.DDPStrategy(process_group_backend=None).process_group_backend == "fccl"
    trainer = trainer_of(pl, "fccl", ".", devices=1)  # one process: a group of one
    model = small_model(pl)
    trainer.fit(model, data())
    assert trainer.strategy.world_size == 1 and trainer.strategy.all_gather(tensor).shape == (1, 2)
    assert trainer.strategy.reduce(torch.tensor(3), reduce_op="mean").item() == 3


def test_one_process_and_no_group():
    run_lightning(without_a_group, world=1)
