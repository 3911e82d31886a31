"""`make gpu`: a table of jobs that need a GPU, and what runs them."""
