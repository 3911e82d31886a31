"""Stand-in."""

from enum import Enum, auto


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()


class Request:
    def __init__(self, request_id, prompt_token_ids, sampling_params, pooling_params, priority, block_hasher):
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_output_tokens = self.num_computed_tokens = self.num_preemptions = 0
        self.priority, self.max_tokens = priority, sampling_params.max_tokens
        self.status, self.hasher = RequestStatus.WAITING, block_hasher

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def append_output_token_ids(self, token):
        self.all_token_ids.append(token)
        self.num_output_tokens += 1

    def is_finished(self):
        return self.num_output_tokens >= self.max_tokens
