"""The model of scaling: bytes and times that can be worked out by hand, and what the page shows of it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("scaling_model", ROOT / "benchmarks/scaling_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_over_the_network_are_those_of_rings(model):
    machine, work = model.Machine(), model.Work(compute_s=1.0, weight_nbytes=16.0, grad_nbytes=16.0, microbatches=2)
    assert model.step(machine, work, 1, is_hybrid=False).network_nbytes == 0
    # Six passes of 16 bytes, three quarters of each from other hosts, over eight adapters.
    assert model.step(machine, work, 4, is_hybrid=False).network_nbytes == 6 * 16 * 3 / 4 / 8
    # Once an eighth of weights and of gradients, three quarters from other hosts.
    assert model.step(machine, work, 4, is_hybrid=True).network_nbytes == 2 * 16 / 8 * 3 / 4


def test_the_longer_of_computing_and_the_wire_is_the_step(model):
    machine = model.Machine()
    slow, fast = (model.step(machine, model.Work(compute_s=s), 2, is_hybrid=False) for s in (10.0, 0.0))
    assert slow.step_s > 10.0 and slow.wire_s == fast.wire_s == fast.step_s
    resident = model.step(machine, model.Work(compute_s=0.0, is_resident=True), 2, is_hybrid=False)
    assert resident.wire_s == pytest.approx(fast.wire_s * 2 / 3)


def test_the_page_shows_what_the_script_prints(model, capsys):
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    model.main([])
    printed = capsys.readouterr().out
    assert all(line in page for line in printed.splitlines())


@pytest.mark.parametrize(
    "wrong", ["--hosts 0", "--hosts 2 -1", "--microbatches 0", "--compute-ms nan", "--compute-ms inf"]
)
def test_what_would_be_nonsense_is_refused(model, capsys, wrong):
    with pytest.raises(SystemExit):
        model.main(wrong.split())
    assert "above 0 value" in capsys.readouterr().err
