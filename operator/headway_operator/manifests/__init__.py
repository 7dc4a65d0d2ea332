"""The children of a service, one kind per file, and `render`, which joins them. Pure; applies nothing."""

from headway_operator.manifests.render import render

__all__ = ["render"]
