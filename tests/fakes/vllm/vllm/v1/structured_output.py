"""Stand-in."""


class StructuredOutputManager:
    """No grammar."""

    def __init__(self, config):
        self.config = config
