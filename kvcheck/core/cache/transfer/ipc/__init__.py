"""The wire between two processes of a machine that map the same memory, and the gate that shuts a peer out of it."""
