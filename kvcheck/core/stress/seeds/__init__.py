"""Runs of many seeds: small batches of schedules, in many processes or on many machines, counted once."""
