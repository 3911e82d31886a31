"""Base: errors, ids and pages, registries, the run record and child processes, for all other packages."""
