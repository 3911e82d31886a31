"""What a checkout has beside the package: scripts that measure kvcheck itself. Nothing of it is installed."""
