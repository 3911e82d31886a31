"""A run of any subject: its plan, rows, cells, workers and record. It names no subject."""
