"""What the probes of SGLang drive its parts with: pools, trees, both sides of a transfer."""
