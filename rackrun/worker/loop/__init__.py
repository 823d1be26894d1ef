"""The user's ``main``, its `Run` object and the step loop, from one generation to the next."""
