"""Prices of running servers: one seeded load on two settings or two servers, timed in turn, every answer judged."""
