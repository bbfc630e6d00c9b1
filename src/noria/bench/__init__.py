"""Benchmarks: workloads as data, a load generator for any OpenAI-compatible server, the same in process, reports."""
