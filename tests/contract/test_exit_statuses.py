"""The statuses that a runtime ends with are those that the operator reads a cause from."""

from headway_operator import names
from headway_operator.cluster.kubernetes_causes import ended
from headway_runtime.errors import ConfigError, DoesNotFitError, ModelFetchError


def test_both_sides_have_the_same_numbers() -> None:
    assert ModelFetchError.exit_status == names.EXIT_STATUS_FETCH
    assert DoesNotFitError.exit_status == names.EXIT_STATUS_DOES_NOT_FIT
    pod = {"status": {"containerStatuses": [{"name": "runtime"}]}}
    for error, want in (
        (ModelFetchError, "ModelFetchFailed"),
        (DoesNotFitError, "DoesNotFit"),
        (ConfigError, "CrashLoopBackOff"),
    ):
        assert ended(pod, {"name": "runtime"}, {"exitCode": error.exit_status})[0] == want
