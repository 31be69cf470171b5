"""The ways in which a training fails, each with the reason codes that speak for it. `tdbg diagnose` sorts by these.

A closed list: every code belongs to one mode. A mode is a drawer for evidence, it says nothing about causes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Mode:
    """`words` finish "this run shows ..."; `next_check` is for a mode whose incidents name none."""

    name: str
    words: str
    codes: tuple[str, ...]
    next_check: str


MODES: Final = (
    Mode("crash", "a rank that ended, a job that stopped or began again",
         ("RANK_FAILED", "HANG", "COLLECTIVE_MISMATCH", "RESTARTED"),
         "tdbg timeline RUN shows what came before; the program's own output has the traceback"),
    Mode("out of memory", "memory at its limit, on its way there or unevenly held",
         ("OOM", "OOM_PRECURSOR", "MEMORY_LEAK", "MEMORY_IMBALANCE"),
         "tdbg metrics RUN memory shows each rank's memory by step"),
    Mode("non-finite", "NaN or Inf in data, loss, gradients or parameters",
         ("NONFINITE_INPUT", "NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM", "AMP_OVERFLOW"),
         "run the step before the first one with torch.autograd.set_detect_anomaly(True)"),
    Mode("silent error", "training that goes on and is not what was meant: replicas, reductions, data, updates",
         ("PARAM_DESYNC", "BUFFER_DESYNC", "GRAD_DESYNC", "REDUCTION_WRONG", "GRAD_OUTLIER_RANK", "HPARAM_DESYNC",
          "OPTIM_STATE_DESYNC", "STEP_DESYNC", "LOSS_SPIKE", "GRAD_SPIKE", "GRAD_VANISHED", "SAMPLER_SEED_MISMATCH",
          "RNG_DUPLICATED", "WORKER_SEED_DUPLICATED", "SHARD_OVERLAP", "SHARD_MISSING", "SHARD_UNEVEN",
          "EPOCH_NOT_RESHUFFLED", "SAMPLES_DROPPED", "DATA_REPEATED", "DATA_ERROR_SWALLOWED", "PARAM_NOT_OPTIMIZED",
          "PARAM_NEVER_UPDATED", "EVAL_MODE_TRAINING", "INIT_SUSPECT", "GRAD_NOT_ZEROED", "GRAD_ACCUM_MISMATCH",
          "LOSS_NOT_NORMALISED", "CLIP_BEFORE_UNSCALE", "TIE_BROKEN", "LR_EXHAUSTED", "DEAD_MODULE",
          "RESUME_INCOMPLETE"),
         "tdbg incident RUN ID shows all of the evidence"),
    Mode("metric error", "numbers that do not say what they are taken for: logged loss, evaluation",
         ("LOGGED_LOSS_MISMATCH", "TRAIN_EVAL_OVERLAP", "TRAIN_MODE_EVAL", "NO_VALIDATION"),
         "evaluate the last checkpoint again, in eval mode, on data that training did not see"),
    Mode("not reproducible", "ranks or seeds that would not give the same run again",
         ("SEED_MISMATCH", "IDENTITY_MISMATCH", "NOT_SEEDED"),
         "run it twice and lay both beside each other: tdbg compare A B"),
    Mode("slow training", "steps that take longer than they need: one rank, one phase, from one step on",
         ("STRAGGLER", "SLOWDOWN", "CHECKPOINT_STALL"),
         "profile a step of the rank and phase named"),
    Mode("slow data", "training that waits for its data",
         ("DATA_STARVED",),
         "more workers, a cheaper transform, or data nearer to the machine"),
)  # fmt: skip
