"""The prefix cache. This version keeps the device tier; host and storage tiers build on the same tree."""
