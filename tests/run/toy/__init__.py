"""A fifth subject: a dial that must point where it was turned to."""
