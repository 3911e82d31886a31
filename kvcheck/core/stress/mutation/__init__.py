"""Mutation: single edits of the cache's source, each judged by the schedules of a default run."""
