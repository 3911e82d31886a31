"""The status of a request."""


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)
