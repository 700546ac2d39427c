"""The folder of the disk tier: whether blocks can be written there, and as many as the configuration says."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.doctor.findings import Area, Finding, Severity

_PATH = "kv_cache_config.disk_cache_path"
_SIZE = "kv_cache_config.disk_cache_size"


def cache_folder_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at the folder without writing to it.

    Args:
        config: the effective ``kv_cache_config``.
    """
    size, path = config.get("disk_cache_size"), config.get("disk_cache_path")
    if not size or not path:
        return
    folder = Path(path)
    if not folder.is_dir():
        yield _finding(_PATH, f"is {path!r}, no existing folder: nothing is evicted to disk", fix=f"mkdir -p {path}")
        return
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        what = f"is {path!r}, where this user cannot write: nothing is evicted to disk"
        yield _finding(_PATH, what, fix="give this user the folder, or name another")
        return
    free = shutil.disk_usage(folder).free
    if free < size:
        what = f"is {size} bytes, and {path} has {free} free: blocks are dropped once it is full"
        yield _finding(_SIZE, what, fix=f"lower it, or free some room in {path}")


def _finding(subject: str, what: str, *, fix: str) -> Finding:
    return Finding(Area.CONFIGURATION, Severity.WARNING, subject, what, fix=fix)
