"""Engines that kvcheck can ask: a file and a row for each."""
