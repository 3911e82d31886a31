"""The frame that all engines share: the child process, stand-ins, names, content, probes.

Invariants:
- Nothing here names an engine; nothing here imports one outside the child.
"""
