"""The wire between two processes of a machine that map the same memory, and the fence that shuts a peer out of it."""
