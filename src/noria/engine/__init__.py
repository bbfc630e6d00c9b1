"""The engine: which request computes what at each step. Knows plans and an executor, nothing of devices."""
