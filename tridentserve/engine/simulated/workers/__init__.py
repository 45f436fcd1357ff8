"""The simulated workers: what they hold, what they run and how long it takes."""
