"""Running servers, judged from outside by a model with known answers; imports no cache, stress runner or probe."""
