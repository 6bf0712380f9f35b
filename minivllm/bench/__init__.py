"""Workloads, runs that measure, and reports."""
