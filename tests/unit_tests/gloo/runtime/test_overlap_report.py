"""The overlap report counts the time of a step, and nothing when it is off."""

import contextlib
import time
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.diagnostics.overlap_report import OverlapReport, Times, folded
from megatron_fsdp.machine.device import Device, HostTime, PeakMemory
from megatron_fsdp.runtime.timeline import Kind, Timeline
from megatron_fsdp.state.main_grad import MainGrad
from megatron_fsdp.state.param_group import ParamGroup
from tests.unit_tests.harness.parity import Case
from tests.unit_tests.harness.rank_pool import RankPool
from tests.unit_tests.harness.sharded import Sharding, build_sharded


class Clock:
    """Time that passes when it is told to, so that what is reported is known exactly."""

    now_ms = 0.0

    @classmethod
    def pause(cls, ms: float) -> None:
        cls.now_ms += ms

    @classmethod
    def moment(cls, device: Device | None = None) -> HostTime:
        return HostTime(cls.now_ms / 1000)


class Pause(torch.autograd.Function):
    """The identity, in 10 ms forward and 20 ms backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        Clock.pause(10)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        Clock.pause(20)
        return grad


class PausingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(super().forward(x))


class Pausing(nn.Module):
    """Two units of 30 ms each, and 5 ms of the root between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PausingLayer(), PausingLayer()])
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            Clock.pause(5)
        return self.last(x)


@contextlib.contextmanager
def taking(ms: float, target: type, name: str) -> Iterator[None]:
    """Makes a method take this long."""
    original = getattr(target, name)

    def slowly(*args, **kwargs):
        Clock.pause(ms)
        return original(*args, **kwargs)

    with mock.patch.object(target, name, slowly):
        yield


def step(model: MegatronFSDP) -> None:
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    model.zero_grad()


def build() -> MegatronFSDP:
    sharding = Sharding(strategy=3, units=(PausingLayer,), is_poisoned=False)
    return build_sharded(Pausing, Case(task="integers", sharding=sharding).recipe, sharding)[0]


def job_report() -> tuple[list[Times], Times, str, str]:
    """(rows, total, table, short table) of a step with known pauses."""
    model = build()
    step(model)
    with (
        mock.patch.object(Device, "record_timed_event", Clock.moment),
        taking(7, ParamGroup, "unshard"),
        taking(3, MainGrad, "reduce"),
        model.overlap_report() as report,
    ):
        step(model)
        Clock.pause(2)
    return list(report.rows), report.total, str(report), report.short()


def test_each_unit_is_told_what_it_took(ranks2: RankPool) -> None:
    for rows, total, table, short in ranks2.run(job_report):
        figures = {
            row.label: tuple(
                round(value, 6) for value in (row.compute_ms, row.gather_ms, row.reduce_ms, row.exposed_ms)
            )
            for row in rows
        }
        assert figures == {
            "(root)": (10.0, 7.0, 3.0, 10.0),
            "layers.0": (30.0, 14.0, 3.0, 17.0),  # gathered for forward and for backward
            "layers.1": (30.0, 7.0, 3.0, 10.0),  # stays from forward to backward
            "(outside units)": (2.0, 0.0, 0.0, 0.0),
        }
        assert total.compute_ms == pytest.approx(72) and total.exposed_ms == pytest.approx(37)
        assert "layers.1 " in table and "layers.* x2 " in short and "layers.1" not in short
        assert "0% of it hidden" in table and "peak memory" not in table


def job_hybrid() -> tuple[float, Times]:
    """Milliseconds and the report of two steps after which outer shards are left to be gathered."""
    sharding = Sharding(strategy=3, units=(PausingLayer,), outer=1, is_poisoned=False)
    model, optimizer = build_sharded(Pausing, Case(task="integers", sharding=sharding).recipe, sharding)
    began_s = time.perf_counter()
    with model.overlap_report() as report:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return (time.perf_counter() - began_s) * 1000, report.total


def test_the_outer_axis_is_told_apart_on_the_real_clock(ranks4: RankPool) -> None:
    for elapsed_ms, total in ranks4.run(job_hybrid):
        assert 0 < total.outer_ms < total.communication_ms == pytest.approx(total.exposed_ms)
        assert 0 < total.compute_ms < total.compute_ms + total.exposed_ms < elapsed_ms


def job_moments() -> list:
    """Moments noted in steps without a report: before all, after one that raised, and after one that ended."""
    model = build()
    with mock.patch.object(
        Device, "record_timed_event", autospec=True, side_effect=Device.record_timed_event
    ) as record:
        step(model)
        noted = [record.call_count]
        report = model.overlap_report()
        with pytest.raises(ValueError, match="of the block"), report:
            step(model)
            raise ValueError("of the block")
        with pytest.raises(RuntimeError, match="ended without an error"):
            str(report)
        record.reset_mock()
        step(model)
        noted.append(record.call_count)
        with report:
            with pytest.raises(RuntimeError, match="another overlap report"), model.overlap_report():
                pass
            step(model)
        assert report.total.compute_ms > 0
        record.reset_mock()
        step(model)
        return [*noted, record.call_count]


def test_nothing_is_noted_while_no_report_is_open(ranks1: RankPool) -> None:
    assert ranks1.run(job_moments) == [[0, 0, 0]]


def job_kept() -> tuple[bool, str, str]:
    """True if a model is there after its deletion while its report was kept; the report; the error of a second use."""
    model = build()
    with model.overlap_report() as report:
        step(model)
    schedule = weakref.ref(model._schedule)
    del model
    with pytest.raises(RuntimeError) as error, report:
        pass
    return schedule() is not None, report.short(), str(error.value)


def test_figures_that_are_kept_keep_no_model(ranks1: RankPool) -> None:
    [(is_there, table, message)] = ranks1.run(job_kept)
    assert not is_there and "layers.* x2" in table and "is gone" in message


class FakeGPU(Device):
    """Streams beside each other, on the test's clock."""

    has_streams = True
    record_timed_event = Clock.moment

    def peak_memory(self) -> PeakMemory:
        return PeakMemory(3 * 2**20, 5 * 2**20)


def test_what_runs_beside_the_compute_stream_is_exposed_only_where_that_waits() -> None:
    device = FakeGPU(torch.device("cpu"))
    timeline = Timeline(device)
    unit = mock.Mock(is_root=False, label="layer")
    schedule = mock.Mock(timeline=timeline, units=[unit], device=device)
    with OverlapReport(schedule) as report:
        Clock.pause(1)
        with timeline.communicates(Kind.GATHER, unit):
            Clock.pause(4)
        with timeline.waits(Kind.GATHER, unit):
            Clock.pause(1)
        timeline.enter(unit)
        Clock.pause(4)
        with timeline.waits(Kind.REDUCE):
            Clock.pause(2)
        timeline.leave()
    layer, outside = report.rows
    assert layer.compute_ms == pytest.approx(4.0) and outside.compute_ms == pytest.approx(5.0)
    assert layer.gather_ms == pytest.approx(4.0) and layer.reduce_ms == 0
    assert layer.exposed_ms == pytest.approx(3.0)
    head = str(report).splitlines()[0]
    assert head == (
        "12.0 ms: 9.0 compute, 3.0 exposed communication (25.0%); 4.0 ms of communication, 25% of it hidden; "
        "peak memory 3 MiB allocated, 5 MiB reserved"
    )


def test_units_that_differ_by_number_are_one_row() -> None:
    rows = [Times(label=label, compute_ms=1.0) for label in ("0", "a.0.b", "a.10.b", "a.1.c", "h2", "h3")]
    assert [(row.label, row.count) for row in folded(rows)] == [
        ("*", 1),
        ("a.*.b", 2),
        ("a.*.c", 1),
        ("h2", 1),
        ("h3", 1),
    ]
