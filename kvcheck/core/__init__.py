"""Everything that does work: no module here reads argv, the environment or a terminal."""
