"""``lra doctor``: what it says of kernels that cannot run and of data that is there."""

import pytest

from attention.kernels import dispatch
from lra import doctor, prepare
from lra.errors import UserError


@pytest.fixture
def report(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LRA_DATA_DIR", str(tmp_path))

    def run() -> dict[str, str]:
        assert doctor.main([]) == 0
        lines = [line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
        return {name: text.strip() for name, text in (line for line in lines if len(line) == 2)}

    return run


def test_data_that_is_there_is_told_by_regime_and_options(report, capsys, tmp_path):
    assert report()["copying"] == "nothing prepared: lra data prepare copying"
    small = ["task.train_rows=8", "task.validation_rows=4", "task.test_rows=4"]
    assert prepare.main(["prepare", "copying", "task.length=64", *small]) == 0
    capsys.readouterr()
    assert report()["copying"] == "1 with other options, see lra data list"
    folder = next((tmp_path / "copying").glob("length64-*"))
    folder.rename(folder.with_name("length256-generated-v1"))
    # copying's own length is that of the short regime
    assert report()["copying"] == "ready at native, short"


def test_a_kernel_that_cannot_run_is_named_with_the_reason(report, monkeypatch):
    broken = dispatch.Kernel("cpp", print, ("cpu",), missing=lambda: "there is no C++ compiler; install g++")
    elsewhere = dispatch.Kernel("triton", print, ("cuda",), missing=lambda: "Triton is not installed")
    monkeypatch.setitem(dispatch._OPS, "wkv4", [broken, elsewhere, dispatch.Kernel("torch", print)])
    found = report()
    assert found["wkv4 (cpu)"] == "torch; not cpp: there is no C++ compiler; install g++"


def test_it_takes_no_arguments():
    with pytest.raises(UserError, match="takes no arguments, found --verbose"):
        doctor.main(["--verbose"])


@pytest.mark.parametrize("emulates", [False, True])
def test_a_cpu_without_bf16_arithmetic_is_told(report, monkeypatch, emulates):
    monkeypatch.setattr(doctor, "EMULATES_HALF", emulates)
    assert ("use trainer.precision=fp32" in report()["CPU"]) == emulates
