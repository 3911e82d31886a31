"""Start: puts into a process of a real server what its environment names: stand-ins and a planted fault.

    KVCHECK_INSIDE        folder of the ledgers
    KVCHECK_STAND_INS     names of stand-ins, separated by commas
    KVCHECK_FAULT_ORDERS  and KVCHECK_FAULT_LOG: where faults are ordered and noted, see tools.servers.faults.planting

Invariants:
- No file of the engine is changed. Everything goes in while the process loads the engine's modules.
- A name that is not known is refused before the engine is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tools.servers.faults.planting import LOG, ORDERS
from tools.servers.faults.sglang_faults import Faults
from tools.servers.inside.after_import import AfterImport, Change
from tools.servers.inside.ledger import Ledger
from tools.servers.inside.stand_ins import STAND_INS


def start(environment: Mapping[str, str]) -> None:
    """Put it in. Raises ValueError for an unknown name."""
    ledger = Ledger(Path(environment["KVCHECK_INSIDE"]))
    changes: defaultdict[str, list[Change]] = defaultdict(list)
    for name in filter(None, environment.get("KVCHECK_STAND_INS", "").split(",")):
        if name not in STAND_INS:
            raise ValueError(f"unknown stand-in {name!r}; known: {', '.join(STAND_INS)}")
        row = STAND_INS[name]
        if row.module is None:
            row.put_in(name, ledger, None)
        else:
            changes[row.module].append(row.bind(name, ledger))
    if environment.get(ORDERS):
        for module, change in Faults(Path(environment[ORDERS]), Path(environment[LOG])).changes():
            changes[module].append(change)
    if changes:
        AfterImport(changes).install()
