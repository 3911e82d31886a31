"""A pair's ranks as real processes: one worker a rank, a supervisor that starts, watches and judges them."""
