"""The frame that all engines share: the child process, stand-ins, names, content, probes.

Nothing here names an engine, or imports one outside the child.
"""
