"""Questions to the CUDA driver, NVML and UCX by ctypes: versions and attributes, no contexts."""

from __future__ import annotations

import ctypes
from typing import Any

from tide.ucx_package import packaged_ucx

ATTRIBUTES = {
    "multiprocessors": 16,
    "compute major": 75,
    "compute minor": 76,
    "virtual memory": 102,
    "handles by descriptor": 103,
    "gpudirect over virtual memory": 110,
    "stream wait values": 94,
    "dma-buf": 124,
    "fabric handles": 128,
    "multicast": 132,
}
"""CUdevice_attribute numbers of the driver's header."""

NO_DRIVER = "no CUDA driver on this machine (libcuda.so.1 not found)"


def load(*names: str) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def driver_version() -> str | None:
    """ "13.2"; None without a driver."""
    cuda = load("libcuda.so.1")
    number = ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def driver_devices() -> list[dict[str, Any]] | str:
    """The visible GPUs and their attributes; a sentence where there are none."""
    cuda = load("libcuda.so.1")
    if cuda is None:
        return NO_DRIVER
    code = cuda.cuInit(0)
    count = ctypes.c_int()
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0:
        return f"the CUDA driver finds no device (error {code})"
    return [device(cuda, index) for index in range(count.value)] or "no GPU is visible"


def device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, 128, index)
    uuid = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid(ctypes.byref(uuid), index)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), index)
    values: dict[str, Any] = {}
    for what, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        known = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, index) == 0
        values[what] = value.value if known else None
    return {
        "name": name.value.decode(),
        "uuid": bytes(uuid).hex(),
        "memory bytes": total.value,
        **values,
    }


def active_nvlinks(count: int) -> list[int] | None:
    """Of each GPU of the machine, in NVML's order; None without NVML."""
    nvml = load("libnvidia-ml.so.1")
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None
    links = []
    for index in range(count):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        active = 0
        for link in range(18):
            state = ctypes.c_uint()
            code = nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state))
            active += code == 0 and state.value == 1
        links.append(active)
    nvml.nvmlShutdown()
    return links


def ucx_version() -> str | None:
    """Of the UCX that a process would find: by the system's name, else in the package libucx."""
    for name in ("libucp.so.0", *packaged_ucx()):
        ucx = load(name)
        if ucx is None:
            continue
        ucx.ucp_get_version_string.restype = ctypes.c_char_p
        text = ucx.ucp_get_version_string().decode()
        return f"{text} ({'system' if name == 'libucp.so.0' else 'package libucx'})"
    return None
