"""`main`, `Run` and the loop of steps: from one generation to the next."""
