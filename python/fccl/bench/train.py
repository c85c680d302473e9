"""``fccl bench train``: what communication costs a training step."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from typing import IO, Any

from fccl.bench.config import ARENA, NOTHING, TRAIN, BenchConfig, SizePlan
from fccl.bench.plan import known_backends, make_meta

__all__ = ["make_train_config", "run_train", "train_rows"]

_PARTS = ("forward", "backward", "optimizer")


def make_train_config(args: argparse.Namespace) -> BenchConfig:
    """Checks the arguments and plans the run.

    Raises:
        ValueError: the run cannot be done as asked; the message is for people.
    """
    from fccl.bench.models import MODELS

    names = [name.strip() for name in args.models.split(",") if name.strip()]
    for name in names:
        if name not in MODELS:
            raise ValueError(f"--models: unknown model {name!r}; there are {', '.join(MODELS)}")
    if not names:
        raise ValueError(f"--models: name at least one of {', '.join(MODELS)}")
    if args.ranks < 2:
        raise ValueError(f"--ranks must be at least 2, not {args.ranks}: one rank has nothing to communicate")
    if args.steps < 1 or args.warmup < 1 or args.timeout <= 0:
        raise ValueError("--steps and --warmup must be at least 1, and --timeout positive")
    others = [name for name in (part.strip() for part in args.compare.split(",")) if name]
    for name in others:
        if name not in known_backends():
            raise ValueError(
                f"--compare: {name!r} cannot train; here there are {', '.join(known_backends())}"
            )
    plans = []
    for name in names:
        parameters = sum(parameter.numel() for parameter in MODELS[name].build().parameters())
        plans.append(SizePlan(4 * parameters, parameters, 1, 0, name))
    return BenchConfig(
        op=TRAIN,
        form="",
        ranks=args.ranks,
        dtype="float32",
        redop="avg",
        root=0,
        backends=["fccl", ARENA, *(name for name in others if name != "fccl"), NOTHING],
        mode="async",
        plans=plans,
        iterations=args.steps,
        warmup=args.warmup,
        timeout=args.timeout,
    )


def train_rows(config: BenchConfig, plan: SizePlan, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each backend, from what the ranks say of a model.

    A part of a step takes as long as on its slowest rank; all times are medians over the steps, in
    microseconds. "exposed_us" is by how much backward takes longer than with a hook that communicates nothing.
    """
    rows = []
    for name in config.backends:
        steps = zip(*(rank["times"][name] for rank in said), strict=True)
        parts = [[max(rank[part] for rank in step) / 1000 for part in range(3)] for step in steps]
        medians = [statistics.median(step[part] for step in parts) for part in range(3)]
        rows.append(
            {
                "model": plan.model,
                "parameters": plan.count,
                "backend": name,
                "ranks": config.ranks,
                "step_us": round(statistics.median(sum(step) for step in parts), 1),
                **{f"{part}_us": round(median, 1) for part, median in zip(_PARTS, medians, strict=True)},
            }
        )
    silent = rows[-1]["backward_us"]
    for row in rows:
        row["exposed_us"] = round(row["backward_us"] - silent, 1)
    return rows


def _complaints(config: BenchConfig, plan: SizePlan, said: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the trained weights."""
    found = []
    for name in config.backends[:-1]:
        if len({rank["digests"][name] for rank in said}) != 1:
            found.append(f"{plan.model} with {name}: the ranks' weights differ")
    # Two numbers have one sum, whoever adds them.
    if config.ranks == 2 and len({said[0]["digests"][name] for name in config.backends[:-1]}) != 1:
        found.append(f"{plan.model}: the backends' weights differ, which on two ranks they must not")
    return found


def _print_rows(rows: list[dict[str, Any]], baseline: str, out: IO[str]) -> None:
    exposed = {row["backend"]: row["exposed_us"] for row in rows}
    for row in rows:
        share = ""
        if row["backend"] not in (NOTHING, baseline) and exposed.get(baseline, 0) > 0:
            share = f"{100 * row['exposed_us'] / exposed[baseline]:.0f} %"
        print(
            f"  {row['model']:<12} {row['parameters']:>10}  {row['backend']:<10} {row['step_us']:>9.0f} "
            f"{row['forward_us']:>9.0f} {row['backward_us']:>9.0f} {row['optimizer_us']:>9.0f} "
            f"{row['exposed_us']:>9.0f} {share:>8}".rstrip(),
            file=out,
            flush=True,
        )


def run_train(args: argparse.Namespace, command_line: list[str], out: IO[str]) -> int:
    """Runs the command; returns the exit status."""
    from fccl.bench.models import MODELS
    from fccl.bench.runner import RankFailure, run_parts

    try:
        config = make_train_config(args)
    except ValueError as error:
        print(f"fccl bench: {error}", file=sys.stderr)
        return 2
    meta = make_meta(config, command_line)
    baseline = "gloo" if "gloo" in config.backends else config.backends[-2]
    print(
        f"# fccl {meta['fccl']}, torch {meta['torch']}: training with DistributedDataParallel, {config.ranks} ranks\n"
        f"# {meta['cpu']}, {meta['cores']} cores; load average before the run: {meta['load_average_before']:.2f}\n"
        f"# {args.steps} steps each, one thread per rank; backends take turns step by step; times in us are medians\n"
        f"# {'model':<12} {'parameters':>10}  {'backend':<10} {'step':>9} {'forward':>9} {'backward':>9} "
        f"{'optimizer':>9} {'exposed':>9} {'of ' + baseline:>8}",
        file=out,
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    status = 0
    try:
        with contextlib.closing(run_parts(config)) as parts:
            for plan, said in zip(config.plans, parts, strict=True):
                new = train_rows(config, plan, said)
                _print_rows(new, baseline, out)
                rows += new
                for rank in said:
                    meta["engines"].update({name: each["engine"] for name, each in rank["engines"].items()})
                for complaint in _complaints(config, plan, said):
                    print(f"# WRONG: {complaint}", file=out)
                    status = 1
    except RankFailure as failure:
        print(f"fccl bench: training failed; all ranks have been ended\n{failure}", file=sys.stderr)
        for rank_number, trace in failure.tracebacks.items() if args.verbose else ():
            print(f"--- rank {rank_number} ---\n{trace}", file=sys.stderr)
        return 3
    if meta["engines"].get("fccl") != "shared-memory":
        print("# NOTE: fccl did not run on shared memory; its numbers are Gloo's", file=out)
    for plan in config.plans:
        print(f"# {plan.model}: {MODELS[plan.model].text}", file=out)
    if not status:
        same = ", and of every backend" if config.ranks == 2 else ""
        print(f"# weights are the same to the bit on all ranks{same}", file=out)
    if args.json is not None:
        text = json.dumps({"meta": meta, "rows": rows}, indent=1)
        if args.json == "-":
            print(text, flush=True)
        else:
            with open(args.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    return status
