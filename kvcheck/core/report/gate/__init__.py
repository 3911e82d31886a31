"""The gate: decides from stored runs and a budget whether a change may be merged."""
