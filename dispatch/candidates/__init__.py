"""The ways in which requests could run this tick, and what each is worth."""
