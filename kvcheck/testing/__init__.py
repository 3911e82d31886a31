"""kvcheck.testing: your own plain torch KV pool under kvcheck, from your own tests. Public and stable.

    from kvcheck.testing import check_round_trip, streams, waits, watch

    check_round_trip    saves a request, gives its slots to another one, restores it, and judges every tensor
    watch               a value that was given out keeps its bytes, and shares none with the pool
    waits               a reader of a layer waits for the load of that layer
    streams             stand-ins for torch.cuda's streams and events on a machine without a GPU

docs/own-code.md is the page with an example of each. A call that finds something raises IntegrityError, an
AssertionError whose text is the findings. A call that cannot judge raises NotJudged, which says what to do. A call that
returns has judged, and its result says what, and what it did not try.

Stability: the names in `__all__`, their parameters, and the fields of Judged and IntegrityError keep their meaning from
version to version. A parameter that comes later has a default. A finding code keeps its meaning; the wording of a
message may change, and a later version may find more. What is not in `__all__` is internal.
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
