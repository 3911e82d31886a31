"""Stand-in."""


class StructuredOutputManager:
    def __init__(self, config):
        self.config = config
