"""The small model that ships with Headway: its tasks, its tokenizer, its training and its judges.

Everything here runs offline from templates written for this project, so the weights carry the
project's own licence. The serving engine never imports this package: it reads only the files that
the training writes into `headway_runtime/bundled/`.
"""
