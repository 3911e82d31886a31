"""Real servers of engines on this CPU: how each is started, judged, and has faults put in."""
