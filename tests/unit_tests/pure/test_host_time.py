"""`benchmarks/host_time.py` measures, on this version of the engine, what it says it does."""

import json

import pytest

from benchmarks import host_time


@pytest.mark.parametrize("ranks", [1, 4])
def test_host_time_is_measured_per_unit_and_part(tmp_path, capsys, ranks) -> None:
    file = tmp_path / "figures.json"
    small = ["--units", "2", "--params", "2", "--steps", "2", "--repeats", "3", "--warmup", "2"]
    host_time.main([*small, "--ranks", str(ranks), "--parts", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert set(figures["us_per_unit"]) == set(host_time.PHASES) and figures["options"]["ranks"] == ranks
    for times in figures["us_per_unit"].values():
        assert times["min"] <= times["median"] <= times["max"]
    unused = {part for part, value in figures["parts_us_per_unit"].items() if not value}
    assert unused <= ({"event waits", "gathers"} if ranks == 1 else set()), "a part is named for what is not called"
    assert "us per unit, 2 units of 2 parameters" in capsys.readouterr().out


def test_a_part_does_not_count_the_parts_inside_it(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(host_time.time, "thread_time", lambda: now[0])
    clock = host_time.Clock()

    def inner() -> None:
        now[0] += 2.0

    def outer() -> None:
        now[0] += 1.0
        clock.counted("view swaps", inner)()
        now[0] += 4.0

    clock.counted("hooks", outer)()
    assert clock.spent_s["hooks"] == 5.0 and clock.spent_s["view swaps"] == 2.0


@pytest.mark.parametrize("wrong", [["--units", "0"], ["--steps", "-1"], ["--warmup", "-1"]])
def test_what_cannot_be_measured_is_refused(capsys, wrong) -> None:
    with pytest.raises(SystemExit):
        host_time.parse(wrong)
    assert "it should be at least" in capsys.readouterr().err
