"""What the engine process's numerical libraries are told before they load."""

from headway_runtime.server.engine_handle import engine_environment


def test_waiting_threads_sleep_and_counts_follow_the_configuration() -> None:
    environment = engine_environment({"PATH": "/bin", "OMP_NUM_THREADS": "64"}, num_threads=3)
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["PATH"] == "/bin"


def test_the_users_own_wait_policy_is_kept() -> None:
    assert engine_environment({"OMP_WAIT_POLICY": "active"}, num_threads=2)["OMP_WAIT_POLICY"] == "active"
