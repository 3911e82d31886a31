"""A user's own checkpoint on a running server, judged against the same server's cold answers."""
