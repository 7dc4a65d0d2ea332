"""The load benchmark: sends a described load to any OpenAI-compatible server and reports what a client sees.

Of Headway's other packages it imports `headway_traces` alone: what it knows of a server is HTTP.
"""
