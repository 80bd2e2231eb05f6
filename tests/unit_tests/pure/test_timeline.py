"""Reading of a small made-up trace by `tools/fsdp_timeline.py`."""

import gzip
import json
import xml.etree.ElementTree as ElementTree

import pytest

from tools import fsdp_timeline as timeline

GEMM, GATHER, SCATTER, SUM = (
    "ampere_bf16_gemm",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
#: (name, stream, start, duration) in microseconds; step 1 is 0 to 100, step 2 100 to 300.
KERNELS = [
    (GEMM, 7, 10, 80),
    (GATHER, 20, 100, 20),
    (GEMM, 7, 120, 30),
    (GATHER, 20, 125, 35),
    ("cast", 20, 122, 3),
    (GEMM, 7, 160, 40),
    (SCATTER, 24, 190, 30),
    (SUM, 28, 240, 10),
    (SUM, 7, 260, 5),
    (SCATTER, 24, 265, 10),
    (GEMM, 7, 290, 20),  # ends in the next step
]


def events() -> list[dict]:
    def event(category, name, start, duration, **args):
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": start,
            "dur": duration,
            "pid": 0,
            "tid": 1,
            "args": args,
        }

    return [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::mm", 0, 400),
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", "ProfilerStep#2", 90, 200),
        event("gpu_user_annotation", "ProfilerStep#2", 100, 200, stream=7),
        *(event("kernel", name, start, took, stream=stream, device=0) for name, stream, start, took in KERNELS),
        event("kernel", "another device", 0, 400, stream=7, device=1),
        event("gpu_memcpy", "Memcpy HtoD", 210, 40, stream=7, device=0),
    ]


def summary_of(number: int | None, outer=None) -> tuple[timeline.Step, timeline.Summary]:
    works = timeline.gpu_work(events())
    name, span = timeline.choose_step(events(), works, number)
    step = timeline.cut(works, timeline.lane_of_stream(works, outer), name, span)
    return step, timeline.summarize(step)


def test_lanes_are_told_by_name_and_stream() -> None:
    step, summary = summary_of(None)
    assert step.name == "step 2" and summary.length == 200
    assert summary.busy == {"compute": 80, "gather": 58, "reduce": 40, "outer": 10, "in line": 5, "copies": 40}
    assert {lane: {work.stream for work in works} for lane, works in step.lanes.items()} == {
        "compute": {7}, "gather": {20}, "reduce": {24}, "outer": {28}, "in line": {7}, "copies": {7},
    }  # fmt: skip


def test_what_is_exposed_and_what_waits_for_the_host() -> None:
    _, summary = summary_of(2)
    # 100-120, 122-160, 190-220, 240-250 and 260-275; computing 120-150, 160-200 and 290-300.
    assert summary.communication == 20 + 38 + 30 + 10 + 15
    assert summary.exposed == 20 + 10 + 20 + 10 + 15
    assert summary.overlap == pytest.approx(1 - 75 / 113)
    assert summary.gaps == [(100, 120), (150, 160), (200, 290)]
    assert summary.host_bound == (260 - 250) + (290 - 275)
    assert summary_of(1)[1].overlap is None


def test_streams_of_the_outer_axis_can_be_given() -> None:
    step, _ = summary_of(2, outer=[24])
    assert {work.stream for work in step.lanes["outer"]} == {24} and {w.stream for w in step.lanes["reduce"]} == {28}


def test_gathers_by_copy_engines_are_gathers() -> None:
    """Their barriers were computation, beside which everything seemed hidden, and their copies no communication."""
    barrier = (
        "c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
    )
    copy = "Memcpy PtoP (Device -> Device)"
    kernels = [(GEMM, 7, 0, 50), ("cast", 20, 0, 2), (barrier, 20, 10, 5), (SCATTER, 24, 90, 10), (GEMM, 7, 80, 5)]
    made = [{"cat": "kernel", "name": n, "ts": t, "dur": d, "args": {"stream": s}} for n, s, t, d in kernels]
    for name, stream, start in ((copy, 20, 40), (copy, 20, 60), ("Memcpy DtoD", 7, 85), ("Memcpy HtoD", 20, 70)):
        made.append({"cat": "gpu_memcpy", "name": name, "ts": start, "dur": 4, "args": {"stream": stream}})
    works = timeline.gpu_work(made)
    summary = timeline.summarize(timeline.cut(works, timeline.lane_of_stream(works), "all", (0, 100)))
    assert summary.busy == {"compute": 55, "gather": 15, "reduce": 10, "outer": 0, "in line": 0, "copies": 8}
    assert summary.communication == 25 and summary.exposed == 4 + 10


def test_the_command_prints_and_draws(tmp_path, capsys) -> None:
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events()}).encode()))
    assert timeline.main([str(trace)]) == 0
    said = capsys.readouterr().out
    assert "step 2: 0.200 ms" in said and "33.6% of it beside computation, 0.075 ms exposed" in said
    assert "compute idle 0.120 ms in 3 gaps, the longest 0.090 ms; 0.025 ms with every lane idle" in said
    picture = ElementTree.parse(tmp_path / "trace.svg").getroot()
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 11 and "Memcpy HtoD 0.040 ms" in titles


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("{", (), "cannot be read as a chrome trace"),
        ("{}", (), 'has no "traceEvents"'),
        (json.dumps({"traceEvents": events()[:4]}), (), "no GPU kernels; profile with ProfilerActivity.CUDA"),
        (json.dumps(events()), ("--step", "5"), "has no step 5; it has 1, 2"),
        (json.dumps(events()), ("--outer-streams", "a"), "invalid literal"),
        (json.dumps([{"ph": "X", "cat": "kernel", "name": "k"}]), (), "without name, time or arguments"),
        (json.dumps([{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]), (), "the trace takes no time"),
        (json.dumps(events()), ("--svg", "no/such/folder/x.svg"), "the picture is not written"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\x07" * 20, (), "cannot be read as a chrome trace"),
    ],
)
def test_what_cannot_be_drawn_is_told(tmp_path, capsys, content, arguments, message) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert timeline.main([str(trace), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_does_not_replace_its_trace(tmp_path, capsys) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(events()))
    assert timeline.main([str(trace), "--svg", str(trace)]) == 2
    assert json.loads(trace.read_text()) == events() and "which the picture would replace" in capsys.readouterr().err


def test_what_is_too_close_to_be_seen_is_one_box() -> None:
    works = [timeline.Work(f"k{number}", 7, number, number + 0.5, is_copy=False) for number in range(1000)]
    works.append(timeline.Work("long", 7, 1000, 3000, is_copy=False))
    step = timeline.Step("step", 0, 100_000, {"compute": works, "gather": [], "reduce": [], "outer": []})
    step.lanes.update({"in line": [], "copies": []})
    assert timeline.draw(step).count("<title>") == 2
