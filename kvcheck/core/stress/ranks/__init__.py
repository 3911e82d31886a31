"""A pair's ranks as real processes: one worker for each rank, and a supervisor that starts, watches and judges them."""
