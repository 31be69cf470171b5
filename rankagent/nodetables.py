"""The tables that a node's launcher writes about its machine and its ranks' processes, in the ranks' own format."""

from __future__ import annotations

from .tables import Column, Table

HOST = Table("host", (
    Column("node", "int32", "", "index of the node"),
    Column("cpu_ratio", "float64", "1", "share of all cores in use since the sample before, 0..1"),
    Column("cores", "int32", "", "cores that the launcher may use"),
    Column("load1", "float64", "", "run queue, mean of the last minute"),
    Column("memory_total_bytes", "int64", "B", "physical memory"),
    Column("memory_available_bytes", "int64", "B", "memory that can be had without swapping"),
    Column("cgroup_limit_bytes", "int64", "B", "smallest memory limit of the cgroup and its ancestors; -1 for none"),
    Column("cgroup_used_bytes", "int64", "B", "memory charged to the cgroup that has this limit, page cache left out; -1 without"),
    Column("cgroup_oom_kills", "int64", "", "kernel OOM kills in the launcher's cgroup so far; -1 unknown"),
    Column("shm_total_bytes", "int64", "B", "size of /dev/shm; -1 unknown"),
    Column("shm_used_bytes", "int64", "B", "in use of it: tensors on their way from loader workers; -1 unknown"),
    Column("swap_used_bytes", "int64", "B", "swap in use"),
    Column("pressure_memory_ratio", "float64", "1", "share of the last 10 s in which some task waited for memory; -1 unknown"),
    Column("disk_free_bytes", "int64", "B", "free room on the store's file system; -1 unknown"),
    Column("disk_read_bytes", "int64", "B", "read from all disks since boot; -1 unknown"),
    Column("disk_written_bytes", "int64", "B", "written to all disks since boot; -1 unknown"),
    Column("net_sent_bytes", "int64", "B", "sent on all interfaces but loopback since boot"),
    Column("net_received_bytes", "int64", "B", "received on all interfaces but loopback since boot"),
), "one row per node and sample")  # fmt: skip

PROC = Table("proc", (
    Column("node", "int32", "", "index of the node"),
    Column("of_pid", "int64", "", "the rank's main process; `rank` is the rank it claimed"),
    Column("rss_bytes", "int64", "B", "resident memory of the main process"),
    Column("anon_bytes", "int64", "B", "of it pages of no file; -1 unknown"),
    Column("shared_bytes", "int64", "B", "of it shared memory; -1 unknown"),
    Column("vms_bytes", "int64", "B", "address space of the main process"),
    Column("workers", "int32", "", "processes below the main process"),
    Column("workers_rss_bytes", "int64", "B", "resident memory of those, shared pages counted in each"),
    Column("workers_own_bytes", "int64", "B", "resident memory of those without pages that they share with files or each other"),
    Column("limit_as_bytes", "int64", "B", "RLIMIT_AS of the main process; -1 for none"),
    Column("limit_data_bytes", "int64", "B", "RLIMIT_DATA of the main process; -1 for none"),
    Column("data_bytes", "int64", "B", "private writable memory counted against RLIMIT_DATA"),
    Column("cpu_seconds", "float64", "s", "CPU time of the main process so far"),
    Column("threads", "int32", "", "threads of the main process"),
    Column("files", "int32", "", "open file descriptors of the main process; -1 unknown"),
), "one row per rank process and sample")  # fmt: skip

GPU = Table("gpu", (
    Column("node", "int32", "", "index of the node"),
    Column("device", "int32", "", "NVML index"),
    Column("uuid", "text", "", "NVML UUID"),
    Column("name", "text", "", "product name"),
    Column("memory_total_bytes", "int64", "B", "memory of the device"),
    Column("memory_used_bytes", "int64", "B", "memory in use by all processes"),
    Column("utilization_ratio", "float64", "1", "share of the sample period with a kernel running; -1 unknown"),
    Column("power_watts", "float64", "W", "power draw; -1 unknown"),
    Column("temperature_celsius", "int32", "degC", "GPU temperature; -1 unknown"),
    Column("sm_clock_mhz", "int32", "MHz", "SM clock; -1 unknown"),
    Column("memory_clock_mhz", "int32", "MHz", "memory clock; -1 unknown"),
    Column("power_limit_watts", "float64", "W", "power limit in force; -1 unknown"),
    Column("performance_state", "int32", "", "P-state, 0 the fastest; -1 unknown"),
    Column("throttle_reasons", "int64", "", "NVML clock event reasons, bit mask; -1 unknown"),
    Column("ecc_corrected", "int64", "", "corrected ECC errors since the driver was loaded; -1 unknown"),
    Column("ecc_uncorrected", "int64", "", "uncorrected ECC errors since the driver was loaded; -1 unknown"),
    Column("remapped_rows", "int64", "", "memory rows replaced for uncorrectable errors; -1 unknown"),
    Column("pcie_replays", "int64", "", "PCIe packets that had to be sent again; -1 unknown"),
), "one row per device and sample")  # fmt: skip

GPU_PROC = Table("gpu_proc", (
    Column("node", "int32", "", "index of the node"),
    Column("device", "int32", "", "NVML index"),
    Column("of_pid", "int64", "", "process on the device; `rank` is -1 where it is none of ours"),
    Column("memory_used_bytes", "int64", "B", "device memory of this process; -1 when NVML does not say"),
), "one row per device, process and sample")  # fmt: skip

GPU_EVENT = Table("gpu_event", (
    Column("node", "int32", "", "index of the node"),
    Column("device", "int32", "", "NVML index; -1 unknown"),
    Column("xid", "int64", "", "number of the error, as the driver's log gives it (Xid)"),
), "one row per error that a device's driver reported")  # fmt: skip

EXIT = Table("exit", (
    Column("node", "int32", "", "index of the node"),
    Column("of_pid", "int64", "", "the rank's main process as torchrun started it"),
    Column("exit_code", "int32", "", "exit code; minus the signal's number when a signal ended it; -1000 unknown"),
    Column("ended_ns", "int64", "ns", "wall clock when the launcher saw it end"),
    Column("stopped_by_launcher", "bool", "", "true when torchrun had begun to stop the group before this process ended"),
    Column("oom_kills", "int64", "", "kernel OOM kills in the cgroup in the 10 s before; -1 unknown"),
), "one row per rank process that ended; `step` is the last step it had completed")  # fmt: skip

SAMPLER_NOTE = Table("node_note", (
    Column("node", "int32", "", "index of the node"),
    Column("about", "text", "", "what the note is about: gpu, host, seal, supervisor"),
    Column("text", "text", "", "what could not be observed, and why"),
), "what the launcher could not observe")  # fmt: skip

STALL = Table("stall", (
    Column("node", "int32", "", "index of the node"),
    Column("stall", "int32", "", "stall of this node and attempt, from 1"),
    Column("look", "int32", "", "look at this stall, from 1: it is looked at again while it lasts"),
    Column("of_pid", "int64", "", "the rank's recording process"),
    Column("limit_ns", "int64", "ns", "how long nothing had to happen for this to be a stall"),
    Column("since_ns", "int64", "ns", "wall clock of the last progress of any rank of this node"),
    Column("quiet_ns", "int64", "ns", "time without any progress of this node's ranks"),
    Column("phase_since_ns", "int64", "ns", "wall clock when the rank entered its phase; 0 unknown"),
    Column("window_ns", "int64", "ns", "time from the first sample of this look to the last; 0 for one sample"),
    Column("busy_ns", "int64", "ns", "CPU time of the process in the window, and time that its main thread waited for a core"),
    Column("below_ns", "int64", "ns", "CPU time of the processes below it in the window"),
    Column("io_bytes", "int64", "B", "read and written by system calls of the process and those below it in the window; -1 unknown"),
    Column("samples", "int32", "", "stacks that it gave"),
    Column("device", "bool", "", "it holds an accelerator open, so that it may wait for it by spinning"),
    Column("closed", "bool", "", "its program had come to its end"),
    Column("told", "bool", "", "it answered which collectives it issued last: what it issued is known to the end"),
    Column("event", "text", "", "stall; resumed: training went on; stopping: the launcher was about to stop the ranks"),
    Column("phase", "text", "", "data, forward, backward, optimizer, checkpoint, load, other; empty before the first"),
    Column("state", "text", "", "state of its main thread: R runs, S sleeps, D waits for a disk, T stopped; empty unknown"),
), "one row per rank and look at a job that makes no progress; `step` is the last step that the rank had completed")  # fmt: skip

STACK = Table("stack", (
    Column("node", "int32", "", "index of the node"),
    Column("stall", "int32", "", "see stall"),
    Column("look", "int32", "", "see stall"),
    Column("sample", "int32", "", "from 1 within the look"),
    Column("frames", "text", "", "Python stack of the training thread, outermost first, one 'file:line function' a line"),
), "one row per stack that a rank gave when asked")  # fmt: skip

TABLES = (HOST, PROC, GPU, GPU_PROC, GPU_EVENT, EXIT, SAMPLER_NOTE, STALL, STACK)
