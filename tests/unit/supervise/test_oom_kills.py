"""Lack of memory is claimed only when a counter of the kernel moved."""

from pathlib import Path

from ups.supervise.first_cause import OomKills, moved, oom_kill_counters


def host(root: Path, cgroup: str, files: dict[str, str], machine: int = 0) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {machine}\n")
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def test_both_generations_of_control_groups_are_read(tmp_path: Path) -> None:
    first = host(tmp_path / "1", "4:memory:/job\n", {"memory/job/memory.oom_control": "under_oom 0\noom_kill 3\n"})
    second = host(tmp_path / "2", "0::/job\n", {"job/memory.events": "oom 1\noom_kill 4\n"}, machine=9)
    assert list(oom_kill_counters(*first).values()) == [3]
    assert list(oom_kill_counters(*second).values()) == [4], "the machine counts the processes of others"


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert oom_kill_counters(*host(tmp_path, "0::/job\n", {}, machine=9)) == {"machine": 9}


def test_a_kill_of_long_ago_explains_nothing_and_one_of_seconds_ago_does() -> None:
    kills = OomKills()
    kills.look(0.0, {"job": 0})
    kills.look(100.0, {"job": 1})
    assert kills.happened({"job": 1}), "it may have been a moment ago"
    kills.look(140.0, {"job": 1})
    assert not kills.happened({"job": 1})
    assert kills.happened({"job": 2})
    for seconds in range(141, 170):
        kills.look(float(seconds), {"job": 2})
    assert kills.happened({"job": 2}), "a process with much memory takes its time to die"


def test_only_growth_counts() -> None:
    assert not moved({"machine": 3}, {"machine": 3})
    assert moved({"machine": 3, "a": 0}, {"machine": 3, "a": 1})
    assert not moved({"machine": 3}, {})


def test_a_host_without_counters_claims_nothing(tmp_path: Path) -> None:
    assert oom_kill_counters(tmp_path, tmp_path) == {}
