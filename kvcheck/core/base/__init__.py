"""What every other package stands on: errors, ids and pages, registries, the run record, child processes."""
