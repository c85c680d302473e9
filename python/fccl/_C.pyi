from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend, ProcessGroup, Reducer, Store

def build_info() -> dict[str, str | bool]: ...
def selected_isa() -> str: ...
def why_no_shared_memory() -> str: ...
def shutdown_all(why: str) -> None: ...

class FcclBackend(Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group_name: str,
        global_ranks: list[int],
        cpu_factory: Callable[[Store], Backend],
        cuda_factory: Callable[[Store], Backend] | None = None,
    ) -> None: ...
    @property
    def engine(self) -> str: ...
    @property
    def why_inner(self) -> str: ...
    def collective_counts(self) -> dict[str, int]: ...

class AllReduce:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class BF16Compress:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

def register_comm_hook(
    reducer: Reducer, process_group: ProcessGroup, hook: AllReduce | BF16Compress
) -> None: ...
