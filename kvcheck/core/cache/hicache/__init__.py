"""The prefix cache over three tiers: device, host and storage, behind one tree."""
