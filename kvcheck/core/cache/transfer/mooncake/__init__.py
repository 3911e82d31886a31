"""Ranks as processes over Mooncake's transfer engine: its process, its memory and its wire."""
