"""Ranks as processes: links over TCP, heartbeats, and the wire that sends bytes on them."""
