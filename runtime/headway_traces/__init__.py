"""Reads files of recorded requests, and of rates, in the formats that are published and in our own.

It imports none of Headway's other packages: the load benchmark and the simulator read the same files by it.
"""

from headway_traces.files import RateWindow, TraceFile, TraceRequest, read_trace_file
from headway_traces.line import TraceFileError

__all__ = ["RateWindow", "TraceFile", "TraceFileError", "TraceRequest", "read_trace_file"]
