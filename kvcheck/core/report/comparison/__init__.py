"""Several runs beside each other: builds by bugs."""
