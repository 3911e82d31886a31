"""The gate: may this be merged, judged from stored runs and a budget."""
