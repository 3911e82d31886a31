"""Runs of many seeds: batches of schedules, in many processes or on many machines, counted once."""
