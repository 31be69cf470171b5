"""kill -9 of a random rank at a random step: nothing finished may be lost, and RANK_FAILED names rank and step."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

from kit.job import Ended, Job, run

from .row import Row
from .training import AFTER_STEP, FROM_OUTSIDE, IN_STEP, WHEN, announced, lost_steps, train

USUAL = 30


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    for number in range(times):
        ranks, doing = chance.randint(2, 4), chance.choice((AFTER_STEP, IN_STEP, FROM_OUTSIDE))
        victim, at = chance.randrange(ranks), chance.randint(1, 40)

        def strike(running: Job, ranks: int = ranks, victim: int = victim, at: int = at, doing: int = doing) -> None:
            if doing == FROM_OUTSIDE:
                running.until(lambda _: at in announced(running.folder, victim)[1:])
                os.kill(announced(running.folder, victim)[0], signal.SIGKILL)

        spec = train(ranks, 60, victim, at, 0.05 if doing == FROM_OUTSIDE else 0.0, doing)
        ended = run(folder / str(number), spec, act=strike)
        yield Row(f"rank {victim} of {ranks}, step {at}, {WHEN[doing]}", kill_misses(ended, ranks, victim, doing))


def kill_misses(ended: Ended, ranks: int, victim: int, doing: int) -> list[str]:
    misses = lost_steps(ended, ranks)
    if ended.code == 0:
        misses.append("the job ended as if nothing had happened")
    named = [(i["ranks"], i["severity"]) for i in ended.found("RANK_FAILED")]
    if named != [([victim], "critical")]:
        misses.append(f"RANK_FAILED says {named}, not rank {victim}")
    last = len(announced(ended.folder, victim)) - 1
    possible = [last + 1, last + 2] if doing == FROM_OUTSIDE else [last + 1]  # it may hit before a step is announced
    steps = [i["first_step"] for i in ended.found("RANK_FAILED")]
    if len(steps) != 1 or steps[0] not in possible:
        misses.append(f"RANK_FAILED says step {steps}; the rank had finished {last}")
    misses += [f"also {i['reason_code']}: {i['summary']}" for i in ended.alarms if i["reason_code"] != "RANK_FAILED"]
    return misses
