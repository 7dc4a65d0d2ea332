"""The `code` of every error that the gateway answers with itself; docs/api.md says what each means.

Where a replica has a code for the same thing, it is that one.
"""

from typing import Literal

GatewayCode = Literal[
    "admin_disabled",
    "body_memory_full",
    "body_too_large",
    "connections",
    "headers_too_large",
    "internal_error",
    "invalid_admin_token",
    "invalid_http",
    "invalid_routing",
    "method_not_supported",
    "model_not_found",
    "of_one_replica",
    "out_of_range",
    "replica_answer",
    "replica_died",
    "replica_timeout",
    "replicas_refused",
    "request_timeout",
    "response_not_found",
    "shutting_down",
    "suspended",
    "unknown_url",
    "waiting_queue_full",
    "waiting_timeout",
]
