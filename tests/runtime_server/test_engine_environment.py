"""What the engine process's numerical libraries are told before they load."""

import pytest

from headway_runtime.server import engine_handle
from headway_runtime.server.engine_handle import engine_environment


@pytest.mark.parametrize(
    ("can_tell", "limit", "spins"), [(True, None, True), (False, None, False), (True, 2.0, False)]
)
def test_waiting_threads_spin_only_where_that_is_watched_and_free(
    *, can_tell: bool, limit: float | None, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "can_tell_waiting", lambda: can_tell)
    monkeypatch.setattr(engine_handle, "cgroup_cpu_limit", lambda: limit)
    environment = engine_environment({"PATH": "/bin"}, num_threads=3)
    assert ("GOMP_SPINCOUNT" in environment) == spins
    assert environment.get("OMP_WAIT_POLICY") == (None if spins else "passive")


def test_thread_counts_follow_the_configuration() -> None:
    environment = engine_environment({"PATH": "/bin", "OMP_NUM_THREADS": "64"}, num_threads=3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["PATH"] == "/bin"


def test_the_users_own_settings_are_kept() -> None:
    own = {"OMP_WAIT_POLICY": "active", "GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    environment = engine_environment(own, num_threads=2)
    assert environment["OMP_WAIT_POLICY"] == "active"
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"
    assert "GOMP_SPINCOUNT" not in environment
