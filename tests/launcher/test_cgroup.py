"""Memory limits from fixture trees of cgroup version 1, version 2, the mixture of both, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdbg.launcher.node import cgroup

MIB = 1 << 20
V1_NONE = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mounted(root: Path, cgroups: str, *mounts: str) -> None:
    lines = "".join(f"3{i} 2 0:2{i} {m}\n" for i, m in enumerate(mounts))
    write(root, {"proc/self/cgroup": cgroups, "proc/self/mountinfo": "22 1 0:5 / /proc rw - proc proc rw\n" + lines})


V1_MOUNT = "/ /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def v1(root: Path, folder: str, limit: str, used: int = 0, cache: int = 0, kills: str = "oom_kill 0\n") -> None:
    write(root / "sys/fs/cgroup/memory" / folder, {
        "memory.limit_in_bytes": limit, "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {cache}\n",
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\n{kills}",
    })  # fmt: skip


def v2(root: Path, folder: str, limit: str | None, used: int = 0, cache: int = 0, kills: int = 0) -> None:
    files = {"memory.current": f"{used}\n", "memory.stat": f"anon 1\ninactive_file {cache}\n",
             "memory.events": f"low 0\nhigh 0\nmax 7\noom 1\noom_kill {kills}\n"}  # fmt: skip
    write(root / "sys/fs/cgroup" / folder, files | ({"memory.max": limit} if limit is not None else {}))


def test_version_1_takes_the_smallest_limit_of_all_ancestors_and_that_ones_usage(tmp_path: Path) -> None:
    mounted(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job/task\n", V1_MOUNT)
    v1(tmp_path, "", V1_NONE, used=900 * MIB)
    v1(tmp_path, "job", f"{400 * MIB}\n", used=300 * MIB, cache=40 * MIB)
    v1(tmp_path, "job/task", f"{800 * MIB}\n", used=100 * MIB, kills="oom_kill 3\n")
    found = cgroup.memory(cgroup.locate(tmp_path))
    assert found == cgroup.CgroupMemory(400 * MIB, 260 * MIB, 3)


def test_version_1_in_a_container_whose_mount_shows_its_own_group_only(tmp_path: Path) -> None:
    mounted(tmp_path, "4:memory:/docker/abc\n", "/docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory")
    v1(tmp_path, "", f"{64 * MIB}\n", used=10 * MIB)
    assert cgroup.memory(cgroup.locate(tmp_path)).limit_bytes == 64 * MIB


def test_version_2_takes_the_smallest_limit_of_all_ancestors_and_that_ones_usage(tmp_path: Path) -> None:
    mounted(tmp_path, "0::/slice/job\n", V2_MOUNT)
    v2(tmp_path, "", None)
    v2(tmp_path, "slice", f"{200 * MIB}\n", used=150 * MIB, cache=60 * MIB, kills=9)
    v2(tmp_path, "slice/job", "max\n", used=20 * MIB, kills=2)
    found = cgroup.memory(cgroup.locate(tmp_path))
    assert found == cgroup.CgroupMemory(200 * MIB, 90 * MIB, 2)


@pytest.mark.parametrize("path", ["/", "/../outside"])
def test_version_2_in_a_namespace_reads_the_mounts_root(tmp_path: Path, path: str) -> None:
    mounted(tmp_path, f"0::{path}\n", V2_MOUNT)
    v2(tmp_path, "", f"{50 * MIB}\n", used=MIB)
    assert cgroup.memory(cgroup.locate(tmp_path)) == cgroup.CgroupMemory(50 * MIB, MIB, 0)


def test_in_a_mixture_the_memory_controller_is_followed_to_version_1(tmp_path: Path) -> None:
    unified = "/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    mounted(tmp_path, "4:memory:/job\n1:cpu:/\n0::/other\n", unified, V1_MOUNT)
    v1(tmp_path, "job", f"{32 * MIB}\n", used=MIB)
    v1(tmp_path, "", V1_NONE)
    write(tmp_path / "sys/fs/cgroup/unified/other", {"cgroup.procs": ""})
    assert cgroup.memory(cgroup.locate(tmp_path)).limit_bytes == 32 * MIB


def test_no_limit_anywhere_still_counts_oom_kills(tmp_path: Path) -> None:
    mounted(tmp_path, "0::/job\n", V2_MOUNT)
    v2(tmp_path, "job", "max\n", used=MIB, kills=4)
    assert cgroup.memory(cgroup.locate(tmp_path)) == cgroup.CgroupMemory(-1, -1, 4)


def test_without_the_controller_everything_is_unknown(tmp_path: Path) -> None:
    mounted(tmp_path, "0::/\n", V2_MOUNT)
    assert cgroup.locate(tmp_path) is None
    assert cgroup.memory(None) == cgroup.CgroupMemory(-1, -1, -1)
    assert cgroup.locate(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", -1), (V1_NONE, -1), (str(1 << 60), -1), (str((1 << 60) - 1), (1 << 60) - 1), ("4096", 4096), ("", -1)],
)
def test_what_counts_as_no_limit(text: str, limit: int) -> None:
    assert cgroup.parse_limit(text) == limit


def test_pressure_is_the_share_of_the_last_ten_seconds() -> None:
    text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"
    assert cgroup.pressure_ratio(text) == 0.125
    assert cgroup.pressure_ratio("") == -1
