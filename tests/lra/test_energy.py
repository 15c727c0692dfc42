"""Energy: read through NVML where there is one, None elsewhere. The library is a stand-in: no GPU here."""

from types import SimpleNamespace

import pytest
import torch

from lra import energy
from lra.energy import EnergyGauge

CUDA = torch.device("cuda", 0)


class Library:
    """The three functions of NVML that are called, with their conventions: status 0, results through pointers."""

    def __init__(self, *, status: int = 0, supported: bool = True):
        self.status, self.supported, self.millijoules = status, supported, 5_000_000_000_000
        self.names = []

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.names.append(name)
        handle._obj.value = 7
        return self.status

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        assert handle.value == 7
        value._obj.value = self.millijoules
        return 0 if self.supported else 3


@pytest.fixture
def install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-abcd"))

    def use(library: Library) -> Library:
        monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: library)
        return library

    return use


def test_joules_of_the_device_with_this_uuid(install):
    library = install(Library())
    gauge = EnergyGauge(CUDA)
    assert library.names == [b"GPU-1234-abcd"]
    before = gauge.joules()
    library.millijoules += 2500  # beyond 32 bits
    assert gauge.joules() - before == 2.5


def test_a_device_without_a_counter_gives_none(install):
    install(Library(supported=False))
    assert EnergyGauge(CUDA).joules() is None


def test_a_device_that_nvml_does_not_know_gives_none(install):
    install(Library(status=6))
    assert EnergyGauge(CUDA).joules() is None


def test_no_library_gives_none(monkeypatch, install):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(energy.ctypes, "CDLL", absent)
    assert EnergyGauge(CUDA).joules() is None


def test_a_cpu_gives_none():
    assert EnergyGauge(torch.device("cpu")).joules() is None
