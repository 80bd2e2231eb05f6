"""Draws what a GPU's streams did in one step, from a torch profiler's trace, and sums up how well they overlap.

    python tools/fsdp_timeline.py trace.json.gz --svg step.svg

Lanes: compute (kernels on streams without collectives, and on the one with most other work), gather and reduce (NCCL's
kernels by name, gathers by copy engines, and what else runs on their streams), outer (the same on further streams: the
outer axis and other groups), in line (NCCL's kernels on the compute stream itself), copies (between host and device,
and on the device).
"""

import argparse
import collections
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

LANES = ("compute", "gather", "reduce", "outer", "in line", "copies")
COMMUNICATION = ("gather", "reduce", "outer", "in line")
COLORS = {
    "compute": "#4c78a8", "gather": "#f58518", "reduce": "#e45756", "outer": "#b279a2", "in line": "#9d755d",
    "copies": "#72b7b2",
}  # fmt: skip
#: With copy engines a gather is copies on a stream of their own, after a barrier of torch's symmetric memory.
GATHERS = re.compile(r"nccl.*AllGather|\bbarrier_kernel\b", re.IGNORECASE)
REDUCES = re.compile(r"nccl.*Reduce", re.IGNORECASE)
ON_THE_DEVICE = re.compile(r"Memcpy (DtoD|PtoP)", re.IGNORECASE)
STEP = re.compile(r"ProfilerStep#(\d+)")

Intervals = list[tuple[float, float]]


class TraceError(ValueError):
    """The file is no trace that can be drawn."""


@dataclass(frozen=True)
class Work:
    """One kernel or copy; times in microseconds."""

    name: str
    stream: int
    start: float
    end: float
    is_copy: bool

    @property
    def kind(self) -> str | None:
        """The collective of a kernel, by name; None: no communication."""
        if GATHERS.search(self.name):
            return "gather"
        if REDUCES.search(self.name):
            return "reduce"
        return "other" if self.name.lower().startswith("nccl") else None


@dataclass(frozen=True)
class Step:
    """Work between two moments, by lane."""

    name: str
    start: float
    end: float
    lanes: dict[str, list[Work]]


@dataclass(frozen=True)
class Summary:
    """Times of one step, in microseconds."""

    length: float
    busy: dict[str, float]
    """By lane, the time in which it did something."""
    communication: float
    """Some lane of communication was busy."""
    exposed: float
    """So, and the compute lane was not."""
    gaps: Intervals
    """Intervals in which the compute lane did nothing."""
    host_bound: float
    """Intervals in which no lane did anything: the GPU had run out of work that the host had issued."""

    @property
    def overlap(self) -> float | None:
        """Share of communication beside which something was computed; None: there was no communication."""
        return 1 - self.exposed / self.communication if self.communication else None


# -- reading ----------------------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[dict]:
    """The events of a chrome trace, plain or gzipped.

    Raises:
        TraceError: `path` is not such a file.
    """
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read as a chrome trace: {error}") from error
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise TraceError(f'{path} has no "traceEvents"; write it with torch.profiler\'s export_chrome_trace().')
    found = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    for event in found:
        is_whole = isinstance(event.get("name"), str) and isinstance(event.get("args", {}), dict)
        if not (
            is_whole and all(isinstance(event.get(key, 0), (int, float)) for key in ("ts", "dur")) and "ts" in event
        ):
            raise TraceError(f"{path} has an event without name, time or arguments: {str(event)[:200]}")
    return found


def gpu_work(events: Iterable[dict]) -> list[Work]:
    """Kernels and copies, of the first device if there are several, by start.

    Raises:
        TraceError: there are none.
    """
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        raise TraceError("the trace has no GPU kernels; profile with ProfilerActivity.CUDA on a machine with a GPU.")
    device = min(event.get("args", {}).get("device", 0) for event in found)
    works = [
        Work(
            name=event["name"],
            stream=event.get("args", {}).get("stream", event.get("tid", 0)),
            start=float(event["ts"]),
            end=float(event["ts"]) + float(event.get("dur", 0)),
            is_copy=event["cat"] != "kernel",
        )
        for event in found
        if event.get("args", {}).get("device", 0) == device
    ]
    return sorted(works, key=lambda work: work.start)


def steps_of(events: Iterable[dict]) -> dict[int, tuple[float, float]]:
    """Start and end of every step that the profiler marked; on the GPU where the trace has that, else on the host."""
    spans: dict[str, dict[int, tuple[float, float]]] = {"user_annotation": {}, "gpu_user_annotation": {}}
    for event in events:
        match = STEP.fullmatch(str(event.get("name")))
        if match and event.get("cat") in spans:
            start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
            of_kind = spans[event["cat"]]
            before = of_kind.get(int(match[1]), (start, end))
            of_kind[int(match[1])] = (min(before[0], start), max(before[1], end))
    return spans["user_annotation"] | spans["gpu_user_annotation"]


# -- lanes ------------------------------------------------------------------------------------------------------------


def lane_of_stream(works: Sequence[Work], outer: Iterable[int] | None = None) -> dict[int, str]:
    """The lane of each stream: compute, gather, reduce or outer.

    Args:
        works: of the whole trace.
        outer: the streams of the outer axis; None: for gathers, and for reductions, the stream with most of them is the
            inner axis', the others are not.
    """
    computing: collections.Counter[int] = collections.Counter()
    collectives: dict[str, collections.Counter[int]] = {
        "gather": collections.Counter(),
        "reduce": collections.Counter(),
    }
    lanes: dict[int, str] = {}
    for work in works:
        if work.kind is None and not work.is_copy:
            computing[work.stream] += work.end - work.start
        elif work.kind in collectives:
            collectives[work.kind][work.stream] += 1
        elif work.kind is not None:
            lanes[work.stream] = "outer"
    main = computing.most_common(1)[0][0] if computing else None
    streams = {stream for counts in collectives.values() for stream in counts} - {main}
    for stream in streams:
        lanes[stream] = max(collectives, key=lambda kind: collectives[kind][stream])
    for kind in collectives:
        own = [stream for stream in streams if lanes[stream] == kind]
        inner = max(own, key=lambda stream: collectives[kind][stream], default=None)
        for stream in own:
            if stream in outer if outer is not None else stream != inner:
                lanes[stream] = "outer"
    return {stream: "compute" for stream in computing} | lanes | ({} if main is None else {main: "compute"})


def cut(works: Iterable[Work], lanes: dict[int, str], name: str, span: tuple[float, float]) -> Step:
    """The part of `works` that lies in `span`, by lane."""
    start, end = span
    step = Step(name, start, end, {lane: [] for lane in LANES})
    for work in works:
        if work.end <= start or work.start >= end:
            continue
        lane = lanes.get(work.stream, "compute")
        if work.is_copy and (lane == "compute" or not ON_THE_DEVICE.match(work.name)):
            lane = "copies"
        if lane == "compute" and work.kind is not None:
            lane = "in line"
        step.lanes[lane].append(Work(work.name, work.stream, max(work.start, start), min(work.end, end), work.is_copy))
    return step


# -- arithmetic of intervals ------------------------------------------------------------------------------------------


def union(works: Iterable[Work | tuple[float, float]]) -> Intervals:
    """The time that any of `works` covers, as disjoint intervals in order."""
    pairs = sorted((work.start, work.end) if isinstance(work, Work) else work for work in works)
    merged: Intervals = []
    for start, end in pairs:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Intervals, taken: Intervals) -> Intervals:
    """The part of `intervals` that none of `taken` covers; both disjoint and in order."""
    left: Intervals = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        number = first
        while number < len(taken) and taken[number][0] < end:
            other_start, other_end = taken[number]
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
            number += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Intervals) -> float:
    """Time in disjoint intervals."""
    return sum(end - start for start, end in intervals)


def summarize(step: Step) -> Summary:
    """Sums over one step: the lanes' busy time, and communication that no computation hides."""
    busy = {lane: union(works) for lane, works in step.lanes.items()}
    communication = union(pair for lane in COMMUNICATION for pair in busy[lane])
    gaps = without([(step.start, step.end)], busy["compute"])
    return Summary(
        length=step.end - step.start,
        busy={lane: length(intervals) for lane, intervals in busy.items()},
        communication=length(communication),
        exposed=length(without(communication, busy["compute"])),
        gaps=gaps,
        host_bound=length(without(gaps, union([*communication, *busy["copies"]]))),
    )


# -- showing ----------------------------------------------------------------------------------------------------------


def report(step: Step, summary: Summary) -> str:
    """The summary in words."""
    lines = [f"{step.name}: {summary.length / 1000:.3f} ms"]
    for lane in LANES:
        if step.lanes[lane]:
            streams = ", ".join(str(stream) for stream in sorted({work.stream for work in step.lanes[lane]}))
            share = summary.busy[lane] / summary.length
            lines.append(f"  {lane:<8} {summary.busy[lane] / 1000:10.3f} ms busy {share:7.1%}   streams {streams}")
    if summary.overlap is None:
        lines.append("  no communication")
    else:
        lines.append(
            f"  communication {summary.communication / 1000:.3f} ms, {summary.overlap:.1%} of it beside computation, "
            f"{summary.exposed / 1000:.3f} ms exposed"
        )
    longest = max((end - start for start, end in summary.gaps), default=0.0)
    lines.append(
        f"  compute idle {length(summary.gaps) / 1000:.3f} ms in {len(summary.gaps)} gaps, the longest "
        f"{longest / 1000:.3f} ms; {summary.host_bound / 1000:.3f} ms with every lane idle (host-bound)"
    )
    return "\n".join(lines)


WIDTH, LEFT, ROW, TOP = 1500, 90, 34, 40


def draw(step: Step) -> str:
    """The lanes as an SVG picture; kernels too close to be told apart are one box, named after the longest."""
    scale = WIDTH / (step.end - step.start)
    shown = [lane for lane in LANES if step.lanes[lane]]
    height = TOP + ROW * len(shown) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(step.name)}: {(step.end - step.start) / 1000:.3f} ms</text>',
    ]
    for number, lane in enumerate(shown):
        y = TOP + ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end">{lane}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 8}" fill="#f2f2f2"/>')
        for start, end, name in _boxes(step.lanes[lane], 0.5 / scale):
            x, width = LEFT + (start - step.start) * scale, max((end - start) * scale, 0.3)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 8}" fill="{COLORS[lane]}">'
                f"<title>{escape(name)} {(end - start) / 1000:.3f} ms</title></rect>"
            )
    bottom = TOP + ROW * len(shown)
    for tick in range(11):
        x = LEFT + WIDTH * tick / 10
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#cccccc"/>')
        time_ms = (step.end - step.start) * tick / 10_000
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{time_ms:.2f} ms</text>')
    return "\n".join([*parts, "</svg>\n"])


def _boxes(works: Iterable[Work], least_gap: float) -> list[tuple[float, float, str]]:
    """(start, end, name) of boxes, each of works that lie closer than `least_gap`."""
    boxes: list[tuple[float, float, str, float]] = []
    for work in sorted(works, key=lambda work: work.start):
        took = work.end - work.start
        if boxes and work.start - boxes[-1][1] < least_gap and max(took, boxes[-1][3]) < least_gap:
            start, end, name, longest = boxes[-1]
            boxes[-1] = (start, max(end, work.end), *((work.name, took) if took > longest else (name, longest)))
        else:
            boxes.append((work.start, work.end, work.name, took))
    return [box[:3] for box in boxes]


def choose_step(events: Sequence[dict], works: Sequence[Work], number: int | None) -> tuple[str, tuple[float, float]]:
    """Name and span of step `number`; None: the last one marked, or all of the trace if none is.

    Raises:
        TraceError: there is no such step, or it takes no time.
    """
    steps = steps_of(events)
    if number is None and not steps:
        return "all of the trace", _lasting("the trace", (works[0].start, max(work.end for work in works)))
    chosen = max(steps) if number is None else number
    if chosen not in steps:
        raise TraceError(
            f"the trace has no step {chosen}; it has {', '.join(map(str, sorted(steps))) or 'none marked'}."
        )
    return f"step {chosen}", _lasting(f"step {chosen}", steps[chosen])


def _lasting(name: str, span: tuple[float, float]) -> tuple[float, float]:
    if span[1] <= span[0]:
        raise TraceError(f"{name} takes no time in the trace; there is nothing to draw.")
    return span


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives back the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a chrome trace of torch.profiler, .json or .json.gz")
    parser.add_argument("--step", type=int, help="the number of a ProfilerStep; default: the last one")
    parser.add_argument("--svg", type=Path, help="where to draw the picture; default: beside the trace")
    parser.add_argument("--outer-streams", help="streams of the outer axis, such as 24,28; empty: there are none")
    options = parser.parse_args(arguments)
    try:
        outer = options.outer_streams
        streams = None if outer is None else [int(stream) for stream in outer.split(",") if stream.strip()]
        events = read_events(options.trace)
        works = gpu_work(events)
        step = cut(works, lane_of_stream(works, streams), *choose_step(events, works, options.step))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(step, summarize(step)))
    target = options.svg or options.trace.with_name(
        options.trace.name.removesuffix(".gz").removesuffix(".json") + ".svg"
    )
    try:
        if target.exists() and target.samefile(options.trace):
            raise ValueError(f"{target} is the trace, which the picture would replace; pass another --svg")
        target.write_text(draw(step), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: the picture is not written: {error}", file=sys.stderr)
        return 2
    print(f"drawn in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
