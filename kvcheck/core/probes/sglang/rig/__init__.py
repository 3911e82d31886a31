"""The rig for probes of SGLang: its pools, its trees and both sides of a transfer, made without a server."""
