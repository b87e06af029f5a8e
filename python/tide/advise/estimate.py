"""What tide could win, from what was measured and from the model's size. Pure.

From a trace. *At most*: the layout copies that nothing hides, the exposed waiting for gathers and
reduces, and the SM time that their kernels took from others. *Expected*: the copies, and of the SM
time the share that fits the published measurement (Llama-3.1 70B, 8K tokens a GPU: copies 0.33 s,
78 of which 3.8 SM*s stay on 132 SMs, 0.53 s saved): (0.53 - 0.33) / ((78 - 3.8) / 132) = 0.36.
Waiting is not expected to shrink on GPUs. Under gloo a reduce-scatter is an all-reduce, which moves
twice the bytes: half of its exposed waiting is expected to go.

From sizes. share = k * parameters / (active parameters * tokens a GPU). Published savings give k:
31,200 tokens of a diffusion model, 1.4 %: 437; 32,768 of Llama 70B, 3.1 %: 1016.
"""

from __future__ import annotations

from dataclasses import dataclass

from tide.advise.measure import SERVED, Measured

CONTENTION_SHARE = 0.36
SM_FALLBACK = 132
RATIO_LEAST, RATIO_MOST = 437.0, 1016.0


@dataclass(frozen=True)
class Gain:
    """Seconds a step."""

    at_most: float
    expected: float
    copies: float
    waiting: float
    contention: float


def gain(measured: Measured) -> Gain:
    if not measured.fsdp2:
        return Gain(0.0, 0.0, 0.0, 0.0, 0.0)
    waiting = sum(measured.exposed.get(kind, 0.0) for kind in SERVED)
    contention = measured.contended / (measured.sms or SM_FALLBACK)
    expected = measured.exposed_copies + CONTENTION_SHARE * contention
    if not measured.on_gpu and measured.backend.startswith("gloo"):
        expected += measured.exposed.get("reduce", 0.0) / 2
    at_most = measured.exposed_copies + waiting + contention
    return Gain(max(at_most, expected), expected, measured.exposed_copies, waiting, contention)


def ratio_shares(parameters: float, active: float, tokens: float) -> tuple[float, float]:
    """Least and most share of a step that the published measurements let expect."""
    ratio = parameters / (active * tokens)
    return min(1.0, RATIO_LEAST * ratio), min(1.0, RATIO_MOST * ratio)


def verdict(measured: Measured, won: Gain, threshold: float) -> tuple[str, str]:
    """("yes", "perhaps", "no" or "nothing"; a sentence)."""
    if measured.tide:
        return "nothing", "this run is on tide already"
    if not measured.fsdp2:
        return "nothing", "no FSDP2 in this trace (no FSDP:: range): tide has nothing to do here"
    if measured.step <= 0:
        return "nothing", "the trace holds no time"
    expected, most = won.expected / measured.step, won.at_most / measured.step
    if expected >= threshold:
        return "yes", f"worth trying: {expected:.1%} of a step expected, threshold {threshold:.1%}"
    if most < threshold:
        return "no", f"not worth it: at most {most:.1%} of a step, threshold {threshold:.1%}"
    return "perhaps", (
        f"perhaps: {expected:.1%} of a step expected, at most {most:.1%}, threshold "
        f"{threshold:.1%}; measure it with tide parity"
    )


def not_served(measured: Measured) -> list[str]:
    """What tide would leave as it is."""
    result = []
    if measured.fsdp1:
        result.append("FullyShardedDataParallel (FSDP1) is in it: tide serves fully_shard only")
    for kind, seconds in measured.resident.items():
        if kind not in SERVED and seconds:
            share = seconds / measured.step
            result.append(f"{kind}: {share:.1%} of a step; stays with NCCL or gloo")
    if measured.ranks == 1:
        result.append("one rank: there is nothing to gather or to scatter")
    if any(word in measured.device for word in ("AMD", "MI2", "MI3", "gfx")):
        result.append(f"{measured.device}: tide serves CPUs and NVIDIA GPUs")
    return result
