"""Stress: schedules, strategies, scenarios, the history of a run and the oracles that judge it."""
