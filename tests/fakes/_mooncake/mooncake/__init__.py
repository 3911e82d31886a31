"""A stand-in for Mooncake's package: one engine over sockets, with one fault at a time."""
