"""The decode scheduler: admits, prefills, decodes, retracts, resumes and finishes requests."""
