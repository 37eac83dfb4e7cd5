"""What control groups allow, from groups that the tests write."""

import math

import pytest

from attncache_core.runtime.control_groups import allowed_bytes, allowed_processors

V2 = "0::/system.slice/a.service\n"
V1 = "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/\n"


@pytest.fixture
def groups(tmp_path):
    """Return a function that writes files of groups: (own groups, {path: content}) -> where both are."""

    def written(own, files):
        mounted = tmp_path / "mounted"
        for path, content in files.items():
            (mounted / path).parent.mkdir(parents=True, exist_ok=True)
            (mounted / path).write_text(content)
        (tmp_path / "own").write_text(own)
        return mounted, tmp_path / "own"

    return written


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, math.inf),
        (V2, {"cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"cpu.max": "max 100000\n"}, math.inf),
        (V2, {"cpu.max": "not a limit\n"}, math.inf),
        (V2, {"cpu.max": ""}, math.inf),
        # A service of systemd, and a limit for all of them.
        (V2, {"system.slice/a.service/cpu.max": "200000 100000\n"}, 2),
        (
            V2,
            {"system.slice/a.service/cpu.max": "200000 100000\n", "system.slice/cpu.max": "50000 100000\n"},
            0.5,
        ),
        (V2, {"system.slice/other.service/cpu.max": "100000 100000\n"}, math.inf),
        ("0::/../../elsewhere\n", {"cpu.max": "100000 100000\n"}, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (V1, {"cpu/docker/a/cpu.cfs_quota_us": "100000\n", "cpu/docker/a/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_quota_of_processors_is_the_least_of_the_groups_of_the_process(groups, own, files, expected):
    assert allowed_processors(*groups(own, files)) == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, math.inf),
        (V2, {"memory.max": "max\n", "memory.current": "7\n"}, math.inf),
        (V2, {"memory.max": "1000\n", "memory.current": "700\n"}, 300),
        (V2, {"memory.max": "1000\n", "memory.current": "1100\n"}, 0),
        (
            V2,
            {
                "memory.max": "1000\n",
                "memory.current": "700\n",
                "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
            },
            450,
        ),
        (
            V2,
            {"system.slice/a.service/memory.max": "900\n", "system.slice/a.service/memory.current": "100\n"},
            800,
        ),
        (
            V1,
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "400\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
            },
            630,
        ),
        (
            V1,
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "400\n",
                "memory/docker/a/memory.limit_in_bytes": "1000\n",
                "memory/docker/a/memory.usage_in_bytes": "400\n",
            },
            600,
        ),
    ],
)
def test_memory_is_what_the_groups_of_the_process_leave(groups, own, files, expected):
    assert allowed_bytes(*groups(own, files)) == expected
