"""``fccl info``: what fccl found on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from typing import Any

from fccl import _machine
from fccl._version import __version__

__all__ = ["add_parser", "collect", "run"]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything that ``fccl info`` shows; JSON-compatible.

    Works without the compiled module too: "compiled_module" is then None and "problem" says why.
    """
    import torch

    facts: dict[str, Any] = {
        "fccl": __version__,
        "problem": "",
        "compiled_module": None,
        "torch_built_for": None,
        "torch_found": torch.__version__,
        "python": sys.version.split()[0],
        "compiler": None,
        "cpu": _machine.cpu_model(),
        "cores": _machine.core_count(),
        "last_level_cache_bytes": _machine.last_level_cache_bytes(),
        "available_memory_bytes": _machine.available_memory(),
        "cpu_features_built": None,
        "cpu_features_used": None,
        "shares_memory": None,
        "why_no_shared_memory": "",
        "large_pages": None,
        "handover_ns": None,
        "arena_bytes": None,
        "why_no_arena": "",
        "cuda_built": None,
        "cuda_of_torch": torch.version.cuda,
        "lightning": _installed("lightning"),
        "pytorch_lightning": _installed("pytorch-lightning"),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("FCCL_")
        },
    }
    try:
        from fccl import _extension

        module: Any = _extension.load()
        build = module.build_info()
        facts.update(
            compiled_module=getattr(module, "__file__", None),
            torch_built_for=build["torch_version"],
            compiler=build["compiler"],
            cpu_features_built=build["isas"],
            cpu_features_used=module.selected_isa(),
            cuda_built=bool(build["cuda"]),
        )
        why = module.why_no_shared_memory()
        facts.update(shares_memory=not why, why_no_shared_memory=why)
        facts.update(large_pages=module.large_pages(), handover_ns=module.handover_ns())
        arena = module.memory_stats()
        facts.update(arena_bytes=arena["capacity"], why_no_arena=arena["why_none"])
    except (ImportError, RuntimeError) as error:
        facts["problem"] = str(error)
    return facts


def _yes_no(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def _print(facts: dict[str, Any]) -> None:
    from fccl.bench.sizes import format_size

    cache = facts["last_level_cache_bytes"]
    shares = _yes_no(facts["shares_memory"])
    if facts["environment"].get("FCCL_SHM") == "0":
        shares = "turned off by FCCL_SHM=0"
    elif facts["why_no_shared_memory"]:
        shares += f": {facts['why_no_shared_memory']}"
    if facts["why_no_arena"]:
        arena = f"no: {facts['why_no_arena']}"
    else:
        arena = f"up to {format_size(facts['arena_bytes'] or 0)} (fccl.empty, DDP's buckets)"
    features = facts["cpu_features_used"] or "unknown"
    if facts["cpu_features_built"]:
        features += f" (built: {facts['cpu_features_built']})"
    cuda = _yes_no(facts["cuda_built"])
    cuda += f"; torch has {'CUDA ' + facts['cuda_of_torch'] if facts['cuda_of_torch'] else 'no CUDA'}"
    lines = {
        "fccl": facts["fccl"],
        "compiled module": facts["compiled_module"] or "NOT USABLE",
        "torch, built for": facts["torch_built_for"] or "unknown",
        "torch, found": facts["torch_found"],
        "Python": facts["python"],
        "compiler": facts["compiler"] or "unknown",
        "processor": f"{facts['cpu']}, {facts['cores']} cores may be used",
        "last-level cache": format_size(cache) if cache else "unknown",
        "available memory": format_size(facts["available_memory_bytes"]),
        "CPU features used": features,
        "shares memory here": shares,
        "core to core": _machine.format_handover(facts["handover_ns"]) or "unknown",
        "large pages": facts["large_pages"] or "unknown",
        "shared tensors": "unknown" if facts["arena_bytes"] is None else arena,
        "CUDA kernels built": cuda,
        "lightning": facts["lightning"] or "not installed",
        "pytorch-lightning": facts["pytorch_lightning"] or "not installed",
    }
    if facts["environment"]:
        lines["environment"] = " ".join(f"{name}={value}" for name, value in facts["environment"].items())
    for name, value in lines.items():
        print(f"{name:<19} {value}")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``fccl``."""
    parser = subparsers.add_parser(
        "info",
        help="versions, CPU features, and whether ranks can share memory here",
        description="Shows versions, the CPU features that fccl uses, whether processes can share memory "
        "on this machine and if not why, and what else was found. The exit status is 1 if the compiled "
        "module cannot be loaded.",
    )
    parser.add_argument("--json", action="store_true", help="write it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, command_line: list[str]) -> int:
    """Runs the command; returns the exit status."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    if facts["problem"]:
        print(f"fccl info: fccl's compiled module cannot be used: {facts['problem']}", file=sys.stderr)
        return 1
    return 0
