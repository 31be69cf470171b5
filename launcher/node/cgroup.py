"""The memory limit of the launcher's cgroup, version 1, 2 and the mixture of both.

A limit of any ancestor kills just as well, and it is the usage of that very ancestor that counts against it. The ranks
are the launcher's children and share its cgroup. Page cache that the kernel can drop (inactive_file) is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .procfs import flat_table, read_text

NO_LIMIT_BYTES = 1 << 60  # version 1 writes "none" as the largest page-aligned number, 2^63 - 4096


@dataclass(frozen=True)
class Cgroup:
    """Where the memory controller keeps our files: `folder` and its ancestors up to `mount`."""

    version: int
    mount: Path
    folder: Path


@dataclass(frozen=True)
class CgroupMemory:
    """`limit_bytes` and `used_bytes` are -1 without a limit, `oom_kills` is -1 when the kernel does not count them."""

    limit_bytes: int = -1
    used_bytes: int = -1
    oom_kills: int = -1


def locate(root: Path = Path("/"), pid: str = "self") -> Cgroup | None:
    """Find the memory cgroup of a process; None without the controller."""
    mounts = read_text(root / "proc" / pid / "mountinfo")
    for line in read_text(root / "proc" / pid / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 1 if "memory" in controllers.split(",") else 2 if number == "0" else 0
        if not version:
            continue
        for mount, inside in _mounts(mounts, version):
            here = root / mount.lstrip("/")
            folder = here / _below(path, inside)
            if folder.is_dir() and (version == 1 or (folder / "memory.current").exists()):
                return Cgroup(version, here, folder)
            if here.is_dir() and (here / _names(version).limit).exists():
                return Cgroup(version, here, here)  # a container sees its own cgroup as the mount's root
    return None


@dataclass(frozen=True)
class _Names:
    limit: str
    usage: str
    inactive: str
    oom: str


def _names(version: int) -> _Names:
    if version == 1:
        return _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
    return _Names("memory.max", "memory.current", "inactive_file", "memory.events")


def _mounts(mountinfo: str, version: int) -> list[tuple[str, str]]:
    """(mount point, root within the hierarchy) of the memory controller's mounts."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup" if version == 1 else "cgroup2") and (version == 2 or "memory" in kind[2].split(",")):
            found.append((_unescaped(fields[4]), _unescaped(fields[3])))
    return found


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), path)


def _below(path: str, inside: str) -> str:
    """The cgroup's path below the mount point; "" when the mount does not show it (another namespace)."""
    inside = inside.rstrip("/")
    if ".." in path.split("/") or not (path + "/").startswith(inside + "/"):
        return ""
    return path[len(inside) :].lstrip("/")


def memory(cgroup: Cgroup | None) -> CgroupMemory:
    """The smallest limit on the way up, what is charged against it, and the OOM kills in the launcher's own cgroup."""
    if cgroup is None:
        return CgroupMemory()
    names = _names(cgroup.version)
    kills = flat_table(read_text(cgroup.folder / names.oom)).get("oom_kill", -1)
    limits = [(limit, f) for f in _upwards(cgroup) if (limit := parse_limit(read_text(f / names.limit))) >= 0]
    if not limits:
        return CgroupMemory(oom_kills=kills)
    limit, where = min(limits, key=lambda found: found[0])
    usage = read_text(where / names.usage).strip()
    if not usage.isdecimal():
        return CgroupMemory(limit, -1, kills)
    cache = flat_table(read_text(where / "memory.stat")).get(names.inactive, 0)
    return CgroupMemory(limit, max(0, int(usage) - cache), kills)


def _upwards(cgroup: Cgroup) -> list[Path]:
    folders = [cgroup.folder]
    while folders[-1] != cgroup.mount:
        folders.append(folders[-1].parent)
    return folders


def parse_limit(text: str) -> int:
    """Bytes; -1 for "max", for anything from 2^60 and for what is no number."""
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < NO_LIMIT_BYTES else -1


def pressure_ratio(text: str) -> float:
    """Share of the last 10 s in which some task waited ("some avg10=…" of a pressure file); -1 unknown."""
    found = re.search(r"^some .*?avg10=([0-9.]+)", text, re.MULTILINE)
    return float(found[1]) / 100 if found else -1.0
