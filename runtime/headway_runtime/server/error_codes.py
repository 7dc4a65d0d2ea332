"""The `code` of every error that the server answers with; docs/api.md says what each means."""

from typing import Literal

from headway_runtime.errors import RequestCode

HttpCode = (
    RequestCode
    | Literal[
        "adapter_not_found",
        "adapter_not_usable",
        "admin_disabled",
        "body_not_read",
        "body_too_large",
        "connections",
        "engine_busy",
        "engine_dead",
        "engine_error",
        "engine_stalled",
        "engine_starting",
        "headers_too_large",
        "internal_error",
        "invalid_admin_token",
        "invalid_api_key",
        "invalid_http",
        "lora_disabled",
        "lora_updating_disabled",
        "method_not_supported",
        "not_ready",
        "not_the_operator",
        "out_of_range",
        "queue_full",
        "request_timeout",
        "response_not_found",
        "shutting_down",
        "unknown_url",
    ]
)
