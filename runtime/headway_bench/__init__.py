"""The load benchmark: sends a described load to any OpenAI-compatible server and reports what a client sees.

It imports none of Headway's other packages: what it knows of a server is HTTP.
"""
