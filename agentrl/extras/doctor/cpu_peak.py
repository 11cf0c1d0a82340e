"""What one core of a CPU computes at most in float32, from /proc/cpuinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ZEN4 = "25"
"""CPU family of Zen 3 and 4. Zen 4 computes an AVX-512 operation in two halves."""
_FLOPS_PER_CYCLE = (("avx512f", 64), ("fma", 32), ("avx", 16), ("sve", 32), ("asimd", 16), ("sse2", 8))
"""By feature, the first one counts: two units times the width, times two where they multiply and add."""
_HALVED = 32


@dataclass(frozen=True, slots=True)
class CorePeak:
    """A core: its model, clock and float32 operations per second at that clock."""

    model: str
    clock_hz: float
    flops_per_s: float
    feature: str


def read_peak(cpuinfo: str, max_clock_khz: str = "") -> CorePeak | None:
    """Return the peak of a core; None if the clock or the features are not known.

    Args:
        cpuinfo: text of /proc/cpuinfo.
        max_clock_khz: text of cpufreq's `cpuinfo_max_freq`; "": unknown, as in most virtual machines.
    """
    features = set(_field(cpuinfo, r"flags|Features").split())
    found = next(((name, flops) for name, flops in _FLOPS_PER_CYCLE if name in features), None)
    clocks = [float(mhz) * 1e6 for mhz in re.findall(r"^cpu MHz\s*: ([\d.]+)", cpuinfo, re.MULTILINE)]
    if max_clock_khz.strip().isdigit():
        clocks = [float(max_clock_khz) * 1e3]
    if found is None or not clocks:
        return None
    feature, per_cycle = found
    if feature == "avx512f" and _field(cpuinfo, "cpu family") == _ZEN4:
        per_cycle = _HALVED
    clock = max(clocks)
    return CorePeak(_field(cpuinfo, "model name") or "unknown", clock, per_cycle * clock, feature)


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^(?:{name})\s*: (.*)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""
