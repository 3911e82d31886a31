"""The wire between two processes of a machine that map the same memory, and the fence that locks a peer out of it."""
