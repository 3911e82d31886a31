"""Parameters of sampling."""


class SamplingParams:
    def __init__(self, max_new_tokens, temperature):
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature

    def normalize(self, tokenizer):
        pass
