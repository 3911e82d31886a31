"""A run of any subject: its plan, its rows, its cells, its workers and its record. It knows no subject."""
