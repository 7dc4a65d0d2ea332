"""Tool calls in what a model writes: one module per way of writing them, all pure and incremental."""
