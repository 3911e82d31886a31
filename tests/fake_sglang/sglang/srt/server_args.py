"""Arguments of a server."""


class ServerArgs:
    def __init__(self, model_path):
        self.model_path = model_path
