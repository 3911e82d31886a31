"""What driving an installed engine takes, whichever it is: the child, stand-ins, names, content, probes.

Invariants:
- Nothing here names an engine; nothing here imports one outside the child.
"""
