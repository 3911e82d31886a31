"""Releases and forks of engines, judged one after another, with their tables."""
