"""What devices reported of themselves, in words: errors by their Xid, slowed clocks by NVML's bits, memory errors."""

from __future__ import annotations

from typing import Final

# NVML's bits that say that a device runs below the clocks it could run at. Idle, applications' own settings, boost in
# step with other devices and displays are no sign of anything.
SLOWED: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability limit",
}
# Running at the power cap is how a busy device is meant to run.
REMARKABLE: Final = sum(SLOWED) - 0x4

XIDS: Final = {
    13: "graphics engine exception: an illegal access of the program's, or the device",
    31: "memory page fault of the program's",
    43: "the program's channel stopped",
    45: "channels cleaned up after an earlier error",
    48: "uncorrectable ECC error",
    62: "internal microcontroller halted",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "the device fell off the bus",
    92: "many corrected ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the device's system processor does not answer",
    120: "the device's system processor failed",
}

# Of every device: errors, the samples at which its clocks began and ceased to be slowed, and risen error counters.
# `step` is that of the slowest rank at the time: a node's row belongs to no rank.
SQL: Final = f"""
WITH paced AS (
    SELECT attempt, step, min(time_ns) AS time_ns FROM step GROUP BY ALL
), told AS (
    SELECT node, attempt, device, time_ns, throttle_reasons & {REMARKABLE} AS slowed, ecc_uncorrected, remapped_rows
    FROM gpu WHERE throttle_reasons >= 0 OR ecc_uncorrected >= 0
), changed AS (
    SELECT node, attempt, device, time_ns, slowed, lag(slowed, 1, 0) OVER w AS slowed_before,
           ecc_uncorrected - lag(ecc_uncorrected) OVER w AS errors, remapped_rows - lag(remapped_rows) OVER w AS rows
    FROM told WINDOW w AS (PARTITION BY node, device ORDER BY time_ns)
), events AS (
    SELECT node, attempt, device, time_ns, 'xid' AS what, xid AS number FROM gpu_event
    UNION ALL
    SELECT node, attempt, device, time_ns, 'slowed', slowed FROM changed WHERE slowed <> slowed_before AND slowed >= 0
    UNION ALL
    SELECT node, attempt, device, time_ns, 'ecc', errors FROM changed WHERE errors > 0
    UNION ALL
    SELECT node, attempt, device, time_ns, 'rows', rows FROM changed WHERE rows > 0
), on_device AS (
    SELECT node, device, list(DISTINCT rank ORDER BY rank) AS ranks FROM gpu_proc WHERE rank >= 0 GROUP BY ALL
)
SELECT e.attempt, coalesce(p.step, 0), e.time_ns, e.device, e.what, e.number, coalesce(d.ranks, [])
FROM events e ASOF LEFT JOIN paced p ON e.attempt = p.attempt AND e.time_ns >= p.time_ns
LEFT JOIN on_device d ON d.node = e.node AND d.device = e.device
ORDER BY e.time_ns, e.device
"""


def slowed(reasons: int) -> str:
    """The reasons of a bit mask in words; empty when nothing slows the device."""
    return ", ".join(words for bit, words in SLOWED.items() if reasons > 0 and reasons & bit)


def words(device: int, what: str, number: int) -> str:
    """One event of `SQL` as a line."""
    if what == "xid":
        return f"device {device}: Xid {number}" + (f", {XIDS[number]}" if number in XIDS else "")
    if what == "slowed":
        return (
            f"device {device}: clocks slowed by {slowed(number)}" if number else f"device {device}: clocks free again"
        )
    if what == "ecc":
        return f"device {device}: {number} uncorrected memory error(s)"
    return f"device {device}: {number} memory row(s) remapped"
