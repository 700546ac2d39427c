"""How big a pool becomes, and the memory that it lies in."""

import fcntl
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import ManagerSpec

if TYPE_CHECKING:
    import torch

CPU_POOL_LIMIT = 2 << 30
"""Bytes that ``free_memory_fraction`` takes at most on a CPU, where memory belongs to the whole machine: 2 GiB.

``max_tokens`` is not limited by it.
"""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks a pool gets, and why."""

    num_blocks: int
    block_bytes: int
    reason: str

    def __str__(self) -> str:
        nbytes = self.num_blocks * self.block_bytes
        return f"{self.num_blocks} blocks of {self.block_bytes} bytes ({nbytes / 2**20:.1f} MiB): {self.reason}"


def choose_pool_size(spec: ManagerSpec, block_bytes: int) -> PoolSize:
    """Size a pool by ``max_tokens``, else by a fraction of what is free.

    Raises:
        ConfigError: not even one block fits.
    """
    if spec.max_tokens is not None:
        num_blocks = -(-spec.max_tokens // spec.tokens_per_block)
        return _at_least_one(PoolSize(num_blocks, block_bytes, f"max_tokens={spec.max_tokens}"))
    budget, reason = memory_budget(spec)
    return _at_least_one(PoolSize(budget // block_bytes, block_bytes, reason))


def memory_budget(spec: ManagerSpec) -> tuple[int, str]:
    """Bytes that ``free_memory_fraction`` gives, and why so many."""
    available = available_memory(spec.device)
    budget = int(available * spec.free_memory_fraction)
    reason = f"{spec.free_memory_fraction:g} of the {available / 2**20:.0f} MiB that {spec.device} has free"
    if spec.device == "cpu" and budget > CPU_POOL_LIMIT:
        budget = CPU_POOL_LIMIT
        reason += f", limited to {CPU_POOL_LIMIT / 2**20:.0f} MiB on a CPU; max_tokens gives more"
    return budget, reason


def _at_least_one(size: PoolSize) -> PoolSize:
    if size.num_blocks < 1:
        raise ConfigError(
            f"the KV pool would get no block of {size.block_bytes} bytes ({size.reason}); set "
            "kv_cache_config.max_tokens, or raise free_gpu_memory_fraction",
            setting="kv_cache_config.max_tokens",
        )
    return size


def torch_dtype(name: str) -> "torch.dtype":
    """Find a dtype by torch's name without the module. Raises ConfigError."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is not a torch dtype; try float32 or bfloat16", setting="kv_cache_config.dtype")
    return dtype


def require_device(name: str) -> str:
    """Return the device's name. Raises ConfigError: torch does not see it."""
    import torch

    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is not here: torch sees no CUDA device; set device: cpu", setting="device")
    return name


def available_memory(device: str) -> int:
    """Bytes that a process can still get on ``device``; on a CPU, within the limits of its control group."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    machine = int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(machine, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else machine


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def allocate_memory(nbytes: int, device: str, *, shared: bool = False) -> "torch.Tensor":
    """Allocate zeroed bytes once, uint8[nbytes], page-aligned and touched, so that no page fault falls into a transfer.

    Args:
        nbytes: how many.
        device: ``cpu`` or ``cuda:N``.
        shared: on a CPU, where another process of the host can map them.

    Raises:
        ConfigError: the device cannot give them.
    """
    import torch

    try:
        if device != "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        region = _map_shared(nbytes) if shared else _map_private(nbytes)
    except (RuntimeError, OSError, AssertionError) as error:
        raise ConfigError(
            f"{device} cannot give the KV pool {nbytes} bytes: {error}; lower kv_cache_config.max_tokens or "
            "free_gpu_memory_fraction",
            setting="kv_cache_config.max_tokens",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise_huge_pages(region)
    return torch.frombuffer(region, dtype=torch.uint8).zero_()


def _map_private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_shared(nbytes: int) -> mmap.mmap:
    """Map a file in memory whose size is sealed: a peer that writes to one that got shorter would be killed."""
    if not hasattr(os, "memfd_create"):
        return _map_private(nbytes)
    file = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)  # which keeps a descriptor of its own
    finally:
        os.close(file)


def _advise_huge_pages(region: mmap.mmap) -> None:
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: nothing but speed is lost
        return
