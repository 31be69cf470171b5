"""What this process runs on and with: versions, argv, code, flags, environment variables from an allow-list.

Writes    identity
Costs     once after the first step (a few ms: it hashes the user's source files) and once at the end
Blind to  code that is not a file (exec, notebooks), compiled extensions' build options
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

from .. import guard, torchprivate
from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("identity", (
    Column("key", "text", "", "dotted name, e.g. version.torch, env.OMP_NUM_THREADS, code.MODULE, flag.deterministic"),
    Column("value", "text", "", "value, or a digest where the value is code"),
    Column("rule", "text", "", "must (ranks may not differ), should (a difference is worth a note), may (free)"),
), "one row per key; a later row replaces an earlier one of the same key")  # fmt: skip


# Variables that change what a program computes or how. Values are recorded, so nothing that could hold a secret.
ALLOWED_PREFIXES = (
    "ATEN_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32",
    "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "NUMEXPR_", "HSA_", "HIP_", "ROCR_", "XLA_",
    "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "ACCELERATE_", "MALLOC_",
)  # fmt: skip
ALLOWED_NAMES = ("PYTHONHASHSEED", "PYTHONPATH", "PYTHONOPTIMIZE", "LD_LIBRARY_PATH", "LD_PRELOAD")
SECRET_PARTS = ("TOKEN", "KEY", "SECRET", "PASS", "CRED", "AUTH")
# The launcher sets these per rank, or they name a resource that every rank has its own of.
PER_RANK = (
    "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ACCELERATE_TORCH_DEVICE", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
SHOULD_BE_EQUAL = ("NCCL_", "GLOO_", "UCX_", "MALLOC_", "CUDA_CACHE", "LD_LIBRARY_PATH")
# What decides in which precision and by which kernels a program computes: name of the key -> where torch keeps it.
FLAGS = {
    "deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "deterministic_warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "fill_uninitialized_memory": "utils.deterministic.fill_uninitialized_memory",
    "float32_matmul_precision": "get_float32_matmul_precision",
    "default_dtype": "get_default_dtype",
    "anomaly_detection": "is_anomaly_enabled",
    "fp32_precision": "backends.fp32_precision",
    "mkldnn.enabled": "backends.mkldnn.enabled",
    "mkldnn.deterministic": "backends.mkldnn.deterministic",
    "mkldnn.matmul.fp32_precision": "backends.mkldnn.matmul.fp32_precision",
    "cudnn.enabled": "backends.cudnn.enabled",
    "cudnn.benchmark": "backends.cudnn.benchmark",
    "cudnn.deterministic": "backends.cudnn.deterministic",
    "cudnn.allow_tf32": "backends.cudnn.allow_tf32",
    "cudnn.conv.fp32_precision": "backends.cudnn.conv.fp32_precision",
    "cuda.matmul.allow_tf32": "backends.cuda.matmul.allow_tf32",
    "cuda.matmul.fp32_precision": "backends.cuda.matmul.fp32_precision",
    "cuda.matmul.fp16_reduced": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.bf16_reduced": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.fp16_accumulation": "backends.cuda.matmul.allow_fp16_accumulation",
    "sdp.flash": "backends.cuda.flash_sdp_enabled",
    "sdp.mem_efficient": "backends.cuda.mem_efficient_sdp_enabled",
    "sdp.math": "backends.cuda.math_sdp_enabled",
    "sdp.cudnn": "backends.cuda.cudnn_sdp_enabled",
}
SOURCE_LIMIT = 2000  # user modules hashed at most
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning", "pytorch_lightning", "datasets", "deepspeed",
            "peft", "torchvision", "torchaudio", "flash_attn", "apex", "triton", "bitsandbytes")  # fmt: skip


def install(emit: Emit) -> Undo:
    agent = emit.agent
    written: dict[str, str] = {}
    step = [0]  # that the rows belong to

    def put(key: str, value: Any, rule: str) -> None:
        text = str(value)
        if written.get(key) != text:
            written[key] = text
            emit(TABLE, (), (key, text, rule), step=step[0])

    def begin() -> None:
        put("host", socket.gethostname(), "may")
        put("pid", os.getpid(), "may")
        put("world_size", agent.role.world_size, "must")
        put("local_rank", agent.role.local_rank, "may")
        put("argv", json.dumps(sys.argv), "must")
        put("cwd", os.getcwd(), "may")
        put("executable", sys.executable, "may")
        put("version.python", sys.version.split()[0], "must")
        put("cpu.capability", capability(agent.torch), "should")
        put("cpu.machine", platform.machine(), "must")
        for name, value in environment(os.environ).items():
            rule = "may" if name.startswith(PER_RANK) else "should" if name.startswith(SHOULD_BE_EQUAL) else "must"
            put(f"env.{name}", value, rule)

    def observe() -> None:
        """At the first boundary: flags that the program has set by now, packages and code that it has loaded."""
        for key, value in flags(agent.torch).items():
            put(f"flag.{key}", value, "must")
        put("threads.torch", agent.torch.get_num_threads(), "should")
        for name in PACKAGES:
            version = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(version, str):
                put(f"version.{name}", version, "must")
        put("version.torch_build", agent.torch.version.git_version, "should")
        put("packages", packages(sys.path), "should")
        put("argv", json.dumps(sys.argv), "must")  # some programs rewrite it
        cuda = agent.torch.cuda
        if cuda.is_initialized():
            put("device.name", cuda.get_device_name(), "should")
            put("device.capability", cuda.get_device_capability(), "should")
            uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
            put("device.uuid", f"GPU-{uuid}" if uuid is not None else "unknown", "may")
            put("device.allocator", getattr(cuda, "get_allocator_backend", lambda: "unknown")(), "should")
            put("version.cuda", agent.torch.version.cuda, "must")
            put("version.cudnn", agent.torch.backends.cudnn.version(), "should")
        put("backend", dist.get_backend() if (dist := torchprivate.distributed(agent.torch)) else "none", "must")
        for module, digest in sources().items():
            put(f"code.{module}", digest, "must")

    def closed(info: StepInfo) -> None:
        if info.step == 1:
            step[0] = 1
            observe()

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        if agent.window.step <= 2 or agent.watching:
            step[0] = agent.window.step
            put("autocast", autocast(agent.torch), "must")

    def close() -> None:
        step[0] = max(agent.window.step - 1, 0)
        observe()

    begin()
    emit.on("step_closed", closed)
    emit.on("forward_begin", forward)
    emit.on("close", close)
    return lambda: None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be recorded."""
    return {
        name: value[:4096]
        for name, value in sorted(variables.items())
        if (name.startswith(ALLOWED_PREFIXES) or name in ALLOWED_NAMES) and not any(s in name for s in SECRET_PARTS)
    }


def flags(torch: Any) -> dict[str, Any]:
    """Precision and determinism settings of torch, read without initialising a device.

    A setting that this torch lacks or can't tell is left out: reading one after its older and its newer form were both
    used raises.
    """
    found = {}
    for name, path in FLAGS.items():
        value = guard.attempt(lambda e: None, _look_up, torch, path)
        if value is not None:
            found[name] = value
    return found


def _look_up(torch: Any, path: str) -> Any:
    """A dotted path below torch; None where a part is absent. Functions are called."""
    value = torch
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value() if callable(value) else value


def autocast(torch: Any) -> str:
    """Devices and dtypes for which autocast is on at this moment, "off" for none."""
    on = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            on.append(f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}")
    return ",".join(on) or "off"


def capability(torch: Any) -> str:
    """The CPU kernels that torch chose, e.g. AVX2."""
    get = getattr(torch.backends.cpu, "get_cpu_capability", None)
    return str(get()) if get is not None else "unknown"


def packages(path: Sequence[str]) -> str:
    """Digest of the names and versions of all installed packages, from the names of their metadata folders."""
    found = set()
    for folder in path:
        try:
            found |= {n for n in os.listdir(folder or ".") if n.endswith((".dist-info", ".egg-info"))}
        except OSError:
            continue
    return hashlib.blake2b("\n".join(sorted(found)).encode(), digest_size=8).hexdigest()


def sources() -> dict[str, str]:
    """Digest of the source of every loaded module that is neither installed nor the standard library's, by name."""
    outside = tuple({sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")} - {None})
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or len(found) >= SOURCE_LIMIT:
            continue
        full = os.path.abspath(path)
        if full.startswith((*outside, here + os.sep)) or "site-packages" in full or "dist-packages" in full:
            continue
        try:
            with open(full, "rb") as f:
                found[name] = hashlib.blake2b(f.read(), digest_size=8).hexdigest()
        except OSError:
            continue
    return found
