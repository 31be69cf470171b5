"""The machine's row, from a fixture /proc and from this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from tdbg.launcher.node import host, process
from tdbg.rankagent.nodetables import HOST, PROC

KIB = 1024


def fixture(root: Path) -> Path:
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/pressure").mkdir()
    for disk in ("sda", "dm-0", "loop0"):
        (root / "sys/block" / disk).mkdir(parents=True)
    (root / "proc/stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    (root / "proc/loadavg").write_text("1.50 1.00 0.50 2/300 4242\n")
    (root / "proc/meminfo").write_text(
        "MemTotal:  1000 kB\nMemAvailable:  400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nHugePages_Total: 0\n"
    )
    (root / "proc/diskstats").write_text(
        "8 0 sda 1 0 10 0 1 0 20 0 0 0 0\n8 1 sda1 1 0 10 0 1 0 20 0 0 0 0\n253 0 dm-0 1 0 10 0 1 0 20 0 0 0 0\n"
        "7 0 loop0 1 0 10 0 1 0 20 0 0 0 0\n"
    )
    (root / "proc/net/dev").write_text(
        "Inter-|   Receive\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0 0 0 0 0 0 0\n"
        "  eth0: 100 1 0 0 0 0 0 0 300 1 0 0 0 0 0 0\n  eth1:  1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    )
    (root / "proc/pressure/memory").write_text("some avg10=5.00 avg60=0 avg300=0 total=0\n")
    return root


def test_every_number_is_in_its_unit_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    machine = host.Host(tmp_path, fixture(tmp_path))
    (tmp_path / "proc/stat").write_text("cpu  130 0 130 820 120 0 0 0 0 0\n")
    s = machine.sample()
    assert s.cpu_ratio == 0.3
    assert s.load1 == 1.5
    assert (s.memory_total_bytes, s.memory_available_bytes, s.swap_used_bytes) == (1000 * KIB, 400 * KIB, 30 * KIB)
    assert (s.disk_read_bytes, s.disk_written_bytes) == (10 * 512, 20 * 512)
    assert (s.net_sent_bytes, s.net_received_bytes) == (302, 101)
    assert s.pressure_memory_ratio == 0.05
    assert (s.cgroup_limit_bytes, s.cgroup_used_bytes, s.cgroup_oom_kills) == (-1, -1, -1)
    assert s.disk_free_bytes > 0


def test_a_machine_that_tells_nothing_gives_unknowns_and_no_error(tmp_path: Path) -> None:
    s = host.Host(tmp_path / "gone", tmp_path).sample()
    assert (s.memory_total_bytes, s.load1, s.disk_read_bytes, s.disk_free_bytes) == (-1, -1.0, -1, -1)
    assert s.pressure_memory_ratio == -1


def test_the_samples_have_as_many_columns_as_their_tables(tmp_path: Path) -> None:
    assert len(host.Host(tmp_path).sample().columns()) == len(HOST.fixed) - 1
    mine = process.sample_process(os.getpid())
    assert mine is not None
    assert len(mine.columns(1, 0, 0, 0)) == len(PROC.fixed) - 1


def test_this_process_is_measured_as_the_kernel_knows_it() -> None:
    s = process.sample_process(os.getpid())
    assert s is not None
    assert 1 << 20 < s.rss_bytes < s.vms_bytes
    assert 0 < s.data_bytes < s.vms_bytes
    assert s.threads >= 1
    assert s.files >= 3
    assert s.cpu_seconds > 0
    assert abs(process.resident_bytes(os.getpid())[0] - s.rss_bytes) < 64 << 20


def test_limits_that_the_process_set_itself_are_seen_from_outside() -> None:
    limit = 64 << 30
    code = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({limit}, {limit})); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    s = process.sample_process(child.pid)
    workers = process.Tree().below(os.getpid())
    child.communicate(b"\n")
    assert s is not None
    assert s.limit_as_bytes == limit
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert s.limit_data_bytes == (-1 if soft == resource.RLIM_INFINITY else soft)
    assert child.pid in workers
    assert process.sample_process(child.pid) is None


def test_descendants_are_found_at_every_depth() -> None:
    assert sorted(process.below(1, {2: 1, 3: 2, 4: 3, 5: 9, 1: 0})) == [2, 3, 4]


def test_a_command_with_brackets_and_blanks_does_not_shift_the_columns() -> None:
    rest = " ".join(["S", "1"] + ["0"] * 9 + ["250", "50"] + ["0"] * 30)
    ticks = os.sysconf("SC_CLK_TCK")
    assert process.cpu_seconds(f"7 (a) b (c) {rest}") == 300 / ticks


def test_many_processes_are_looked_up_less_often(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_text("7 (x) S 1 0")
    now = [100.0]

    def clock() -> float:
        now[0] += 0.05  # each look at the clock costs 50 ms: one walk of the tree takes that long
        return now[0]

    tree = process.Tree(tmp_path, clock)
    assert tree.below(1) == [7]
    (tmp_path / "proc/7/stat").write_text("7 (x) S 2 0")
    now[0] += 15.0
    assert tree.below(1) == [7]
    now[0] += 30.0
    assert tree.below(1) == []
