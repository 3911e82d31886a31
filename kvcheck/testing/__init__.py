"""kvcheck.testing: checks of your own plain torch KV pool, called from your own tests. Public and stable.

    from kvcheck.testing import check_round_trip, streams, waits, watch

    check_round_trip    saves a request, gives its slots to another one, restores it, and compares every tensor
    watch               checks that a value that was handed out keeps its bytes and shares none with the pool
    waits               checks that a reader of a layer waits for the load of that layer
    streams             replaces torch.cuda's streams and events by stand-ins on a machine without a GPU

docs/own-code.md has an example of each. A call raises IntegrityError, an AssertionError with the findings as its text,
or NotJudged, with the reason and the remedy. Otherwise it returns a Judged: the amount of data compared, and everything
that was not tried.

Stability: the names in `__all__`, their parameters, and the fields of Judged and IntegrityError keep their meaning from
version to version. A parameter that comes later has a default. A finding code keeps its meaning; the wording of a
message may change, and a later version may find more. All other names are internal.

pytest leaves kvcheck's frames out of a traceback, so that it ends in your line; `pytest --full-trace` shows them.
"""

from kvcheck.testing.failures import IntegrityError, Judged, NotJudged
from kvcheck.testing.layer_waits import waits
from kvcheck.testing.owned import watch
from kvcheck.testing.round_trip import check_round_trip
from kvcheck.testing.streams import Streams, streams

__all__ = (
    "IntegrityError",
    "Judged",
    "NotJudged",
    "Streams",
    "check_round_trip",
    "streams",
    "waits",
    "watch",
)
