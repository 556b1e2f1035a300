"""Measure parameters, multiply-adds, latency and throughput of models."""
