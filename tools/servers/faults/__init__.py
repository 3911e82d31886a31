"""Faults that are planted in running servers: orders, and a plug-in for each engine."""
