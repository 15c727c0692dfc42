"""Energy that a GPU took, from the counter of the NVIDIA management library; elsewhere ``None``.

The library comes with the driver and is called directly, without a package. The counter is that of the whole device:
what other processes do on it counts too.
"""

import ctypes
import logging

import torch

LIBRARY = "libnvidia-ml.so.1"

log = logging.getLogger(__name__)


class EnergyGauge:
    """Joules since some fixed time."""

    def __init__(self, device: torch.device) -> None:
        self._library = self._handle = None
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL(LIBRARY)
            handle = ctypes.c_void_p()
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            status = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
        except (OSError, AttributeError) as error:
            log.debug("energy is null: %s", error)
            return
        if status:
            log.debug("energy is null: NVML answers with status %d", status)
            return
        self._library, self._handle = library, handle

    def joules(self) -> float | None:
        """Reading of the counter, ``None`` where there is none (before Volta, on a MIG slice, without a driver)."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3
