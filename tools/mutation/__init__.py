"""`python -m tools.mutation`: single edits of the cache, each judged by the schedules of a default run."""
