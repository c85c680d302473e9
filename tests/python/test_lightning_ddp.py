"""How the Lightning strategies drive DistributedDataParallel: comm hooks, manual optimization, gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

import fccl.hooks
from lightning_testing import data, digest, load, run_lightning, small_model, trainer_of

PL = "lightning.pytorch"


# ---- comm hooks ----


def my_hook(state, bucket):
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def hook_with_factor(state, bucket, factor):
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() * factor)


class CallableHook:
    def __call__(self, state, bucket):
        return default_hooks.allreduce_hook(None, bucket)


def fit_with_hook(pl, ours, folder, name, steps=3, lr=None, **arguments):
    """Fits; returns the weights and checks that DDP says it ran the hook ``name``."""
    seen = []

    def on_train_batch_end(self, *args):
        seen.append(self.trainer.model._get_ddp_logging_data().get("comm_hook"))

    strategy = ours.DDPStrategy(**arguments)
    model = small_model(pl, on_train_batch_end=on_train_batch_end)
    trainer_of(pl, strategy, folder, max_steps=steps).fit(model, data())
    assert seen == [name] * steps, (seen, name)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return digest(model)


def comm_hooks(rank, world, folder):
    pl, ours = load(PL)
    fit = functools.partial(fit_with_hook, pl, ours, folder)
    indices: list = []
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    results = {
        "none": fit(None),
        "ours": fit("fccl.hooks.AllReduce", ddp_comm_hook=fccl.hooks.AllReduce()),
        "bf16": fit("fccl.hooks.BF16Compress", ddp_comm_hook=fccl.hooks.BF16Compress()),
        "wrapped ours": fit(
            "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook",
            ddp_comm_hook=fccl.hooks.AllReduce(),
            ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
        ),
        "python": fit("my_hook", ddp_comm_state=indices, ddp_comm_hook=my_hook),
        "partial": fit("hook_with_factor", ddp_comm_hook=functools.partial(hook_with_factor, factor=1.0)),
        "callable": fit("CallableHook", ddp_comm_hook=CallableHook()),
        "wrapped partial": fit(
            "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook",
            ddp_comm_hook=functools.partial(hook_with_factor, factor=1.0),
            ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
        ),
        "stock bf16": fit("bf16_compress_hook", ddp_comm_hook=default_hooks.bf16_compress_hook),
        "power": fit("powerSGD_hook", ddp_comm_state=power, ddp_comm_hook=powerSGD_hook.powerSGD_hook),
    }
    assert indices, "the hook did not run"
    return results


def test_comm_hooks(tmp_path):
    first, second = run_lightning(comm_hooks, str(tmp_path))
    assert first == second  # the same weights on both ranks, with every hook
    exact = ("none", "ours", "python", "partial", "callable")
    assert len({first[name] for name in exact}) == 1, first
    assert first["bf16"] != first["none"] != first["wrapped ours"] and first["power"] != first["none"]


def post_local_sgd(rank, world, folder):
    pl, ours = load(PL)

    def fit(**arguments):
        digests = []
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False
        )
        strategy = ours.DDPStrategy(
            ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, **arguments
        )
        model = small_model(pl, on_train_batch_end=lambda self, *args: digests.append(digest(self)))
        trainer_of(pl, strategy, folder, max_steps=6, max_epochs=2).fit(model, data())
        return digests

    with pytest.raises(ValueError, match="model averaging period is not provided"):
        fit()
    return fit(model_averaging_period=2)


def test_post_local_sgd_averages_models_at_its_period(tmp_path):
    first, second = run_lightning(post_local_sgd, str(tmp_path))
    same = [a == b for a, b in zip(first, second, strict=True)]
    # Gradients are shared for two steps; then models are averaged at every second step.
    assert same[:2] == [True, True] and True in same[2:] and False in same[2:], same


# ---- how DDP is driven ----


def manual_static_graph(rank, world, folder):
    pl, ours = load(PL)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    weights = []
    # Before 2.6 Lightning itself does not synchronise the first step of a static graph in manual optimization.
    for static in (False, True) if "post_backward" in vars(pl.strategies.DDPStrategy) else (False,):
        model = small_model(pl, training_step=training_step, automatic_optimization=False)
        trainer_of(pl, ours.DDPStrategy(static_graph=static), folder).fit(model, data())
        weights.append(digest(model))
    automatic = small_model(pl)
    trainer_of(pl, "fccl", folder).fit(automatic, data())
    return [*weights, digest(automatic)]


def test_manual_optimization_and_static_graph(tmp_path):
    results = run_lightning(manual_static_graph, str(tmp_path))
    assert len({weights for result in results for weights in result}) == 1


def gathered_loss(rank, world, folder):
    pl, _ = load(PL)

    def training_step(self, batch, batch_idx):
        # The loss of the whole batch on every rank: its gradients must cross the gather.
        out = self.all_gather(self(batch[0]), sync_grads=True)
        return nn.functional.mse_loss(out, self.all_gather(batch[1]))

    models = [small_model(pl), small_model(pl, training_step=training_step)]
    for model in models:
        trainer_of(pl, "fccl", folder).fit(model, data())
    for plain, gathered in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(plain, gathered, rtol=1e-4, atol=1e-5)
    return digest(models[1])


def test_gradients_through_all_gather(tmp_path):
    first, second = run_lightning(gathered_loss, str(tmp_path))
    assert first == second


def unused_parameters(rank, world, folder):
    pl, _ = load(PL)

    def model():
        made = small_model(pl)
        made.unused = nn.Linear(2, 2)
        return made

    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):  # on_exception adds the advice
        trainer_of(pl, "fccl", folder).fit(model(), data())
    fitted = model()
    trainer_of(pl, "fccl_find_unused_parameters_true", folder).fit(fitted, data())
    return digest(fitted)


def test_unused_parameters(tmp_path):
    first, second = run_lightning(unused_parameters, str(tmp_path))
    assert first == second


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("bf16", r"DDPStrategy\(ddp_comm_hook=...\) wants one of fccl's hooks.*not str"),
        (fccl.hooks.BF16Compress, r"wants a hook object, not the class: fccl.hooks.BF16Compress\(\)"),
    ],
)
def test_a_hook_that_is_none_is_explained(hook, words):
    from fccl.lightning import DDPStrategy

    with pytest.raises(TypeError, match=words):
        DDPStrategy(ddp_comm_hook=hook)._register_ddp_hooks()
