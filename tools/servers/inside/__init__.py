"""Stand-ins and ledgers that are put into the process of a server as it starts."""
